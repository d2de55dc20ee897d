"""The specification of a run: names, seeds, what is told of its first games, and the settings that are refused."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from experiments import final_games, learning, train
from experiments.launch import show
from experiments.setup.bands import expected_of
from experiments.setup.spec import RunSpec, run_spec
from experiments.setup.work import Work, seeds_of, warm_starts
from marl.common.errors import UserError
from marl.metrics.stats import Interval
from marl.rollout.games import scripts_module
from marl.rollout.seeds import Seeds
from marl.types import Episode, Payment
from tests.composing import DOND, SMALL, cases, config_hash, configure, identity, run_folder
from tests.experiments.launch.test_command import plan
from tests.experiments.setup.test_presets import OWN
from tests.marl.episodes import aborted_game, deal_game, failed_game


def settings(*overrides: str) -> DictConfig:
    return configure("train", *overrides)


def spec_of(*overrides: str) -> RunSpec:
    return run_spec(settings(*overrides))


def test_names_follow_from_the_configuration() -> None:
    cfg = settings("env=dond", "ablation=full", "seed=3")
    assert run_folder(cfg).name == f"dond-full-s3-{config_hash(cfg)[:8]}"
    assert config_hash(settings("runs=elsewhere", "threads=1", "progress=false")) == config_hash(settings())
    for one in (f"name={'n' * 190}", f"name='{'木' * 62}'", f"arm={'a' * 100} name={'n' * 100}", f"seed={10**200}"):
        with pytest.raises(UserError, match=r"^name, arm and seed=.*\d+ bytes are too many for a name\. Use 200\.$"):
            run_folder(settings(*one.split()))
    assert config_hash(settings("checkpoint.every=1", "checkpoint.keep=9")) == config_hash(settings())
    for rounding in ("algo.concurrency=8", "algo.update.token_budget=512"):  # they change the order of sums
        assert config_hash(settings(rounding)) != config_hash(settings())
    typed = [settings(f"env.objective={one}", f"loss.listening.weight={none}") for one, none in ((1, 0), (1.0, 0.0))]
    assert config_hash(typed[0]) == config_hash(typed[1]) != config_hash(settings("env.objective=0"))
    human = [settings(f"data.dond={folder}", "base=human") for folder in ("here", "there")]
    assert config_hash(human[0]) == config_hash(human[1]) != config_hash(settings())
    assert config_hash(settings("reward.speaking.weight=0.4")) != config_hash(settings())
    quick = ("algo.decode_steps=2", "algo.play_bf16=true", "algo.update.gradient_checkpointing=true")
    faster = identity(settings(*quick))
    assert (faster["algo"].pop("decode_steps"), faster["algo"].pop("play_bf16")) == (2, True)
    assert faster["algo"]["update"].pop("gradient_checkpointing")
    assert faster == identity(settings())  # settings that are off do not change the identity of older runs


def test_what_is_off_in_our_terms_is_kept_in_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of the user's may have the names of our newer settings, with other defaults."""
    (tmp_path / "drawn.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Drawn:\n"
        "    weight: float = 1.0\n    samples: int = 16\n    scale: bool = False\n    votes: float = 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ("", ", samples: 4", ", scale: true", ", votes: 0")
    hashes = [config_hash(settings(f"+reward.mine={{_target_: drawn.Drawn{each}}}")) for each in own]
    assert len({*hashes, config_hash(settings())}) == 5
    ours = [config_hash(settings(*given)) for given in ((), ("reward.speaking.samples=4", "loss.listening.votes=0"))]
    assert ours[0] == ours[1] != config_hash(settings("reward.speaking.samples=5"))


def test_an_arm_may_be_a_number() -> None:
    """`arm=0` is a number on the command line, and a name for everything that reads the run."""
    cfg = settings(*DOND, "arm=0")
    spec = run_spec(cfg)
    assert cfg.arm == 0 and spec.arm == "0" and "-0-s0-" in spec.folder.name
    assert expected_of(spec.name, spec.arm, spec.env) is None


def test_terms_of_ones_own_are_in_the_line_of_an_iteration_and_the_last_table() -> None:
    found = {"loss/own": 0.25, "loss/policy": 1.0, "game/score": 3.0, "reward/paid": -0.5, "game/win_rate/white": 0.5}
    assert learning.headline(found) == "score 3.00  own 0.250  paid -0.500  white 0.500"
    for speed, said in ((1 / 60, "0.02 games/s"), (1234.5, "1234.50 games/s")):
        assert learning.headline({"speed/rollout_games_per_second": speed}) == said
    conditions = {"base": {"reward/paid": Interval(0, 0, 0, 1)}, "trained": {"loss/own": Interval(0, 0, 0, 1)}}
    assert show.rows_of(conditions) == ["reward/paid", "loss/own"]
    ours = {"trained": {"loss/policy": Interval(0, 0, 0, 1), "game/score": Interval(0, 0, 0, 1)}}
    assert show.rows_of(ours) == ["game/score"]


def hopeless(episodes: list[Episode], capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Returns the warning about the learner's first games, or "" if there is none."""
    cfg = settings(*overrides)
    work = Work(run_spec(cfg), torch.device("cpu"), lambda: None, lambda: None, None)
    own = [replace(e, players=dict.fromkeys(e.players, "learner")) for e in episodes]
    final_games.warn_if_hopeless(work, own)
    return capsys.readouterr().out


def test_games_that_nothing_can_be_learned_from_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    deals = [replace(deal_game(0), payments=tuple(Payment(seat, 3, 13.0) for seat in ("player_0", "player_1")))]
    failed, refused = [failed_game(i) for i in range(100)], [aborted_game(i) for i in range(4)]
    assert hopeless(deals + failed[:32], capsys) == ""  # one in thirty-three agrees, as in the quickstart at times
    none = "warning: next to nothing can be learned so far: the game refuses "
    assert hopeless(deals + failed, capsys).startswith(none)  # one in a hundred and one
    assert hopeless(deals + failed, capsys).endswith(
        "pays 99% of its seats 0. Stop this run and train a better base, by more games (now base.games=10000).\n"
    )
    assert "refuses 0% of the learner's replies and pays 100% of its seats 13. Stop" in hopeless(deals * 21, capsys)
    assert hopeless(refused + deals, capsys).startswith(none)
    out_of_reach = hopeless(refused, capsys, "model=hf", "model.name=PATH")
    assert out_of_reach.endswith("Stop this run and train the model on scripted games first, by base=scripted.\n")
    assert "base.epochs=12" in hopeless(refused, capsys, "base=human", "data.dond=DIR")
    assert not hopeless(failed, capsys, "ablation=listening_only")  # which does not need the game's reward
    # Replies without room in the context are empty and refused: a base of more games would not help.
    long = replace(refused[0], turns=tuple(replace(t, start=9, reply_ids=()) for t in refused[0].turns))
    warning = "100% of the learner's replies find no room in its context. Stop this run and give it more, by "
    assert warning in hopeless([long], capsys)


@cases("""
algo=filtered_bc reward.speaking.weight=0.5 | reward.speaking.weight=0.5: algo=filtered_bc learns nothing
algo=pikl loss.imitation.weight=0.3 | loss.imitation.weight=0.3: algo=pikl imitates plans
algo=pikl reward.speaking.weight=2 | reward.speaking.weight=2: algo=pikl learns nothing
algo=filtered_bc algo.update.target_kl=0.1 | algo.update.target_kl=0.1: how far
~loss.policy algo.update.target_kl=0.1 | algo.update.target_kl=0.1: how far
base=human data.dond=DIR base.players=careful | base.players=careful: base=human learns from people
base.epochs=12 | base.epochs=12: base=scripted does not read it
base.permute_items=true | base.permute_items=True: base=scripted does not read it
""")
def test_settings_that_change_nothing_are_refused(overrides: list[str], said: str) -> None:
    """Accepting them would give two run names to the same run."""
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        spec_of(*overrides)


@cases("""
algo.advantage=rloo algo.group=8 loss.value.weight=0.9 | loss.value.weight=0.9: algo.advantage=rloo, which has no
ablation=rae loss.value={weight:0} arm=mine | loss.value.weight=0: algo.advantage=rae, which has no critic
algo=filtered_bc loss.value.weight=0.9 | loss.value.weight=0.9: algo=filtered_bc does not take loss.value. Leave it out
algo=filtered_bc loss.policy.weight=0.7 | loss.policy.weight=0.7: algo=filtered_bc does not take loss.policy
algo=pikl loss.policy.clip_coef=0.1 | loss.policy.clip_coef=0.1: algo=pikl does not take loss.policy. Leave it out, or
""")
def test_values_of_losses_that_the_learner_does_not_take_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        plan("train", *overrides)


@cases("""
-m ablation=full,rae loss.value.weight=0.5 | by default
-m experiment=among_us_quickstart ablation=full,rloo,grpo,rae | by its files
loss.value.weight=0.9 | with a critic
algo=pikl loss.value.weight=0.9 | with a critic
algo=filtered_bc loss.entropy.weight=1 | taken with a weight
algo=filtered_bc ~loss.policy | gone
""")
def test_values_of_losses_that_the_learner_takes_are_taken(overrides: list[str], said: str) -> None:
    assert plan("train", *overrides), said


def test_settings_that_a_learner_reads_are_kept() -> None:
    """Filtered cloning drops the terms that only PPO reads, but learns from a user's own term, and from entropy with a
    weight."""
    assert set(spec_of("algo=filtered_bc", f"+{OWN}", "loss.entropy.weight=1").losses) == {
        "imitation", "listening", "world_model", "kl", "entropy", "own"
    }  # fmt: skip
    assert set(spec_of("algo=filtered_bc").losses) == {"imitation", "listening", "world_model", "kl"}
    for algo in ("filtered_bc", "pikl"):
        assert spec_of(f"algo={algo}").rewards["speaking"].weight == 0
    assert spec_of("algo.update.target_kl=0.1").algo.update.target_kl == 0.1


@cases(r"""
env.objective=3 | env.objective must be a number from -1 to 1
env.contexts=missing.txt | env.contexts=missing.txt: the file cannot be read
base=human data.dond=/nonexistent | data.dond=/nonexistent:
cast.negotiator={partner:nobody,partners:0.1} | There is no scripted negotiator 'nobody'
cast.negotiator.partners=2 | cast.negotiator.partners=2: leaves no seat to learner, who learns
algo.alternate=5 | algo.alternate=5: learner learns alone; must be 0
eval.cast.negotiator.partners=2 | cast.negotiator.partners=2: leaves no seat to learner, who learns
cast.negotiator.partners=-1 | partners=-1.0: must be at least 0
cast.negotiator.partners=2.5 | cast.negotiator.partners=2.5: this role has 2 seats; must be at most 2
cast.negotiator.pool=-1 | pool=-1: must be at least 0
cast.negotiator.pool=2 | cast.negotiator.pool=2: past selves hold no seat. Set cast.negotiator.partners
cast.negotiator.partner=past_learner | past_learner is no player to name. Set cast.*.pool for past selves
env=among_us cast.crewmate.pool=5 cast.imposter={player:learner,partners:0.5,pool:7} | two roles have past selves
cast.negotiator.pick=best | pick=best: must be one of uniform, wins
env=among_us cast.imposter.pool=2 cast.imposter.partners=0.5 | base does not learn, so it has no past selves
+eval.cast.negotiator.pool=2 | eval.cast.negotiator.pool=2: past selves play in training
cast.negotiator.player=base | cast.negotiator.player=base: nobody learns; let one of them be learner or rival
+cast.mediator.player=base | it names the roles negotiator, mediator; the game's are negotiator
algo=pikl algo.planner.lambdas=[-1] | algo\.planner\.lambdas=\(-1\.0,\): name at least one, each 0
algo=pikl algo.planner.choose=own | algo.planner.choose=own: with algo=pikl plans are played
algo=pikl ~loss.plan | loss.plan is missing: with algo=pikl
algo=pikl cast.negotiator={player:learner,partner:rival,partners:1} | algo=pikl trains one learner, and the cast has
loss=plan algo.planner.choose=best | algo.planner.choose=best: PPO learns from the policy's own samples
loss=plan algo.intents=runs/intents-both-s0 | loss\.plan: with algo\.intents=runs/intents-both-s0 no claim is planned
algo.intents=runs/x env.questions=claims | env\.questions=claims: algo\.intents=runs/x plans whole claims
algo.intents=runs/x env.format=structured | env\.format=structured: algo\.intents=runs/x plans
loss=plan env.questions=claims | env\.questions=claims: loss\.plan plans whole claims
cast.negotiator.partner=base+plan cast.negotiator.partners=1 env.questions=claims | base\+plan plans whole claims
algo.intents=runs/x cast.negotiator.partners=1 cast.negotiator.pool=2 | past selves are told no intents
base=human data.dond=x env.questions=claims | env\.questions=claims: base=human learns to answer questions about values
loss=plan algo=filtered_bc | loss=plan: algo=filtered_bc imitates games as they were played. Drop it
algo=filtered_bc loss.kl.estimator=k2 | loss.kl.estimator=k2: algo=filtered_bc does not learn from plain
env=among_us algo=pikl algo.planner.mistake=0.5 | algo.value=plan: with env.imposters=1 and
algo=pikl loss.kl.estimator=k3 | loss.kl.estimator=k3: algo=pikl does not learn from plain samples
algo=pikl algo.planner.iterate=best | algo.planner.iterate=best: must be one of average, last
algo=pikl algo.planner.others=me | algo.planner.others=me: must be one of plan, anchor
algo=pikl algo.planner.belief=none | algo.planner.belief=none: must be one of listening, prior
algo=pikl algo.planner.beta=[0.5,0.5] | algo.planner.beta=\(0\.5, 0\.5\): give 1 probabilities
algo=pikl algo.planner.choose=worst | algo.planner.choose=worst: must be one of sample, best
algo=pikl algo.planner.iterations=0 | algo.planner.iterations=0: must be at least 1
algo=pikl algo.planner.mistake=-1 | algo.planner.mistake=-1.0: must be at least 0
algo=pikl algo.gamma=2 | algo.gamma=2.0: must be from 0 to 1
algo=pikl algo.value=both | algo.value=both: must be one of plan, paid
loss=plan loss.plan.floor=0 | loss.plan.floor=0.0: must be between 0 and 1
loss.entropy.over=all | loss.entropy.over=all: must be one of choice, speech, both
loss.kl.over=all | loss.kl.over=all: must be one of choice, speech, both
loss.policy.speech=-1 | loss.policy.speech=-1.0: must be at least 0
reward.speaking.of=odds | reward.speaking.of=odds: must be one of probability, log_probability
loss=plan loss.plan.form=l2 | loss.plan.form=l2: must be one of cross_entropy, kl
cast.negotiator.partner=scripted+plan cast.negotiator.partners=1 | scripted has no policy to plan from
algo.concurrency=0 | algo.concurrency=0: must be at least 1
algo.alternate=-1 | algo.alternate=-1: must be at least 0
algo.games=1.5 | algo.games=1.5: must be a whole number
algo.temperature=0 | algo.temperature=0.0: must be above 0
algo.update.minibatches=0 | algo.update.minibatches=0: must be at least 1
algo.imitate=best | algo.imitate=best
eval.final_games=0 | eval.final_games=0: must be at least 1
checkpoint.every=0 | checkpoint.every=0: must be at least 1
seed=-1 | seed=-1: must be a whole number
model.critic=oracle | model.critic=oracle: must be one of private, privileged
reward.speaking.listeners=none | reward.speaking.listeners=none: must be one of others, all
loss.kl.estimator=k9 | loss.kl.estimator=k9
algo.credit.speech=both | algo.credit.speech=both
algo.credit.gae_lambda=-0.1 | algo.credit.gae_lambda=-0.1: must be from 0 to 1
algo.advantage=ppo | algo.advantage=ppo: must be one of gae, rloo, grpo, rae
algo.advantage=rloo | algo.group=1: algo.advantage=rloo compares plays of one start; must be at least 2
algo.group=0 | algo.group=0: algo.advantage=gae compares plays of one start; must be at least 1
algo.advantage=rae algo.scale=false | algo.scale=false: algo.advantage=rae does not divide
algo.advantage=rae algo.credit.gae_lambda=1 | algo.credit.gae_lambda=1: algo.advantage=rae has no
algo.credit.gamma=1.5 | algo.credit.gamma=1.5: must be from 0 to 1
algo.credit.gamma=nan | algo.credit.gamma=nan
reward.speaking.baseline=silence | reward.speaking.baseline=silence: must be one of before, resampled
reward.speaking.samples=0 | reward.speaking.samples=0: must be at least 1
env=among_us reward.speaking.baseline=resampled cast.crewmate.partner=chat chat.model=x chat.url=http://a | an endpoint
reward.speaking.weight=much | reward.speaking.weight=much: must be a number
reward.speaking._target_=marl.Nothing | there is no such class. Is its folder on PYTHONPATH
reward.speaking._target_=nowhere.Term | there is no such class. Is its folder on PYTHONPATH
base=human | data.dond=DIR
data.dond=somewhere | data.dond=somewhere: base=scripted does not read it. Drop one, or take
base=none | base=none: a model from scratch knows no word yet
base.data=humans | base.data=humans: must be one of scripted, human, none
loss.listening.votes=1 | loss.listening.votes=1: nobody votes in env.game=dond; must be 0
env=among_us loss.listening.votes=-1 | loss\.listening\.votes=-1: would learn wrong votes; must be 0 or above
loss.listening.renamed=true | loss.listening.renamed=true: env.game=dond has no names that can stand
base.lessons=[{players:nobody,steps:5}] | base.lessons\[0\]: There is no scripted negotiator 'nobody'
base.lessons=[{players:random}] | base.lessons\[0\].steps is missing
env=among_us base.lessons=[{players:random,steps:1,env:{players:9}}] | base.lessons\[0\]: env.players
base.lessons=[[random,5]] | base.lessons\[0\]=\['random', 5\]: must be settings of Lesson:
base.lessons=[{players:random,steps:0.5}] | base.lessons\[0\].steps=0.5: must be a whole number
base.lessons=[{players:random,steps:-1}] | base.lessons.steps=-1: must be at least 0
base.lessons=[{players:random,steps:1,anchor:-0.1}] | base.lessons.anchor=-0.1: must be at least 0
base.lessons=[{players:random,steps:1,optimizer:lion}] | base.lessons.optimizer=lion: must be one of adamw
base.lessons=[{players:random,steps:1,env:{style:natural}}] | must leave game and style to env
base.rows=0 | base.rows=0: must be at least 1
base.players=nobody | base.players: There is no scripted negotiator 'nobody'
base=human base.lessons=[{players:random,steps:5}] | only scripted players answer; must be
base.dropout=1.0 | base.dropout=1.0: must be at least 0 and below 1
base.seed=-1 | base.seed=-1: must be from 0 to 9223372036854775807
base.seed=9223372036854775808 | base.seed=9223372036854775808: must be at most
base.learning_rate=-0.5 | base.learning_rate=-0.5: must be at least 0
eval.temperature=1e-40 | eval.temperature=1e-40: must be a number from 0.001 to 1,000.0, or 0
algo.temperature=-1 | algo.temperature=-1.0: must be a number from 0.001
algo.update.learning_rate=1e39 | algo.update.learning_rate=1e[+]39: must be a number from
loss.policy.choice=1e39 | loss.policy.choice=1e[+]39: must be a number from
loss.policy.clip_coef=-1 | loss.policy.clip_coef=-1.0: must be above 0
algo.update.target_kl=-1 | algo.update.target_kl=-1.0: must be at least 0
base.weight_decay=-0.5 | base.weight_decay=-0.5: must be at least 0
base.warmup=-1 | base.warmup=-1.*: must be at least 0
+base.vary.objective=[] | base.vary.objective=\[\]: must name a value
algo.update.weight_decay=-0.5 | algo.update.weight_decay=-0.5: must be at least 0
model.vocab_size=7 | model.vocab_size=7: must be at least 400
model.kind=small | model.kind=small: must be one of tiny, hf
model.layers=0 | model.layers=0: must be from 1 to
model.layers=10000000 | model.layers=10000000: must be at most 1,000,000
model.hidden_size=1000000000000000000 | model.hidden_size=1000000000000000000: must be at most 1,000,000
model.kv_heads=3 | model.kv_heads=3: must divide model.heads=4
model.hidden_size=12 | model.hidden_size=12: must be a multiple of 8
cast.negotiator={player:scripted,partner:learner,partners:1} | eval.cast: learner learns but does not play in evaluation
eval.cast.negotiator=5 | eval\.cast\.negotiator=5: must be a group of settings
base.lessons=[{players:random,steps:1,env:5}] | base.lessons\[0\].env=5: must be a group of settings
base.vary.objective=5 | base.vary.objective=5: must be a list
threads=-1 | threads=-1: must be a whole number, at least 1
threads=true | threads=True: must be a whole number
runs=null | runs=None: must be the name of a folder
env.game=null | env.game=None: must be the name of a game
base=human data.dond=5 | data.dond=5: must be the name of a folder
model.context=1e9 | model.context=1000000000.0: must be a whole number
model.vocab_size=1000000000 | model.vocab_size=1000000000: must be at most 1,000,000
name=a/b | name='a/b': must be a name that can be part of a folder's
arm=null | arm=None: must be a name
init.learner=true | init.learner=True: must be text, or null
algo.kind=[] | algo.kind=\[\]: must be one of ppo, filtered_bc
cast.negotiator.partners=inf | cast.negotiator.partners=inf: must be a number from -1e[+]30 to 1e[+]30
loss.kl._target_=null | loss.kl=.* has no _target_: give the whole term, as conf/loss/default.yaml
model.name=/models/mine | model.name=/models/mine: the small model has no name. Add model=hf
loss.kl._target_=os.system | is no loss. Name a dataclass with the fields weight and reads
loss.kl._target_=marl.rewards.game.GameReward | is no loss
reward.game._target_=marl.losses.kl.KLLoss | is no reward
+loss.policy.reads=value | loss\.policy\.reads='value': must be one of reply, values,
loss.listening.weight=-0.5 | loss\.listening\.weight=-0\.5: would learn the opposite; must be 0
algo.context=4096 | algo.context=4096 is more than the model can read
algo.context=1000000000000000000000000000000 | algo.context=1000000000000000000000000000000: must be at most 1,000,000
model.context=1000000000000000000000000000000 | model.context=1000000000000000000000000000000: must be at most 1,000,000
chat.url=[] | chat.url must be http
model=hf model.name=/nonexistent/model base=none | model\.name=/nonexistent/model: .*there is no such folder
""")
def test_bad_settings_are_refused_in_one_sentence(overrides: list[str], said: str, tmp_path: Path, bases: Path) -> None:
    small = [o for o in (DOND if "env=among_us" not in overrides else SMALL) if not o.startswith("model.")]
    with pytest.raises(UserError, match=said) as error:
        train.main(settings(*small, f"runs={tmp_path}", f"cache={bases}", *overrides))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import not_installed", "cannot be imported: No module named 'not_installed'"),
        ("class Term(", r"cannot be imported: .*line 1"),
        ("x = 1", "there is no such class"),
    ],
)
def test_a_term_that_cannot_be_imported_says_why(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_term_{len(code)}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=said):
        run_spec(settings(f"reward.speaking._target_={name}.Term"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import not_installed", "needy_v0 needs not_installed, which is not installed"),
        ("", "This game has no scripted players: write needy_scripted.py"),
    ],
)
def test_a_game_that_lacks_a_part_says_which(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_v0.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "needy_v0", raising=False)
    with pytest.raises(UserError, match=said):
        scripts_module("needy")


def test_a_run_that_starts_from_another_plays_other_games() -> None:
    first, then = settings("seed=3"), settings("seed=3", "init.learner=first")
    assert seeds_of(run_spec(first)) == Seeds(games=3, sampling=None, shuffling=3)
    assert seeds_of(run_spec(then)) == seeds_of(spec_of("seed=3", "init.learner=other"))
    assert seeds_of(run_spec(then)).games not in (3, seeds_of(run_spec(then)).sampling)
    assert seeds_of(run_spec(then)).shuffling not in (3, None)
    assert seeds_of(run_spec(then)) != seeds_of(spec_of("seed=4", "init.learner=first"))


def test_parts_of_training_have_seeds_of_their_own() -> None:
    assert seeds_of(spec_of("seed=3", "seeds.sampling=0")) == Seeds(games=3, sampling=0, shuffling=3)
    assert seeds_of(spec_of("seed=3", "seeds.games=5", "seeds.shuffling=6")) == Seeds(5, None, 6)
    again = seeds_of(spec_of("seed=3", "seeds.sampling=0", "init.learner=first"))
    assert again.sampling not in (0, None) and again.games == seeds_of(spec_of("seed=3", "init.learner=first")).games
    # Null means absent, so that older runs keep their folders.
    assert "seeds" not in identity(settings("seed=3"))
    assert identity(settings("seeds.games=5"))["seeds"] == {"games": 5}
    for setting in ("seeds.games=-1", "seeds.sampling=x", "seeds.shuffling=1.5", "+seeds.words=1"):
        with pytest.raises(UserError, match=setting.strip("+").partition("=")[0]):
            spec_of(setting)


def test_each_run_of_a_chain_plays_other_games(tmp_path: Path) -> None:
    """Runs start where the one before ended, by its learner or its rival. The length of the chain counts, even if a
    second start is nearer the base, or if the runs before the last are gone."""
    beginnings = {
        "a": ["init.learner=a"],
        "b": [f"init.rival={tmp_path}/b/rival"],
        "c": ["init.learner=c", "init.rival=a"],
    }
    two = "cast.negotiator={player: learner, partner: rival, partners: 1}"
    chain = [settings("seed=3", two, f"runs={tmp_path}")]
    for name, start in beginnings.items():
        folder = tmp_path / name
        (folder / "rival").mkdir(parents=True)
        (folder / "rival" / "policy.json").write_text("{}")
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(chain[-1], resolve=True))
        links = (
            {"warm_starts": warm_starts(run_spec(chain[-1]))} if name == "c" else {}
        )  # cards of earlier versions lack it
        (folder / "run.json").write_text(json.dumps({"run": name, "figures": {}, **links}))
        chain.append(settings("seed=3", two, f"runs={tmp_path}", *start))
    seeds = [seeds_of(run_spec(cfg)) for cfg in chain]
    assert seeds[:2] == [Seeds.of(3), seeds_of(spec_of("seed=3", "init.learner=first"))]
    assert [warm_starts(run_spec(cfg)) for cfg in chain] == [0, 1, 2, 3] and len(set(seeds)) == 4
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    assert seeds_of(spec_of("seed=3", "runs=elsewhere", f"init.learner={tmp_path}/c")) == seeds[-1]
