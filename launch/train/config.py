"""What a training run is: every number that decides its losses, checked before anything is sent.

For: one flat record that options fill in, checkpoints store and resumed runs start from. Needs no
torch, so that `--help` and the launching process are quick. Not for: where output goes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from burst_rt.errors import ConfigError, InputError
from burst_rt.planning.layouts import KINDS, make_layout
from burst_rt.planning.masks import Causal
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import STRATEGIES, check_name, choose

__all__ = [
    "CHECKPOINT_NAME", "DTYPES", "LAYOUTS", "STRATEGIES", "ModelConfig", "ProgressMode",
    "RunOptions", "ShardingOptions", "TrainConfig",
    "mesh_shape", "require_text",
]  # fmt: skip

DTYPES = ("float32", "bfloat16")
LAYOUTS = tuple(sorted(KINDS))
# Of the folders in a run's `checkpoints`.
CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")

ProgressMode = Literal["auto", "bar", "lines", "none"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture: what must be equal for a checkpoint to fit."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    vocab_size: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward: 8/3 of dim, as in Llama, rounded up to a multiple of 32."""
        return 32 * math.ceil(8 * self.dim / 3 / 32)

    def validate(self) -> None:
        """Raise ConfigError for a model that cannot be built."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                raise ConfigError(f"model: {field.name} must be positive, got {value}.")
        if self.dim % self.heads:
            raise ConfigError(
                f"model: dim ({self.dim}) must be a multiple of heads ({self.heads}); change --dim "
                "or --heads."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model: rotary positions need an even dim / heads, got {self.head_dim}; change "
                "--dim or --heads."
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model: heads ({self.heads}) must be a multiple of kv-heads ({self.kv_heads}); "
                "change either."
            )


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """How sequences are split and computed; none of it is part of the model."""

    seq_len: int
    layout: str
    strategy: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run; the defaults are the job that `burst-rt train` shows itself with. `batch`
    counts sequences of a global step.
    """

    data: str | None = None
    seq_len: int = 2048
    steps: int = 320
    batch: int = 1
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    lr: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    context_parallel: int | None = None
    layout: str = "zigzag"
    strategy: str = "auto"
    dtype: str = "float32"
    eval_every: int = 40
    eval_sequences: int = 8
    checkpoint_every: int = 80
    keep_checkpoints: int = 2

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            layers=self.layers, dim=self.dim, heads=self.heads, kv_heads=self.kv_heads
        )

    @property
    def sharding(self) -> ShardingOptions:
        return ShardingOptions(
            seq_len=self.seq_len, layout=self.layout, strategy=self.strategy, dtype=self.dtype
        )

    @property
    def data_path(self) -> Path | None:
        return None if self.data is None else Path(self.data)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError for what cannot run on `world_size` ranks; a pure function, so it says
        the same on every rank.
        """
        for name in ("seq_len", "steps", "batch", "lr", "clip", "keep_checkpoints"):
            if not getattr(self, name) > 0:  # NaN is not
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}."
                )
        for name in (
            "warmup",
            "weight_decay",
            "seed",
            "eval_every",
            "eval_sequences",
            "checkpoint_every",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}."
                )
        if self.seed >= 2**63:
            raise ConfigError(f"--seed must be below 2**63, got {self.seed}.")
        for name, known in (("layout", LAYOUTS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"--{name} must be one of {', '.join(known)}, got {getattr(self, name)}."
                )
        try:
            check_name(self.strategy)
        except InputError as error:
            raise ConfigError(f"--strategy: {error.message}") from error
        self.model.validate()
        data_size, context_size = mesh_shape(world_size, self.context_parallel)
        if self.batch % data_size:
            raise ConfigError(
                f"--batch: {self.batch} sequences cannot be shared by {data_size} data-parallel "
                f"groups; choose a multiple of {data_size}, "
                f"or a larger --context-parallel."
            )
        name, number = check_name(self.strategy)
        if name == "all-to-all" or number is not None:
            self._check_division(context_size)

    def _check_division(self, context_size: int) -> None:
        """Raise ConfigError where heads or ranks do not divide as the strategy wants."""
        layout = make_layout(self.layout, self.seq_len, context_size)
        problem = Problem(
            q_layout=layout,
            kv_layout=layout,
            mask=Causal(),
            batch=1,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.model.head_dim,
            input_bytes=4,
            sum_bytes=4,
            needs_grad=(True, True, True),
        )
        try:
            choose(problem, self.strategy, forward=True)
        except InputError as error:
            raise ConfigError(f"--strategy: {error.message}") from error

    def resumed(self, chosen: Mapping[str, object]) -> TrainConfig:
        """This run with the options that were chosen anew. Raises ConfigError when the model would
        be another one.
        """
        after = dataclasses.replace(self, **chosen)  # type: ignore[arg-type]  # typed by the command line
        if after.model != self.model:
            raise ConfigError(
                f"--resume: the checkpoint holds another model; expected {self.model}, got "
                f"{after.model}. "
                "Leave the model's options out, or start a new run."
            )
        return after

    def evaluated(self, chosen: Mapping[str, object], world_size: int) -> TrainConfig:
        """What a checkpoint of this run is measured with on `world_size` ranks. Raises ConfigError
        for what cannot be.
        """
        # What suited the ranks of the training need not suit these.
        config = self.resumed({"context_parallel": None, "strategy": "auto", **chosen})
        # The batch is training's; here every group takes whole sequences one by one.
        config = dataclasses.replace(config, batch=world_size)
        config.validate(world_size)
        return config


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run's output goes; decides no loss. `out` None: a new folder under runs/."""

    out: Path | None = None
    resume: bool = False
    progress: ProgressMode = "auto"

    def validate(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        if self.resume and self.out is None:
            raise ConfigError("--resume continues the run in --out DIR; name its folder.")
        if self.out is not None and CHECKPOINT_NAME.fullmatch(self.out.name):
            # A run inside of a checkpoint would go when the checkpoint goes.
            raise ConfigError(
                f"--out: {self.out} is named like a checkpoint; name its run's folder."
            )


def require_text(path: Path | None) -> None:
    """Raise ConfigError where --data names nothing."""
    if path is not None and not path.exists():
        raise ConfigError(
            f"--data: {path} does not exist; give a text file or a folder of text files."
        )


def mesh_shape(world_size: int, context_parallel: int | None) -> tuple[int, int]:
    """(data, context) sizes of the mesh; None puts all ranks on the sequence. Raises ConfigError
    when they do not divide.
    """
    context_size = world_size if context_parallel is None else context_parallel
    if context_size <= 0 or world_size % context_size:
        raise ConfigError(
            f"--context-parallel: {world_size} ranks cannot form groups of {context_size}; choose "
            f"a divisor of {world_size}."
        )
    return world_size // context_size, context_size
