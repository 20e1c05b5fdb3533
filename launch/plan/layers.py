"""One layer spread over ranks, as plain numbers and graphs. Pure Python.

The graphs tell how many bytes the layer sends and holds, and how long it takes in the simulator.
`LayerShape` is Llama's layer: x + attention(norm(x)), then x + feed_forward(norm(x)), with RMSNorm,
rotary positions, grouped key/value heads, SwiGLU and no biases. `LayerSizes` is any model's: a
mixture of experts, whose every expert each rank holds (a part of each under tensor parallelism),
and a recurrence (`burst_rt/planning/recurrences.py`) instead of attention or beside it. A layer is
spread in one of these ways:

* "tensor-parallel" (Megatron-LM, arXiv 1909.08053; V1 in the BurstAttention paper): heads and the
  feed-forward's width are split, and every rank holds the whole sequence. The forward has an
  all-reduce after attention and after the feed-forward; the backward has them before the two.
* "tensor-parallel+sequence" (Megatron-LM with sequence parallelism, arXiv 2205.05198; V3): the
  weights are split in the same way, but outside attention and feed-forward a rank holds only a part
  of the sequence. An all-gather comes before the two, a reduce-scatter after them. The backward
  does the reverse. It also gathers the inputs once more for the weights' gradients, because
  gathered inputs are not kept, and sums the norms' gradients over the ranks.
* any strategy of `planning/strategies`: the sequence is split and every rank holds all weights.
  Only attention communicates, and recurrences send their states along the positions, except that
  training sums the gradients of all weights over the ranks. Here it does so once a backward.
  Inference has no such sum, and several micro-batches need only one. Where weights are sharded
  (`shards.py`), they are gathered instead, and the gradients scattered.

Sums of activations and gradients travel in the inputs' type, as Megatron's do.

`layer_sizes.py` has the sizes, `layer_graph.py` the graphs. `benchmarks/tensor_parallel.py` runs
the same layer on tensors; there autograd waits for each collective in turn.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from burst_rt.launch.plan.layer_graph import LayerGraph
from burst_rt.launch.plan.layer_sizes import HALVES, TENSOR_PARALLEL, LayerShape, Spread
from burst_rt.launch.plan.steady import steady_of
from burst_rt.planning.forecast import fold_of, working_bytes
from burst_rt.planning.steady import Steady
from burst_rt.planning.strategies.hybrid import Hybrid
from burst_rt.scheduler import HOST_LANES, Graph, Lane, Schedule
from burst_rt.scheduler.simulator import Hardware, Rotated, Simulated, simulate

__all__ = ["HALVES", "TENSOR_PARALLEL", "LayerMemory", "LayerShape", "SpreadLayer"]


class LayerMemory(NamedTuple):
    """Bytes of one layer on one rank. Inference holds weights and working only."""

    weights: int
    gradients: int  # gradients of the weights
    # Tensors that the forward keeps for the backward: x and its normed form for each sublayer;
    # q, k, v; the output of attention with its lse; gate, up and their product; what goes into a
    # recurrence, its output, and the states at the beginnings of runs; no matrix of scores.
    # Autograd keeps a little more, such as the gate's silu.
    activations: int
    # Temporary memory of attention, of a recurrence or of the products, whichever needs more.
    # Attention needs slots, sums and copies, a recurrence its chunks' states; the products need
    # gathered inputs and unsummed outputs.
    working: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class SpreadLayer(Spread):
    """A spread layer's graphs, and what they take: bytes sent and held, seconds on a machine."""

    # Two smaller worlds that tell about this one; None: it is simulated itself.
    steady: Steady | None = None

    def settled(self, hardware: Hardware) -> SpreadLayer:
        """The same layer; where its hops are alike, one that shorter rings tell about."""
        return replace(self, steady=steady_of(self, hardware))

    @cached_property
    def shorter(self) -> tuple[SpreadLayer, ...]:
        """This layer on the worlds of `steady`, with shards as long; none where that is None."""
        return tuple(
            replace(
                self,
                steady=None,
                world_size=world,
                seq_len=self.seq_len * world // self.world_size,
                ranks_per_node=min(self.ranks_per_node, world * self.tensor),
                sharers=self.num_ranks,
            )
            for world in self.steady or ()
        )

    @property
    def typical(self) -> SpreadLayer:
        """A layer whose ranks hold the same for attention, and have the same tiles: not one of a
        thousand ranks, where one of fifty is enough.
        """
        return self.shorter[-1] if self.shorter else self

    def graph(
        self,
        rank: int,
        *,
        forward: bool,
        lanes: tuple[Lane, ...] = HOST_LANES,
        attention: bool = True,
        again: bool = False,
    ) -> Graph:
        """The graph of one rank in one direction.

        again: the forward as checkpointing computes it again in the backward, for which weights
        have been gathered. attention: False where it has kept attention's outputs: everything but
        attention.
        """
        builder = LayerGraph(self, rank, lanes)
        return builder.forward(attention, again) if forward else builder.backward()

    def schedules(
        self, *, forward: bool, attention: bool = True, again: bool = False, fold: int = 1
    ) -> list[Schedule | Rotated]:
        """The schedules of all ranks, as `simulate` takes them; attention, again: as for `graph`.

        All ranks share one schedule where all ranks do the same; replicas share theirs. fold: the
        number of consecutive ranks that do the same, of which only the first has a schedule.
        """
        graph = partial(self.graph, forward=forward, attention=attention, again=again)
        if fold > 1:
            firsts = [Schedule.of(graph(rank)) for rank in range(0, self.world_size, fold)]
            return [
                Rotated(of_rank, number * self.world_size, fold)
                for number in range(self.copies)
                for of_rank in firsts
            ]
        per_node = self._nodes_alike(forward)
        if per_node:
            node = [Schedule.of(graph(rank)) for rank in range(per_node)]
            ranks = range(self.num_spread)
            return [Rotated(node[rank % per_node], rank - rank % per_node) for rank in ranks]
        first = graph(0)
        # Under tensor parallelism attention is the same on all ranks; only messages may differ.
        sizes: dict[str, set[int]] = defaultdict(set)
        for part in first.parts:
            sizes[part.buffer].add(part.size_bytes)
        even = all(len(each) == 1 for each in sizes.values())
        schedule = Schedule.of(first)
        if self.tensor_parallel and even and self.world_size > 1:
            return [Rotated(schedule, rank) for rank in range(self.world_size)]
        if self.world_size == 1:  # Only weights travel: each rank has neighbours of its own.
            ranks = range(1, self.num_spread * self.copies)
            return [schedule, *(Schedule.of(graph(rank)) for rank in ranks)]
        one = [schedule, *(Schedule.of(graph(rank)) for rank in range(1, self.num_spread))]
        return one + [
            Rotated(of_rank, number * self.num_spread)
            for number in range(1, self.copies)
            for of_rank in one
        ]

    def seconds(self, hardware: Hardware, *, forward: bool) -> float:
        """Seconds that one direction takes on a machine: the end of a simulated run."""
        return self.simulated(hardware, forward=forward).end_s

    def simulated(
        self, hardware: Hardware, *, forward: bool, attention: bool = True, again: bool = False
    ) -> Simulated:
        """A simulated run of one direction of all ranks on a machine, without spans.

        attention, again: as for `graph`.
        """
        kernel = None if self.sizes.attention is None else self.choice(forward=forward).kernel
        fold = self._fold(hardware, forward)
        folded = hardware.folded() if fold > 1 else None
        return simulate(
            self.schedules(forward=forward, attention=attention, again=again, fold=fold),
            folded or hardware,
            seconds=lambda task: hardware.device.seconds(task, kernel),
        )

    def num_simulated(self, hardware: Hardware, *, forward: bool) -> int:
        """The ranks of a simulated run, or of the longer of two."""
        if self.shorter and self.strategy != "direct":
            return self.shorter[-1].num_simulated(hardware, forward=forward)
        return self.num_spread * self.copies // self._fold(hardware, forward)

    def _nodes_alike(self, forward: bool) -> int:
        """The ranks of a node, where all nodes do the same with other heads; else 0."""
        if self.tensor > 1 or self.copies > 1:
            return 0
        if self.sizes.recurrence is not None or self.sizes.attention is None:
            return 0
        program = self.program(forward=forward)
        across = isinstance(program, Hybrid) and program.across and self.layout.has_even_shards
        return program.ring_size if across else 0

    def _fold(self, hardware: Hardware, forward: bool) -> int:
        """See `fold_of`."""
        if self.strategy.partition(":")[0] != "hybrid" or self.tensor > 1:
            return 1
        if self.ranks_per_node != hardware.node.ranks:
            return 1
        if self.sizes.recurrence is not None or self.sizes.attention is None:
            return 1
        return fold_of(self.program(forward=forward), hardware)

    def sent_bytes(self, rank: int, *, forward: bool) -> int:
        """Bytes that a rank sends in one direction, counted from the graph, so always exact.

        With A = batch x seq_len x dim x input_bytes and W ranks, where W divides everything:

        tensor-parallel           4 (W-1)/W A forward, as much backward
        tensor-parallel+sequence  4 (W-1)/W A forward, 6 (W-1)/W A backward,
                                  and 4 (W-1)/W x dim x input_bytes for the norms
        attention strategies      attention's own, a recurrence's states and the tokens before
                                  runs, and in the backward 2 (W-1)/W x the bytes of all weights
        """
        return self.graph(rank, forward=forward).wire_bytes

    def memory(self, rank: int, *, backward: bool = True, working: bool = True) -> LayerMemory:
        """The bytes of this layer on one rank; see `LayerMemory`.

        backward: whether there is one. working: False says 0 in their place, and makes no graph.
        """
        size, rows, sublayers = self.input_bytes, self.rows(rank), self.sizes.sublayers
        vectors = sum(sublayer.vectors for sublayer in sublayers)
        products = (self.sizes.num_weights - vectors) // self.share
        weights = (vectors + products) * size
        per_row = sum(sublayer.kept for sublayer in sublayers) // self.share
        x = 2 * len(sublayers) * self.own_rows(rank) * self.sizes.dim
        activations = (x + rows * per_row) * size + self._lse(rank) + self._states(rank)
        # The output of a split weight is one term of a sum, for the whole sequence. With a split
        # sequence the weight's input has been gathered, too.
        whole = rows * self.sizes.dim * size * (2 if self.gathers else 1)
        holds = 0
        if working:
            directions = (True, False) if backward else (True,)
            attention = max(self._attention_bytes(rank, forward) for forward in directions)
            holds = max(whole, attention, self._chunk_states(rank))
        return LayerMemory(weights, weights, activations, holds)

    def checkpointed_bytes(self, rank: int, *, attention: bool) -> int:
        """Bytes of this layer that checkpointing keeps on one rank until the backward.

        That is the layer's input; with `attention` the output of attention and its lse, too.
        Recurrences are computed again.
        """
        size = self.own_rows(rank) * self.sizes.dim * self.input_bytes
        core = self.sizes.attention
        if attention and core is not None:
            out = core.num_heads // self.share * core.v_head_dim * self.input_bytes
            size += self.rows(rank) * out + self._lse(rank)
        return size

    def cached_bytes(self, rank: int) -> int:
        """Bytes of this layer's cache after a prompt: keys and values, or states.

        Keys and values of all tokens, whatever the layer's window; under MLA those of all heads,
        as transformers keeps them.
        """
        core = self.sizes.attention
        kv = 0 if core is None else self.rows(rank) * core.kv_width // self.share * self.input_bytes
        recurrence = self.sizes.recurrence
        if recurrence is None:
            return kv
        halo = recurrence.halo_bytes(self.input_bytes, self.batch)
        return kv + (recurrence.state_bytes(self.batch) + halo) // self.share

    def _lse(self, rank: int) -> int:
        core = self.sizes.attention
        heads = 0 if core is None else core.num_heads // self.share
        return self.rows(rank) * heads * max(4, self.input_bytes)

    def _states(self, rank: int) -> int:
        """Bytes of the states at the beginnings of a rank's runs."""
        recurrence = self.sizes.recurrence
        if recurrence is None:
            return 0
        runs = 1 if self.tensor_parallel else len(self.layout.runs[self.place(rank)])
        return runs * recurrence.state_bytes(self.batch) // self.share

    def _chunk_states(self, rank: int) -> int:
        recurrence = self.sizes.recurrence
        if recurrence is None:
            return 0
        return recurrence.chunk_state_bytes(self.rows(rank)) // self.share

    def _attention_bytes(self, rank: int, forward: bool) -> int:
        if self.sizes.attention is None:
            return 0
        choice = self.typical.choice(forward=forward)
        place = self.place(rank) % choice.program.problem.world_size
        return working_bytes(choice, place, choice.program.graph(place))
