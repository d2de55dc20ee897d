"""Talk in Diplomacy: what a seat notes, what words state, and intents that a planted model finds in them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from envs.core import TurnKind
from envs.diplomacy.pure import CODES, HOMES, POWERS, N, Pure, order_text
from marl.intents.orders import OrderReader, trees_of
from marl.intents.press import Intent, Notes, Phase, Utterance, choices_of, stated, talk_view, truthful
from marl.intents.press_training import annotate, order_rows, with_intents
from marl.model.tokens import Tokens
from marl.types import Kind
from tests.marl.intents.press_models import Obedient, played, speaker

PAR, BER, CON, LON = (HOMES.index(place) for place in ("PAR", "BER", "CON", "LON"))
MOVE, HELP = PAR * N + CON, PAR * N + PAR  # PAR to CON; to support it where it stays


def tokens() -> Tokens:
    return speaker().tokens


def phase(**units: str) -> Phase:
    """A first position, or one with these units alone, by province."""
    state = Pure().start(1)
    if units:
        state[0, :N] = [POWERS.index(units[home]) if home in units else -1 for home in HOMES]
    return Phase("", state)


@pytest.mark.parametrize(
    ("text", "own", "reader"),
    [
        ("please support PAR to CON .", "A PAR - CON", "A BER S A PAR - CON"),
        ("i move PAR to CON , will you support it ?", "A PAR - CON", "A BER S A PAR - CON"),
        ("support PAR to CON please .", "A PAR - CON", "A BER S A PAR - CON"),
        ("i will support BER to LON .", "A PAR S A BER - LON", "A BER - LON"),
        ("go BER to LON , i support you .", "A PAR S A BER - LON", "A BER - LON"),
    ],
)
def test_words_that_leave_no_doubt_state_both_orders(text: str, own: str, reader: str) -> None:
    found = stated(Utterance("FRANCE", "GERMANY", text), phase())
    assert found is not None
    assert (order_text(*found.own), order_text(*found.reader)) == (own, reader)


@pytest.mark.parametrize(
    "text",
    [
        "peace ? i do not attack you .",
        "yes , i will .",
        "please support BER to CON .",  # which is the reader's own unit
        "please support LON to CON .",  # a third power's
        "i will support PAR to CON .",  # its own
        "please support PAR to PAR .",
        "please support PAR to BER .",  # into the place of who should help
        "please support PAR to XYZ .",
    ],
)
def test_other_words_state_nothing(text: str) -> None:
    assert stated(Utterance("FRANCE", "GERMANY", text), phase()) is None


def test_which_of_two_units_helps_is_not_stated() -> None:
    two = phase(PAR="FRANCE", BER="GERMANY", ROM="GERMANY")
    assert stated(Utterance("FRANCE", "GERMANY", "please support PAR to CON ."), two) is None
    assert stated(Utterance("GERMANY", "FRANCE", "please support BER to CON ."), two) is not None
    assert (
        stated(Utterance("GERMANY", "FRANCE", "please support ROM to CON ."), two) is None
    )  # intents are of first units


def test_an_intent_is_told_in_the_words_of_orders() -> None:
    assert Intent((PAR, MOVE), (BER, MOVE)).text() == "me PAR to CON you support PAR to CON\n"
    assert Intent((PAR, HELP), (BER, HELP)).text() == "me PAR alone you support PAR alone\n"


def test_a_seat_notes_the_talk_and_orders_that_it_knows() -> None:
    for episode, agent, notes in played().views:
        power = episode.facts["powers"][agent]
        assert notes.power == power
        own = [turn.message for turn in episode.turns if turn.agent == agent and turn.message]
        assert [s.text for p in notes.phases for s in p.talk if s.speaker == power] == own
        for said in (s for p in notes.phases for s in p.talk):
            assert power in (said.speaker, said.reader) and said.speaker != said.reader
    for both in played().notes:  # everybody reads the same orders, and what one says another hears
        first, *others = both.values()
        everything = {(n, s) for notes in both.values() for n, p in enumerate(notes.phases) for s in p.talk}
        for notes in others:
            assert [p.orders for p in notes.phases] == [p.orders for p in first.phases]
            heard = {(n, s) for n, p in enumerate(notes.phases) for s in p.talk}
            assert heard == {(n, s) for n, s in everything if notes.power in (s.speaker, s.reader)}
        for each in first.phases[:-1]:  # a game may end before the last orders are told
            legal = Pure().legal(each.state)[0]
            assert each.orders and all(legal[place, code] for place, code in each.orders.items())
            assert {*each.orders} == {*np.flatnonzero(each.state[0, :N] >= 0)}


@pytest.mark.parametrize(
    ("reply", "cut", "heard"),
    [
        ("please support PAR to CON . [END]", 14, "please support"),
        (" please  support\nPAR to CON . [END]", 19, "please  support PAR"),  # spaces stay
    ],
)
def test_a_message_that_was_cut_is_noted_as_it_was_heard(reply: str, cut: int, heard: str) -> None:
    notes = Notes()
    notes.read("you FRANCE years 1 solo 4\nspring 1\nFRANCE PAR GERMANY BER\nto?\n")
    notes.to = "GERMANY"
    notes.say(reply)
    notes.read(f"cut {cut}\nGERMANY: ...\nGERMANY: no , sorry .\n")
    assert notes.phases[-1].talk == [
        Utterance("FRANCE", "GERMANY", heard),
        Utterance("GERMANY", "FRANCE", "no , sorry ."),
    ]


def test_every_order_is_chosen_by_its_options() -> None:
    for place, tree in trees_of(phase().state).items():
        codes = np.flatnonzero(Pure().legal(phase().state)[0, place]).tolist()
        chosen = [choices_of(tree, code) for code in codes]
        assert len(codes) == 43 and len({*chosen}) == 43
    assert choices_of(trees_of(phase().state)[BER], MOVE) == ("+PAR", "-CON")
    assert choices_of(trees_of(phase().state)[PAR], HELP) == ("H",)


def test_a_phase_with_a_broken_promise_is_not_truthful() -> None:
    said = Utterance("FRANCE", "GERMANY", "please support PAR to CON .")
    kept, broken = {PAR: MOVE, BER: BER * N + BER}, {PAR: HELP, BER: MOVE}
    state = phase().state
    assert truthful(Phase("", state, [said], kept)) and not truthful(Phase("", state, [said], broken))
    assert truthful(Phase("", state, [said], broken), "ENGLAND")  # who does not read of it


# --- A planted model --------------------------------------------------------------------------------------------------
def test_annotation_reads_the_words_and_not_what_was_ordered() -> None:
    seats = [notes for players in ("careful", "mixture") for _, _, notes in played(players).views]
    broken = 0
    for notes, phases in zip(seats, annotate(seats, Obedient(tokens())), strict=True):  # type: ignore[arg-type]
        for each, intents in zip(notes.phases, phases, strict=True):
            mine = [said for said in each.talk if said.speaker == notes.power]
            for said, intent in zip(mine, intents, strict=True):
                words = stated(said, each)
                if words is not None:
                    assert intent == words
                    broken += bool(each.orders) and each.orders[words.own[0]] != words.own[1]
    assert broken > 0  # else nothing is told from the naive annotation


def test_a_view_holds_the_talk_with_its_partner_alone() -> None:
    _, _, notes = played().views[0]
    whole = tokens().decode(talk_view(notes, notes.power, notes.phases, None, tokens()).stream.tokens)
    texts = {said: said.text for each in notes.phases for said in each.talk}
    assert all(text in whole for text in texts.values())
    partner = next(iter(texts)).reader if next(iter(texts)).speaker == notes.power else next(iter(texts)).speaker
    view = talk_view(notes, notes.power, notes.phases, partner, tokens())
    lines = tokens().decode(view.stream.tokens)
    spoken = lines.count("say ") + len(re.findall(rf"({'|'.join(POWERS)}): ", lines))
    assert spoken == sum(partner in (said.speaker, said.reader) for said in texts)
    assert lines.count("say ") == sum(partner == said.reader for said in texts)


# --- Probabilities of orders ------------------------------------------------------------------------------------------
def test_probabilities_are_of_legal_orders_and_chains_of_both_choices() -> None:
    reader, state, notes = OrderReader(speaker(), 512), phase().state, played().views[0][2]
    view = talk_view(notes, notes.power, notes.phases[:1], None, reader.tokens)
    (probs,) = reader.probabilities([view.stream.tokens], [state], [range(N)])
    assert probs.shape == (N, CODES) and np.allclose(probs.sum(-1), 1)
    assert ((probs > 0) == Pure().legal(state)[0]).all()
    # The same by a player's own steps: a question, a choice, and a second one behind it.
    tree = trees_of(state)[BER]
    view.observe("BER?\n", (), 0)
    first = view.cue(tuple(tree))
    ids = [*view.stream.tokens]

    def choose(options: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            logits = speaker().logits(speaker().hidden(torch.tensor([ids]))[0, -1])
        return logits[list(options)].double().softmax(-1).numpy()

    by_first = dict(zip(tree, choose(first), strict=True))
    assert probs[BER, BER * N + CON] == pytest.approx(by_first["-CON"], rel=1e-4)
    view.reply([first[tuple(tree).index("+PAR")]], Kind.CHOICE)
    rest = tree["+PAR"]
    assert not isinstance(rest, int)
    second = view.cue(tuple(rest))
    ids = [*view.stream.tokens]
    by_second = dict(zip(rest, choose(second), strict=True))
    assert probs[BER, MOVE] == pytest.approx(by_first["+PAR"] * by_second["-CON"], rel=1e-4)


def test_a_pair_is_read_alike_from_both_its_sides() -> None:
    for notes in played().notes:
        by_power = {own.power: own for own in notes.values()}
        for own in by_power.values():
            for other in {s.reader for p in own.phases for s in p.talk if s.speaker == own.power}:
                theirs = talk_view(by_power[other], other, by_power[other].phases, own.power, tokens())
                mirrored = talk_view(own, other, own.phases, own.power, tokens())
                assert mirrored.stream == theirs.stream


def test_streams_are_read_alike_alone_and_together() -> None:
    reader = OrderReader(speaker(), 512, at_once=2)
    state, notes = phase().state, played().views[0][2]
    streams = [talk_view(n, n.power, n.phases[:1], None, reader.tokens).stream.tokens for _, _, n in played().views]
    together = reader.probabilities(streams[:3], [state] * 3, [[PAR], [BER, CON], [LON]])
    (alone,) = reader.probabilities(streams[1:2], [state], [[BER, CON]])
    assert np.allclose(together[1], alone, atol=1e-6) and not together[1][PAR].any()
    assert notes.phases


# --- Rows that are learned from ---------------------------------------------------------------------------------------
def test_rows_of_orders_hold_what_was_ordered_where_it_is_asked() -> None:
    rows, untrue = order_rows(played("mixture"), 2, tokens(), np.random.default_rng(0))
    assert rows and untrue > 0
    for episode, agent in rows[:20]:
        stream = episode.streams[agent].tokens
        for turn in episode.turns:
            assert stream[turn.start] == turn.reply_ids[0] and turn.reply_ids[0] in turn.legal
            assert tokens().decode([stream[turn.start]]).strip() == turn.text
        asked = re.findall(r"([A-Z]{3})\?", tokens().decode(stream))
        assert len(asked) == len({*asked})


def test_intents_stand_before_the_cue_and_move_all_that_follows() -> None:
    episode, agent, notes = played().views[0]
    own = [said for each in notes.phases for said in each.talk if said.speaker == notes.power]
    intents = [Intent((PAR, MOVE + i), (BER, MOVE)) for i in range(len(own))]
    shown, _ = with_intents(episode, agent, intents, tokens())
    text = tokens().decode(shown.streams[agent].tokens)
    assert len(shown.streams[agent].kinds) == len(shown.streams[agent].tokens)
    for turn, was in zip(shown.turns, episode.turns, strict=True):
        if turn.agent == agent:
            stream = shown.streams[agent].tokens
            assert tuple(stream[turn.start : turn.start + len(turn.reply_ids)]) == was.reply_ids
    speaking = [t for t in shown.turns if t.agent == agent and t.kind == TurnKind.SPEAK]
    for turn, intent in zip(speaking, intents, strict=True):
        before = tokens().decode(shown.streams[agent].tokens[: turn.start])
        assert before.endswith(intent.text() + tokens().decode(tokens().format.cue))
    for belief, was_asked in zip(shown.beliefs, episode.beliefs, strict=True):
        if belief.listener == agent:
            kept = shown.streams[agent].tokens[belief.position]
            assert kept == episode.streams[agent].tokens[was_asked.position]
    for intent in intents:
        text = text.replace(intent.text(), "")
    assert text == tokens().decode(episode.streams[agent].tokens)
