"""A few human dialogues as the published files have them, and where those files are looked for."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("DOND_DATA", Path(__file__).resolve().parents[1] / "../shared/data/dond"))

needs_data = pytest.mark.skipif(
    not (DATA / "data.txt").exists(),
    reason=f"the published dialogues are not in {DATA}: set DOND_DATA to the folder of data.txt, val.txt and test.txt",
)

DEAL = (
    "1 0 4 2 1 2 YOU: i would like 4 hats <eos> THEM: deal <eos> YOU: <selection> "
    "item0=0 item1=4 item2=0 <eos> reward=8 agree 1 4 4 1 1 2"
)

DEAL_AS_PARTNER = (
    "1 4 4 1 1 2 THEM: i would like 4 hats <eos> YOU: deal <eos> THEM: <selection> "
    "item0=1 item1=0 item2=1 <eos> reward=6 agree 1 0 4 2 1 2"
)

CLASH = (
    "1 6 3 0 2 2 YOU: me the book and balls ? <eos> THEM: <selection> "
    "item0=1 item1=3 item2=2 <eos> reward=10 disagree 1 2 3 2 2 1"
)

CLASH_AS_PARTNER = (
    "1 2 3 2 2 1 THEM: me the book and balls ? <eos> YOU: <selection> "
    "item0=1 item1=2 item2=0 <eos> reward=6 disagree 1 6 3 0 2 2"
)

LONE_CLASH = (
    "1 3 3 1 1 4 THEM: hi <eos> YOU: the ball <eos> THEM: <selection> "
    "item0=0 item1=0 item2=1 <eos> reward=4 disagree 1 3 3 2 1 1"
)

WALKED = (
    "1 3 3 1 1 4 THEM: hi <eos> YOU: no <eos> THEM: <selection> "
    "no agreement <eos> reward=no agreement agree 1 3 3 2 1 1"
)

LOST = "1 3 3 1 1 4 THEM: hi <eos> YOU: <selection> disconnect <eos> reward=disconnect agree 1 3 3 2 1 1"

ROWS = (DEAL, DEAL_AS_PARTNER, CLASH, CLASH_AS_PARTNER, LONE_CLASH, WALKED, LOST)

VAL = (
    "<input> 1 6 3 0 2 2 </input> <dialogue> YOU: me the book and balls ? <eos> THEM: <selection> </dialogue> "
    "<output> <disagree> <disagree> <disagree> <disagree> <disagree> <disagree> </output> "
    "<partner_input> 1 2 3 2 2 1 </partner_input>"
)

TEST = (
    "<input> 1 3 3 1 1 4 </input> <dialogue> THEM: hi <eos> YOU: <selection> </dialogue> "
    "<output> <disconnect> <disconnect> <disconnect> <disconnect> <disconnect> <disconnect> </output> "
    "<partner_input> 1 3 3 2 1 1 </partner_input>"
)


def write(folder: Path, rows: tuple[str, ...] = ROWS, val: str = VAL, test: str = TEST) -> Path:
    (folder / "data.txt").write_text("\n".join(rows) + "\n")
    (folder / "val.txt").write_text(val + "\n")
    (folder / "test.txt").write_text(test + "\n")
    return folder


def games_of(count: int) -> tuple[str, ...]:
    """Returns both views of `count` deals, which differ in what is said. One player scores nothing in every fourth
    deal."""
    rows = []
    for i in range(count):
        talk = f"YOU: i would like 4 hats {i} <eos> THEM: deal <eos> YOU: <selection>"
        back = f"THEM: i would like 4 hats {i} <eos> YOU: deal <eos> THEM: <selection>"
        mine, theirs = ("1 10 4 0 1 0", "1 2 4 1 1 4") if i % 4 == 0 else ("1 0 4 2 1 2", "1 4 4 1 1 2")
        scores = (0, 6) if i % 4 == 0 else (8, 6)
        rows += [
            f"{mine} {talk} item0=0 item1=4 item2=0 <eos> reward={scores[0]} agree {theirs}",
            f"{theirs} {back} item0=1 item1=0 item2=1 <eos> reward={scores[1]} agree {mine}",
        ]
    return tuple(rows)
