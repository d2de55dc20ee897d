"""Games of two styles, what a game has to say of itself, and which games a seed deals."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from marl.agents.base import Agent, Player
from marl.agents.text import TextAgent
from marl.common.errors import UserError
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import Cast, everyone, rollout
from marl.rollout.seeds import GAMES, SHUFFLE, Game, draw_games, shuffle_seed
from tests.marl.hint import Hint


class Says:
    """Says one word, and takes the first option."""

    def observe(self, text: str) -> None: ...

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        return options[0] if options else "ba"


def between(one: Agent, other: Agent) -> Cast:
    """Seats `one` first, `other` elsewhere."""
    return lambda game, env: {a: one if i == 0 else other for i, a in enumerate(env.possible_agents)}


class Noting:
    """A scripted player that notes everything it reads."""

    def __init__(self, player: Player, read: list[str]) -> None:
        self.player, self.read = player, read

    def observe(self, text: str) -> None:
        self.read.append(text)
        self.player.observe(text)

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        self.read.extend((text, *options))
        return self.player.reply(text, options)


def noting(name: str, game: str, style: str | None) -> tuple[TextAgent, list[str]]:
    read: list[str] = []
    made = scripted(game, "random")
    return TextAgent(name, lambda seed, role: Noting(made.make(seed, role), read), style=style), read


@pytest.mark.parametrize(("game", "opening", "own"), [("dond", "books ", "natural"), ("among_us", " grid ", "compact")])
def test_players_of_two_styles_meet_in_one_game(game: str, opening: str, own: str) -> None:
    """Players read their own style whatever the game's is; a player without a style reads the game's."""
    natural, english = noting("natural", game, "natural")
    compact, brief = noting("compact", game, "compact")
    plain, of_game = noting("plain", game, None)
    make_env = env_maker({"game": game, "style": own})
    games = draw_games(3, 1, count=4)
    for one, other in ((natural, compact), (natural, plain), (plain, compact)):
        for episode in rollout(games, between(one, other), make_env, 2):
            assert not any(turn.error.startswith("'") for turn in episode.turns)  # every choice is one of its options
    for read, style in ((english, "natural"), (brief, "compact"), (of_game, own)):
        assert any(text.startswith(opening) for text in read) == (style == "compact")
        assert any(text.startswith("You ") for text in read) == (style == "natural")
        if game == "among_us":
            moves = {text for text in read if text.startswith("go")}
            assert moves and all(("_" in move) == (style == "compact") for move in moves)


def test_a_game_without_styles_is_played_by_players_that_have_one() -> None:
    speaker = TextAgent("speaker", lambda *_: Says(), style="natural")
    (episode,) = rollout(draw_games(0, 1, count=1), everyone(speaker), Hint, 1)
    assert "right" in episode.outcome


def without(name: str) -> Callable[[dict[str, Any], bool], None]:
    return lambda info, over: info.pop(name)


def ending(outcome: Any) -> Callable[[dict[str, Any], bool], None]:
    return lambda info, over: info.update(outcome=outcome) if over else None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            without("entry"),
            r"^Untold: infos\['player_\d'\] has no entry; a game says these of each agent at every step",
        ),
        (ending({"right": True}), r"^Untold: outcome={'right': True} at the end of a game; must have `how`"),
        (ending(None), r"^Untold: outcome=None at the end of a game; must have `how`"),
        (
            ending({"how": "checkmate"}),
            r"^Untold: outcome={'how': 'checkmate'} .* must have `winner`, the name of who won",
        ),
        (ending({"how": "checkmate", "winner": 0}), r"^Untold: outcome={'how': 'checkmate', 'winner': 0} .* `winner`"),
        (ending({"how": "even", "winner": "white"}), ""),
        (ending({"how": "shake hands", "deal": True}), ""),
    ],
)
def test_what_a_game_leaves_unsaid_is_named_in_its_first_game(
    change: Callable[[dict[str, Any], bool], None], said: str
) -> None:
    class Untold(Hint):
        def step(self, actions: dict[str, str]) -> Any:
            *rest, infos = super().step(actions)
            for info in infos.values():
                change(info, not self.agents)
            return *rest, infos

    agent = everyone(TextAgent("said", lambda *_: Says()))
    with pytest.raises(UserError, match=said) if said else nullcontext():
        rollout([Game(0)], agent, Untold, 1)


def test_games_of_a_place_are_the_same_forever() -> None:
    first = [1554199118406742183, 1581778138908509251, 3708516775575914691]
    assert [g.seed for g in draw_games(0, GAMES, 1, count=8)][:3] == first and shuffle_seed(0, 1) == 1961547765


def test_other_places_have_other_games() -> None:
    places = [(seed, part, iteration) for seed in range(4) for part in (GAMES, SHUFFLE) for iteration in range(1, 40)]
    seeds = [g.seed for place in places for g in draw_games(place[0], *place[1:], count=16)]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 1 << 63 for s in seeds)
    assert len({shuffle_seed(s, i) for s in range(5) for i in range(1, 100)}) == 5 * 99


def test_a_game_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.diplomacy.board.PACKAGE", "no_such_package")
    with pytest.raises(
        UserError, match=r"^env: Diplomacy needs the package diplomacy, which is not installed\. Install"
    ):
        env_maker({"game": "diplomacy"})
