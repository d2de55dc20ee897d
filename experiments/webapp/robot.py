"""A program in a person's place: reads the pages of a study as a browser does, and plays by a scripted player.

It knows nothing but what the server sends to a browser. What it plays is marked as simulated by the server.
"""

import json
import logging
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser

import httpx2

from envs.core import END
from envs.dond.replies import MESSAGE, PROPOSE
from envs.dond.rules import ITEMS
from marl.agents.base import Player
from marl.common.errors import UserError

PATIENCE = 120.0  # seconds that an opponent may take
ROLE = re.compile(r"You are \w+, an? (\w+)")
TEXT = re.compile(r'name="text" value="(\w+)"')  # which text of a study the page shows
CLAIM = re.compile(r"(\d+) books, (\d+) hats, (\d+) balls")


class GamePage(HTMLParser):
    """Content of a game's page: its state, the rules, what was heard, and the reply that is due."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.state, self.number, self.rules = "", "", ""
        self.choices: list[str] = []
        self.heard: list[str] = []  # as the game says it
        self._in: list[str] = []
        self._who = self._text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        classes = given.get("class", "").split()
        if "data-state" in given:
            self.state = given["data-state"]
        if given.get("name") == "number":
            self.number = given.get("value", "")
        if given.get("name") == "choice":
            self.choices.append(given.get("value", ""))
        if tag in ("pre", "p", "div"):
            self._in.append(next((c for c in (tag, *classes) if c in ("pre", "news", "who", "bubble")), ""))
            self._text = ""

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("pre", "p", "div") or not self._in:
            return
        where = self._in.pop()
        if where == "pre":
            self.rules = self._text
        elif where == "who":
            self._who = self._text.strip()
        elif where == "news":
            self.heard.append(self._text.strip())
        elif where == "bubble" and not self._who.startswith("You"):
            self.heard.append(heard_line(self._who, self._text.strip()))

    def handle_data(self, data: str) -> None:
        self._text += data


class Robot:
    """One person of a study: consents, plays by `player(seed, role)` until it may play no more, and finishes."""

    def __init__(self, address: str, player: Callable[[int, str], Player], seed: int, token: str = "") -> None:
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs a line for each request
        self.client = httpx2.Client(base_url=address, follow_redirects=True, timeout=PATIENCE)
        self.player, self.seed, self.token = player, seed, token
        self.seconds: list[float] = []  # from each reply to when the next is due
        self.waited = 0.0  # for all pages of games

    def join(self, consent: int, answer: str | None = None) -> None:
        """Agrees to all statements and answers the screening question."""
        if self.token:
            self._post("/enter", token=self.token)
        read = TEXT.findall(self._get("/study").text)
        ticked = {f"agree{number}": "yes" for number in range(consent)}
        self._post("/study/consent", text="".join(read), **ticked)
        if answer is not None:
            self._post("/study/screening", answer=answer)

    def play(self, number: int) -> bool:
        """Plays the next game. Returns false where there is none."""
        before = time.monotonic()
        found = self._post("/study/next")
        if not found.url.path.startswith("/play/"):
            return False
        address, page = found.url.path, GamePage(found.text)
        role = ROLE.search(page.rules)
        player = self.player(self.seed * 1000 + number, role[1] if role else "negotiator")
        opened, heard = False, 0
        until = time.monotonic() + PATIENCE
        while page.state in ("waiting", "yours"):
            if page.state == "waiting":
                if time.monotonic() > until:
                    raise UserError(f"{address}: the opponent has not replied for {PATIENCE:g} seconds.")
                page = self._live(address)
                continue
            lines = [*([] if opened else [page.rules]), *page.heard[heard:]]
            text = "".join(line.rstrip("\n") + "\n" for line in lines)
            opened, heard = True, len(page.heard)
            began = time.monotonic()
            page = GamePage(
                self._post(address, number=page.number, **form_of(player.reply(text, tuple(page.choices)), page)).text
            )
            while page.state == "waiting" and time.monotonic() < began + PATIENCE:
                page = self._live(address)
            self.seconds.append(time.monotonic() - began)
            until = time.monotonic() + PATIENCE
        self.waited += time.monotonic() - before
        return True

    def finish(self) -> None:
        self._post("/study/finish")

    def _live(self, address: str) -> GamePage:
        """The game as the last of the server's events shows it."""
        lines = self._get(f"{address}/live").text.splitlines()
        events = [line for line in lines if line.startswith("data: ")]
        return GamePage(json.loads(events[-1].removeprefix("data: ")))

    def _get(self, path: str) -> httpx2.Response:
        return checked(self.client.get(path))

    def _post(self, path: str, **fields: str) -> httpx2.Response:
        return checked(self.client.post(path, data=fields))


def heard_line(who: str, said: str) -> str:
    """A message as its game tells it: to a partner, to a power of Diplomacy, or to all in Among Us."""
    if who == "Partner":
        return f"Partner: {said}"
    return f"{who} to you: {said}" if who.isupper() else f'{who} says: "{said}"'


def checked(response: httpx2.Response) -> httpx2.Response:
    """The response. UserError for one that is no page of a game; a refused reply is one."""
    if response.status_code >= 300 and "data-state" not in response.text:
        raise UserError(f"{response.url.path} was answered with {response.status_code}: {response.text[:200]}")
    return response


def form_of(reply: str, page: GamePage) -> dict[str, str]:
    """The form that stands for a reply as the game's players write it."""
    text = reply.partition(END)[0].strip()
    if page.choices:
        return {"choice": text if text in page.choices else page.choices[0]}
    claim = CLAIM.search(text) if text.startswith(PROPOSE) else None
    if claim is not None:
        return {"kind": "propose", **dict(zip(ITEMS, claim.groups(), strict=True))}
    return {"kind": "message", "text": text.removeprefix(MESSAGE).strip()}
