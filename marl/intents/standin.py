"""Writes scripted dialogues in the files of human ones, to stand in where there are no human ones."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from envs.dond.environment import AGENTS
from envs.dond.rules import points
from envs.human_dond import SELECTION
from marl.common.errors import UserError
from marl.common.files import write_text
from marl.metrics.negotiation import talk_of
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import everyone, rollout
from marl.rollout.seeds import draw_games
from marl.types import Episode

PLACE = 106  # of the seed
FILES = ("data", "val", "test")


def write_scripted(folder: Path, env: Mapping[str, Any], games: int, seed: int = 0) -> Path:
    """Plays scripted games and writes data.txt, val.txt and test.txt as people's are; the last two hold a tenth each.

    Left out are games without two claims, or whose players do not take turns. UserError for too few games.
    """
    episodes = rollout(
        draw_games(seed, PLACE, count=games), everyone(scripted("dond")), env_maker({**env, "split": "all"}), 64
    )
    found = [both for episode in episodes if (both := _rows(episode))]
    if len(found) < 20:
        raise UserError(f"scripted_games={games}: gives {len(found)} dialogues that can stand in. Give more")
    texts: dict[str, list[str]] = {name: [] for name in FILES}
    for number, both in enumerate(found):
        texts["data"] += [row for row, _ in both]
        if number % 10 < 2:
            texts[FILES[1 + number % 10]] += [held_out for _, held_out in both]
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in texts.items():
        write_text(folder / f"{name}.txt", "".join(f"{line}\n" for line in lines))
    return folder


def _rows(episode: Episode) -> list[tuple[str, str]]:
    """Each player's row of `data.txt`, and its line in a held-out file."""
    talk = talk_of(episode)
    said = [(line.seat, line.message) for line in talk.lines if line.claim is None]
    proposed = [line.seat for line in talk.lines if line.claim is not None]
    claims = [line.claim for line in sorted(talk.lines, key=lambda line: line.seat) if line.claim is not None]
    turns = [seat for seat, _ in said] + proposed[:1]
    if len(claims) != len(AGENTS) or not said or any(a == b for a, b in pairwise(turns)):
        return []
    deal = episode.outcome["deal"]
    found = []
    for seat in range(len(AGENTS)):
        own, other = (
            " ".join(f"{n} {v}" for n, v in zip(talk.counts, talk.values[i], strict=True)) for i in (seat, 1 - seat)
        )
        who = ["YOU" if i == seat else "THEM" for i in range(len(AGENTS))]
        words = " <eos> ".join([*(f"{who[i]}: {text}" for i, text in said), f"{who[proposed[0]]}: {SELECTION}"])
        claim = claims[seat]
        assert claim is not None
        chosen = " ".join(f"item{i}={n}" for i, n in enumerate(claim))
        verdict = f"reward={points(claim, talk.values[seat])} {'agree' if deal else 'disagree'}"
        held_out = (
            f"<input> {own} </input> <dialogue> {words} </dialogue> <output> {chosen} </output> "
            f"<partner_input> {other} </partner_input>"
        )
        found.append((f"{own} {words} {chosen} <eos> {verdict} {other}", held_out))
    return found
