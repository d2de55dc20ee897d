"""Settings of a model and of its base."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from marl.common.errors import UserError, check_choices, check_range
from marl.losses import Loss
from marl.losses.claim import ClaimLoss
from marl.losses.imitation import ImitationLoss
from marl.losses.listening import ListeningLoss
from marl.losses.world_model import WorldModelLoss
from marl.model.branches import QUESTIONS
from marl.model.loading import MOST, load_config
from marl.model.lora import AdapterConfig
from marl.model.optim import OPTIMIZERS
from marl.model.policy import tiny_config

DATA, KINDS, KEEPS = ("scripted", "human", "none"), ("tiny", "hf"), ("all", "nonzero")
MOST_SEEDS = 2**63 - 1  # as torch takes them
FEWEST_TOKENS = 400  # 256 bytes, and the words that Deal or No Deal keeps whole; Among Us has more
SIZES = {  # of a tiny model's settings, what `transformers` calls them
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "intermediate_size": "intermediate_size",
    "context": "max_position_embeddings",
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """`kind` tiny (trained here from scratch) or hf (`name`: a local folder or hub name).

    `lora`: what learns is an adapter over frozen weights; None: all weights learn.
    """

    kind: str = "tiny"
    name: str = ""
    vocab_size: int = 1024
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 1
    intermediate_size: int = 384
    context: int = 1024
    questions: str = "stream"  # or beside it, or auto: see `branches.read_questions`
    lora: AdapterConfig | None = None

    def __post_init__(self) -> None:
        check_choices(self, "model", kind=KINDS, questions=QUESTIONS)
        for name, key in SIZES.items():
            check_range(self, "model", f"[1, {MOST[key]}]", name)
        if self.kind != "tiny":  # has a shape of its own
            return
        check_range(self, "model", f"[{FEWEST_TOKENS}, inf)", "vocab_size")
        if self.name:
            raise UserError(f"model.name={self.name}: the small model has no name. Add model=hf")
        if self.heads % self.kv_heads:
            raise UserError(f"model.kv_heads={self.kv_heads}: must divide model.heads={self.heads}")
        if self.hidden_size % (2 * self.heads):
            raise UserError(
                f"model.hidden_size={self.hidden_size}: must be a multiple of {2 * self.heads}, twice model.heads"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights; only frozen ones may be in bfloat16."""
        return self.lora.dtype if self.lora else torch.float32

    @property
    def base_lora(self) -> AdapterConfig | None:
        """The adapter that a base is fine-tuned with; a small model is trained from scratch, in full."""
        return self.lora if self.kind == "hf" else None

    def shape(self) -> dict[str, int]:
        """The shape of a tiny model, as `tiny_config` takes it."""
        return {name: getattr(self, name) for name in SIZES if name != "vocab_size"}

    def made_of(self) -> dict[str, Any]:
        """The settings that a trained base depends on, which has no adapter; `questions` came later."""
        found = {name: value for name, value in asdict(self).items() if name != "lora"}
        return {name: value for name, value in found.items() if (name, value) != ("questions", "stream")}

    def lm_config(self) -> PreTrainedConfig:
        """The language model's own configuration; a tiny one's vocabulary may turn out smaller."""
        return tiny_config(self.vocab_size, **self.shape()) if self.kind == "tiny" else load_config(self.name)


@dataclass(frozen=True)
class Lesson:
    """A stage of a scripted base that trains listening only."""

    players: str  # whose games, by the name of scripted players
    steps: int
    env: Mapping[str, Any] = field(default_factory=dict)  # settings of the game that differ in the lesson
    until: float = 0.0  # above 0: end once the log-loss of the last ten steps is below; the learning rate is constant
    optimizer: str = "adamw"
    learning_rate: float = 3e-4
    anchor: float = 1.0  # weight of the KL of all replies to the model before the first lesson

    def __post_init__(self) -> None:
        check_range(self, "base.lessons", "[0, inf)", "steps", "until", "anchor", "learning_rate")
        check_choices(self, "base.lessons", optimizer=OPTIMIZERS)
        if "game" in self.env or "style" in self.env:
            raise UserError(f"base.lessons: env={dict(self.env)} must leave game and style to env")


@dataclass(frozen=True)
class BaseConfig:
    """The base's training data and training. Raises UserError, naming the setting, for bad values."""

    data: str = "scripted"  # or human (needs data.dond), or none
    games: int = 10000  # scripted ones
    tokenizer_games: int = 800  # the tokenizer is trained on so many, at least 20 and otherwise no more than `games`
    players: str = ""  # of scripted games, by name; "" for the game's default ones
    # Human data only, until `human_games`:
    epochs: int = 4
    permute_items: bool = False  # books, hats and balls swap names at random in each pass
    deals_only: bool = False  # train on deals only
    claim: float = 0.0  # weight of a further loss on claims and tags (losses/claim.py)
    hold_out: bool = True  # don't train on the game's test contexts; without it, evaluate on contexts of another origin
    keep: str = "all"  # or nonzero: train only on views whose player scored
    human_games: int = 0  # train on so many of the remaining dialogues, drawn by `seed`; 0: on all of them
    held_out_games: int = 0  # measure on the first so many dialogues of each held-out split; 0: on all of them
    dropout: float = 0.0  # of the embeddings and of each block's output (Llama-family models)
    rows: int = 16  # in one step
    learning_rate: float = 4e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    bf16: bool = False
    seed: int = 0
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # game settings that change from game to game
    imitation: float = 1.0
    world_model: float = 0.1
    after_questions: bool = True  # world modelling predicts the token after a belief question, too
    listening: float = 0.5
    lessons: tuple[Lesson, ...] = ()  # further stages, one after another

    def __post_init__(self) -> None:
        check_choices(self, "base", data=DATA, keep=KEEPS)
        check_range(self, "base", "[1, inf)", "games", "tokenizer_games", "epochs", "rows")
        check_range(self, "base", "[0, inf); 0 for all of them", "human_games", "held_out_games")
        check_range(self, "base", "[0, inf)", "learning_rate", "weight_decay", "warmup")
        if not 0 <= self.seed <= MOST_SEEDS:
            raise UserError(f"base.seed={self.seed}: must be from 0 to {MOST_SEEDS}")
        check_range(self, "base", "[0, 1)", "dropout")
        for name, values in self.vary.items():
            if not values:
                raise UserError(f"base.vary.{name}=[]: must name a value; or leave it out (~base.vary.{name})")

    @property
    def games_of_tokenizer(self) -> int:
        """Number of scripted games for the tokenizer: no more than a small base learns from."""
        return min(max(self.games, 20), self.tokenizer_games)

    def losses(self) -> dict[str, Loss]:
        return {
            "imitation": ImitationLoss(self.imitation),
            # At weight 0 it would make logits of all that is read, which nothing uses.
            **({"world_model": WorldModelLoss(self.world_model, self.after_questions)} if self.world_model else {}),
            "listening": ListeningLoss(self.listening),
            **({"claim": ClaimLoss(self.claim)} if self.claim else {}),
        }

    def made_of(self) -> dict[str, Any]:
        """The settings that the trained base depends on; those of human data only if they are used."""
        default = BaseConfig()
        later = (
            "players", "hold_out", "dropout", "keep", "human_games", "held_out_games", "tokenizer_games",
            "after_questions",
        )  # fmt: skip
        unused = {name for name in later if getattr(self, name) == getattr(default, name)}
        of_people = {"permute_items", "deals_only", "claim", "hold_out", "keep", "human_games", "held_out_games"}
        unused |= {"tokenizer_games"} if self.data == "human" else of_people
        unused |= set() if self.lessons else {"lessons"}
        return {name: value for name, value in asdict(self).items() if name not in unused}
