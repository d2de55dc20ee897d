"""The player behind a chat endpoint, against a server of our own on a real socket."""

import gzip
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envs import among_us_v0, dond_v0
from envs.among_us import texts as among_us_texts
from envs.core import Style
from marl.agents.chat import Answers, ChatAgent, ChatConfig, Endpoint
from marl.agents.completion import Answer, Lost
from marl.common.errors import UserError
from marl.common.secrets import hidden
from marl.report.transcripts import episode_to_json
from marl.rollout.games import scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode
from tests.endpoint import KEY, Answering, Server, move, sensible


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answering], Server]]:
    """Starts servers that answer as told; the key is in the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = []

    def start(answering: Answering) -> Server:
        servers.append(Server(answering))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.stopped.set()
        server.shutdown()
        server.server_close()


def agent_of(url: str, **settings: Any) -> ChatAgent:
    return ChatAgent(ChatConfig(url=url, model="m", **{"retries": 0, "timeout": 5.0, **settings}))


def make_env(style: str = "natural") -> Any:
    return dond_v0.parallel_env(style=style)


def play(agent: ChatAgent, games: int = 4, style: str = "natural", seed: int = 0) -> list[Episode]:
    """Plays games of the agent against itself."""
    return rollout(draw_games(seed, count=games), everyone(agent), lambda: make_env(style), games)


def test_a_right_answer_is_played(serve: Callable[[Answering], Server]) -> None:
    server = serve(sensible)
    agent = agent_of(server.url)
    episodes = play(agent)
    assert [e.outcome["how"] for e in episodes] == ["mismatch"] * 4 and not agent.lost
    assert all(e.players == {"player_0": "chat", "player_1": "chat"} for e in episodes)
    # first mover and partner greet, then both claim: four replies a game
    assert len(server.asked) == agent.endpoint.calls == 16  # type: ignore[union-attr]
    assert agent.endpoint.tokens == 1600 and agent.endpoint.reserved == 0  # type: ignore[union-attr]
    assert set(server.keys) == {f"Bearer {KEY}"}
    first = next(asked for asked in server.asked if len(asked["messages"]) == 2)
    assert first["path"] == "/v1/chat/completions" and first["max_tokens"] == 200 and first["temperature"] == 1.0
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert "Your goal" in first["messages"][0]["content"] and first["messages"][1]["content"] == "It is your turn."
    claim = next(asked for asked in server.asked if len(asked["messages"]) == 4)
    assert [m["role"] for m in claim["messages"]] == ["system", "user", "assistant", "user"]
    assert claim["messages"][2]["content"] == "[message] hello {} [END]"
    assert claim["messages"][3]["content"] == "Partner: hello {}"


def test_games_do_not_wait_for_one_another(serve: Callable[[Answering], Server]) -> None:
    """No first answer comes before eight were asked for; more than `parallel` are never under way."""
    eight = threading.Barrier(8, timeout=10)

    def together(server: Server, body: dict[str, Any], handler: Any) -> None:
        if len(body["messages"]) == 2 and body["messages"][1]["content"] == "It is your turn.":
            eight.wait()
        sensible(server, body, handler)

    server = serve(together)
    agent = agent_of(server.url, timeout=30.0, parallel=8)
    assert len(play(agent, games=16)) == 16 and not agent.lost
    assert server.most_open == 8


def packed_answer(server: Server, asked: dict[str, Any], handler: Any) -> None:
    """Sends the answer packed, under a charset that makes no sense: JSON is UTF-8 whatever the headers say."""
    charset = ("hex", "zlib", "base64", "rot13", "idna", "undefined", "utf-32", "no-such")[len(server.asked) % 8]
    said = json.dumps({"choices": [{"message": {"content": "[message] h\u00fcte [END]"}}]}, ensure_ascii=False)
    body = gzip.compress(said.encode())
    handler.send_response(200)
    for name, value in (("Content-Encoding", "gzip"), ("Content-Length", str(len(body)))):
        handler.send_header(name, value)
    handler.send_header("Content-Type", f"application/json; charset={charset}")
    handler.end_headers()
    handler.wfile.write(body)


def test_a_right_answer_is_read_however_it_is_sent(serve: Callable[[Answering], Server]) -> None:
    server = serve(packed_answer)
    agent = agent_of(server.url)
    assert {turn.message for turn in play(agent, games=1)[0].turns} == {"h\u00fcte"} and not agent.lost
    assert len(server.asked) >= 8


def raw(*lines: str) -> Answering:
    """Sends these lines as they are, and hangs up."""

    def answering(server: Server, body: dict[str, Any], handler: Any) -> None:
        handler.wfile.write("\r\n".join([*lines, ""]).encode("latin-1"))
        handler.close_connection = True

    return answering


def endless(packed: bool = False) -> Answering:
    """A body in pieces, without end."""

    def answering(server: Server, body: dict[str, Any], handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        if packed:
            handler.send_header("Content-Encoding", "gzip")
        handler.end_headers()
        pack = zlib.compressobj(9, zlib.DEFLATED, 31)
        while not server.stopped.is_set():
            piece = pack.compress(bytes(2**20)) if packed else b" " * 2**16
            if piece:
                handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

    return answering


def of_kind(charset: str, body: str = '{"choices": []}', status: int = 200) -> Answering:
    return lambda s, b, h: h.send(body, status, {"Content-Type": f"application/json; charset={charset}"})


OK = "HTTP/1.1 200 OK"
GOING = ("Connection: close", "Content-Length: 2")  # who asks next must not take this connection
HOSTILE: dict[str, tuple[Answering, Lost]] = {
    "html": (lambda s, b, h: h.send("<html>welcome</html>", headers={"Content-Type": "text/html"}), Lost.NONSENSE),
    "empty": (lambda s, b, h: h.send(""), Lost.NONSENSE),
    "deep": (lambda s, b, h: h.send("[" * 100_000), Lost.NONSENSE),
    "gzip": (lambda s, b, h: h.send("not packed", headers={"Content-Encoding": "gzip"}), Lost.UNREACHABLE),
    "declined": (lambda s, b, h: h.say(None, refusal="I can't help with that."), Lost.DECLINED),
    "server error": (lambda s, b, h: h.send("{}", 500), Lost.STATUS),
    "bad request": (lambda s, b, h: h.send("{}", 400), Lost.STATUS),
    "no such model": (lambda s, b, h: h.send("{}", 404), Lost.STATUS),
    "busy": (lambda s, b, h: h.send("{}", 429), Lost.BUSY),
    "key": (lambda s, b, h: h.send(json.dumps({"error": {"message": s.keys[0]}}), 401), Lost.KEY),
    "forbidden": (lambda s, b, h: h.send("{}", 403), Lost.DECLINED),
    "charset zlib, no text": (of_kind("zlib", "\x00"), Lost.NONSENSE),
    "charset undefined": (of_kind("undefined", "{}", 400), Lost.STATUS),
    "moved": (lambda s, b, h: h.send("{}", 307, {"Location": "/v1/elsewhere"}), Lost.MOVED),
    "moved without an address": (lambda s, b, h: h.send("{}", 302), Lost.MOVED),
    "moved to no address": (lambda s, b, h: h.send("{}", 308, {"Location": "http://[:1"}), Lost.MOVED),
    "endless": (endless(), Lost.NONSENSE),
    "endless, packed": (endless(packed=True), Lost.NONSENSE),
    "packed twice": (lambda s, b, h: h.send("{}", headers={"Content-Encoding": "gzip, gzip"}), Lost.NONSENSE),
    "length too large": (raw(OK, "Content-Length: 99", "", "{}"), Lost.UNREACHABLE),
    "length too small": (lambda s, b, h: h.send('{"choices": []}', headers={"Content-Length": "3"}), Lost.NONSENSE),
    "length below 0": (raw(OK, "Content-Length: -5", "", "{}"), Lost.UNREACHABLE),
    "not HTTP": (raw("hello"), Lost.UNREACHABLE),
    "endless headers": (raw(OK, *(f"X-{n}: {n}" for n in range(20_000)), "", "{}"), Lost.UNREACHABLE),
    "odd cookies": (raw(OK, *GOING, "Set-Cookie: \xff=\x01; expires=soon", "", "{}"), Lost.NONSENSE),
    "hangs up": (lambda s, b, h: h.connection.shutdown(socket.SHUT_RDWR), Lost.UNREACHABLE),
}


def test_a_failure_costs_its_game_and_the_others_go_on(serve: Callable[[Answering], Server]) -> None:
    """The first games fail in their first request, each in another way; the last three end as they would have."""

    def answering(server: Server, body: dict[str, Any], handler: Any) -> None:
        number = len(server.asked) - 1  # one at a time: first the openings, in the order of the games
        (bad[number][0] if number < len(bad) else sensible)(server, body, handler)

    bad = list(HOSTILE.values())
    server = serve(answering)
    agent = agent_of(server.url, parallel=1)
    episodes = play(agent, games=len(bad) + 3)
    assert [e.outcome["how"] for e in episodes] == ["abort"] * len(bad) + ["mismatch"] * 3
    assert {index: why for (index, _), why in agent.lost} == dict(enumerate(reason for _, reason in bad))
    assert all([t.text for t in e.turns] == [""] * 5 for e in episodes[: len(bad)])
    assert len(server.asked) == len(bad) + 3 * 4  # a lost seat's endpoint is not asked again
    lost = agent.figures()["lost"]
    assert sum(lost.values()) == len(bad) and lost["key refused"] == 1 and "1 key refused" in agent.summary()
    assert "3 redirected elsewhere" in agent.summary()
    before = {"calls": 5, "tokens": 100, "replayed": 2, "lost": {"key refused": 2, "budget spent": 1}}
    now, whole = agent.figures(), agent.figures(before)  # of a run that was stopped and goes on
    assert [whole[name] - now[name] for name in ("calls", "tokens", "replayed")] == [5, 100, 2]
    assert whole["lost"] == {**now["lost"], "key refused": 3, "budget spent": 1}


def test_redirects_are_not_followed(serve: Callable[[Answering], Server]) -> None:
    """Messages and the key do not reach the other address, and each call is counted."""
    other = serve(sensible)

    def moved(server: Server, body: dict[str, Any], handler: Any) -> None:
        status = (301, 302, 303, 307, 308)[len(server.asked) - 1]
        handler.send("{}", status, {"Location": f"{other.url}/chat/completions"})

    server = serve(moved)
    agent = agent_of(server.url, retries=2, parallel=1)
    assert [e.outcome["how"] for e in play(agent, games=5)] == ["abort"] * 5
    assert not other.asked and len(server.asked) == agent.figures()["calls"] == 5
    assert agent.figures()["lost"] == {"redirected elsewhere": 5}
    other.shutdown()
    other.server_close()
    gone = agent_of(other.url)  # nobody listens there any more
    assert [e.outcome["how"] for e in play(gone, games=2)] == ["abort"] * 2
    assert gone.figures()["lost"] == {"cannot be reached": 2}


def test_a_hanging_endpoint_is_given_up(serve: Callable[[Answering], Server]) -> None:
    """One that never answers, and one that sends a byte now and then, so that no single read takes long."""

    def hang(server: Server, body: dict[str, Any], handler: Any) -> None:
        drips = len(server.asked) % 2
        if drips:
            handler.send_response(200)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", "100000")
            handler.end_headers()
        while not server.stopped.wait(0.05):
            if drips:
                handler.wfile.write(b" ")
                handler.wfile.flush()

    agent = agent_of(serve(hang).url, timeout=0.3)
    began = time.monotonic()
    episodes = play(agent, games=2)
    assert [e.outcome["how"] for e in episodes] == ["abort"] * 2 and time.monotonic() - began < 20
    assert agent.figures()["lost"] == {"no answer in time": 2}


def test_too_many_requests_then_right(serve: Callable[[Answering], Server]) -> None:
    def answering(server: Server, body: dict[str, Any], handler: Any) -> None:
        if len(server.asked) % 2:
            handler.send("{}", 429, {"Retry-After": "0.01"})
        else:
            sensible(server, body, handler)

    server = serve(answering)
    agent = agent_of(server.url, retries=1, parallel=1)
    assert [e.outcome["how"] for e in play(agent, games=1)] == ["mismatch"] and not agent.lost
    assert agent.endpoint.calls == len(server.asked) == 8  # type: ignore[union-attr]


@pytest.mark.parametrize(("status", "stops"), [(401, True), (403, False), (404, False), (500, False)])
def test_only_a_refused_key_stops_a_game_beside_a_learner(
    status: int, stops: bool, serve: Callable[[Answering], Server]
) -> None:
    """Status 403 costs one game alone, because moderators answer so to a single request."""

    def answering(server: Server, body: dict[str, Any], handler: Any) -> None:
        if len(server.asked) == 2:
            handler.send("{}", status)
        else:
            sensible(server, body, handler)

    agent = agent_of(serve(answering).url, parallel=1)
    agent.stops = True
    if stops:
        with pytest.raises(UserError, match="chat: key refused"):
            play(agent)
    else:
        assert sorted(e.outcome["how"] for e in play(agent)) == ["abort"] + ["mismatch"] * 3
    assert len(agent.lost) == 1 and len(agent.lost_for_good()) == stops


def test_the_budget_in_tokens_is_never_overdrawn(serve: Callable[[Answering], Server]) -> None:
    """The most that an answer may cost is reserved before the request; afterwards its real cost counts."""
    server = serve(lambda server, body, handler: handler.say(move(body["messages"]), tokens=1000))
    agent = agent_of(server.url, tokens=6000, parallel=4)
    play(agent, games=4)
    assert 0 < agent.figures()["tokens"] == 1000 * len(server.asked) <= 6000
    assert set(agent.figures()["lost"]) == {"budget spent"}


def test_answers_are_kept_and_replayed_without_network(serve: Callable[[Answering], Server], tmp_path: Path) -> None:
    server = serve(sensible)
    path = tmp_path / "kept" / "answers.jsonl"
    first = play(agent_of(server.url, answers=str(path)))
    asked = len(server.asked)
    again = agent_of(server.url, answers=str(path))
    assert play(again) == first and len(server.asked) == asked  # nothing was sent
    assert again.figures() == {"calls": 0, "tokens": 0, "replayed": 16, "lost": {}}
    server.shutdown()
    replay = ChatAgent(ChatConfig(model="m", answers=str(path), replay=True))
    assert play(replay) == first
    others = play(replay, games=1, seed=1)  # games that were not played then
    assert others[0].outcome["how"] == "abort" and replay.figures()["lost"] == {"not among the kept answers": 1}
    assert {e.outcome["how"] for e in play(ChatAgent(ChatConfig(model="other", answers=str(path), replay=True)))} == {
        "abort"
    }


def test_a_killed_runs_last_line_is_mended_and_a_broken_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answers = Answers(path)
    answers.add({"a": 1}, Answer("one", 3))
    answers.add({"a": 2}, Answer("two\n\ud83d\ude00", None))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"request": {"a"')
    torn = Answers(path)
    assert len(torn) == 2 and torn.get({"a": 1}) == Answer("one", 3)
    torn.add({"a": 3}, Answer("three"))
    assert path.read_bytes().startswith(whole) and len(Answers(path)) == 3
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(UserError, match="line 1"):
        Answers(path)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\xff\xfe\x00", b"null", b'["request"]', b"[" * 100_000,
        b'{"request": {"a": ' + b"[" * 490 + b"]" * 490 + b'}, "answer": "hi", "tokens": 1' + b"}" * 2,
        b'{"request": "abc", "answer": "hi", "tokens": 1}', b'{"request": {}, "answer": 7, "tokens": 1}',
        b'{"request": {}, "answer": "hi", "tokens": "1"}', b'{"request": {}, "answer": "hi"}',
        b'{"request": {}, "answer": "hi", "tokens": 1, "thoughts": 2}', b"9" * 10_000,
    ],
)  # fmt: skip
def test_a_damaged_file_of_answers_is_one_sentence(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    Answers(path).add({"a": 1}, Answer("one", 3))
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(UserError, match="line 2: expected an answer as it was kept") as refused:
        Answers(path)
    assert len(str(refused.value)) < 300


def test_a_file_of_answers_is_a_file_whose_texts_can_be_sent(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for place in (tmp_path, fifo, tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match=r"chat\.answers"):
            Answers(place)
    with pytest.raises(UserError, match=r"chat\.answers"):
        ChatConfig(url="http://localhost/v1", model="m", answers="a\0b")
    path = tmp_path / "answers.jsonl"
    path.write_text('{"request": {"a": 1}, "answer": "a\\ud800", "tokens": null, "thoughts": "\\udfff"}\n')
    assert Answers(path).get({"a": 1}) == Answer("a?", None, "?")


def test_the_key_and_other_secrets_are_in_no_file_and_no_words(
    serve: Callable[[Answering], Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Secrets are masked even if the endpoint repeats them. The file of answers can be replayed with other secrets, or
    none."""
    secrets = {"api_key": "first-31415926", "a": [{"headers": {"Authorization": "Bearer second-27182818"}}]}

    def telling(server: Server, body: dict[str, Any], handler: Any) -> None:
        known = f"{body['a'][0]['headers']['Authorization']}, {server.keys[0]}"
        handler.say(f"<think>{body['api_key']}</think>[message] it is {known} [END]")

    path = tmp_path / "answers.jsonl"
    agent = agent_of(serve(telling).url, answers=str(path), extra={**secrets, "user": KEY, "effort": "low"})
    episodes = play(agent, games=1)
    asked = agent.endpoint.config.extra  # type: ignore[union-attr]
    assert asked["api_key"] == "first-31415926" and episodes[0].turns[0].message == "it is [key], Bearer [key]"
    said = [repr(episodes), repr(agent), repr(agent.config), agent.summary(), path.read_text(), *capsys.readouterr()]
    assert not any(word in text for text in said for word in ("31415926", "27182818", KEY))
    assert '"effort": "low"' in path.read_text()
    for other in ({"api_key": "another", "a": [{"headers": {"Authorization": "none"}}]}, hidden(secrets)):
        extra = {**other, "user": KEY, "effort": "low"}
        replay = ChatAgent(ChatConfig(model="m", answers=str(path), replay=True, extra=extra))
        assert play(replay, games=1) == episodes and not replay.lost
    other = ChatAgent(ChatConfig(model="m", answers=str(path), replay=True, extra={**secrets, "effort": "high"}))
    assert play(other, games=1)[0].outcome["how"] == "abort"


def test_it_reads_natural_words_whatever_the_others_read(serve: Callable[[Answering], Server]) -> None:
    natural, compact = serve(sensible), serve(sensible)
    play(agent_of(natural.url, parallel=1), games=2)
    play(agent_of(compact.url, parallel=1), games=2, style="compact")
    assert compact.asked == natural.asked
    scripts = scripted("dond", "careful")
    agent = agent_of(compact.url)
    cast = {"player_0": agent, "player_1": scripts}
    (episode,) = rollout(draw_games(0, count=1), lambda g, e: cast, lambda: make_env("compact"), 1)
    assert set(episode.players.values()) == {"chat", "careful"} and not agent.lost


def test_choices_are_answered_by_number(serve: Callable[[Answering], Server]) -> None:
    def first_option(server: Server, body: dict[str, Any], handler: Any) -> None:
        last = body["messages"][-1]["content"]
        handler.say("1" if "answer with its number alone:\n1) " in last else "hello all [END]")

    server = serve(first_option)
    agent = ChatAgent(ChatConfig(url=server.url, model="m", retries=0))
    env = among_us_v0.parallel_env(players=4, max_steps=4)  # of compact style, as scripts read it
    scripts = scripted("among_us", "random")

    def cast(game: Any, env: Any) -> dict[str, Any]:
        return {**dict.fromkeys(env.possible_agents, scripts), env.possible_agents[0]: agent}

    (episode,) = rollout(draw_games(0, count=1), cast, lambda: env, 1)
    own = [t for t in episode.turns if t.agent == "player_0"]
    assert own and not any(t.error for t in own) and not agent.lost
    assert {t.text for t in own} <= set(among_us_texts.OPTION[Style.NATURAL].values())
    assert "You play Among Us on a grid of rooms" in server.asked[0]["messages"][0]["content"]


def test_a_count_that_is_chosen_is_the_count(serve: Callable[[Answering], Server]) -> None:
    """The answer "1" claims one book, and does not choose the first option, which is no books."""
    said = {"message or make a proposal": "2", "do you claim": "1"}

    def answering(server: Server, body: dict[str, Any], handler: Any) -> None:
        last = body["messages"][-1]["content"]
        handler.say(next((word for asked, word in said.items() if asked in last), "hello"))

    server = serve(answering)
    make = lambda: dond_v0.parallel_env(style="natural", format="structured")  # noqa: E731
    (episode,) = rollout(draw_games(0, count=1), everyone(agent_of(server.url, parallel=1)), make, 1)
    assert episode.outcome["claims"] == ((1, 1, 1), (1, 1, 1)) and not episode.outcome["errors"]
    counts = [text for a in server.asked if "do you claim" in (text := a["messages"][-1]["content"])]
    assert counts and all("answer with it alone:\n0\n1" in asked and "1) " not in asked for asked in counts)


def test_a_placeholder_for_a_key_is_no_secret(
    serve: Callable[[Answering], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that stand for a key, if the endpoint needs none, may be printed."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    server = serve(lambda server, body, handler: handler.say("[message] I want none of the books [END]"))
    assert play(agent_of(server.url), games=1)[0].turns[0].message == "I want none of the books"
    assert server.keys[0] == "Bearer none"


def test_what_was_paid_for_is_kept_where_the_budget_ends(serve: Callable[[Answering], Server], tmp_path: Path) -> None:
    """Requests are under way when another one finds the budget spent. Their answers are kept, and the next command asks
    nothing twice."""
    began = threading.Barrier(3, timeout=10)

    def slowly(server: Server, body: dict[str, Any], handler: Any) -> None:
        began.wait()
        time.sleep(0.2)
        sensible(server, body, handler)

    path = tmp_path / "answers.jsonl"
    agent = agent_of((server := serve(slowly)).url, calls=3, parallel=4, answers=str(path))
    agent.stops = True
    with pytest.raises(UserError, match="chat: budget spent"):
        play(agent, games=4)
    assert len(server.asked) == 3 == len(Answers(path))
    server.answering = sensible
    play(agent_of(server.url, answers=str(path)), games=4)
    asked = [json.dumps(body["messages"]) for body in server.asked]
    assert len(asked) == 16  # four replies a game


def test_an_answer_that_breaks_off_may_have_been_paid_for(serve: Callable[[Answering], Server]) -> None:
    """Tokens of the answer count against the budget. A connection that is refused costs nothing."""
    server = serve(raw(OK, "Content-Length: 99", "", "{}"))
    agent = agent_of(server.url, tokens=9000, parallel=1)
    play(agent, games=20)
    assert set(agent.figures()["lost"]) == {"cannot be reached", "budget spent"} and 0 < len(server.asked) < 20
    gone = agent_of("http://127.0.0.1:9/v1")
    play(gone, games=1)
    assert gone.figures()["tokens"] == 0 and gone.figures()["lost"] == {"cannot be reached": 1}


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "ftp://nowhere"])
def test_a_proxy_that_cannot_be_used_is_one_sentence(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(UserError, match="proxy"):
        Endpoint(ChatConfig(url="http://localhost:8000/v1", model="m", key=""))


def test_bad_settings_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good: dict[str, Any] = {"url": "http://localhost:8000/v1", "model": "m"}
    for change, named in (
        ({"url": ""}, "chat.url"), ({"url": "ftp://x"}, "chat.url"), ({"url": f"http://{KEY}@host/v1"}, "chat.url"),
        ({"url": f"http://h/v1?key={KEY}"}, "chat.url"), ({"url": "http://h:99999/"}, "chat.url"),
        ({"model": ""}, "chat.model"), ({"key": KEY}, "chat.key"), ({"retries": -1}, "chat.retries"),
        ({"timeout": 0.0}, "chat.timeout"), ({"timeout": float("nan")}, "chat.timeout"),
        ({"parallel": 0}, "chat.parallel"), ({"temperature": -1.0}, "chat.temperature"),
        ({"temperature": float("nan")}, "chat.temperature"), ({"temperature": float("inf")}, "chat.temperature"),
        ({"replay": True}, "chat.replay"), ({"extra": {"messages": []}}, "chat.extra"),
        ({"extra": {"top_p": float("nan")}}, "chat.extra"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=named) as refused:
            ChatConfig(**{**good, **change})
        assert KEY not in str(refused.value)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UserError, match="OPENAI_API_KEY"):
        Endpoint(ChatConfig(**good))
    monkeypatch.setenv("OPENAI_API_KEY", "two words")
    with pytest.raises(UserError, match="can't be a key") as refused:
        Endpoint(ChatConfig(**good))
    assert "two words" not in str(refused.value)
    with pytest.raises(UserError, match="holds no answer"):
        ChatAgent(ChatConfig(model="m", answers=str(tmp_path / "none.jsonl"), replay=True))


SAID = "[message] I'd like the hats. [END]"


def test_thoughts_are_heard_by_nobody_and_kept(serve: Callable[[Answering], Server], tmp_path: Path) -> None:
    def answering(server: Server, body: dict[str, Any], handler: Any) -> None:
        if len(server.asked) == 1:
            handler.say(f"<think>They want books.</think>{SAID}", reasoning_content="In a field.")
        else:
            handler.say(None, reasoning="In a field of another name.")

    server, path = serve(answering), str(tmp_path / "kept.jsonl")
    episodes = play(agent_of(server.url, answers=path), games=1)
    first, second, *_ = episodes[0].turns
    assert (first.text, first.message, first.thoughts) == (SAID, "I'd like the hats.", "In a field.\nThey want books.")
    assert (second.text, second.thoughts, second.cut) == ("", "In a field of another name.", False) and second.error
    assert not any(word in json.dumps(asked) for word in ("They want", "In a field") for asked in server.asked)
    assert all(message["content"] for asked in server.asked for message in asked["messages"])
    kept = episode_to_json(episodes[0])["turns"]
    assert (
        kept[0]["thoughts"] == "In a field.\nThey want books."
        and "thoughts" not in episode_to_json(play(agent_of(serve(sensible).url), games=1)[0])["turns"][0]
    )
    replay = ChatAgent(ChatConfig(model="m", answers=path, replay=True))
    assert play(replay, games=1) == episodes and not replay.lost


def test_a_reply_cut_at_its_limit_says_so(serve: Callable[[Answering], Server], tmp_path: Path) -> None:
    contents = [None, "", "<think>They want", "[message] I'd like", *[None] * 20]

    def answering(server: Server, body: dict[str, Any], handler: Any) -> None:
        message = {"content": contents[len(server.asked) - 1], "reasoning_content": "They want"}
        handler.send(json.dumps({"choices": [{"finish_reason": "length", "message": message}]}))

    path = str(tmp_path / "kept.jsonl")
    agent = agent_of(serve(answering).url, answers=path)
    episodes = play(agent, games=1)
    turns = episodes[0].turns
    whole = {"finish_reason": "length", "message": {"content": f"{SAID} And then"}}  # it ended before the limit
    fine = agent_of(serve(lambda s, b, h: h.send(json.dumps({"choices": [whole]}))).url)
    assert not any(turn.cut for turn in play(fine, games=1)[0].turns) and "cut" not in fine.figures()
    assert [(t.text, t.cut) for t in turns[:5]] == [*[("", True)] * 3, ("[message] I'd like", True), ("", True)]
    assert agent.figures()["cut"] == len(turns) and episode_to_json(episodes[0])["turns"][0]["cut"] and not agent.lost
    assert f"{len(turns)} answers cut at chat.max_tokens=200" in agent.summary()
    assert agent.figures({"calls": 0, "tokens": 0, "replayed": 0, "cut": 2, "lost": {}})["cut"] == len(turns) + 2
    replay = ChatAgent(ChatConfig(model="m", answers=path, replay=True))
    assert play(replay, games=1) == episodes and replay.figures()["cut"] == len(turns)
