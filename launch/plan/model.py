"""A whole model on a machine: each kind of layer times its layers; activations kept or not.

It is pure Python. A model by its sizes has layers of one kind; `configuration.py` reads others.

The layer comes from `burst_rt.launch.plan.layers`. Times leave out the embedding and the head (one
row of logits a sequence; their weights are counted), the sampler, and the optimizer's step.

Memory counts the weights of all layers and 16-bit activations. Training also holds gradients, and
AdamW's 12 bytes a weight, each whole or sharded (`shards.py`). Activations that do not fit are
computed again in the backward, layer by layer: all but attention, if its outputs fit
(`burst_rt.checkpoint`), else all. Every rank holds all experts of a mixture (a part of each under
tensor parallelism). The gradients of weights that layers share are summed once for each of these
layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from math import inf, prod
from typing import Literal, NamedTuple, TypeAlias, get_args

from burst_rt.errors import InputError
from burst_rt.launch.plan.bounds import Known, LayerPass, Taken
from burst_rt.launch.plan.layers import TENSOR_PARALLEL, LayerMemory, SpreadLayer
from burst_rt.launch.plan.models import Model, sizes_of
from burst_rt.launch.plan.shards import Shard, held_bytes
from burst_rt.launch.plan.steady import SIMULATED_UP_TO
from burst_rt.launch.plan.sublayers import Attention
from burst_rt.launch.plan.words import parse_mask
from burst_rt.planning.choose import CANDIDATES, LAYOUTS
from burst_rt.planning.masks import Causal, Mask, SlidingWindow
from burst_rt.planning.strategies import check_name
from burst_rt.scheduler.simulator import Hardware

__all__ = [
    "ACTIVATIONS",
    "ATTENTION",
    "EVERY_UP_TO",
    "Activations",
    "ModelForecast",
    "Phase",
    "Question",
    "SpreadModel",
    "candidates_of",
    "fewest_ranks",
    "forecast_model",
    "parse_strategy",
    "published_mask",
    "tile_of",
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
    shard: Shard = "zero1"  # what training shards
    # Ranks that share a sequence; the others have batches of their own. None: all.
    context: int | None = None

    def ranks_of_context(self, world_size: int) -> int:
        """The ranks that share a sequence. Raises InputError where the others cannot, too."""
        context = self.context or world_size
        if world_size % context:
            raise InputError(
                f"--context: expected a divisor of --world {world_size}, got {context}"
            )
        return context


class Rank(NamedTuple):
    """See `ModelForecast.rank`."""

    lacking: int  # bytes held where they do not fit
    bounded: bool
    time_s: float
    sent_bytes: int


@dataclass(frozen=True)
class ModelForecast:
    """One phase of a model under one strategy. Each number is the worst rank's."""

    strategy: str  # with the ranks of a group: "hybrid:8"
    layout: str
    mask: str
    phase: Phase
    time_s: float
    idle_s: float  # seconds for which the rank's device is idle
    sent_bytes: int
    memory_bytes: int
    out_of_memory: bool
    activations: Activations | None  # None but in training
    # False: it takes at least time_s, and was not simulated.
    simulated: bool = True

    @property
    def rank(self) -> Rank:
        """The best has the least: it fits, or lacks least memory; then it is the fastest."""
        lacking = self.memory_bytes if self.out_of_memory else 0
        return Rank(lacking, not self.simulated, self.time_s, self.sent_bytes)

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

    All ranks are simulated, however many. Raises InputError for a strategy and sizes that do not go
    together.
    """
    candidates = candidates_of(question, strategy, world_size, hardware, whole=True)
    return min((each.simulated() for each in candidates), key=lambda f: f.rank)


def candidates_of(
    question: Question, strategy: str, world_size: int, hardware: Hardware, *, whole: bool = False
) -> list[SpreadModel]:
    """A strategy in the layout that was asked for, or in each.

    whole: whether all ranks are simulated, also where shorter rings tell as much. Tensor
    parallelism has no layout: a rank has the whole sequence, or a contiguous part of it.
    Raises InputError for a strategy and sizes that do not go together.
    """
    kinds: tuple[str, ...] = (question.layout,)
    if question.layout == "auto":
        kinds = LAYOUTS if strategy not in TENSOR_PARALLEL else LAYOUTS[:1]
        if any(sizes_of(layer).recurrence for _, layer in question.model.layers):
            kinds = tuple(kind for kind in kinds if kind != "striped")
    return [
        SpreadModel(replace(question, layout=kind), strategy, world_size, hardware, whole=whole)
        for kind in kinds
    ]


class SpreadModel:
    """A model under one strategy, in one layout, before it is simulated: its memory, its bound."""

    def __init__(
        self,
        question: Question,
        strategy: str,
        world_size: int,
        hardware: Hardware,
        *,
        whole: bool = False,
    ) -> None:
        self.question, self.strategy, self._hardware = question, strategy, hardware
        self._layers = _layers(question, strategy, world_size, hardware, whole=whole)
        self.limit = hardware.device.memory_bytes
        self.memory_bytes, self._taken = _need(question, self._layers, self.limit)
        if strategy in ("hybrid", "two-level"):
            # Where kinds of layers differ in the ranks of a group, the name says none.
            names = {
                layer.typical.choice(forward=True).strategy for layer in _attending(self._layers)
            }
            self.strategy = names.pop() if len(names) == 1 else strategy

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.limit

    @property
    def num_simulated(self) -> int:
        """The ranks of the largest run that is simulated."""
        return max(
            layer.num_simulated(self._hardware, forward=forward)
            for _, layer in self._layers
            for forward in (True, False)
        )

    @property
    def simulates(self) -> bool:
        """Whether a simulation takes at most a minute or so."""
        return self.num_simulated <= SIMULATED_UP_TO

    @cached_property
    def bound(self) -> ModelForecast:
        """What it takes at least."""
        return self._forecast(self._bounds)

    def simulated(self, limit_s: float = inf, known: Known | None = None) -> ModelForecast:
        """The forecast; a bound where that shows that more than `limit_s` is taken.

        known: what passes take that were simulated on this machine; this adds to it.
        """
        known = {} if known is None else known
        taken = dict(self._bounds)
        # A forward has fewer tasks than a backward, and is done before it.
        order = sorted(taken, key=lambda run: not run.forward)
        # Whole forecasts know no limit, so that nothing is to be ruled out for them.
        for run in order if limit_s < inf else ():
            if self._seconds(taken) > limit_s:
                return self._forecast(taken)
            taken[run] = run.raised(taken[run], self._hardware, known)
        for run in order:
            if self._seconds(taken) > limit_s:
                return self._forecast(taken)
            taken[run] = run.simulated(self._hardware, known)
        return self._forecast(taken)

    @cached_property
    def _bounds(self) -> dict[LayerPass, Taken]:
        runs = {run: None for _, layer in self._layers for run in _runs(layer, self._taken)}
        bounds = {run: run.bounded(self._hardware) for run in runs}
        if not self.simulates:
            # What graphs are made of takes a gigabyte where ranks are a thousand.
            for layer in _attending(self._layers):
                for forward in (True, False):
                    layer.typical.program(forward=forward).forget()
        return bounds

    def _passes(self, known: Mapping[LayerPass, Taken]) -> list[tuple[int, Taken]]:
        """How often each pass is made, and what it takes."""
        return [
            (count, known[run])
            for count, layer in self._layers
            for run in _runs(layer, self._taken)
        ]

    def _seconds(self, known: Mapping[LayerPass, Taken]) -> float:
        return sum(count * taken.time_s for count, taken in self._passes(known))

    def _forecast(self, known: Mapping[LayerPass, Taken]) -> ModelForecast:
        passes = self._passes(known)
        return ModelForecast(
            self.strategy,
            self._layers[0][1].layout.kind,
            self.question.mask,
            self.question.phase,
            self._seconds(known),
            sum(count * taken.idle_s for count, taken in passes),
            sum(count * taken.sent_bytes for count, taken in passes),
            self.memory_bytes,
            not self.fits,
            self._taken,
            all(taken.simulated for _, taken in passes),
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
    if _held_at_least(question, strategy) > limit:
        return None
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


def _held_at_least(question: Question, strategy: str) -> int:
    """Bytes that a rank holds on however many ranks, in weights, gradients and states."""
    model = question.model
    if strategy in TENSOR_PARALLEL:
        return 0
    inside = model.num_weights - model.outside
    if question.phase != "train":
        return _INPUT_BYTES * (inside + model.outside)
    largest = max(sizes_of(layer).num_weights for _, layer in model.layers)
    return held_bytes(question.shard, inside, max(0, model.outside), largest, ranks=1 << 40)


def tile_of(
    question: Question, strategy: str, world_size: int, hardware: Hardware
) -> tuple[int, int] | None:
    """Queries and keys of the largest tile of the forward; None where no layer has attention."""
    layers = _attending(_layers(question, strategy, world_size, hardware))
    tiles = [layer.typical.program(forward=True).footprint(0).tile for layer in layers]
    sizes = ((tile.q_len, tile.kv_len) for tile in tiles)
    return max(sizes, key=prod, default=None)


_Layers: TypeAlias = list[tuple[int, SpreadLayer]]


def _layers(
    question: Question, strategy: str, world_size: int, hardware: Hardware, *, whole: bool = False
) -> _Layers:
    """How many layers of each kind, and the kind spread over the ranks."""
    context = question.ranks_of_context(world_size)
    per_node = min(hardware.node.ranks, world_size)
    even = per_node if world_size % per_node == 0 else 1
    asked = parse_mask(question.mask)
    spread = [
        (
            count,
            SpreadLayer(
                layer,
                question.seq_len,
                context,
                strategy,
                question.batch,
                _INPUT_BYTES,
                _allowed(asked, sizes_of(layer).attention, question.seq_len),
                question.layout,
                even,
                asked,
                question.shard if question.phase == "train" else "none",
                world_size // context,
            ),
        )
        for count, layer in question.model.layers
    ]
    return spread if whole else [(count, layer.settled(hardware)) for count, layer in spread]


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
    need = partial(_memory_bytes, question, layers, rank, held)
    if not training:
        return need(None), None
    *larger, smallest = ACTIVATIONS
    fitting = (name for name in larger if need(name) <= limit)
    taken = question.activations or next(fitting, smallest)
    return need(taken), taken


def _runs(layer: SpreadLayer, taken: Activations | None) -> list[LayerPass]:
    """A layer's directions: the forward, and in training the others."""
    runs = [LayerPass(layer, forward=True)]
    if taken is not None:
        runs.append(LayerPass(layer, forward=False))
    if taken == "attention kept":
        runs.append(LayerPass(layer, forward=True, attention=False, again=True))
    elif taken == "computed again":
        runs.append(LayerPass(layer, forward=True, again=layer.gathers_weights))
    return runs


def _memory_bytes(
    question: Question,
    layers: _Layers,
    rank: int,
    held: list[LayerMemory],
    activations: Activations | None,
) -> int:
    """Bytes of a rank. held: the bytes of a layer of each kind. activations: None for the first
    token.
    """
    model, share = question.model, layers[0][1].share
    counts = [count for count, _ in layers]
    num_weights = _total(counts, (one.weights // _INPUT_BYTES for one in held))
    num_weights += model.outside // share
    working = max(one.working for one in held)
    if activations is None:
        # The caches, and what goes from layer to layer.
        cached = _total(counts, (layer.cached_bytes(rank) for _, layer in layers))
        passing = max(one.activations for one in held)
        return num_weights * _INPUT_BYTES + cached + passing + working
    largest = max(one.weights // _INPUT_BYTES for one in held)
    outside = model.outside // share
    ranks = layers[0][1].num_ranks // share
    states = held_bytes(question.shard, num_weights - outside, outside, largest, ranks)
    kept = [one.activations for one in held]
    if activations != "kept":
        with_attention = activations == "attention kept"
        kept = [layer.checkpointed_bytes(rank, attention=with_attention) for _, layer in layers]
    # One layer's activations are all there while its backward runs.
    whole = max(one.activations - each for one, each in zip(held, kept, strict=True))
    return states + _total(counts, kept) + whole + working


def _total(counts: Iterable[int], sizes: Iterable[int]) -> int:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))
