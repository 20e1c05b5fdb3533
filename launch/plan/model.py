"""A whole model on a machine: each kind of layer times its layers; activations kept or not.

It is pure Python. A model by its sizes has layers of one kind; `configuration.py` reads others.

The layer comes from `burst_rt.launch.plan.layers`. Times leave out the embedding and the head (one
row of logits a sequence; their weights are counted), the sampler, and the optimizer's step.

Memory counts the weights of all layers and 16-bit activations. Training also holds gradients, and
AdamW's 12 bytes a weight (float32 weight and two moments) spread over the ranks. ZeRO stage 1
spreads them so, and sends no more bytes than the sum of gradients that is counted here. Activations
that do not fit are computed again in the backward, layer by layer: all but attention, if its
outputs fit (`burst_rt.checkpoint`), else all. Every rank holds all experts of a mixture (a part of
each under tensor parallelism). The gradients of weights that layers share are summed once for each
of these layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Literal, TypeAlias, get_args

from burst_rt.errors import InputError
from burst_rt.launch.plan.layers import TENSOR_PARALLEL, LayerMemory, LayerShape, SpreadLayer
from burst_rt.launch.plan.sublayers import Attention, LayerSizes
from burst_rt.launch.plan.words import parse_mask
from burst_rt.planning.choose import CANDIDATES, LAYOUTS
from burst_rt.planning.masks import Causal, Mask, SlidingWindow
from burst_rt.planning.strategies import check_name
from burst_rt.scheduler.simulator import Hardware

__all__ = [
    "ACTIVATIONS", "ATTENTION", "EVERY_UP_TO", "MODELS", "Activations", "Model", "ModelForecast",
    "Phase", "Question", "fewest_ranks", "forecast_model", "parse_model", "parse_strategy",
    "published_mask", "tile_of",
]  # fmt: skip

Phase: TypeAlias = Literal["first-token", "train"]
# Names of the treatments of activations in training: the fastest first, the smallest last.
# "attention kept": a layer's input, and attention's output and lse, are kept. "computed again":
# only a layer's input is kept.
Activations: TypeAlias = Literal["kept", "attention kept", "computed again"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
# Names of the attention strategies of `simulate`: the planners' candidates, and others for
# comparing.
ATTENTION = (*CANDIDATES, "ring-q", "ring-naive", "burst-untiled")
# Maximum world size up to which `fewest_ranks` tries every number of ranks.
EVERY_UP_TO = 64
_INPUT_BYTES = 2
_ADAMW_BYTES = 12


@dataclass(frozen=True)
class Model:
    """A decoder."""

    name: str
    layers: tuple[tuple[int, LayerShape | LayerSizes], ...]  # how many of each kind
    # Weights that no layer has: embedding and head. Less than none, where layers share theirs.
    outside: int
    inactive: int = 0  # weights of experts to which one token does not go
    about: str = ""  # what its configuration says, in one line

    @property
    def num_layers(self) -> int:
        return sum(count for count, _ in self.layers)

    @property
    def num_weights(self) -> int:
        """The weights of all layers, of the embedding and of the head."""
        weights = (count * _sizes(layer).num_weights for count, layer in self.layers)
        return sum(weights) + self.outside

    @property
    def layer(self) -> LayerShape:
        """The layer of a Llama-like model, whose layers are all alike. Raises InputError."""
        (_, layer), *others = self.layers
        if others or not isinstance(layer, LayerShape):
            raise InputError(f"{self.name}: expected a model by its sizes")
        return layer


def _sizes(layer: LayerShape | LayerSizes) -> LayerSizes:
    return layer if isinstance(layer, LayerSizes) else layer.sizes


def _llama(name: str, num_layers: int, layer: LayerShape, vocab_size: int) -> Model:
    """A Llama-like decoder; embedding and head have a matrix each."""
    return Model(name, ((num_layers, layer),), 2 * vocab_size * layer.dim)


# H. Touvron et al., "LLaMA", arXiv 2302.13971, table 2; widths of the feed-forward from the
# published checkpoints.
MODELS = {
    "llama-7b": _llama("llama-7b", 32, LayerShape(4096, 32, 32, 128, 11008), 32000),
    "llama-13b": _llama("llama-13b", 40, LayerShape(5120, 40, 40, 128, 13824), 32000),
}
# Names of the sizes by which a model may be given, and of the sizes that may be left out.
_SIZES = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn", "vocab")
_OPTIONAL = ("kv_heads", "head_dim", "vocab")


def parse_model(text: str) -> Model:
    """A model by its name in MODELS, or by its sizes.

    Sizes look like "layers=32,dim=4096,heads=32,kv_heads=8,head_dim=128,ffn=14336,vocab=128256".
    kv_heads, head_dim and vocab may be left out, and are then heads, dim / heads and 32000. Raises
    InputError that names the size at fault.
    """
    if text in MODELS:
        return MODELS[text]
    if "=" not in text:
        raise InputError(
            f"--model: expected one of {sorted(MODELS)} or sizes such as "
            f"'layers=32,dim=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256', got {text!r}, which "
            "is no path of a config.json or of its folder either"
        )
    given: dict[str, int] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name not in _SIZES:
            raise InputError(f"--model: expected sizes from {', '.join(_SIZES)}, got {name!r}")
        if not re.fullmatch("[1-9][0-9]{0,11}", value):
            raise InputError(
                f"--model: {name}: expected a whole number from 1 to 999,999,999,999, written out, "
                f"got {value[:40]!r}"
            )
        if name in given:
            raise InputError(f"--model: {name}: expected it once, got it again as {value!r}")
        given[name] = int(value)
    missing = [name for name in _SIZES if name not in given and name not in _OPTIONAL]
    if missing:
        raise InputError(f"--model: {', '.join(missing)} missing in {text!r}; add it")
    heads = given["heads"]
    if "head_dim" not in given and given["dim"] % heads:
        raise InputError(
            f"--model: head_dim: expected dim / heads to be a whole number, got {given['dim']} / "
            f"{heads}; give head_dim"
        )
    shape = LayerShape(
        given["dim"],
        heads,
        given.get("kv_heads", heads),
        given.get("head_dim", given["dim"] // heads),
        given["ffn"],
    )
    return _llama(text, given["layers"], shape, given.get("vocab", 32000))


@dataclass(frozen=True)
class Question:
    """What is to be computed, on any number of ranks."""

    model: Model
    seq_len: int
    phase: Phase
    mask: str = "causal"  # see `parse_mask`
    batch: int = 1
    # One of LAYOUTS, or "auto": for each strategy the one with the best forecast.
    layout: str = "zigzag"
    # What becomes of activations in training; None: the first of ACTIVATIONS that fits.
    activations: Activations | None = None


@dataclass(frozen=True)
class ModelForecast:
    """One phase of a model under one strategy. Each number is the worst rank's."""

    strategy: str  # with the ranks of a group: "hybrid:8"
    layout: str
    mask: str
    phase: Phase
    time_s: float | None  # None where the model does not fit into memory
    idle_s: float  # seconds for which the rank's device is idle
    sent_bytes: int
    memory_bytes: int
    out_of_memory: bool
    activations: Activations | None  # None but in training

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def parse_strategy(text: str) -> str:
    """The text, if it names a strategy that `forecast_model` takes. Raises InputError."""
    known = (*ATTENTION, *TENSOR_PARALLEL)
    if text in known:
        return text
    try:
        if check_name(text)[0] in known:
            return text
    except InputError:
        pass
    hint = "; `burst-rt plan` compares what auto chooses from" if text == "auto" else ""
    raise InputError(
        f"--strategy: expected one of {', '.join(known)}, hybrid:N, two-level:N (N: ranks of a "
        f"group), got {text!r}{hint}"
    )


def published_mask(strategy: str) -> str:
    """The mask of a strategy in the BurstAttention paper's comparison of causal models.

    In that comparison (arXiv 2403.09347) the paper's rings compute all scores, "full", and tensor
    parallelism computes the causal half, "causal". Strategies that are not in the paper: "causal".
    """
    return "full" if strategy in ("burst", "ring-kv", "burst-untiled", "ring-naive") else "causal"


def forecast_model(
    question: Question, strategy: str, world_size: int, hardware: Hardware
) -> ModelForecast:
    """Simulates one layer of each kind, and multiplies by the number of layers of that kind.

    Tensor parallelism has no layout: a rank has the whole sequence, or a contiguous part of it.
    Raises InputError for a strategy and sizes that do not go together.
    """
    if question.layout == "auto":
        kinds: tuple[str, ...] = LAYOUTS if strategy not in TENSOR_PARALLEL else LAYOUTS[:1]
        if any(_sizes(layer).recurrence for _, layer in question.model.layers):
            kinds = tuple(kind for kind in kinds if kind != "striped")
        forecasts = [
            forecast_model(replace(question, layout=kind), strategy, world_size, hardware)
            for kind in kinds
        ]
        return min(forecasts, key=lambda f: (f.out_of_memory, f.time_s or 0.0))
    layers = _layers(question, strategy, world_size, hardware)
    limit = hardware.device.memory_bytes
    memory, taken = _need(question, layers, limit)
    passes = [
        tuple(count * number for number in one)
        for count, layer in layers
        for one in _passes(layer, hardware, taken)
    ]
    time_s, idle_s, sent = map(sum, zip(*passes, strict=True))
    fits = memory <= limit
    if strategy in ("hybrid", "two-level"):
        # Where kinds of layers differ in the ranks of a group, the name says none.
        names = {layer.choice(forward=True).strategy for layer in _attending(layers)}
        strategy = names.pop() if len(names) == 1 else strategy
    return ModelForecast(
        strategy,
        layers[0][1].layout.kind,
        question.mask,
        question.phase,
        time_s if fits else None,
        idle_s,
        int(sent),
        memory,
        not fits,
        taken,
    )


def fewest_ranks(
    question: Question, strategy: str, hardware: Hardware, up_to: int = 512
) -> int | None:
    """The fewest ranks, up to `up_to`, whose devices hold the model.

    Every number up to 64 is tried; above, numbers of whole nodes. None where no such number is
    enough.
    """
    limit = hardware.device.memory_bytes
    per_node = hardware.node.ranks
    # "hybrid:8" is what "hybrid" is on one number of ranks.
    name = strategy.partition(":")[0]
    every = range(1, min(up_to, EVERY_UP_TO) + 1)
    whole_nodes = range(EVERY_UP_TO // per_node * per_node + per_node, up_to + 1, per_node)
    for world_size in chain(every, whole_nodes):
        try:
            layers = _layers(question, name, world_size, hardware)
            # Attention's slots are known from its graphs only, which take long to make.
            if (
                _need(question, layers, limit, working=False)[0] <= limit
                and _need(question, layers, limit)[0] <= limit
            ):
                return world_size
        except InputError:
            pass  # the strategy cannot use this number of ranks
    return None


def tile_of(
    question: Question, strategy: str, world_size: int, hardware: Hardware
) -> tuple[int, int] | None:
    """Queries and keys of the largest tile of the forward; None where no layer has attention."""
    layers = _attending(_layers(question, strategy, world_size, hardware))
    tiles = [layer.program(forward=True).footprint(0).tile for layer in layers]
    sizes = ((tile.q_len, tile.kv_len) for tile in tiles)
    return max(sizes, key=prod, default=None)


_Layers: TypeAlias = list[tuple[int, SpreadLayer]]


def _layers(question: Question, strategy: str, world_size: int, hardware: Hardware) -> _Layers:
    """How many layers of each kind, and the kind spread over the ranks."""
    per_node = min(hardware.node.ranks, world_size)
    even = per_node if world_size % per_node == 0 else 1
    asked = parse_mask(question.mask)
    return [
        (
            count,
            SpreadLayer(
                layer,
                question.seq_len,
                world_size,
                strategy,
                question.batch,
                _INPUT_BYTES,
                _allowed(asked, _sizes(layer).attention, question.seq_len),
                question.layout,
                even,
                asked,
            ),
        )
        for count, layer in question.model.layers
    ]


def _allowed(asked: Mask, attention: Attention | None, seq_len: int) -> Mask:
    """The mask that was asked for, as far as a layer's own mask allows."""
    window = None if attention is None else attention.window
    if window is None:
        return asked
    if isinstance(window, SlidingWindow):
        if window.left >= seq_len - 1:
            window = Causal()
        if asked == Causal():  # A window looks back only.
            return window
    return asked & window


def _attending(layers: _Layers) -> list[SpreadLayer]:
    return [layer for _, layer in layers if layer.sizes.attention is not None]


def _need(
    question: Question, layers: _Layers, limit: int, *, working: bool = True
) -> tuple[int, Activations | None]:
    """Bytes of the worst rank, and what becomes of activations: what was asked, or what fits.

    working: False leaves out what attention and the products hold for a while.
    """
    training = question.phase == "train"
    first = layers[0][1]
    rank = max(range(first.world_size), key=first.rows)
    held = [layer.memory(rank, backward=training, working=working) for _, layer in layers]
    need = partial(_memory_bytes, question.model, layers, rank, held)
    if not training:
        return need(None), None
    *larger, smallest = ACTIVATIONS
    fitting = (name for name in larger if need(name) <= limit)
    taken = question.activations or next(fitting, smallest)
    return need(taken), taken


def _passes(
    layer: SpreadLayer, hardware: Hardware, taken: Activations | None
) -> list[tuple[float, float, int]]:
    """What one layer's directions take: the forward, and in training the others."""
    passes = [_direction(layer, hardware, forward=True)]
    if taken is not None:
        passes.append(_direction(layer, hardware, forward=False))
    if taken == "attention kept":
        passes.append(_direction(layer, hardware, forward=True, attention=False))
    elif taken == "computed again":
        passes.append(passes[0])
    return passes


def _direction(
    layer: SpreadLayer, hardware: Hardware, *, forward: bool, attention: bool = True
) -> tuple[float, float, int]:
    """Seconds, the longest idle seconds, the most bytes sent; attention: as for `layer.graph`."""
    run = layer.simulated(hardware, forward=forward, attention=attention)
    idle_s = max(rank.idle_s for rank in run.ranks)
    sent_bytes = max(rank.sent_bytes for rank in run.ranks)
    return run.end_s, idle_s, sent_bytes


def _memory_bytes(
    model: Model,
    layers: _Layers,
    rank: int,
    held: list[LayerMemory],
    activations: Activations | None,
) -> int:
    """Bytes of a rank. held: the bytes of a layer of each kind. activations: None for the first
    token.
    """
    share = layers[0][1].share
    counts = [count for count, _ in layers]
    num_weights = _total(counts, (one.weights // _INPUT_BYTES for one in held))
    num_weights += model.outside // share
    working = max(one.working for one in held)
    if activations is None:
        # The caches, and what goes from layer to layer.
        cached = _total(counts, (layer.cached_bytes(rank) for _, layer in layers))
        passing = max(one.activations for one in held)
        return num_weights * _INPUT_BYTES + cached + passing + working
    states = _ADAMW_BYTES * model.num_weights // layers[0][1].world_size
    kept = [one.activations for one in held]
    if activations != "kept":
        with_attention = activations == "attention kept"
        kept = [layer.checkpointed_bytes(rank, attention=with_attention) for _, layer in layers]
    # One layer's activations are all there while its backward runs.
    whole = max(one.activations - each for one, each in zip(held, kept, strict=True))
    return 2 * num_weights * _INPUT_BYTES + states + _total(counts, kept) + whole + working


def _total(counts: Iterable[int], sizes: Iterable[int]) -> int:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))
