"""Whole games between models, scripts and both: what ends up in the episodes, and whether the trainer agrees."""

import dataclasses
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.utils import seeding

from envs.core import END, Question, TurnKind
from envs.dond import environment as dond_environment
from marl.agents.base import Agent, Reply, Request
from marl.agents.model import ModelAgent
from marl.agents.text import TextAgent
from marl.decoding.engine import Engine
from marl.learning.batch import collate, rows_of
from marl.learning.forward import forward
from marl.model.policy import Policy
from marl.rollout.games import env_maker, scripted
from marl.rollout.rollout import Cast, everyone, rollout
from marl.rollout.seeds import GAMES, Game, Seeds, draw_games, sampling_seed
from marl.types import Episode, Kind, TokenBatch
from tests.marl.models import CHATML, NO_SYSTEM, hf_policy, precise, teach, tiny_policy

COMPACT = env_maker({"game": "dond", "style": "compact", "objective": 1.0, "max_entries": 12})
NATURAL = env_maker({"game": "dond", "style": "natural", "objective": 0.0, "max_entries": 6, "max_errors": 3})
SEATS = dond_environment.AGENTS
PRIVILEGED = 33


def against(one: Agent, other: Agent) -> Cast:
    """`one` holds the first seat, `other` the rest."""
    return lambda game, env: {a: one if i == 0 else other for i, a in enumerate(env.possible_agents)}


# --- A small game with everything that Deal or No Deal lacks: choices, turns at the same time, steps that only pass ---


class Relay:
    """a and b speak at once, then time passes, then c chooses while a speaks; c is asked about the secret twice.

    What is said is what stands before the end marker; nothing said is an error. Even secrets are choices between
    numbers, odd ones between sentences.
    """

    possible_agents = ("a", "b", "c")

    def reset(self, seed: int, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        rng, _ = seeding.np_random(seed)
        self.secret = int(options.get("secret", rng.integers(10)))
        self.agents = list(self.possible_agents)
        self.clock = 0
        self.said: list[tuple[str, str]] = []
        self.question = Question("who knows?", tuple(str(n) for n in range(11)), str(self.secret))
        options_of_c = ("1", "2", "3") if self.secret % 2 == 0 else ("go left", "go right")
        self.choice = options_of_c
        texts = {"a": f"secret {self.secret}\n", "b": "listen\n", "c": "wait\n"}
        return self._see(texts, {"a": 2, "b": 2}), {agent: self._info() for agent in self.agents}

    @property
    def facts(self) -> dict[str, Any]:
        return {"secret": self.secret}

    def privileged(self, agent: str) -> tuple[float, ...]:
        return (self.secret / 10, float("abc".index(agent)))

    def step(self, actions: Mapping[str, str]) -> tuple[dict, dict, dict, dict, dict]:
        infos = {agent: self._info() for agent in self.agents}
        rewards = dict.fromkeys(self.agents, 0.0)
        texts, turns = dict.fromkeys(self.agents, ""), {}
        speakers = {0: "ab", 1: "", 2: "a"}[self.clock]
        for agent in speakers:
            text = actions[agent].partition(END)[0]
            self.said.append((agent, text))
            infos[agent].update(message=text, span=(0, len(text)), error="" if text else "nothing said")
        if self.clock == 0:
            infos["c"]["questions"] = (self.question,)
            texts["c"] = f"them: {self.said[0][1]}\nthem: {self.said[1][1]}\n"
        elif self.clock == 1:
            texts["c"], turns = "cut\n", {"a": 2, "c": 1}
        else:
            assert actions["c"] in self.choice, actions
            self.said.append(("c", actions["c"]))
            rewards = {"a": 1.0, "b": -0.5, "c": 0.0}
            infos["c"]["questions"] = (self.question,)
            texts["c"] = "deal\n"
            self.agents = []
        self.clock += 1
        for info in infos.values():
            ended = {"how": "all is said", "winner": None, "said": tuple(self.said)}
            info["outcome"] = ended if not self.agents else None
        over = dict.fromkeys(infos, not self.agents)
        return self._see(texts, turns), rewards, over, dict.fromkeys(infos, False), infos

    def _info(self) -> dict[str, Any]:
        return {"role": "runner", "questions": (), "error": "", "message": "", "span": (0, 0), "entry": ""}

    def _see(self, texts: Mapping[str, str], turns: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        return {
            agent: {"text": text, "turn": turns.get(agent, 0), "options": self.choice if turns.get(agent) == 1 else ()}
            for agent, text in texts.items()
        }


# --- Policies ---


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    folder = tmp_path_factory.mktemp
    tiny = tiny_policy(PRIVILEGED)
    script = scripted("dond", tokens=tiny.tokens)
    batch = collate(rows_of(rollout(draw_games(9, 9, count=6), everyone(script), COMPACT, 6), {"scripted"}), {})
    teach(tiny, batch.tokens, batch.reply, 40)  # enough for messages that are heard, and for errors
    return {
        "tiny": tiny,
        "gpt2": hf_policy(folder("gpt2"), "gpt2", privileged_size=PRIVILEGED, context=4096),
        "llama": hf_policy(folder("llama"), "llama", chat_template=NO_SYSTEM, privileged_size=PRIVILEGED, context=4096),
        "qwen3": hf_policy(folder("qwen3"), "qwen3", chat_template=CHATML, single_digits=True,
                           privileged_size=PRIVILEGED, context=4096),
    }  # fmt: skip


NAMES = ("tiny", "gpt2", "llama", "qwen3")
ENVS = dict.fromkeys(NAMES, NATURAL) | {"tiny": COMPACT}


def model(policy: Policy, name: str = "learner", **settings: Any) -> ModelAgent:
    context = min(policy.context, 2048)
    return ModelAgent(name, policy, **{"slots": 24, "context": context, "max_new_tokens": 12, **settings})


def play(
    name: str, policies: dict[str, Policy], games: Sequence[Game], concurrency: int = 8, **settings: Any
) -> list[Episode]:
    """A model against a script and in self-play, so that others' messages are heard in both."""
    learner, partner = model(policies[name], **settings), scripted("dond")
    half = len(games) // 2
    return [
        *rollout(games[:half], everyone(learner), ENVS[name], concurrency),
        *rollout(games[half:], against(learner, partner), ENVS[name], concurrency),
    ]


@pytest.fixture(scope="module")
def some(policies: dict[str, Policy]) -> list[Episode]:
    """Games of the small model, played once for all tests that look at what is in them."""
    return play("tiny", policies, draw_games(6, GAMES, count=20))


@torch.no_grad()
def agree(policy: Policy, batch: TokenBatch, probs: np.ndarray, temperature: float) -> None:
    """Checks that the trainer computes, from the collated rows, what was noted while playing."""
    out = forward(policy, batch, temperature, {"reply": False, "values": False, "beliefs": False})
    reply = batch.reply
    assert int(reply.sum()) > 50 and float(batch.logprobs[reply].std()) > 0.3
    torch.testing.assert_close(out.logprobs[reply], batch.logprobs[reply], atol=1e-4, rtol=0)
    assert float(batch.values[batch.decision].std()) > 0.01
    torch.testing.assert_close(out.values[batch.decision], batch.values[batch.decision], atol=1e-4, rtol=0)
    assert probs.shape == tuple(out.beliefs.shape) and len(probs) > 20
    np.testing.assert_allclose(out.beliefs.exp().numpy(), probs, atol=1e-4)


# --- Sampler and trainer ---


@pytest.mark.parametrize(("name", "temperature"), list(zip(NAMES, (0.7, 1.0, 0.7, 1.0), strict=True)))
def test_sampler_and_trainer_agree(name: str, temperature: float, policies: dict[str, Policy]) -> None:
    episodes = play(name, policies, draw_games(0, GAMES, count=8), temperature=temperature)
    probs = [b.probs for e, a in rows_of(episodes, {"learner"}) for b in e.beliefs if b.listener == a]
    assert {b.step for e in episodes for b in e.beliefs} > {0}  # some messages were heard
    agree(policies[name], collate(rows_of(episodes, {"learner"}), {}), np.array(probs), temperature)


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_sampler_and_trainer_agree_on_choices_too(name: str, policies: dict[str, Policy]) -> None:
    privileged = Policy(policies[name].lm, policies[name].tokens, 2)
    torch.nn.init.constant_(privileged.value_head[2].weight, 0.1)  # type: ignore[arg-type]
    learner = model(privileged.eval(), slots=60, context=300, temperature=0.8)
    episodes = rollout(draw_games(1, GAMES, count=20), everyone(learner), Relay, 20)
    batch = collate(rows_of(episodes, {"learner"}), {})
    assert int((batch.kind == Kind.CHOICE).sum()) == 20 and batch.legal.shape[2] == 3
    probs = [b.probs for e, a in rows_of(episodes, {"learner"}) for b in e.beliefs if b.listener == a]
    agree(privileged, batch, np.array(probs), 0.8)


# --- The same games, whatever else is going on ---


def same_episodes(one: Sequence[Episode], other: Sequence[Episode], exact: bool = False) -> None:
    tolerance = {"atol": 0.0 if exact else 1e-6, "rtol": 0.0}
    for a, b in zip(one, other, strict=True):
        for field in dataclasses.fields(Episode):
            if field.name not in ("turns", "beliefs"):
                assert getattr(a, field.name) == getattr(b, field.name), field.name
        for s, t in zip(a.turns, b.turns, strict=True):
            assert dataclasses.replace(s, logprobs=(), value=0.0) == dataclasses.replace(t, logprobs=(), value=0.0)
            np.testing.assert_allclose(s.logprobs, t.logprobs, **tolerance)
            # A critic of large weights magnifies rounding: of values up to 1.8 some differ by 5e-7 to 1.1e-6.
            np.testing.assert_allclose(s.value, t.value, **{**tolerance, "rtol": 0.0 if exact else 2e-6})
        for p, q in zip(a.beliefs, b.beliefs, strict=True):
            empty = np.zeros(0)
            left, right = (dataclasses.astuple(dataclasses.replace(x, probs=empty)) for x in (p, q))
            assert [x for x in left if x is not empty and not isinstance(x, np.ndarray)] == [
                x for x in right if not isinstance(x, np.ndarray)
            ]
            np.testing.assert_allclose(p.probs, q.probs, **tolerance)


@pytest.mark.parametrize("env", [COMPACT, Relay])
def test_an_episode_is_a_function_of_its_own_game(env: Any, policies: dict[str, Policy]) -> None:
    """Other games, their order, and how many are played at a time make no difference. Different seeds give different
    episodes."""
    games = draw_games(3, GAMES, count=4)
    policy = precise(
        policies["tiny"] if env is COMPACT else Policy(policies["tiny"].lm, policies["tiny"].tokens).eval()
    )

    def run(games: Sequence[Game], concurrency: int, **settings: Any) -> list[Episode]:
        return rollout(games, everyone(model(policy, **settings)), env, concurrency)

    expected = run(games, 4)
    assert len({tuple(next(iter(e.streams.values())).tokens) for e in expected}) == 4
    same_episodes(expected, run(games, 4), exact=True)
    same_episodes(expected, run(games[::-1], 3, patience=0.9, read_budget=300)[::-1])
    same_episodes(expected[:2], run(games[:2], 1))
    same_episodes(expected, run(games, 4, decode_steps=4))


def test_a_game_that_ends_makes_room_for_the_next_at_once() -> None:
    opened: list[int] = []
    closed: list[int] = []
    at_once: list[int] = []

    def make_env() -> Any:
        env = COMPACT()
        reset = env.reset
        env.reset = lambda seed, options: (opened.append(seed), reset(seed=seed, options=options))[1]
        return env

    class Watching(TextAgent):
        def act(self, requests: Sequence[Request]) -> list[Reply]:
            at_once.append(len(opened) - sum(closed))
            assert at_once[-1] == min(4, 11 - sum(closed))
            return super().act(requests)

    agent = Watching("watching", scripted("dond").make)
    rollout(draw_games(0, GAMES, count=11), everyone(agent), make_env, 4, closed.append)
    assert len(opened) == sum(closed) == 11 and closed[-1] >= 1
    assert rollout([], everyone(agent), make_env, 4) == []
    assert len(closed) > 3 and at_once.count(4) > 3  # they end one after the other, so that rooms are taken over


# --- What an episode holds ---


def test_turns_and_payments_are_those_of_the_game(some: list[Episode]) -> None:
    """The recorded texts, played again, give the same game."""
    kinds = Counter()
    for episode in some:
        env = COMPACT()
        observations, infos = env.reset(seed=episode.seed)
        paid = []
        for step, turn in enumerate(episode.turns):
            assert (turn.step, turn.role, turn.kind) == (step, "negotiator", TurnKind.SPEAK)
            assert observations[turn.agent]["turn"] == TurnKind.SPEAK
            observations, rewards, _, _, infos = env.step({turn.agent: turn.text})
            info = infos[turn.agent]
            assert (turn.message, turn.error) == (info["message"], info["error"])
            paid += [(agent, step, amount) for agent, amount in rewards.items() if amount]
            kinds[info["entry"]] += 1
            assert turn.rewards == {}
        assert not env.agents and episode.steps == len(episode.turns)
        assert [(p.agent, p.step, p.amount) for p in episode.payments] == paid
        assert episode.outcome == infos["player_0"]["outcome"] and episode.facts == env.facts
        assert episode.privileged == {agent: env.privileged(agent) for agent in SEATS}
    assert min(kinds[entry] for entry in ("message", "error")) > 10  # both were played


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_replies_that_meet_the_limit_of_their_tokens_are_marked(decode_steps: int, policies: dict[str, Policy]) -> None:
    games = play("tiny", policies, draw_games(7, GAMES, count=10), max_new_tokens=9, decode_steps=decode_steps)
    said = [t for e in games for t in e.turns if t.reply_ids]
    assert all(t.cut == (END not in t.text) for t in said)  # this tokenizer's models have no other end
    assert all(len(t.reply_ids) == 9 for t in said if t.cut) and 5 < sum(t.cut for t in said) < len(said) - 5
    assert not any(t.cut for e in games for t in e.turns if not t.reply_ids)  # the script's


class Says:
    """Says whatever text it was given; reports a body where it can, and else takes the last option."""

    def __init__(self, text: str) -> None:
        self.text = text

    def observe(self, text: str) -> None: ...

    def reply(self, text: str, options: Sequence[str] = ()) -> str:
        reports = [option for option in options if option.startswith("report")]
        return (reports or options)[-1] if options else self.text


@pytest.mark.parametrize("words", [20, 21])
def test_messages_that_the_game_cuts_are_marked(words: int) -> None:
    """Others hear twenty words, so a longer message is cut. Words after the end marker were never said."""
    make_env = env_maker({"game": "among_us", "style": "compact", "tasks": 10})
    text = " red" * words + f" {END} and more that nobody hears"
    games = rollout(draw_games(7, GAMES, count=10), everyone(TextAgent("wordy", lambda *_: Says(text))), make_env, 10)
    said = [t for e in games for t in e.turns if t.kind == TurnKind.SPEAK]
    assert said and all(t.cut == (words > 20) for t in said)
    assert {len(t.message.split()) for t in said} == {min(words, 20)}
    assert not any(t.cut for e in games for t in e.turns if t.kind == TurnKind.CHOOSE)


def test_a_body_is_what_was_heard(some: list[Episode], policies: dict[str, Policy]) -> None:
    tokens, heard = policies["tiny"].tokens, 0
    for turn in (t for e in some for t in e.turns if t.reply_ids):
        body = tokens.decode(turn.reply_ids[slice(*turn.body)])
        assert bool(turn.message) == bool(body.strip())
        if turn.message and "\ufffd" not in turn.message:
            assert body.split() == turn.message.split()  # white space becomes single blanks
            assert "[message]" not in body and END not in body
            heard += 1
    assert heard > 10


def test_the_games_of_the_relay_are_told_to_the_right_seats(policies: dict[str, Policy]) -> None:
    tokens = policies["tiny"].tokens
    policy = Policy(policies["tiny"].lm, tokens).eval()
    games = [Game(seed, {"secret": seed % 10}) for seed in range(12)]
    for episode in rollout(games, everyone(model(policy, slots=36)), Relay, 12):
        secret = episode.facts["secret"]
        options = ("1", "2", "3") if secret % 2 == 0 else ("go left", "go right")
        assert [(t.agent, t.step, t.kind) for t in episode.turns] == [
            ("a", 0, TurnKind.SPEAK), ("b", 0, TurnKind.SPEAK), ("a", 2, TurnKind.SPEAK), ("c", 2, TurnKind.CHOOSE),
        ]  # fmt: skip
        first, second, third, choice = episode.turns
        assert choice.text in options and choice.reply_ids[0] in choice.legal and len(choice.legal) == len(options)
        assert not choice.message and choice.body == (0, 0)
        assert episode.outcome["said"] == (
            *(("ab"[i], t.text.partition(END)[0]) for i, t in enumerate((first, second))),
            ("a", third.text.partition(END)[0]),
            ("c", choice.text),
        )
        assert [(p.agent, p.step, p.amount) for p in episode.payments] == [("a", 2, 1.0), ("b", 2, -0.5)]
        assert episode.steps == 3
        listing = "" if secret % 2 == 0 else "\nA) go left\nB) go right"
        letter = tokens.decode(choice.reply_ids)
        assert choice.text == (letter.strip() if not listing else options["AB".index(letter.strip())])
        q = "who knows?"
        who_list = tokens.label(tuple(str(n) for n in range(11)))[1]
        streams = {agent: tokens.decode(s.tokens) for agent, s in episode.streams.items()}
        assert streams["a"] == f"<|bos|>secret {secret}\n<|you|>{first.text}<|you|>{third.text}"
        assert streams["b"] == f"<|bos|>listen\n<|you|>{second.text}"
        assert streams["c"] == (
            f"<|bos|>wait\nthem: {first.message}\nthem: {second.message}\n{q}{who_list}cut\n{listing}<|you|>{letter}"
            f"deal\n{q}{who_list}"
        )
        assert [(b.listener, b.step) for b in episode.beliefs] == [("c", 1), ("c", 3)]


@pytest.mark.parametrize("name", ["tiny", "qwen3"])
def test_questions_stand_where_they_fell_due(name: str, some: list[Episode], policies: dict[str, Policy]) -> None:
    """Questions are asked before the first message and after every one, behind its text, in the order of the items."""
    tokens = policies[name].tokens
    episodes = some if name == "tiny" else play(name, policies, draw_games(8, GAMES, count=6))
    for episode in episodes:
        due = [0, *(t.step + 1 for t in episode.turns if t.message)]
        for agent in (a for a in SEATS if episode.players[a] == "learner"):
            own = [b for b in episode.beliefs if b.listener == agent]
            stream = episode.streams[agent]
            assert [b.step for b in own] == [step for step in due for _ in range(3)]
            assert [b.position for b in own] == sorted({b.position for b in own})
            partner = episode.facts["values"][1 - SEATS.index(agent)]
            for i, belief in enumerate(own):
                assert belief.question.answer == str(partner[i % 3])
                assert stream.kinds[belief.position] == Kind.QUESTION
                following = stream.kinds[belief.position + 1 : belief.position + 2]
                asked = tokens.decode(stream.tokens[: belief.position + 1])
                ids, listing, _ = tokens.label(belief.question.candidates)
                assert belief.candidate_ids == tuple(ids)
                if tokens.format.ask_in_turn:
                    assert following == [Kind.OBSERVATION]
                    asked = asked.removesuffix(tokens.decode(tokens.format.cue)).removesuffix("<|im_end|>\n")
                assert asked.endswith(belief.question.text + listing)
            turns = [t for t in episode.turns if t.agent == agent]
            spoken = [i for i, kind in enumerate(stream.kinds) if kind == Kind.SPEECH]
            assert spoken == [t.start + i for t in turns for i in range(len(t.reply_ids))]
            for turn in turns:
                assert tuple(stream.tokens[turn.start : turn.start + len(turn.reply_ids)]) == turn.reply_ids
                before = [b for b in own if b.position < turn.start]
                assert {b.step for b in before} <= set(range(turn.step + 1))
                assert all(b.step > turn.step for b in own[len(before) :])
        # others' answers come sorted by when they were due
        assert [b.step for b in episode.beliefs] == sorted(b.step for b in episode.beliefs)


# --- Casts ---


def test_only_models_leave_streams_and_only_learners_rows(policies: dict[str, Policy]) -> None:
    learner, base = model(policies["tiny"]), model(policies["tiny"], "base")
    script = scripted("dond")
    partners = {0: learner, 1: base, 2: script}
    cast: Cast = lambda game, env: dict(zip(SEATS, (learner, partners[game.seed % 3]), strict=True))  # noqa: E731
    episodes = rollout([Game(s) for s in range(3)], cast, COMPACT, 3)
    for episode in episodes:
        partner = partners[episode.seed % 3]
        assert episode.players == {"player_0": "learner", "player_1": partner.name}
        assert set(episode.streams) == set(SEATS[: 1 if partner is script else 2])
        assert {b.listener for b in episode.beliefs} == set(episode.streams)
        for turn in episode.turns:
            if episode.players[turn.agent] == "scripted":
                assert (turn.reply_ids, turn.start, turn.logprobs, turn.body) == ((), -1, (), (0, 0)) and turn.text
            else:
                assert turn.reply_ids and turn.start >= 0 and len(turn.logprobs) == len(turn.reply_ids)
    expected = [(e, a) for e in episodes for a in SEATS if e.players[a] == "learner"]
    assert [(id(e), a) for e, a in rows_of(episodes, {"learner"})] == [(id(e), a) for e, a in expected]
    assert len(expected) == 4 and len(rows_of(episodes, {"base"})) == 1 and rows_of(episodes, {"scripted"}) == []


def test_recorded_scripts_leave_the_streams_that_a_model_would(policies: dict[str, Policy]) -> None:
    """A model that is made to say, token by token, what the scripts said, meets the same game."""
    for name in ("tiny", "qwen3"):
        policy = policies[name]
        recorder = scripted("dond", tokens=policy.tokens)
        recorded = rollout(draw_games(12, GAMES, count=8), everyone(recorder), ENVS[name], 8)
        # a slip without an end marker is a reply of its own only for scripts
        usable = [e for e in recorded if all(policy.tokens.ends(t.reply_ids) for t in e.turns)][:2]
        assert len(usable) == 2
        for episode in usable:
            assert set(episode.streams) == set(SEATS) and episode.players["player_0"] == "scripted"
            script = deque(token for turn in episode.turns for token in turn.reply_ids)
            agent = model(policy, max_new_tokens=200, context=policy.context)
            agent.engine = Dictated(policy, script, agent.engine)
            [again] = rollout([Game(episode.seed)], everyone(agent), ENVS[name], 1)
            assert again.streams == episode.streams and not script
            for ours, theirs in zip(again.turns, episode.turns, strict=True):
                assert dataclasses.replace(ours, value=0.0) == theirs
            assert [(b.listener, b.step, b.position, b.question, b.candidate_ids) for b in again.beliefs] == [
                (b.listener, b.step, b.position, b.question, b.candidate_ids) for b in episode.beliefs
            ]
            assert all(np.allclose(b.probs, 1 / 11) for b in episode.beliefs)


class Dictated(Engine):
    """Reads as an engine does; what it writes is dictated, one token after another."""

    def __init__(self, policy: Policy, script: deque[int], like: Engine) -> None:
        super().__init__(policy, like.slots, like.context)
        self.script = script

    def sample(
        self, hidden: torch.Tensor, legal: Sequence[tuple[int, ...]], temperature: float, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        assert len(hidden) == 1, "one seat moves at a time"
        return np.array([self.script.popleft()]), np.zeros(1)


def test_what_players_draw_can_have_a_seed_of_its_own(policies: dict[str, Policy]) -> None:
    """The same games, other draws; without it, each game's own."""
    agent = everyone(model(Policy(policies["tiny"].lm, policies["tiny"].tokens).eval()))
    played = [rollout(Seeds(15, sampling, 0).draw(2, count=4), agent, Relay, 4) for sampling in (None, None, 0, 0, 1)]
    facts = [[(e.seed, e.facts) for e in episodes] for episodes in played]
    said = [[[t.text for t in e.turns] for e in episodes] for episodes in played]
    assert all(each == facts[0] for each in facts) and facts[0][0][0] == draw_games(15, GAMES, 2, count=1)[0].seed
    assert said[0] == said[1] and said[2] == said[3]
    assert said[0] != said[2] != said[4] != said[0]


def test_every_seat_has_a_seed_of_its_own_whatever_the_sampling_seed() -> None:
    games = [*draw_games(15, GAMES, count=40), *(Game(s) for s in range(40))]
    sampled = [dataclasses.replace(game, sampling=n) for game in games for n in (None, 0, 1)]
    seeds = {sampling_seed(game, seat) for game in sampled for seat in range(3)}
    assert len(seeds) == 80 * 3 * 3 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert Seeds.of(3) == Seeds(3, None, 3)


@pytest.mark.parametrize("text", ["\x00", "數字🙂" * 3000, "[message] <|you|><|pad|> \ud800 [END]"])
def test_any_text_as_a_reply_leaves_the_game_standing(text: str, policies: dict[str, Policy]) -> None:
    cast = against(model(policies["gpt2"]), TextAgent("rambling", lambda *_: Says(text)))
    for episode in rollout(draw_games(14, GAMES, count=4), cast, NATURAL, 4):
        assert "deal" in episode.outcome
        stream, end = episode.streams["player_0"], policies["gpt2"].tokens.tokenizer.eos_token_id
        read = [t for t, kind in zip(stream.tokens, stream.kinds, strict=True) if kind == Kind.OBSERVATION]
        assert end not in read[1:]


def test_progress_is_told_in_every_round_also_where_no_game_ended() -> None:
    progress: list[int] = []
    script = scripted("dond", "")
    rollout(draw_games(9, 9, count=3), everyone(script), COMPACT, 2, progress.append)
    assert sum(progress) == 3 and progress.count(0) >= 3, progress
