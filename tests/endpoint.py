"""A chat endpoint on a real socket, which answers as it is told."""

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from envs.dond.replies import proposal_text
from envs.dond.texts import parse_prompt

KEY = "sk-test-31415926"
Answering = Callable[["Server", dict[str, Any], Any], None]  # (server, request's body, handler)


class Server(ThreadingHTTPServer):
    """Answers as told, and notes what it was asked and with which key."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, answering: Answering) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answering, self.asked, self.keys = answering, list[dict[str, Any]](), list[str]()
        self.open = self.most_open = 0
        self.lock = threading.Lock()
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.asked.append({**body, "path": self.path})
            server.keys.append(self.headers["authorization"])
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        try:
            server.answering(server, body, self)
        except (BrokenPipeError, ConnectionResetError):
            pass  # who asked has left
        finally:
            with server.lock:
                server.open -= 1

    def send(self, body: str, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        content = body.encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def say(self, text: str | None, tokens: int = 100, **message: Any) -> None:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text, **message}}
        self.send(json.dumps({"object": "chat.completion", "choices": [choice], "usage": {"total_tokens": tokens}}))

    def log_message(self, *args: Any) -> None:
        """Prints nothing."""


def sensible(server: Server, body: dict[str, Any], handler: Any) -> None:
    """Greets, then claims, as `move` does."""
    handler.say(move(body["messages"]))


def move(messages: list[dict[str, str]]) -> str:
    """Returns the reply of a simple player, who greets first and then claims. The claim is one of each item if the
    prompt says `Pool`, otherwise the whole pool."""
    counts = parse_prompt(messages[0]["content"] + "\n")[0]
    spoken = any(m["role"] == "assistant" for m in messages)
    pending = "has made a proposal" in messages[-1]["content"]
    if not spoken and not pending:
        return "[message] hello {} [END]"
    return proposal_text((1, 1, 1) if messages[0]["content"].count("Pool") else counts)
