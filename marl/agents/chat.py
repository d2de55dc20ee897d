"""A player behind any OpenAI-compatible chat endpoint. It reads a game in natural style and answers like anybody else.

A request that fails for good costs its own game only: that seat says nothing more, and the loss is counted.

Secrets: the key comes from an environment variable and is only ever sent. Bodies and error texts of an endpoint are
never shown or kept; the key and other secrets are struck out of answers, unless they are shorter than `SHORTEST`, as
placeholders are. An endpoint is not trusted: redirects are not followed, and at most `LONGEST_BODY` bytes are read.
Left out: streamed answers, tools, prices.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from envs.core import END, Style, TurnKind
from marl.agents.base import Key, Reply, Request
from marl.agents.completion import Answer, Lost, answer_of, read_answer
from marl.common.errors import UserError, check_range, check_text
from marl.common.files import canonical, writing
from marl.common.secrets import SHORTEST, hidden, secrets_in
from marl.types import Belief, Stream

CHAT = "chat"  # what such a player is called in a cast
YOUR_TURN = "It is your turn."  # a chat cannot end with the system's words, or one's own
STRUCK_OUT = "[key]"
LONGEST_BODY = 2**22  # bytes of a response; a longer one is no answer
PACKED = ("identity", "gzip")  # as a response may be; others unpack to more than can be counted on the way

ChatMessage = dict[str, str]  # role and content
FOR_GOOD = (Lost.KEY, Lost.BUDGET, Lost.ABSENT)  # every further seat would be lost too
CHANGED = "another chat.key, a larger chat.calls or chat.tokens, or chat.replay=false"  # what helps then
URL = "must be http(s)://HOST/PATH without user, password or query, as in http://localhost:8000/v1"


def check_nothing_secret(url: Any, key: Any) -> None:
    """Raises UserError, without showing it, for an address or a key's name that may hold a secret.

    Every run checks this, even if nobody plays through an endpoint: its card keeps the command.
    """
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        fits = fits and parts.username is None and not parts.query
    except (ValueError, AttributeError):
        fits = False
    if url not in ("", None) and not fits:
        raise UserError(f"chat.url {URL}")
    if not isinstance(key, str) or not re.fullmatch("([A-Z_][A-Z0-9_]*)?", key):
        raise UserError("chat.key must be the name of an environment variable, in capitals, never the key itself")


def known_secrets(key: str, extra: Mapping[str, Any]) -> list[str]:
    """The value of the environment variable `key`, and whatever might be a secret in the settings `extra`."""
    found = [os.environ.get(key, "").strip() if key else "", *secrets_in(extra)]
    return [secret for secret in found if len(secret) >= SHORTEST]


@dataclass(frozen=True)
class ChatConfig:
    """The endpoint and its limits. Raises UserError, naming the setting, for bad values."""

    url: str = ""  # the part before /chat/completions, as in http://localhost:8000/v1
    model: str = ""
    key: str = "OPENAI_API_KEY"  # the environment variable that holds the key; "" for an endpoint without one
    temperature: float | None = 1.0  # None leaves it to the endpoint
    max_tokens: int = 200  # of an answer
    max_tokens_field: str = "max_tokens"  # its name in the request; some models want max_completion_tokens
    timeout: float = 60.0  # seconds that one try may take in all
    retries: int = 3  # further tries after the first
    parallel: int = 8  # requests at a time
    calls: int = 10_000  # budget of one command; each try counts
    tokens: int = 10_000_000  # the same, prompts and answers together
    answers: str = ""  # a file that keeps answers, and gives them to the same request of the same game
    replay: bool = False  # answer from that file only, without network
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)  # more fields of the body; perhaps a secret

    def __post_init__(self) -> None:
        if not self.model:
            raise UserError("chat.model is empty. Name the model that the endpoint is to use")
        if self.replay and not self.answers:
            raise UserError("chat.replay=true needs a file. Name it in chat.answers")
        if not self.url and not self.replay:
            raise UserError(f"chat.url is empty: it {URL}")
        check_nothing_secret(self.url, self.key)
        check_text(self.answers, "chat.answers")
        check_range(self, "chat", "[1, inf)", "max_tokens", "parallel")
        check_range(self, "chat", "[0, inf)", "retries", "calls", "tokens")
        check_range(self, "chat", "(0, inf) seconds", "timeout")
        check_range(self, "chat", "[0, inf), or null", "temperature")
        if not isinstance(self.extra, Mapping) or {"messages", "model", "stream"} & {*self.extra}:
            raise UserError("chat.extra must be a group of fields, without messages, model or stream")
        try:
            json.dumps(self.extra, allow_nan=False)
        except ValueError as error:
            raise UserError("chat.extra holds a number that is not finite, which JSON does not have") from error


# --- The file of answers ----------------------------------------------------------------------------------------------
class Answers:
    """A file of answers by request, one line of JSON each.

    A request is the seat's seed, the model with its settings, and all messages. So games that began alike keep answers
    of their own, and the same game is always answered the same. Failures are not kept.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file, if it exists. Cuts off an unfinished last line, of a killed run, before adding more.

        Raises UserError for any other line that is no answer.
        """
        self.path = path
        self._answers: dict[str, Answer] = {}
        try:
            if path.exists() and not path.is_file():
                raise UserError(f"chat.answers={path} is no file. Name another")
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise UserError(f"chat.answers={path}: the file cannot be read ({error.strerror})") from error
        lines = content.split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                entry = json.loads(line)
                self._answers[digest(entry["request"])] = _kept(entry)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise UserError(
                    f"chat.answers={path}, line {number}: expected an answer as it was kept. Name another file"
                ) from error
        self._torn = len(lines[-1])  # bytes of an unfinished line
        self._read = len(content)

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, request: Mapping[str, Any]) -> Answer | None:
        return self._answers.get(digest(request))

    def add(self, request: Mapping[str, Any], answer: Answer) -> None:
        self._answers[digest(request)] = answer
        optional = {name: value for name in ("thoughts", "cut") if (value := getattr(answer, name))}
        entry = {"request": dict(request), "answer": answer.text, "tokens": answer.tokens, **optional}
        line = json.dumps(entry) + "\n"
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._torn and self.path.stat().st_size == self._read:
                os.truncate(self.path, self._read - self._torn)
            self._torn = 0
            with self.path.open("ab") as file:
                file.write(line.encode())


def _kept(entry: Mapping[str, Any]) -> Answer:
    """An answer from its line. TypeError where it is none."""
    text, tokens, thoughts, cut = entry["answer"], entry["tokens"], entry.get("thoughts", ""), entry.get("cut", False)
    ours = isinstance(text, str) and isinstance(tokens, int | None) and isinstance(thoughts, str)
    if not ours or not isinstance(entry["request"], dict):
        raise TypeError("not as it was kept")
    return answer_of(text, tokens, thoughts, cut is True)


def digest(request: Mapping[str, Any]) -> str:
    """The digest of a request without its secrets, so that a file of answers can be replayed without them."""
    return hashlib.sha256(canonical(hidden(request, mark=lambda _: "secret")).encode()).hexdigest()


# --- Requests ---------------------------------------------------------------------------------------------------------
class Endpoint:
    """One endpoint and its budget. `ask` never raises for anything that an endpoint does."""

    calls = tokens = 0  # spent
    reserved = 0  # tokens that requests under way may still cost

    def __init__(self, config: ChatConfig) -> None:
        """Raises UserError if the key's variable is not set, or a proxy that the environment names cannot be used."""
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs a line for each request
        self.config = config
        key = os.environ.get(config.key, "").strip() if config.key else ""
        if config.key and not key:
            raise UserError(
                f"chat.key={config.key}: this environment variable is not set. Set it to the endpoint's key, or give "
                "chat.key='' for an endpoint that wants none"
            )
        if not re.fullmatch("[!-~]*", key):
            raise UserError(f"chat.key={config.key}: the value of this environment variable can't be a key")
        self._secrets = sorted(known_secrets(config.key, config.extra), key=len, reverse=True)  # one may hold another
        authorization = {"Authorization": f"Bearer {key}"} if key else {}
        # A cookie would be sent back, and may be of letters that no header can have.
        cookies = CookieJar(policy=DefaultCookiePolicy(allowed_domains=[]))
        headers = {"Accept-Encoding": "gzip", **authorization}
        limits = httpx2.Limits(max_connections=config.parallel)
        try:
            self.client = httpx2.AsyncClient(headers=headers, cookies=cookies, timeout=config.timeout, limits=limits)
        except (ImportError, ValueError, httpx2.InvalidURL) as error:
            raise UserError(
                f"chat: the proxy that ALL_PROXY, HTTPS_PROXY or HTTP_PROXY names cannot be used "
                f"({type(error).__name__}). Unset it, or name one of http:// or https://"
            ) from error
        self._slots = asyncio.Semaphore(config.parallel)

    async def ask(self, messages: Sequence[ChatMessage]) -> Answer | Lost:
        """Tries up to 1 + `retries` times, each within `timeout` seconds from its start to the answer's last byte."""
        async with self._slots:
            for attempt in range(self.config.retries + 1):
                found, wait = await self._try(messages)
                if wait is None or attempt == self.config.retries:
                    return found
                await asyncio.sleep(min(wait or 0.5 * 2**attempt, self.config.timeout))
        raise AssertionError("there is always a first try")

    async def _try(self, messages: Sequence[ChatMessage]) -> tuple[Answer | Lost, float | None]:
        """Calls once. Returns also the seconds to wait before the next try: 0 if unknown, None for no other try."""
        # No tokenizer has more tokens than bytes, besides the marks around each message.
        most = sum(len(m["content"].encode()) + 16 for m in messages) + self.config.max_tokens
        config = self.config
        if self.calls >= config.calls or self.tokens + self.reserved + most > config.tokens:
            return Lost.BUDGET, None
        self.calls += 1
        self.reserved += most
        cost = most  # where nothing else is known: it may have been answered, and paid for, all the same
        body = {"model": config.model, "messages": messages, config.max_tokens_field: config.max_tokens, **config.extra}
        if config.temperature is not None:
            body["temperature"] = config.temperature
        try:
            async with asyncio.timeout(config.timeout):  # the client's own limit is one of each piece that it reads
                url = f"{config.url.rstrip('/')}/chat/completions"
                async with self.client.stream("POST", url, json=body) as response:
                    if response.status_code >= 300:
                        cost = 0
                        return _refused(response.status_code, response.headers.get("retry-after", ""))
                    found = read_answer((await _body(response)).decode("utf-8-sig", "replace"))
        except (TimeoutError, httpx2.TimeoutException):
            return Lost.TIMEOUT, 0.0
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            if isinstance(error, httpx2.ConnectError | httpx2.InvalidURL):
                cost = 0
            return Lost.UNREACHABLE, 0.0
        else:
            if isinstance(found, Lost):
                return found, None if found is Lost.DECLINED else 0.0
            cost = most if found.tokens is None else found.tokens
            return replace(found, text=self._struck(found.text), thoughts=self._struck(found.thoughts)), None
        finally:
            self.reserved -= most
            self.tokens += cost

    def _struck(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, STRUCK_OUT)
        return text


def _refused(status: int, after: str) -> tuple[Lost, float | None]:
    """Returns the meaning of a failed status, and the seconds to wait before the next try (None: no other try)."""
    if status in (401, 403):  # 403 is as a rule a moderator's refusal of these messages
        return Lost.KEY if status == 401 else Lost.DECLINED, None
    if status < 400:
        return Lost.MOVED, None
    seconds = float(after) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", after) else 0.0
    again = status in (408, 409, 429) or status >= 500
    return Lost.BUSY if status == 429 else Lost.STATUS, seconds if again else None


async def _body(response: httpx2.Response) -> bytes:
    """The response's content; nothing if that is longer than LONGEST_BODY, or packed in another way than asked."""
    body = bytearray()
    if response.headers.get("content-encoding", "identity").lower() in PACKED:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > LONGEST_BODY:
                return b""
    return bytes(body)


# --- Seats ------------------------------------------------------------------------------------------------------------
@dataclass
class ChatAgentState:
    """State of a seat: its chat so far, and the reply that is owed."""

    seed: int
    messages: list[ChatMessage]
    options: tuple[str, ...] = ()
    numbered: bool = False  # they are chosen by their numbers
    request: dict[str, Any] = field(default_factory=dict)
    lost: bool = False

    def hear(self, content: str) -> None:
        """Adds a text of the game as the user's; texts without a reply between them are one message."""
        if self.messages[-1]["role"] == "user":
            self.messages[-1] = {"role": "user", "content": f"{self.messages[-1]['content']}\n{content}"}
        else:
            self.messages.append({"role": "user", "content": content})


class ChatAgent:
    """Any number of seats, each a chat of its own; requests of all games are under way at once.

    A game's first observation is the system's message, own replies are the assistant's, everything else the user's. A
    choice is listed by numbers and answered by one, or by the option's own words.
    """

    style = Style.NATURAL

    def __init__(self, config: ChatConfig, stops: bool = False, waits: bool = True) -> None:
        """`stops`: raise UserError when all further seats would be lost too (FOR_GOOD), as beside a learner. `waits`:
        `act` returns at least one reply while any is owed; else those that are there by now.

        Raises UserError without a client or a key, and for a bad file of answers.
        """
        self.name, self.config, self.stops, self.waits = CHAT, config, stops, waits
        self.answers = Answers(Path(config.answers)) if config.answers else None
        if config.replay and not self.answers:
            raise UserError(f"chat.replay=true: {config.answers} holds no answer. Play once without it")
        self.endpoint = None if config.replay else Endpoint(config)
        self._extra = hidden(config.extra, known_secrets(config.key, config.extra))  # as it may be kept
        self.lost: list[tuple[Key, Lost]] = []  # seats whose endpoint failed: they say nothing more
        self.kept = 0  # replies from the file
        self.cut = 0  # replies that met the limit of tokens
        self._states: dict[Key, ChatAgentState] = {}
        self._owed: dict[Key, Future[Answer | Lost]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        replies = [reply for r in requests if (reply := self._begin(r)) is not None]
        if self._owed and not replies and self.waits:
            wait(self._owed.values(), return_when=FIRST_COMPLETED)
        for key in [key for key, future in self._owed.items() if future.done()]:
            state, found = self._states[key], self._owed.pop(key).result()
            replies.append(self._reply(key, state, found))
        return replies

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        for key in keys:
            self._states.pop(key, None)
        return {}

    def repeat(self, r: Request, text: str) -> None:
        """Reads a request and takes `text` as the reply that was given to it, without asking the endpoint."""
        state = self._read(r)
        if text:
            state.messages.append({"role": "assistant", "content": text})

    def lost_for_good(self, since: int = 0) -> list[Lost]:
        """Reasons for which every further seat would be lost too, among the losses from number `since` on."""
        return [reason for _, reason in self.lost[since:] if reason in FOR_GOOD]

    def figures(self, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Calls, tokens, replies from the file, cut replies (if any), and lost seats by reason; added to those that a
        run noted `before` it was stopped."""
        before = before or {}
        calls, tokens = (self.endpoint.calls, self.endpoint.tokens) if self.endpoint else (0, 0)
        own = {"calls": calls, "tokens": tokens, "replayed": self.kept, "cut": self.cut}
        counted = {name: before.get(name, 0) + count for name, count in own.items()}
        lost = Counter(before.get("lost", {})) + Counter(reason.value for _, reason in self.lost)
        return {name: n for name, n in counted.items() if n or name != "cut"} | {"lost": dict(sorted(lost.items()))}

    def summary(self) -> str:
        """The figures in a line."""
        found = self.figures()
        lost = ", ".join(f"{count} {reason}" for reason, count in found["lost"].items()) or "none"
        cut = f"{self.cut} answers cut at chat.max_tokens={self.config.max_tokens}; " if self.cut else ""
        used = f"{found['calls']} calls, {found['tokens']} tokens, {self.kept} kept answers used"
        return f"chat: {used}; {cut}seats lost to the endpoint: {lost}"

    def _read(self, r: Request) -> ChatAgentState:
        """Adds the request to its seat's chat."""
        text = r.text.strip("\n")
        if r.key not in self._states:
            self._states[r.key] = ChatAgentState(r.seed, [{"role": "system", "content": text}])
        elif text:
            self._states[r.key].hear(text)
        state = self._states[r.key]
        if r.turn == TurnKind.WAIT or state.lost:
            return state
        state.options = r.options
        if r.options:
            state.numbered = not all(option.isdecimal() for option in r.options)  # else a count is its own number
            listed = [f"{n}) {option}" if state.numbered else option for n, option in enumerate(r.options, start=1)]
            which = "its number" if state.numbered else "it"
            state.hear("\n".join([f"Choose one of these, and answer with {which} alone:", *listed]))
        elif state.messages[-1]["role"] != "user":
            state.hear(YOUR_TURN)
        return state

    def _begin(self, r: Request) -> Reply | None:
        """Reads the request. If a reply is owed, answers from the file or asks the endpoint."""
        state = self._read(r)
        if r.turn == TurnKind.WAIT:
            return None
        if state.lost:
            return Reply(r.key, "")
        settings = {name: getattr(self.config, name) for name in ("model", "temperature", "max_tokens")}
        state.request = {"seed": state.seed, **settings, "extra": self._extra, "messages": list(state.messages)}
        known = self.answers.get(state.request) if self.answers is not None else None
        if known is not None:
            self.kept += 1
            return self._reply(r.key, state, known)
        if self.endpoint is None:
            return self._reply(r.key, state, Lost.ABSENT)
        asked = self._ask(self.endpoint, state.request)
        self._owed[r.key] = asyncio.run_coroutine_threadsafe(asked, self._running(self.endpoint))
        return None

    async def _ask(self, endpoint: Endpoint, request: Mapping[str, Any]) -> Answer | Lost:
        """Asks the endpoint, and keeps its answer at once: it was paid for."""
        found = await endpoint.ask(request["messages"])
        if isinstance(found, Answer) and self.answers is not None:
            self.answers.add(request, found)
        return found

    def _reply(self, key: Key, state: ChatAgentState, found: Answer | Lost) -> Reply:
        if isinstance(found, Lost):
            state.lost = True
            self.lost.append((key, found))
            if self.stops and found in FOR_GOOD:
                wait(self._owed.values(), self.config.timeout)  # what was paid for is kept
                raise UserError(
                    f"chat: {found.value}, so every further game would be lost. Start the same command again with "
                    f"{CHANGED}; it goes on from its last checkpoint"
                )
            return Reply(key, "")
        if found.text:  # some endpoints refuse a message without words
            state.messages.append({"role": "assistant", "content": found.text})
        cut = found.cut and END not in found.text
        self.cut += cut
        said = found.text.strip()
        if state.numbered and re.fullmatch("[0-9]{1,3}", said) and 1 <= int(said) <= len(state.options):
            said = state.options[int(said) - 1]
        return Reply(key, said if state.options else found.text, thoughts=found.thoughts, cut=cut)

    def _running(self, endpoint: Endpoint) -> asyncio.AbstractEventLoop:
        """The event loop of the requests, on a thread that ends with this agent."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name=CHAT, daemon=True).start()
            weakref.finalize(self, _leave, self._loop, endpoint)
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _leave(loop: asyncio.AbstractEventLoop, endpoint: Endpoint) -> None:
    async def leave() -> None:
        await endpoint.client.aclose()
        loop.stop()

    asyncio.run_coroutine_threadsafe(leave(), loop)
