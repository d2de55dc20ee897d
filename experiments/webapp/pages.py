"""The pages, and what guards them: every request passes `Site.page`, every text is escaped by the templates."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from experiments.webapp import runs as runs_page
from experiments.webapp import watch
from experiments.webapp.boards import picture
from experiments.webapp.engine import Engine, Full, Sight
from experiments.webapp.forms import Refused, done, form_of
from experiments.webapp.opponents import SEATS, Opponents
from experiments.webapp.roster import Roster
from experiments.webapp.session import COOKIE, Rate, Sessions, host_is_fine, origin_is_fine, set_cookie
from experiments.webapp.store import Record, Store, new_record
from experiments.webapp.study_pages import Page, StudyPages, wrong_of
from experiments.webapp.table import LONGEST, reply_of, table_view
from marl.common.errors import UserError
from marl.report.html import TEMPLATES, report_script, templates

WAIT = 20.0  # seconds after which a page that waits for news asks again
SHOWN = 100  # recorded games on a page
FIRST = re.compile(r"(\d{1,8})\.(\d{1,8})")  # where a page of them begins: a file's number and a game's in it
OBJECTIVES = {
    "own": "as the opponent usually plays",
    "1": "cooperative",
    "0": "semi-competitive",
    "-1": "strictly competitive",
}
GAMES = {"dond": "Deal or No Deal", "among_us": "Among Us", "diplomacy": "Diplomacy"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
PICTURE = "default-src 'none'; style-src 'unsafe-inline'"
REPORT = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{report_script()[1]}'; "
    "base-uri 'none'; frame-ancestors 'none'"
)


@dataclass
class Site:
    """All pages, or those of a study alone. `app` makes the application."""

    engine: Engine
    store: Store
    opponents: Opponents
    sessions: Sessions
    runs: Path
    rate: Rate  # requests of a person
    newcomers: Rate  # sessions for an address
    roster: Roster | None = None  # of the study that is served

    def __post_init__(self) -> None:
        here = Path(__file__).parent
        self._templates = templates(here / "templates")
        out = self.engine.out
        recorded_in = out.name if out.parent == self.runs else ""  # else finished games cannot be watched here
        self._templates.globals |= {
            "recorded_in": recorded_in,
            "games": GAMES,
            "longest": LONGEST,
            "study": self.roster.study if self.roster else None,
            "simulated": self.roster is not None and self.roster.simulated,
            "quoted": quote,
        }
        style = (TEMPLATES / "style.css").read_text() + (here / "static/web.css").read_text()
        self._static = {
            "style.css": (style, "text/css"),
            "web.js": ((here / "static/web.js").read_text(), "text/javascript"),
        }
        self._study: StudyPages | None = None
        if self.roster is not None:
            self._study = StudyPages(self.roster, self.engine, self.opponents, out / "episodes", self.html)

    def app(self) -> Starlette:
        game: list[tuple[str, Page, str]] = [
            ("/play/{game}", self.play, "GET"),
            ("/play/{game}", self.reply, "POST"),
            ("/play/{game}/live", self.live, "GET"),
            ("/play/{game}/stop", self.stop, "POST"),
            ("/play/{game}/board", self.own_board, "GET"),
        ]
        open_pages: list[tuple[str, Page, str]] = [
            ("/", self.home, "GET"),
            ("/play", self.choose, "GET"),
            ("/play", self.begin, "POST"),
            ("/watch", self.watch, "GET"),
            ("/watch/{run}/{file:path}/{line:int}/board/{phase:int}", self.board, "GET"),
            ("/watch/{run}/{file:path}/{line:int}/beside/{other}/{file2:path}/{line2:int}", self.beside, "GET"),
            ("/watch/{run}/{file:path}/{line:int}", self.recorded, "GET"),
            ("/runs", self.run_table, "GET"),
            ("/runs/{run}", self.run, "GET"),
            ("/runs/{run}/curves", self.curves, "GET"),
            ("/runs/{run}/report", self.report, "GET"),
        ]
        pages = [*game, *(self._study.pages() if self._study else open_pages)]
        routes = [Route(path, self.page(do), methods=[method]) for path, do, method in pages]
        routes += [Route("/enter", self.enter, methods=["GET", "POST"]), Route("/static/{name}", self.static)]
        return Starlette(routes=routes, exception_handlers={404: self.missing, 405: self.missing})

    # --- Guards -----------------------------------------------------------------------------------------------------
    def page(self, do: Page) -> Callable[[Request], Awaitable[Response]]:
        """Lets a request through to `do(request, person)`: known host, own form, not too often, with the token."""

        async def guarded(request: Request) -> Response:
            try:
                self.check(request)
                cookie, fresh = request.cookies.get(COOKIE), None
                person = self.sessions.person(cookie)
                if person is None:
                    if self.sessions.token is not None:
                        return RedirectResponse("/enter", 303, headers=HEADERS)
                    fresh = self.newcomer(request)
                    person = str(self.sessions.person(fresh))
                if iscoroutinefunction(do):
                    response: Response = await do(request, person)
                else:  # reads files, or waits for the database
                    response = await run_in_threadpool(cast(Callable[..., Response], do), request, person)
                if fresh is not None:
                    set_cookie(response, COOKIE, fresh)
            except Refused as refused:
                plain = refused.status not in (404, 429) or "x-script" in request.headers
                response = (
                    PlainTextResponse(f"{refused}\n", refused.status)
                    if plain
                    else self.html("error.html", refused.status, why=str(refused))
                )
            except Full as full:
                response = self.queued(full, request.url.path, {})
            except UserError as error:
                response = self.html("error.html", 400, why=str(error))
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return guarded

    def check(self, request: Request) -> None:
        if not host_is_fine(request.headers, self.sessions.token):
            raise Refused(421, "This server answers to localhost alone. Start it with a token to use another name.")
        if request.method == "POST" and not origin_is_fine(request.headers):
            raise Refused(403, "This form came from another site.")
        asker = self.sessions.person(request.cookies.get(COOKIE)) or (request.client.host if request.client else "")
        if not self.rate.allows(asker):
            raise Refused(429, "Too many requests. Wait a minute.")

    def newcomer(self, request: Request) -> str:
        """A cookie for somebody new. Refuses where one address brings too many: each would have a limit of its own."""
        if not self.newcomers.allows(request.client.host if request.client else ""):
            raise Refused(429, "Too many new visitors from your address. Wait a minute.")
        return self.sessions.new()

    async def enter(self, request: Request) -> Response:
        """Asks for the token, and gives a session to whoever has it."""
        try:
            self.check(request)
            given = (await form_of(request)).get("token", "") if request.method == "POST" else ""
            cookie = self.newcomer(request) if self.sessions.admits(given) else ""
        except Refused as refused:
            return PlainTextResponse(f"{refused}\n", refused.status, headers=HEADERS)
        if self.sessions.token is None:
            return RedirectResponse("/", 303, headers=HEADERS)
        if cookie:
            response: Response = RedirectResponse("/", 303, headers=HEADERS)
            set_cookie(response, COOKIE, cookie)
            return response
        wrong = request.method == "POST"
        response = self.html("enter.html", 403 if wrong else 200, wrong=wrong)
        response.headers.update(HEADERS)
        return response

    async def static(self, request: Request) -> Response:
        found = self._static.get(request.path_params["name"])
        if found is None:
            return PlainTextResponse("Not found\n", 404)
        return Response(found[0], media_type=found[1], headers={**HEADERS, "Cache-Control": "max-age=60"})

    async def missing(self, request: Request, error: Exception) -> Response:
        response = self.html("error.html", 404, why="There is no such page.")
        response.headers.update(HEADERS)
        return response

    def queued(self, full: Full, action: str, fields: Mapping[str, str]) -> Response:
        """The page of somebody who waits for a place; it sends the same form again."""
        response = self.html("full.html", 503, place=full.place, action=action, fields=fields)
        response.headers["Retry-After"] = "5"
        return response

    def html(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        text = self._templates.get_template(template).render(**values)
        return HTMLResponse(text.encode("utf-8", "replace"), status)  # a recorded name may have half surrogate pairs

    # --- Play -------------------------------------------------------------------------------------------------------
    async def home(self, request: Request, person: str) -> Response:
        return RedirectResponse("/play", 303)

    def choose(self, request: Request, person: str) -> Response:
        offered, mine = self.opponents.offered(), [(game, self.ended(game)) for game in self.store.games_of(person)]
        return self.html("choose.html", offered=offered, seats=SEATS, objectives=OBJECTIVES, mine=mine)

    def ended(self, game: Record) -> str:
        """Says in a few words how a game ended for its person."""
        if game.state != "over":
            return {"open": "goes on", "stopped": "stopped"}[game.state]
        result = self.store.result(game.id)
        if "deal" in result:
            return f"{'deal' if result['deal'] else 'no deal'}, score {result['score']:g}"
        if not result.get("winner"):
            return "over"
        return "won" if result["score"] else "lost"

    async def begin(self, request: Request, person: str) -> Response:
        form = await form_of(request)
        game, seat, objective = form.get("game", ""), form.get("seat", "any"), form.get("objective", "own")
        if game not in GAMES or seat not in SEATS[game] or objective not in OBJECTIVES:
            raise UserError("Choose a game, a seat and an opponent of the list.")
        plans = form.get("plan") == "yes"
        opponent = await run_in_threadpool(self.opponents.find, form.get("opponent", ""), game, plans)
        env = {**opponent.env, "style": "natural"}
        if game == "dond" and objective != "own":
            env["objective"] = float(objective)
        if game == "diplomacy":
            env["press"] = "private" if form.get("talk") == "yes" else "none"
        # A model is loaded here, so that games under way don't wait for it.
        await run_in_threadpool(self.opponents.load, opponent.name, env, self.engine.busy())
        record = new_record(person, opponent.name, env, seat)
        try:
            await done(self.engine.open(record))
        except Full as full:
            return self.queued(full, "/play", form)
        return RedirectResponse(f"/play/{record.id}", 303)

    def own(self, request: Request, person: str) -> Sight:
        """The game of this address, if it is this person's."""
        sight = self.engine.sight(request.path_params["game"])
        if sight is None or sight.person != person:
            raise Refused(404, "There is no such game, or it is somebody else's.")
        return sight

    async def news(self, request: Request, person: str) -> Sight:
        """Returns the game as soon as it waits for nobody else, or after a moment."""
        until = time.monotonic() + 0.3
        while True:
            sight = self.own(request, person)
            if sight.state != "waiting" or time.monotonic() > until:
                return sight
            await asyncio.sleep(0.02)

    def shown(self, template: str, sight: Sight, why: str = "") -> Response:
        """A game, or its table alone."""
        wrong = wrong_of(self.store.result(sight.id)) if sight.state == "over" else ""
        of_study = {"ending": {}, "rules": False}
        if self._study is not None:
            of_study = {"ending": self._study.standing(sight), "rules": self._study.begins(sight)}
        found = table_view(sight)
        return self.html(template, 400 if why else 200, sight=sight, table=found, why=why, wrong=wrong, **of_study)

    async def play(self, request: Request, person: str) -> Response:
        return self.shown("play.html", await self.news(request, person))

    async def live(self, request: Request, person: str) -> Response:
        """The table alone, for the script: a stream of server-sent events, one for each change until it is the
        person's turn."""
        self.own(request, person)
        since = request.headers.get("last-event-id") or request.query_params.get("since", "")  # the first: reconnected
        known = int(since) if since.isdecimal() and len(since) < 9 else -1
        stream = self.changes(request, person, known)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def changes(self, request: Request, person: str, known: int) -> AsyncIterator[str]:
        """Ends after `WAIT` seconds; the browser then asks again by itself."""
        yield "retry: 300\n\n"
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            try:
                sight = self.own(request, person)
            except Refused:  # deleted meanwhile
                return
            if sight.version != known:
                known = sight.version
                yield f"id: {known}\ndata: {json.dumps(bytes(self.shown('table.html', sight).body).decode())}\n\n"
                if sight.state != "waiting":
                    return
            await asyncio.sleep(0.02)

    async def reply(self, request: Request, person: str) -> Response:
        if not self.engine.resumed.is_set():  # started again just now: the game is taken up before it goes on
            await run_in_threadpool(self.engine.resumed.wait, 60)
        sight = self.own(request, person)
        form = await form_of(request)
        why = ""
        number = form.get("number", "")
        if sight.state == "yours" and number == str(sight.number):  # else: sent twice, or too late
            try:
                await done(self.engine.say(sight.id, sight.number, reply_of(sight, form)))
            except UserError as error:
                why = str(error)
        if request.headers.get("x-script") == "1":
            sight = await self.news(request, person)
            return self.shown("table.html", sight, why)
        if why:
            return self.shown("play.html", sight, why)
        return RedirectResponse(f"/play/{sight.id}#now", 303)

    async def stop(self, request: Request, person: str) -> Response:
        sight = self.own(request, person)
        await done(self.engine.stop(sight.id, "You stopped the game."))
        return RedirectResponse("/", 303)

    def own_board(self, request: Request, person: str) -> Response:
        """The picture of the board in a game of Diplomacy that somebody plays."""
        sight = self.own(request, person)
        record = self.store.find(sight.id)
        if record is None or sight.game != "diplomacy":
            raise UserError("There is no such picture.")
        svg = picture(str(record.env["map_name"]), [text for kind, text in sight.entries if kind == "seen"])
        return Response(svg, media_type="image/svg+xml", headers={"Content-Security-Policy": PICTURE})

    # --- Watch ------------------------------------------------------------------------------------------------------
    def watch(self, request: Request, person: str) -> Response:
        asked = {name: request.query_params.get(name, "")[:200] for name in ("run", "arm", "ending", "words")}
        at = FIRST.fullmatch(request.query_params.get("first", ""))
        start = (int(at[1]), int(at[2])) if at else (0, 0)
        names = sorted({file.run for file in watch.files_of(self.runs)})
        found, after = watch.games_of(self.runs, SHOWN, start, **asked)
        return self.html(
            "watch.html",
            games_found=found,
            start=start,
            after=after,
            asked=asked,
            runs=names,
            arms=sorted({watch.arm_of(self.runs / name) for name in names} - {""}),
            endings=list(dict.fromkeys((*watch.ENDINGS, *(game.ending for game in found)))),
        )

    def recorded(self, request: Request, person: str) -> Response:
        game = watch.recorded_game(self.runs, **request.path_params)
        return self.html("recorded.html", game=game, others=watch.same_games(self.runs, **request.path_params))

    def board(self, request: Request, person: str) -> Response:
        """The picture of a position of Diplomacy."""
        svg = watch.board_of(self.runs, **request.path_params)
        return Response(svg, media_type="image/svg+xml", headers={"Content-Security-Policy": PICTURE})

    def beside(self, request: Request, person: str) -> Response:
        """One game as two runs played it, side by side."""
        run, file, line, other, file2, line2 = request.path_params.values()
        places = ((run, file, line), (other, file2, line2))
        return self.html("beside.html", both=[watch.recorded_game(self.runs, *place) for place in places])

    # --- Runs -------------------------------------------------------------------------------------------------------
    def run_table(self, request: Request, person: str) -> Response:
        return self.html("runs.html", rows=[runs_page.row_of(folder) for folder in runs_page.folders(self.runs)])

    def run(self, request: Request, person: str, template: str = "run.html") -> Response:
        folder = runs_page.find_run(self.runs, request.path_params["run"])
        row, panels = runs_page.row_of(folder), runs_page.curves(folder)
        return self.html(template, row=row, panels=panels, width=runs_page.WIDTH, height=runs_page.HEIGHT)

    def curves(self, request: Request, person: str) -> Response:
        """The curves alone, for the script."""
        return self.run(request, person, "curves.html")

    def report(self, request: Request, person: str) -> Response:
        folder = runs_page.find_run(self.runs, request.path_params["run"])
        try:
            text = (folder / "report.html").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError("This run has no report yet. It is written when the run ends.") from error
        return HTMLResponse(text, headers={"Content-Security-Policy": REPORT})
