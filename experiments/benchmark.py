"""Speed of rollouts and of updates, beside the loop that people write first. `make bench`.

In one process, on the same games and the same small model (random weights, so that nothing has to be trained): this
engine, and one `generate` call a turn over the whole history. Prints and saves games and tokens a second, medians over
repeats, and the ratio. What random weights say is refused, so a game is five replies of full length, the same for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from envs.core import END, TurnKind
from experiments.cli import command
from experiments.evaluate import pick_device, set_threads
from experiments.terminal import say
from marl.advantages import Credit, add_advantages
from marl.agents import Agent, Key, ModelAgent, Reply, Request, beliefs_of
from marl.batch import collate, seats_of
from marl.files import write_json
from marl.games import env_maker, game_module
from marl.losses import Loss
from marl.losses.listening import ListeningLoss
from marl.losses.policy import PolicyLoss
from marl.losses.value import ValueLoss
from marl.policy import Policy, tiny_lm
from marl.pretrain import scripted_texts
from marl.rewards import add_rewards
from marl.rewards.game import GameReward
from marl.rollout import Game, draw_games, rollout
from marl.runs import hardware
from marl.tokens import Tokens, View, train_tokenizer
from marl.types import Belief, Episode, Kind, Stream
from marl.update import UpdateConfig, update


class GenerateAgent:
    """The baseline: `generate` over the whole history for every turn, a forward pass over it for every question."""

    def __init__(self, policy: Policy, max_new_tokens: int) -> None:
        self.name, self.policy, self.tokens = "generate", policy, policy.tokens
        self.max_new_tokens = max_new_tokens
        self.ends = [i for text in (END, f" {END}") for i in self.tokens.encode(text)]
        self._views: dict[Key, View] = {}
        self._answers: dict[Key, list[np.ndarray]] = {}
        self._roles: dict[Key, str] = {}

    @torch.no_grad()
    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """Answers all that is asked at once, then replies wherever one is owed."""
        for r in requests:
            view = self._views.setdefault(r.key, View(self.tokens))
            self._roles[r.key] = r.role
            view.observe(r.text, r.questions, r.step)
        self._answer([r.key for r in requests if r.questions])
        owed = [r for r in requests if r.turn != TurnKind.WAIT]
        if not owed:
            return []
        for r in owed:
            self._views[r.key].cue()
        ids, mask = self._padded([self._views[r.key].stream.tokens for r in owed])
        generate: Any = self.policy.lm.generate
        made = generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=self.ends,
            pad_token_id=self.tokens.pad_id,
        )
        replies = []
        for r, row in zip(owed, made[:, ids.shape[1] :].tolist(), strict=True):
            stop = next((i + 1 for i, token in enumerate(row) if token in self.ends), len(row))
            reply = tuple(row[:stop])
            start = self._views[r.key].reply(reply, Kind.SPEECH)
            replies.append(Reply(r.key, self.tokens.reply_text(reply), reply, start, (0.0,) * len(reply)))
        return replies

    def _answer(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        views = [self._views[key] for key in keys]
        ids, mask = self._padded([view.stream.tokens for view in views])
        logits = self.policy.lm(input_ids=ids, attention_mask=mask).logits
        for i, (key, view) in enumerate(zip(keys, views, strict=True)):
            answers = self._answers.setdefault(key, [])
            for asked in view.asked[len(answers) :]:
                at = ids.shape[1] - len(view.stream) + asked.position
                answers.append(logits[i, at, list(asked.candidate_ids)].softmax(-1).cpu().numpy())

    def _padded(self, streams: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask (R, T), padded on the left."""
        width = max(map(len, streams))
        ids = torch.tensor([[self.tokens.pad_id] * (width - len(s)) + s for s in streams], device=self.policy.device)
        lengths = torch.tensor([len(s) for s in streams], device=self.policy.device)
        return ids, (torch.arange(width, device=ids.device)[None] >= width - lengths[:, None]).long()

    def finish(self, keys: Sequence[Key]) -> dict[Key, tuple[Stream, list[Belief]]]:
        """The streams and beliefs of finished games."""
        kept = {}
        for key in keys:
            view, answers = self._views.pop(key), self._answers.pop(key, [])
            kept[key] = (view.stream, beliefs_of(key[1], self._roles.pop(key), view.asked, answers))
        return kept


@command("benchmark")
def main(cfg: DictConfig) -> None:
    """Measures, prints, and writes `out`."""
    set_threads(cfg.threads)
    device = pick_device(cfg.device)
    env = {"game": "dond", "style": "compact", "max_entries": 12}
    make_env = env_maker(env)
    tokens = Tokens(train_tokenizer(scripted_texts("dond", [make_env], 0), game_module("dond").COMPACT_TOKENS, 1024))
    lm = tiny_lm(tokens.size, hidden_size=cfg.hidden_size, layers=cfg.layers, context=cfg.context)
    policy = Policy(lm, tokens).to(device).eval()
    games = draw_games(cfg.seed, count=cfg.games)
    rows: dict[str, dict[str, list[float]]] = {}
    episodes: list[Episode] = []
    for repeat in range(cfg.repeats):
        for name, make_agent in (
            ("slots", lambda: slots_agent(policy, cfg)),
            ("generate", lambda: GenerateAgent(policy, cfg.max_new_tokens)),
        ):
            played, seconds = timed(make_agent, games, make_env, cfg.games)
            made = sum(len(s) for e in played for s in e.streams.values())
            row = rows.setdefault(name, {"games_per_second": [], "tokens_per_second": []})
            row["games_per_second"].append(len(games) / seconds)
            row["tokens_per_second"].append(made / seconds)
            speed = f"{len(games) / seconds:8.2f} games/s  {made / seconds:9.0f} tokens/s"
            say(f"repeat {repeat + 1}/{cfg.repeats}  {name:9} {speed}")
            if name == "slots":
                episodes = played
        row = rows.setdefault("update", {"tokens_per_second": []})
        row["tokens_per_second"].append(update_speed(policy, episodes))
        say(f"repeat {repeat + 1}/{cfg.repeats}  update    {row['tokens_per_second'][-1]:27.0f} tokens/s")
    report(rows, cfg)


def slots_agent(policy: Policy, cfg: DictConfig) -> ModelAgent:
    """This project's player."""
    return ModelAgent("slots", policy, slots=2 * cfg.games, context=cfg.context, max_new_tokens=cfg.max_new_tokens)


def timed(
    make_agent: Callable[[], Agent], games: Sequence[Game], make_env: Callable[[], Any], concurrency: int
) -> tuple[list[Episode], float]:
    """Plays the games in self-play; returns them and the seconds they took."""
    agent = make_agent()
    began = time.perf_counter()
    episodes = rollout(games, lambda game, env: dict.fromkeys(env.possible_agents, agent), make_env, concurrency)
    return episodes, time.perf_counter() - began


def update_speed(policy: Policy, episodes: Sequence[Episode]) -> float:
    """Tokens a second of one PPO pass over the rows of these episodes."""
    filled = add_rewards(episodes, {"game": GameReward()})
    batch = add_advantages(collate(seats_of(filled, {"slots"}), {"game": 1.0}), Credit(), 0.0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
    losses: dict[str, Loss] = {"policy": PolicyLoss(), "value": ValueLoss(), "listening": ListeningLoss()}
    began = time.perf_counter()
    update(policy, None, batch, losses, optimizer, UpdateConfig(), torch.Generator().manual_seed(0))
    return int((batch.kind != Kind.PAD).sum()) / (time.perf_counter() - began)


def report(rows: Mapping[str, Mapping[str, Sequence[float]]], cfg: DictConfig) -> None:
    """Medians, spread and the ratio, printed and written."""
    ratio = [
        a / b for a, b in zip(rows["slots"]["games_per_second"], rows["generate"]["games_per_second"], strict=True)
    ]
    say(f"\nmedians of {cfg.repeats}: {cfg.games} games at once, {cfg.layers} layers of {cfg.hidden_size}")
    for name, row in rows.items():
        for unit, values in row.items():
            say(f"  {name:9} {unit:18} {median(values):10.1f}  ({min(values):.1f} to {max(values):.1f})")
    say(f"  slots / generate, games a second: {median(ratio):.1f}  ({min(ratio):.1f} to {max(ratio):.1f})")
    out = Path(cfg.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figures = {name: {unit: list(values) for unit, values in row.items()} for name, row in rows.items()}
    write_json(out, {"figures": figures, "ratio": ratio, "hardware": hardware()})
    say(f"written: {out}")


if __name__ == "__main__":
    main()
