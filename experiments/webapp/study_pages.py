"""The pages of a study: information and consent, a screening question, games, pay, the end, withdrawal.

Where a study is served, there are no other pages: whoever takes part sees neither who the opponents are nor others'
games.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from experiments.webapp.engine import Engine, Full, Sight
from experiments.webapp.forms import done, form_of
from experiments.webapp.opponents import Opponents
from experiments.webapp.roster import Person, Played, Roster
from experiments.webapp.session import set_cookie
from experiments.webapp.study import Study
from marl.common.errors import UserError
from marl.report.views import NO_DEAL

Html = Callable[..., Response]
Page = Callable[[Request, str], Response | Awaitable[Response]]  # for a person; a plain function runs in a thread


@dataclass
class StudyPages:
    """`html(template, status, **values)` renders a page; `folder` holds the transcripts of finished games."""

    roster: Roster
    engine: Engine
    opponents: Opponents
    folder: Path
    html: Html
    played: Mapping[tuple[str, str], tuple[str, Mapping[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.played = opponents_of(self.roster, self.opponents)

    def pages(self) -> list[tuple[str, Page, str]]:
        return [
            ("/", self.home, "GET"),
            ("/study", self.home, "GET"),
            ("/study/consent", self.consent, "POST"),
            ("/study/screening", self.screening, "POST"),
            ("/study/next", self.next, "POST"),
            ("/study/finish", self.finish, "POST"),
            ("/study/withdraw", self.ask, "GET"),
            ("/study/withdraw", self.withdraw, "POST"),
        ]

    def home(self, request: Request, session: str) -> Response:
        return self.html("study_refused.html") if self.out in request.cookies else self.shown(session)

    @property
    def out(self) -> str:
        """A cookie's name. It tells that the screening question was failed here, and outlives a withdrawal."""
        return f"screened_{self.roster.study.name}"

    def shown(self, session: str, why: str = "", again: str = "") -> Response:
        """The page of where this person is in the study. `again`: since when the text is another."""
        study, person = self.roster.study, self.roster.person(session)
        status = 400 if why or again else 200
        if person is None or person.version != study.version:
            again = again or ("you agreed" if person else "")
            return self.html("study_information.html", status, pays=pays_of(study), again=again, why=why)
        if person.state == "screening":
            return self.html("study_screening.html", status, why=why)
        if person.state == "refused":
            return self.html("study_refused.html")
        games = self.roster.games(session)
        return self.html(
            "study.html",
            status,
            person=person,
            part=study.parts[person.part],
            pay=study.pay_in(person.part),
            earned=study.pay.money(self.roster.pay(person)),
            played=len(games),
            open_game=open_of(games),
            why=why,
        )

    async def consent(self, request: Request, session: str) -> Response:
        if self.out in request.cookies:
            return self.html("study_refused.html")
        form, statements = await form_of(request), self.roster.study.consent
        if form.get("text") != self.roster.study.digest:
            return await run_in_threadpool(self.shown, session, "", "you opened this page")
        if any(form.get(f"agree{number}") != "yes" for number in range(len(statements))):
            why = "You can take part only if you agree to every statement. If you do not, simply leave this page."
            return await run_in_threadpool(self.shown, session, why)
        await run_in_threadpool(self.roster.consent, session)
        return RedirectResponse("/study", 303)

    async def screening(self, request: Request, session: str) -> Response:
        screening, answer = self.roster.study.screening, (await form_of(request)).get("answer", "")
        if screening is not None and answer in screening.answers:
            await run_in_threadpool(self.roster.passed, session, answer == screening.right)
            response = RedirectResponse("/study", 303)
            person = await run_in_threadpool(self.roster.person, session)
            if person is not None and person.state == "refused":
                set_cookie(response, self.out, "yes")
            return response
        return await run_in_threadpool(self.shown, session, "Choose one of the answers.")

    def playing(self, session: str) -> Person:
        """The person, if it takes part now. UserError otherwise."""
        person = self.roster.person(session)
        if person is None or person.version != self.roster.study.version or person.state != "playing":
            raise UserError("You do not take part in this study now. Load its first page.")
        return person

    async def next(self, request: Request, session: str) -> Response:
        person = await run_in_threadpool(self.playing, session)
        games = await run_in_threadpool(self.roster.games, session)
        if here := open_of(games):
            return RedirectResponse(f"/play/{here}", 303)
        if len(games) >= self.roster.study.games:
            return RedirectResponse("/study", 303)
        record = await run_in_threadpool(self.roster.assign, person, self.played)
        try:
            await run_in_threadpool(self.opponents.load, record.opponent, record.env, self.engine.busy())
            await done(self.engine.open(record))
        except UserError as error:
            await run_in_threadpool(self.roster.take_back, record.id)
            if isinstance(error, Full):
                raise
            if here := open_of(await run_in_threadpool(self.roster.games, session)):  # begun by a second click
                return RedirectResponse(f"/play/{here}", 303)
            return await run_in_threadpool(self.shown, session, str(error))
        return RedirectResponse(f"/play/{record.id}", 303)

    async def finish(self, request: Request, session: str) -> Response:
        await self.stop_games(session)
        await run_in_threadpool(self.roster.finish, session)
        return RedirectResponse("/study", 303)

    def ask(self, request: Request, session: str) -> Response:
        return self.html("study_withdraw.html", there=self.roster.person(session))

    async def withdraw(self, request: Request, session: str) -> Response:
        if await run_in_threadpool(self.roster.person, session) is not None:
            await self.stop_games(session)
            for game in await run_in_threadpool(self.roster.withdraw, session):
                (self.folder / f"{game}.jsonl").unlink(missing_ok=True)
        return self.html("study_withdrawn.html")

    async def stop_games(self, session: str) -> None:
        for game in await run_in_threadpool(self.roster.games, session):
            if game.state == "open":
                await done(self.engine.stop(game.game, "You stopped the game."))

    def begins(self, sight: Sight) -> bool:
        """Tells whether a person begins its first game: the rules are open in it."""
        begins = sight.number == 0 and sight.state in ("yours", "waiting")
        return begins and len(self.roster.games(sight.person)) == 1

    def standing(self, sight: Sight) -> dict[str, Any]:
        """Text for a person in a game: its number and how much is earned so far; at its end points, pay, what went
        wrong, and whether there is another."""
        person = self.roster.person(sight.person)
        if person is None:
            return {}
        games = self.roster.games(sight.person)
        game = next((game for game in games if game.game == sight.id), None)
        if game is None:
            return {}
        so_far = {"number": game.number, "earned": self.roster.study.pay.money(self.roster.pay(person))}
        if sight.state in ("yours", "waiting"):
            return so_far
        pay, result = self.roster.as_of(game.version).pay_in(game.part), game.result
        return {
            "points": f"{result['score']:g}" if "score" in result else "",
            "wrong": wrong_of(result),
            "pay": pay.money(pay.of(result)),
            **so_far,
            "more": person.state == "playing" and len(games) < self.roster.study.games,
        }


def open_of(games: Sequence[Played]) -> str | None:
    """The game of these that is open, if there is one."""
    return next((game.game for game in games if game.state == "open"), None)


def wrong_of(result: Mapping[str, Any]) -> str:
    """Says in a sentence what went wrong in a finished game; empty if nothing did."""
    how = result.get("how", "")
    if how == "failed":
        return "The opponent or the server failed. This is not your fault."
    if result.get("aborted_by") == "opponent":
        return "The opponent broke the rules too often. This is not your fault."
    return f"No deal: {NO_DEAL[how]}." if how in NO_DEAL else ""


def pays_of(study: Study) -> dict[str, str]:
    """The pay for each thing, over all parts: "$0.10 or $0.20" where they differ, empty for nothing."""
    pays = [study.pay_in(name) for name in study.parts]
    found = {}
    for name in ("taking_part", "game", "point", "aborted"):
        paid = any(getattr(pay, name) for pay in pays)
        found[name] = " or ".join(dict.fromkeys(pay.money(getattr(pay, name)) for pay in pays)) if paid else ""
    return found


def opponents_of(roster: Roster, opponents: Opponents) -> dict[tuple[str, str], tuple[str, dict[str, Any]]]:
    """Each condition's opponent and game, by part and condition, all loaded: nobody is to wait, or to meet a failure.

    UserError if one is not there, its game is wrong, or they do not fit into memory.
    """
    found = {}
    opponents.models = max(opponents.models, sum(len(part.conditions) for part in roster.study.parts.values()))
    for name, part in roster.study.parts.items():
        for each, condition in part.conditions.items():
            where = f"parts.{name}.conditions.{each}"
            opponent = opponents.of_condition(condition, part.game, where)
            env = {**opponent.env, **part.env, **condition.env, "game": part.game, "style": "natural"}
            opponents.check(opponent.name, env, condition.seat, where)
            opponents.load(opponent.name, env, set())
            found[name, each] = opponent.name, env
    return found
