"""The board of Diplomacy: adjudication of hand-made positions, corrections, branching, scores, ends."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from envs.diplomacy import board as module
from envs.diplomacy.board import MAPS, Board, Kind, left, load_package

pytest.importorskip("diplomacy", reason="needs the extra `diplomacy`: pip install 'diplomacy==1.1.2'")


def random_orders(board: Board, rng: Random) -> dict[str, list[str]]:
    orders: dict[str, list[str]] = {}
    for power, units in board.options().items():
        orders[power] = []
        for options in units.values():
            orders[power].append(
                rng.choice(left(options, orders[power]) if board.kind is Kind.ADJUSTMENTS else options)
            )
    return orders


def play_random(map_name: str, seed: int, years: int = 5) -> tuple[Board, list[object]]:
    board, rng = Board(map_name, years), Random(seed)
    seen: list[object] = [board.state()]
    while not board.over:
        board.process(random_orders(board, rng))
        assert not board.corrections
        seen.append((board.orders, board.results, replace(board.state(), options=None)))
    return board, seen


def put(board: Board, units: Mapping[str, Sequence[str]], phase: str = "SPRING 1901 MOVEMENT", **centres: str) -> None:
    """Sets up these units and no others; `centres` names each power's centres in one string."""
    owned = [tuple(centres[power].split()) if power in centres else () for power in board.powers]
    board.restore(
        replace(
            board.state(),
            phase=phase,
            units=tuple(tuple(units.get(power, ())) for power in board.powers),
            centres=tuple(owned) if centres else board.state().centres,
            options=None,
        )
    )


# --- Maps and settings ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("map_name", "powers", "units", "centres", "to_win"),
    [
        ("pure", 7, 7, 7, 4),
        ("standard_france_austria", 2, 6, 34, 18),
        ("standard_germany_italy", 2, 6, 34, 18),
        ("standard", 7, 22, 34, 18),
    ],
)
def test_maps(map_name: str, powers: int, units: int, centres: int, to_win: int) -> None:
    board = Board(map_name)
    assert len(board.powers) == powers and sum(map(len, board.units().values())) == units
    assert (len(board.centre_names), board.win_centres) == (centres, to_win)
    assert (board.phase, board.kind, board.over) == ("S1901M", Kind.MOVES, False)
    assert sum(board.centres().values()) == units
    assert board.scores().sum() == pytest.approx(1)
    assert map_name in ("standard_france_austria", "standard_germany_italy") or "</svg>" in board.svg()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"map_name": "mars"}, "map_name must be one of pure, "),
        ({"years": 0}, "years must be a whole number from 1 to 100"),
        ({"win_centres": 8}, "win_centres must be a whole number from 2 to 7, got 8"),
        ({"map_name": "standard", "win_centres": 4}, "win_centres must be a whole number from 5 to 34"),
    ],
)
def test_bad_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Board(**settings)  # type: ignore[arg-type]


def test_absent_or_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERSION", "9.9")
    with pytest.raises(ImportError, match=r"needs the package diplomacy 9\.9, got 1\.1\.2\. Install it with"):
        load_package()
    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    with pytest.raises(ImportError, match=r"which is not installed\. Install it with: pip install"):
        Board()


# --- Adjudication -----------------------------------------------------------------------------------------------------
def test_pure_is_decided_by_support() -> None:
    board = Board("pure")
    assert len(board.options()["FRANCE"]["A PAR"]) == 1 + 6 + 6 + 30  # hold, moves, supports to hold, to move
    orders = {
        "FRANCE": ["A PAR - BER"],
        "ENGLAND": ["A LON S A PAR - BER"],
        "GERMANY": ["A BER H"],
        "AUSTRIA": ["A VIE - ROM"],  # one against one: bounces
        "ITALY": ["A ROM H"],
        "RUSSIA": ["A MOS - CON"],  # they change places only by way of a third
        "TURKEY": ["A CON - MOS"],
    }
    board.process(orders)
    assert board.units()["FRANCE"] == ("A BER",) and board.units()["GERMANY"] == ()
    assert board.results["A VIE"] == board.results["A MOS"] == board.results["A CON"] == ("bounce",)
    # Paris is the only free province, and nobody retreats to where the attack came from: the unit is lost at once.
    assert board.results["A BER"] == ("dislodged",) and board.phase == "F1901M"
    board.process({"RUSSIA": ["A MOS - CON"], "AUSTRIA": ["A VIE S A MOS - CON"]})
    assert board.phase == "F1901R" and board.kind is Kind.RETREATS
    assert board.dislodged()["TURKEY"] == ("A CON",)
    assert board.options()["TURKEY"] == {"A CON": ("A CON R PAR", "A CON D")}
    assert board.options()["FRANCE"] == {}
    board.process({"TURKEY": ["A CON R PAR"]})
    # Adjustments: Germany, Turkey and France's homes are others' now.
    assert board.owned()["TURKEY"] == ("PAR",) and board.owned()["FRANCE"] == ("BER",)
    assert board.phase == "W1901A" and board.options()["RUSSIA"] == {"BUILD 1": ("A MOS B", "WAIVE")}


def test_circular_movement() -> None:
    board = Board("pure")
    board.process({"FRANCE": ["A PAR - BER"], "GERMANY": ["A BER - ROM"], "ITALY": ["A ROM - PAR"]})
    assert [board.units()[p] for p in ("FRANCE", "GERMANY", "ITALY")] == [("A BER",), ("A ROM",), ("A PAR",)]
    assert board.corrections == {p: (f"A {u} has no order. It counts as A {u} H.",) for p, u in (
        ("AUSTRIA", "VIE"), ("ENGLAND", "LON"), ("RUSSIA", "MOS"), ("TURKEY", "CON"))}  # fmt: skip


@pytest.mark.parametrize(
    ("units", "orders", "after", "result"),
    [
        (  # a support is cut by an attack from elsewhere
            {"FRANCE": ["A MAR", "A GAS"], "GERMANY": ["A BUR"], "ITALY": ["A PIE"]},
            {"FRANCE": ["A MAR S A GAS - BUR", "A GAS - BUR"], "GERMANY": ["A BUR H"], "ITALY": ["A PIE - MAR"]},
            {"FRANCE": ("A GAS", "A MAR"), "GERMANY": ("A BUR",)},
            {"A GAS": ("bounce",), "A MAR": ("cut",), "A PIE": ("bounce",)},
        ),
        (  # but not by the unit that is attacked with it, unless that dislodges
            {"FRANCE": ["A MAR", "A GAS"], "GERMANY": ["A BUR"]},
            {"FRANCE": ["A MAR S A GAS - BUR", "A GAS - BUR"], "GERMANY": ["A BUR - MAR"]},
            {"FRANCE": ("A BUR", "A MAR")},
            {"A BUR": ("bounce", "dislodged"), "A MAR": ()},
        ),
        (  # nobody dislodges a unit of one's own
            {"FRANCE": ["A MAR", "A GAS", "A BUR"]},
            {"FRANCE": ["A MAR S A GAS - BUR", "A GAS - BUR", "A BUR H"]},
            {"FRANCE": ("A BUR", "A GAS", "A MAR")},
            {"A GAS": ("bounce",)},
        ),
        (  # a convoy
            {"ENGLAND": ["A LON", "F NTH"]},
            {"ENGLAND": ["A LON - NWY VIA", "F NTH C A LON - NWY"]},
            {"ENGLAND": ("F NTH", "A NWY")},
            {"A LON": ()},
        ),
        (  # is disrupted where its fleet is dislodged
            {"ENGLAND": ["A LON", "F NTH"], "GERMANY": ["F HEL", "F SKA"]},
            {"ENGLAND": ["A LON - NWY VIA", "F NTH C A LON - NWY"], "GERMANY": ["F HEL - NTH", "F SKA S F HEL - NTH"]},
            {"ENGLAND": ("A LON",), "GERMANY": ("F NTH", "F SKA")},
            {"F NTH": ("dislodged",)},
        ),
        (  # three in a row: the second moves away if the third does
            {"FRANCE": ["A PAR", "A BUR"], "GERMANY": ["A RUH"]},
            {"FRANCE": ["A PAR - BUR", "A BUR - RUH"], "GERMANY": ["A RUH - HOL"]},
            {"FRANCE": ("A BUR", "A RUH"), "GERMANY": ("A HOL",)},
            {},
        ),
    ],
)  # fmt: skip
def test_adjudication(
    units: dict[str, list[str]],
    orders: dict[str, list[str]],
    after: dict[str, tuple[str, ...]],
    result: dict[str, tuple[str, ...]],
) -> None:
    board = Board("standard")
    put(board, units)
    board.process(orders)
    assert {power: board.units()[power] for power in after} == after
    for unit, expected in result.items():
        assert tuple(sorted(board.results[unit])) == expected, board.results


def test_retreats() -> None:
    """Two units that retreat to one place are both lost, and one without an order is disbanded."""
    board = Board("standard")
    put(board, {"ITALY": ["A PIE"]}, "SPRING 1901 RETREATS")
    start = replace(
        board.state(), options=None,
        retreats=tuple(
            {"FRANCE": (("A BUR", ("GAS", "PAR")),), "GERMANY": (("A MAR", ("GAS", "SPA")),)}.get(power, ())
            for power in board.powers
        ),
    )  # fmt: skip
    for orders, left_over in (
        ({"FRANCE": ["A BUR R GAS"], "GERMANY": ["A MAR R GAS"]}, ((), ())),
        ({"FRANCE": ["A BUR R GAS"], "GERMANY": ["A MAR R SPA"]}, (("A GAS",), ("A SPA",))),
        ({"FRANCE": ["A BUR R PIE"], "GERMANY": []}, ((), ())),
    ):
        board.restore(start)
        assert board.options()["FRANCE"] == {"A BUR": ("A BUR R GAS", "A BUR R PAR", "A BUR D")}
        board.process(orders)
        assert (board.units()["FRANCE"], board.units()["GERMANY"]) == left_over and board.phase == "F1901M"


def test_builds_disbands_and_waives() -> None:
    board = Board("standard")
    put(
        board, {"FRANCE": ["A SPA"], "GERMANY": ["A BER", "A MUN"]}, "FALL 1901 MOVEMENT",
        FRANCE="PAR BRE MAR SPA", GERMANY="BER",
    )  # fmt: skip
    board.process({"FRANCE": ["A SPA H"], "GERMANY": ["A BER H", "A MUN - BUR"]})
    assert board.phase == "W1901A" and board.kind is Kind.ADJUSTMENTS
    options = board.options()
    assert list(options["FRANCE"]) == ["BUILD 1", "BUILD 2", "BUILD 3"] and list(options["GERMANY"]) == ["DISBAND 1"]
    listed = options["FRANCE"]["BUILD 1"]
    assert listed == ("A BRE B", "A MAR B", "A PAR B", "F BRE B", "F MAR B", "WAIVE")
    assert left(listed, ["A BRE B"]) == ("A MAR B", "A PAR B", "F MAR B", "WAIVE")
    board.process({"FRANCE": ["F BRE B", "A BRE B", "WAIVE"]})  # a second in one province; none of Germany
    assert board.units()["FRANCE"] == ("F BRE", "A SPA")
    assert board.corrections["FRANCE"] == (
        "'A BRE B' is no legal order of this power, or one too many.", "1 adjustment is missing. The rules decide.",
    )  # fmt: skip
    assert board.corrections["GERMANY"] == ("1 adjustment is missing. The rules decide.",)
    assert board.units()["GERMANY"] == ("A BER",)  # the unit farthest from home goes


# --- Bad orders -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], ("A PAR has no order. It counts as A PAR H.",)),
        (["A LON - BER"], ("'A LON - BER' is no legal order of this power.",)),  # another's
        (["A PAR - MARS"], ("'A PAR - MARS' is no legal order",)),
        (["A PAR - BER", "A PAR - ROM"], ("A PAR has several orders.",)),
        (["A PAR - BER", "A PAR - BER"], ("A PAR has several orders.",)),
        (["WAIVE", None, 3, "", "A PAR"], ("'WAIVE'", "'None'", "'3'", "''", "'A PAR'", "no order")),
        ("A PAR - MARS", ("'A PAR - MARS'",)),
        (None, ("no order",)),
        ({"A PAR": "H"}, ("no order",)),
    ],
)
def test_bad_orders_count_as_hold(given: object, words: tuple[str, ...]) -> None:
    board = Board("pure")
    board.process({"FRANCE": given, "MARS": ["A PAR H"]})  # type: ignore[dict-item]
    assert board.orders["FRANCE"] == ("A PAR H",)
    assert board.corrections["MARS"] == ("There is no power 'MARS'.",)
    for word in words:
        assert any(word in sentence for sentence in board.corrections["FRANCE"]), board.corrections


def test_orders_that_are_not_by_power_are_refused() -> None:
    board = Board("pure")
    with pytest.raises(ValueError, match=r"Orders must be lists by power, .* got \['A PAR H'\]\."):
        board.process(["A PAR H"])  # type: ignore[arg-type]
    assert board.phase == "S1901M"


# --- Branching, determinism, ends -------------------------------------------------------------------------------------
@pytest.mark.parametrize("map_name", MAPS)
def test_restored_positions_go_on_alike(map_name: str) -> None:
    board, rng = Board(map_name, years=3), Random(1)
    other = Board(map_name, years=3)
    while not board.over:
        position = pickle.loads(pickle.dumps(board.state()))
        orders = random_orders(board, rng)
        board.process(orders)
        other.restore(position)
        assert replace(other.state(), options=None) == replace(position, options=None)
        assert other.options().keys() == orders.keys()
        other.process(random_orders(other, rng))  # something else, and back
        other.restore(position)
        other.process(orders)
        assert other.results == board.results
        assert other.state() == replace(board.state(), options=None)
        np.testing.assert_array_equal(other.features(), board.features())
        other.restore(replace(position, options=None))
        assert other.options() == Board.options(other)
    with pytest.raises(ValueError, match="The game is over"):
        board.process({})
    with pytest.raises(ValueError, match="cannot be set up on the map"):
        Board("pure" if map_name != "pure" else "standard").restore(board.state())


def test_same_orders_same_game() -> None:
    assert play_random("standard_france_austria", 3)[1] == play_random("standard_france_austria", 3)[1]


def test_solo_and_limit() -> None:
    board = Board("pure", years=2, win_centres=2)
    orders = {"FRANCE": ["A PAR - BER"], "ENGLAND": ["A LON S A PAR - BER"]}
    board.process(orders)
    assert not board.over  # centres change hands in autumn
    before = board.state()
    board.process({})
    assert board.over and board.winner == "FRANCE" and board.phase == "COMPLETED"
    assert board.scores().tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert board.centres()["FRANCE"] == 2 and not board.alive("GERMANY")
    assert board.options() == {power: {} for power in board.powers}
    solo = board.state()
    board.restore(before)
    assert not board.over and board.winner is None
    board.restore(solo)
    assert board.over and board.winner == "FRANCE"

    board = Board("pure", years=1)
    board.restore(before)
    board.process({})
    assert board.phase == "W1901A"  # France may build in Paris
    assert board.options()["FRANCE"] == {"BUILD 1": ("A PAR B", "WAIVE")}
    board.process({})
    assert board.over and board.winner is None
    assert board.scores().tolist() == pytest.approx([1 / 9, 1 / 9, 4 / 9, 0, 1 / 9, 1 / 9, 1 / 9])


def test_features() -> None:
    board = Board("pure", years=4)
    owner, unit, fleet, dislodged, time = np.split(board.features(), [56, 105, 112, 161])
    home = [3, 6, 1, 5, 2, 4, 0]  # whose BER, CON, LON, MOS, PAR, ROM, VIE are
    assert owner.reshape(7, 8).argmax(1).tolist() == home and owner.sum() == 7
    assert unit.reshape(7, 7).argmax(1).tolist() == home and unit.sum() == 7
    assert not fleet.any() and not dislodged.any() and time.tolist() == [1, 0, 0, 0, 0]
    board.process({"FRANCE": ["A PAR - BER"], "ENGLAND": ["A LON S A PAR - BER"], "GERMANY": ["A BER H"]})
    board.process({"RUSSIA": ["A MOS - CON"], "AUSTRIA": ["A VIE S A MOS - CON"]})
    owner, unit, fleet, dislodged, time = np.split(board.features(), [56, 105, 112, 161])
    assert owner.reshape(7, 8).argmax(1).tolist() == home
    assert unit.reshape(7, 7)[0].tolist() == [0, 0, 1, 0, 0, 0, 0] and not unit.reshape(7, 7)[4].any()
    assert np.argwhere(dislodged.reshape(7, 7)).tolist() == [[1, 6]] and time.tolist() == [0, 1, 0, 1, 0]
    board.process({})
    board.process({})
    assert board.features()[-5:].tolist() == [1, 0, 0, 0, 0.25]
    sizes = {name: len(Board(name).features()) for name in MAPS}
    assert sizes == {"pure": 166, "standard_france_austria": 482, "standard_germany_italy": 482, "standard": 1402}
