"""A whole model on a machine: each kind of layer times its layers; activations kept or not.

It is pure Python. A model by its sizes has layers of one kind; `configuration.py` reads others.

The layer comes from `burst_rt.launch.plan.layers`. Times leave out the embedding and the head (one
row of logits a sequence; their weights are counted), and the sampler. `steps.py` makes a step of
training of the layers' passes.

Memory (`held.py`) counts the weights of all layers and 16-bit activations. Training also holds
gradients, and an optimizer's states, each whole or sharded (`shards.py`). In a pipeline it is the
first stage's, which keeps the activations of as many micro-batches as there are stages. Activations
that do not fit are computed again in the backward, layer by layer: all but attention, if its
outputs fit (`burst_rt.checkpoint`), else all. Every rank holds all experts of a mixture (a part of
each under tensor parallelism). The gradients of weights that layers share are summed once for each
of these layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from math import ceil, inf, prod
from typing import NamedTuple

from burst_rt.errors import InputError
from burst_rt.launch.plan.bounds import Known, LayerPass, Taken
from burst_rt.launch.plan.held import (
    INPUT_BYTES,
    Layers,
    held_at_least,
    memory_of,
    outside_of,
    weight_ranks,
)
from burst_rt.launch.plan.layers import TENSOR_PARALLEL, SpreadLayer
from burst_rt.launch.plan.models import sizes_of
from burst_rt.launch.plan.question import ACTIVATIONS, Activations, Phase, Question
from burst_rt.launch.plan.shards import OPTIMIZERS, updated_weights
from burst_rt.launch.plan.steady import SIMULATED_UP_TO
from burst_rt.launch.plan.steps import Total, handover_seconds, of_step
from burst_rt.launch.plan.sublayers import Attention
from burst_rt.launch.plan.words import parse_mask
from burst_rt.planning.choose import CANDIDATES
from burst_rt.planning.chooser import LAYOUTS
from burst_rt.planning.masks import Causal, Mask, SlidingWindow
from burst_rt.planning.strategies import check_name
from burst_rt.scheduler import Cost
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

# Names of the attention strategies of `simulate`: the planners' candidates, and others for
# comparing.
ATTENTION = (*CANDIDATES, "sliced", "ring-q", "ring-naive", "burst-untiled")
# Maximum world size up to which `fewest_ranks` tries every number of ranks.
EVERY_UP_TO = 64


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
        f"group), sliced:N (N: slices), got {text!r}{hint}"
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
        self._mesh = question.mesh(world_size)
        self._layers = _layers(question, strategy, world_size, hardware, whole=whole)
        self.limit = hardware.device.memory_bytes
        self.memory_bytes, self._taken = memory_of(question, self._layers, self.limit)
        if strategy in ("hybrid", "sliced", "two-level"):
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
        passes = (self._passes(layer) for _, layer in self._layers)
        runs = dict.fromkeys(run for each in passes for some in each for run in some)
        bounds = {run: run.bounded(self._hardware) for run in runs}
        if not self.simulates:
            # What graphs are made of takes a gigabyte where ranks are a thousand.
            for layer in _attending(self._layers):
                for forward in (True, False):
                    layer.typical.program(forward=forward).forget()
        return bounds

    def _passes(self, layer: SpreadLayer) -> tuple[list[LayerPass], ...]:
        """A layer's passes: forward, backward, and the backward that sums the gradients, too."""
        forward = LayerPass(layer, forward=True)
        if self._taken is None:
            return [forward], [], []
        again = []
        if self._taken == "attention kept":
            again = [LayerPass(layer, forward=True, attention=False, again=True)]
        elif self._taken == "computed again":
            again = [LayerPass(layer, forward=True, again=layer.gathers_weights)]
        summing = LayerPass(layer, forward=False)
        if self.question.micro_batches == 1 or layer.gathers_weights:
            return [forward], [summing, *again], [summing, *again]
        usual = LayerPass(replace(layer, sums=False), forward=False)
        return [forward], [usual, *again], [summing, *again]

    def _seconds(self, known: Mapping[LayerPass, Taken]) -> float:
        return self._step(known).time_s

    def _step(self, known: Mapping[LayerPass, Taken]) -> Total:
        """All layers, or a step of training."""
        passes = [(count, self._passes(layer)) for count, layer in self._layers]

        def total(which: int) -> Total:
            taken = [(count, known[run]) for count, runs in passes for run in runs[which]]
            return Total(*(sum(count * each[i] for count, each in taken) for i in range(3)))

        forward, backward, summing = total(0), total(1), total(2)
        if self._taken is None:
            return forward
        parts, stages = self.question.micro_batches, self._mesh.pipeline
        step = of_step(forward, backward, summing, parts, stages, self._handover)
        return step._replace(time_s=step.time_s + self._optimizer_s)

    @cached_property
    def _handover(self) -> tuple[float, int]:
        """Seconds and bytes of what goes from a stage to the next."""
        first, stages = self._layers[0][1], self._mesh.pipeline
        size = max(map(first.own_rows, range(first.num_spread))) * first.sizes.dim * INPUT_BYTES
        world_size = stages * self._mesh.stage
        return handover_seconds(self._hardware, world_size, stages, size), size

    @cached_property
    def _optimizer_s(self) -> float:
        """Seconds of the optimizer's step: it reads and writes memory."""
        weights = sum(
            count * sum(map(layer.held_weights, layer.sizes.sublayers))
            for count, layer in self._layers
        )
        outside = outside_of(self.question, self._layers)
        ranks = weight_ranks(self._layers)
        updated = updated_weights(self.question.shard, weights + outside, ranks)
        moved = updated * OPTIMIZERS[self.question.optimizer].moved
        return self._hardware.device.rates["default"].seconds(Cost(0, ceil(moved)))

    def _forecast(self, known: Mapping[LayerPass, Taken]) -> ModelForecast:
        step = self._step(known)
        return ModelForecast(
            self.strategy,
            self._layers[0][1].layout.kind,
            self.question.mask,
            self.question.phase,
            step.time_s,
            step.idle_s,
            round(step.sent_bytes),
            self.memory_bytes,
            not self.fits,
            self._taken,
            all(taken.simulated for taken in known.values()),
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
    if held_at_least(question, strategy) > limit:
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
                memory_of(question, layers, limit, working=False)[0] <= limit
                and memory_of(question, layers, limit)[0] <= limit
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
    tiles = [layer.typical.program(forward=True).footprint(0).tile for layer in layers]
    sizes = ((tile.q_len, tile.kv_len) for tile in tiles)
    return max(sizes, key=prod, default=None)


def _layers(
    question: Question, strategy: str, world_size: int, hardware: Hardware, *, whole: bool = False
) -> Layers:
    """How many layers of each kind a stage has, and the kind spread over the stage's ranks."""
    mesh = question.mesh(world_size)
    per_node = min(hardware.node.ranks, mesh.stage)
    even = per_node if mesh.stage % per_node == 0 else 1
    asked = parse_mask(question.mask)
    spread = [
        (
            -(-count // mesh.pipeline),
            SpreadLayer(
                layer,
                question.seq_len,
                mesh.context,
                strategy,
                question.batch,
                INPUT_BYTES,
                _allowed(asked, sizes_of(layer).attention, question.seq_len),
                question.layout,
                even,
                asked,
                question.shard if question.phase == "train" else "none",
                mesh.data,
                tensor=mesh.tensor,
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


def _attending(layers: Layers) -> list[SpreadLayer]:
    return [layer for _, layer in layers if layer.sizes.attention is not None]
