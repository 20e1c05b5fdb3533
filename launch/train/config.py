"""What a training run is: every number that decides its losses, with its option's help and limits.

One flat record: options fill it in, checkpoints store it and resumed runs start from it. It is
checked before anything is sent. Needs no torch, so that `--help` and the launching process are
quick.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Literal

from burst_rt.errors import ConfigError, InputError, MissingPackage
from burst_rt.planning.choose import choose
from burst_rt.planning.layouts import KINDS, make_layout
from burst_rt.planning.masks import Causal
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import STRATEGIES, check_name

__all__ = [
    "CHECKPOINT_NAME", "DTYPES", "LAYOUTS", "MACHINE_FILE", "ModelConfig", "ProgressMode",
    "RunOptions", "TrainConfig", "mesh_shape", "option_name", "require_model", "require_text",
    "require_transformers",
]  # fmt: skip

DTYPES = ("float32", "bfloat16")
LAYOUTS = tuple(sorted(KINDS))
# The names of the folders in a run's `checkpoints`.
CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
# The file of a run that says what its strategies were planned with.
MACHINE_FILE = "machine.toml"

ProgressMode = Literal["auto", "bar", "lines", "none"]

# Options of the byte-level model: a folder of transformers says its shape itself, and its strategy
# is auto.
_BYTE_LEVEL = ("layers", "dim", "heads", "kv_heads", "strategy")
# Contents of a transformers folder, the names of their files, and what to do if they are missing.
_FILES = (
    ("a configuration", ("config.json",), "model.save_pretrained writes it"),
    (
        "safetensors",
        ("*.safetensors",),
        "weights of another format are not read: load them with transformers, and save_pretrained",
    ),
    (
        "a tokenizer",
        ("tokenizer*", "vocab*", "*.model"),
        "tokenizer.save_pretrained writes it",
    ),
)
# Learning rate of a model that is trained already, which moves in smaller steps.
_FINE_TUNING_LR = 2e-5

# Requirements on the values of options, and their checks. NaN fails both checks.
_LIMITS: dict[str, Callable[[float], bool]] = {
    "be positive": lambda value: value > 0,
    "not be negative": lambda value: value >= 0,
}


def _option(text: str, must: str = "") -> dict[str, str]:
    """Metadata of a field: its option's help, and what its value must (of _LIMITS)."""
    return {"help": text, "must": must}


def _positive(text: str) -> dict[str, str]:
    return _option(text, "be positive")


def _not_negative(text: str) -> dict[str, str]:
    return _option(text, "not be negative")


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
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value <= 0:
                raise ConfigError(f"model: {entry.name} must be positive, got {value}.")
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
                "change --heads or --kv-heads."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. A field is an option of `burst-rt train`; its metadata hold the option's help
    and what its value must. The defaults are the job that the command shows itself with.
    """

    model: str | None = field(
        default=None,
        metadata=_option(
            "Folder of a model of transformers (config.json, safetensors, tokenizer) to fine-tune; "
            "nothing is downloaded. [default: a new byte-level model]"
        ),
    )
    data: str | None = field(
        default=None,
        metadata=_option("Text file, or folder of text files. [default: Python's own library]"),
    )
    seq_len: int = field(
        default=2048,
        metadata=_positive(
            "Length of a sequence in bytes (with --model: tokens), over all ranks that share it."
        ),
    )
    steps: int = field(default=320, metadata=_positive("Optimizer steps of the whole run."))
    batch: int = field(default=1, metadata=_positive("Sequences per step, over all ranks."))
    layers: int = field(default=4, metadata=_option("Layers of the byte-level model."))
    dim: int = field(default=128, metadata=_option("Width of the byte-level model."))
    heads: int = field(default=4, metadata=_option("Attention heads; must divide --dim."))
    kv_heads: int = field(default=2, metadata=_option("Key/value heads; must divide --heads."))
    lr: float = field(
        default=3e-3,
        metadata=_positive(
            "Peak learning rate of AdamW; it decays to a tenth. With --model the default is "
            f"{_FINE_TUNING_LR:g}."
        ),
    )
    warmup: int = field(
        default=20, metadata=_not_negative("Steps of linear warm-up before the cosine decay.")
    )
    weight_decay: float = field(default=0.1, metadata=_not_negative("Weight decay of matrices."))
    clip: float = field(default=1.0, metadata=_positive("Clip gradients to this global norm."))
    seed: int = field(
        default=0, metadata=_not_negative("Seed for the weights and for drawing sequences.")
    )
    context_parallel: int | None = field(
        default=None,
        metadata=_option("Ranks that share a sequence; must divide the ranks. [default: all]"),
    )
    layout: str = field(
        default="zigzag", metadata=_option(f"How a sequence is split: {', '.join(LAYOUTS)}.")
    )
    strategy: str = field(
        default="auto",
        metadata=_option(
            f"How attention is spread over ranks: {', '.join(STRATEGIES)}. hybrid:N and "
            "two-level:N form groups of N ranks; sliced:N exchanges heads in N slices."
        ),
    )
    dtype: str = field(
        default="float32",
        metadata=_option(
            f"Type of matrix products and attention: {', '.join(DTYPES)}. Weights are float32."
        ),
    )
    checkpoint_activations: bool = field(
        default=False,
        metadata=_option(
            "Save memory: the backward recomputes all activations but attention's outputs. "
            "Losses stay the same."
        ),
    )
    eval_every: int = field(
        default=40,
        metadata=_not_negative("Steps between measurements on held-out text; 0: at the end only."),
    )
    eval_sequences: int = field(
        default=8, metadata=_not_negative("Held-out sequences to measure on; 0: all whole ones.")
    )
    checkpoint_every: int = field(
        default=80, metadata=_not_negative("Steps between checkpoints; 0: at the end only.")
    )
    keep_checkpoints: int = field(default=2, metadata=_positive("Checkpoints to keep."))

    @property
    def architecture(self) -> ModelConfig | None:
        """The architecture of the byte-level model; None if a transformers folder gives it."""
        if self.model is not None:
            return None
        return ModelConfig(
            layers=self.layers, dim=self.dim, heads=self.heads, kv_heads=self.kv_heads
        )

    @property
    def data_path(self) -> Path | None:
        return None if self.data is None else Path(self.data)

    def validate(self, world_size: int) -> None:
        """Raise ConfigError for what cannot run on `world_size` ranks, as far as can be seen
        without torch: from the values, and from the names of files.
        """
        self._check_values()
        try:
            strategy, number = check_name(self.strategy)
        except InputError as error:
            raise ConfigError(f"--strategy: {error.message}") from error
        if self.architecture is not None:
            self.architecture.validate()
        data_size, context_size = mesh_shape(world_size, self.context_parallel)
        if self.batch % data_size:
            raise ConfigError(
                f"--batch: {self.batch} sequences cannot be shared by {data_size} data-parallel "
                f"groups; choose a multiple of {data_size}, or a larger --context-parallel."
            )
        if self.seq_len < context_size:
            raise ConfigError(
                f"--seq-len: {self.seq_len} cannot be split over {context_size} ranks; choose at "
                "least one token for each, or a smaller --context-parallel."
            )
        if self.architecture and (strategy == "all-to-all" or number is not None):
            self._check_division(self.architecture, context_size)
        if self.model is not None:
            require_model(Path(self.model))
        require_text(self.data_path)

    def _check_values(self) -> None:
        """Raise ConfigError for a value that is outside its own limits."""
        for must, fits in _LIMITS.items():
            for entry in fields(self):
                value = getattr(self, entry.name)
                if entry.metadata["must"] == must and not fits(value):
                    raise ConfigError(f"{option_name(entry.name)} must {must}, got {value}.")
        if self.seed >= 2**63:
            raise ConfigError(f"--seed must be below 2**63, got {self.seed}.")
        for name, known in (("layout", LAYOUTS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"--{name} must be one of {', '.join(known)}, got {getattr(self, name)}."
                )

    def _check_division(self, model: ModelConfig, context_size: int) -> None:
        """Raise ConfigError where heads or ranks do not divide as the strategy wants."""
        layout = make_layout(self.layout, self.seq_len, context_size)
        problem = Problem(
            q_layout=layout,
            kv_layout=layout,
            mask=Causal(),
            batch=1,
            num_heads=model.heads,
            num_kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            input_bytes=4,
            sum_bytes=4,
            needs_grad=(True, True, True),
        )
        try:
            choose(problem, self.strategy, forward=True)
        except InputError as error:
            raise ConfigError(f"--strategy: {error.message}") from error

    def begun(self, chosen: Mapping[str, object]) -> TrainConfig:
        """This configuration for a new run. chosen: the options that the user gave. Raises
        ConfigError for options that do not go with --model.
        """
        if self.model is None:
            return self
        odd = [option_name(name) for name in _BYTE_LEVEL if name in chosen]
        if odd:
            raise ConfigError(
                f"{', '.join(odd)}: of the byte-level model alone; expected none beside --model "
                f"({self.model}), whose configuration says its shape, and whose strategy is auto; "
                "leave it out."
            )
        return self if "lr" in chosen else replace(self, lr=_FINE_TUNING_LR)

    def resumed(self, chosen: Mapping[str, object]) -> TrainConfig:
        """This run with the newly chosen options. Raises ConfigError when the model would be
        another one.
        """
        after = replace(self, **chosen)  # type: ignore[arg-type]  # typed by the command line
        if after.architecture != self.architecture:
            expected, got = self._model_in_words(), after._model_in_words()
            option = "--resume" if after.model == self.model else "--model"
            raise ConfigError(
                f"{option}: the checkpoint holds another model; expected {expected}, got {got}. "
                "Leave the model's options out, or start a new run."
            )
        # The rate of learning is the run's own.
        return after.begun({**chosen, "lr": after.lr})

    def _model_in_words(self) -> str:
        return str(self.architecture) if self.model is None else f"the one of {self.model}"

    def on_ranks(self, world_size: int, *, elastic: bool) -> TrainConfig:
        """This run on `world_size` ranks. elastic: with another context_parallel or strategy where
        its own do not fit. Raises ConfigError, as `validate` does, for what cannot run there.
        """
        wanted = self.context_parallel
        sizes = [None] if wanted is None else _nearest(wanted, world_size)
        for size, strategy in product(sizes, (self.strategy, "auto")) if elastic else ():
            config = replace(self, context_parallel=size, strategy=strategy)
            with suppress(ConfigError):
                config.validate(world_size)
                return config
        self.validate(world_size)
        return self

    def evaluated(self, chosen: Mapping[str, object], world_size: int) -> TrainConfig:
        """The configuration with which a checkpoint of this run is measured on `world_size` ranks.
        Raises ConfigError for what cannot be.
        """
        # A choice that suited the ranks of the training need not suit these ranks.
        config = replace(self, context_parallel=None, strategy="auto").resumed(chosen)
        # Training's batch has no meaning here: every group takes whole sequences one by one.
        config = replace(config, batch=world_size)
        config.validate(world_size)
        return config


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run's output goes, which decides no loss."""

    # None: a new folder under runs/.
    out: Path | None = None
    resume: bool = False
    # Whether the job may be a restart, perhaps with fewer ranks.
    elastic: bool = False
    progress: ProgressMode = "auto"

    def validate(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        if self.resume and self.out is None:
            raise ConfigError("--resume needs --out DIR, the folder of the run to continue.")
        if self.elastic and self.out is None:
            raise ConfigError("--elastic needs --out DIR, the folder that all starts share.")
        if self.out is not None and CHECKPOINT_NAME.fullmatch(self.out.name):
            # A run inside a checkpoint would be deleted with the checkpoint.
            raise ConfigError(
                f"--out: {self.out} is named like a checkpoint; name the folder of the run."
            )


def _nearest(wanted: int, most: int) -> Sequence[int]:
    """The sizes of groups to try: the wanted one, the larger ones, in which a rank has fewer tokens
    of a sequence, then the smaller ones.
    """
    return [*range(wanted, most + 1), *range(min(wanted - 1, most), 0, -1)]


def option_name(name: str) -> str:
    """The command line's name of a field of TrainConfig."""
    return f"--{name.replace('_', '-')}"


def require_text(path: Path | None) -> None:
    """Raise ConfigError where --data names nothing."""
    if path is not None and not path.exists():
        raise ConfigError(
            f"--data: {path} does not exist; give a text file or a folder of text files."
        )


def require_model(path: Path) -> None:
    """Raise ConfigError for a --model whose folder cannot hold a model, or where transformers is
    missing. Loads nothing.
    """
    require_transformers("--model")
    if not path.is_dir():
        raise ConfigError(
            f"--model: expected the folder of a model of transformers, and {path} is none; nothing "
            "is downloaded: give a folder that save_pretrained has written."
        )
    for what, patterns, hint in _FILES:
        if not any(any(path.glob(pattern)) for pattern in patterns):
            raise ConfigError(
                f"--model: expected {what} ({' or '.join(patterns)}) in {path}, found none; {hint}."
            )


def require_transformers(what: str) -> None:
    """Raise MissingPackage where transformers, which `what` needs, is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingPackage(
            f"{what} needs transformers, which is not installed; in the clone of burst_rt say: "
            "pip install '.[hf]'"
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
