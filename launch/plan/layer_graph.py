"""The graph of one rank of a spread layer, in one direction.

The graphs are for `simulate`, `check_world` and counting bytes. Attention's own tasks are in the
graphs, without the arguments that tell a driver which tensors to take. All tasks that do not depend
on a collective go on while it runs: gradients of weights hide transfers, as in Megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

from burst_rt.launch.plan.layer_sizes import Spread
from burst_rt.launch.plan.recurrence_graph import RecurrenceGraph
from burst_rt.launch.plan.shards import Travel, ring_bytes
from burst_rt.launch.plan.sublayers import Attention, FeedForward, Product, Sublayer
from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.planning.strategies import AGREE, Program
from burst_rt.runtime.collectives import (
    all_gather,
    all_reduce,
    even_parts,
    reduce_scatter,
)
from burst_rt.scheduler import Buffer, Cost, Graph, GraphBuilder, Lane, Op, Part

__all__ = ["LayerGraph"]

_Parts: TypeAlias = "Iterable[Buffer | Part]"

# The lane on which collectives add up, in parallel with the products, as NCCL's collectives do. On
# the compute lane a sum would wait for a long product to end; so would a recurrence's state.
_SUMS = Lane("sums", max_in_flight=1)


class LayerGraph:
    """Builds the graph of one rank. A buffer is named after its sublayer and what it holds."""

    def __init__(self, layer: Spread, rank: int, lanes: tuple[Lane, ...]) -> None:
        self.layer, self.dim, self.rank, self.lanes = layer, layer.sizes.dim, rank, lanes
        self.rows, self.own_rows = layer.rows(rank), layer.own_rows(rank)
        self.g = GraphBuilder(rank, layer.num_spread * layer.copies, (*lanes, _SUMS))
        # Which group of `tensor` ranks this one is in, and its number there.
        self.group, self.member = divmod(rank, layer.tensor)
        self.tag = 0
        self.agreed = self.g.buffer("agreed")
        self.g.compute("agree", AGREE, writes=[self.agreed], lane="control")

    def forward(self, with_attention: bool, again: bool) -> Graph:
        """The graph of the forward: x becomes the layer's output.

        Without attention, attention's outputs are there already. again: the weights are, too.
        """
        self._move_weights([] if again else ["gather weights"])
        x = self.g.buffer("x", initialised=True)
        for sublayer in self.layer.sizes.sublayers:
            name, core = sublayer.name, sublayer.core
            normed, wide = self._tokens(f"{name} normed"), self.g.buffer(f"{name} wide")
            self._element(
                f"{name} norm",
                "norm",
                2 * self.own_rows * self.dim,
                reads=[x],
                writes=[self._own(normed)],
            )
            self._product(sublayer.into, reads=self._gather(normed), writes=[wide])
            if isinstance(core, Attention):
                rotated = self._rotated(core)
                if with_attention:
                    program = self.layer.program(forward=True)
                    attention = _Inserted(self, program)
                    narrow = attention.bound
                    self._element("rotate", "rotate", rotated, reads=[wide], writes=narrow)
                    attention.insert(self.agreed)
                else:
                    narrow = [self.g.buffer("attention narrow")[0]]
                    self._element("rotate", "rotate", rotated, reads=[wide], writes=narrow)
            else:
                narrow = [self.g.buffer(f"{name} narrow")[0]]
                if isinstance(core, FeedForward):
                    self._gate(sublayer, forward=True, reads=wide, writes=narrow[0])
                else:
                    self._recurrence(core).forward(wide, narrow[0])
            out = self._terms(f"{name} out")
            self._product(sublayer.out, reads=narrow, writes=[out])
            others = self._reduce(out)
            self._element(
                f"{name} residual",
                "residual",
                3 * self.own_rows * self.dim,
                reads=[self._own(out), *others],
                accumulates=[x],
            )
        return self.g.build()

    def backward(self) -> Graph:
        """The graph of the backward: the gradient of the output becomes "dx"."""
        self._move_weights(["gather weights", "scatter gradients"])
        order = self.layer.sizes.sublayers[::-1]
        dout = self._tokens(f"{order[0].name} dout", initialised=True)
        for sublayer, after in pairwise(order):
            dx = self._tokens(f"{after.name} dout")
            self._back(sublayer, dout, dx)
            dout = dx
        self._back(order[-1], dout, self.g.buffer("dx"))
        return self.g.build()

    def _back(self, sublayer: Sublayer, dout: Buffer, dx: Buffer) -> None:
        """Adds the backward of a sublayer.

        dout: the gradient of its output; dx: the gradient of its input.
        """
        name, core, out = sublayer.name, sublayer.core, sublayer.out
        norm_grad, grads = self._gradients(sublayer)
        whole = self._gather(dout)
        dwide = self.g.buffer(f"{name} dwide")
        if isinstance(core, Attention):
            attention = _Inserted(self, self.layer.program(forward=False))
            self._product(out, reads=whole, writes=attention.bound)
            self._product(out, reads=whole, accumulates=[grads])
            attention.insert(self.agreed)
            self._element(
                "rotate back",
                "rotate",
                self._rotated(core),
                reads=attention.bound,
                writes=[dwide],
            )
        else:
            dnarrow = self.g.buffer(f"{name} dnarrow")
            self._product(out, reads=whole, writes=[dnarrow])
            self._product(out, reads=whole, accumulates=[grads])
            if isinstance(core, FeedForward):
                self._gate(sublayer, forward=False, reads=dnarrow, writes=dwide[0])
            else:
                self._recurrence(core).backward(dnarrow, dwide[0])
        normed = self._tokens(f"{name} normed", initialised=True)
        whole = self._gather(normed, after=dwide)
        dnormed = self._terms(f"{name} dnormed")
        self._product(sublayer.into, reads=[dwide], writes=[dnormed])
        others = self._reduce(dnormed)
        self._product(sublayer.into, reads=[dwide, *whole], accumulates=[grads])
        reads, count = [self._own(dnormed), self._own(dout), *others], 4 * self.own_rows * self.dim
        self._element(
            f"{name} norm back",
            "norm",
            count,
            reads=reads,
            writes=[self._own(dx)],
            accumulates=[norm_grad],
        )
        summed = self.layer.num_summed(sublayer)
        if summed and self.layer.tensor_parallel:
            self.tag = all_reduce(
                self.g, norm_grad, tag=self.tag, reads=[self.agreed], lane=_SUMS.name
            )
        elif summed:
            name = f"{sublayer.name} gradients"
            reads = [self.agreed, norm_grad, grads]
            arrived = self._travel(f"{name} reduced", summed, reads, gathers=False)
            self._travel(f"{name} gathered", summed, arrived, gathers=True)

    def _move_weights(self, names: Sequence[str]) -> None:
        """Adds what goes between ranks that shard weights, while the layer computes: the next
        layer's weights, and the last one's gradients.
        """
        if self.layer.gathers_weights:
            for name in names:
                count = sum(map(self.layer.held_weights, self.layer.sizes.sublayers))
                self._travel(name, count, [self.agreed], gathers=name == "gather weights")

    def _travel(
        self, name: str, count: int, reads: Sequence[Buffer | Part], *, gathers: bool
    ) -> list[Part]:
        """Adds a gather, or a reduce-scatter, of `count` numbers over all ranks; see `ring_bytes`.
        Returns what arrives.
        """
        layer, per_node = self.layer, self.layer.groups_per_node
        groups = self.g.world_size // layer.tensor
        parts = [n * layer.input_bytes for n in even_parts(count, layer.num_ranks)]

        def sent_by(group: int) -> Travel:
            part = parts[(group + gathers) % len(parts)]
            return ring_bytes(count * layer.input_bytes, part, layer.num_ranks, per_node)

        # The same for all contexts of a node, of which each has the graphs of the first.
        ring = _neighbours(self.group, groups if per_node == 1 else self.layer.ranks_alike)
        across = (self.group + per_node) % groups, (self.group - per_node) % groups
        sends, recvs = [], []
        for way, (to, by) in (("near", ring), ("far", across)):
            leaving, coming = (getattr(sent_by(group), way) for group in (self.group, by))
            if leaving and coming and to != self.group:
                out = self.g.buffer(f"{name} {way} out", size_bytes=leaving, initialised=True)
                sends.append((out[0], self._rank_of(to)))
                into = self.g.buffer(f"{name} {way} in", size_bytes=coming)
                recvs.append((into[0], self._rank_of(by)))
        if sends:
            self.tag += 1
            self.g.exchange(name, sends=sends, recvs=recvs, tag=self.tag, reads=reads)
        return [part for part, _ in recvs]

    def _rank_of(self, group: int) -> int:
        """The member of a group with the same number as this rank."""
        return group * self.layer.tensor + self.member

    # Buffers.

    def _tokens(self, name: str, *, initialised: bool = False) -> Buffer:
        """A buffer of rows as wide as x. Where the sequence is gathered, each rank has a part."""
        if not self.layer.gathers:
            return self.g.buffer(name, initialised=initialised)
        return self.g.buffer(
            name, parts=self.layer.world_size, size_bytes=self._by_rank(), initialised=initialised
        )

    def _terms(self, name: str) -> Buffer:
        """A buffer of rows as wide as x, whose values are summed over the ranks."""
        if not self.layer.tensor_parallel:
            return self.g.buffer(name)
        sizes = self._by_rank() if self.layer.gathers else self._evenly(self.rows * self.dim)
        return self.g.buffer(name, parts=self.layer.world_size, size_bytes=sizes)

    def _own(self, buffer: Buffer) -> Buffer | Part:
        return buffer[self.rank] if self.layer.gathers and len(buffer.parts) > 1 else buffer

    def _by_rank(self) -> list[int]:
        return [
            self.layer.own_rows(rank) * self.dim * self.layer.input_bytes
            for rank in range(self.layer.world_size)
        ]

    def _evenly(self, count: int) -> list[int]:
        return [part * self.layer.input_bytes for part in even_parts(count, self.g.world_size)]

    def _gradients(self, sublayer: Sublayer) -> tuple[Buffer, Buffer]:
        """Buffers of gradients: of the norm's weight, and of the two products' weights.

        The two are one buffer where both are summed over the ranks, or neither is.
        """
        summed = self.layer.num_summed(sublayer) if self.layer.gathers else 0
        sizes = self._evenly(summed) if summed else [0]
        name = f"{sublayer.name} gradients"
        norm = self.g.buffer(name, parts=len(sizes), size_bytes=sizes, initialised=True)
        if not self.layer.gathers:
            return norm, norm
        return norm, self.g.buffer(f"{name} of products", initialised=True)

    # Tasks.

    def _gather(self, tokens: Buffer, after: Buffer | None = None) -> list[Part]:
        """Gathers the tokens where the sequence is split. Returns the parts that hold tokens."""
        if not self.layer.gathers:
            return list(tokens.parts)
        self.tag = all_gather(
            self.g, tokens, tag=self.tag, reads=[self.agreed, *([after] if after else [])]
        )
        return [part for part in tokens.parts if part.size_bytes]

    def _reduce(self, terms: Buffer) -> list[Part]:
        """Sums terms over the ranks that split a weight. Returns what the sum waits for besides."""
        if self.layer.tensor_parallel:
            collective = reduce_scatter if self.layer.gathers else all_reduce
            self.tag = collective(self.g, terms, tag=self.tag, reads=[self.agreed], lane=_SUMS.name)
        size = self.layer.tensor
        if size == 1:
            return []
        # A reduce-scatter and a gather, as one exchange along the ring, like those of weights.
        travels = 2 * (size - 1) * self.rows * self.dim * self.layer.input_bytes // size
        out = self.g.buffer(f"{terms.name} out", size_bytes=travels, initialised=True)
        came = self.g.buffer(f"{terms.name} in", size_bytes=travels)
        to, by = _neighbours(self.rank, size)
        self.tag += 1
        self.g.exchange(
            f"{terms.name} sum",
            sends=[(out[0], to)],
            recvs=[(came[0], by)],
            tag=self.tag,
            reads=[self.agreed, terms],
        )
        return list(came.parts)

    def _product(
        self, product: Product, *, reads: _Parts, writes: _Parts = (), accumulates: _Parts = ()
    ) -> None:
        """Adds a product of all rows with weights.

        With accumulates, adds the gradient of those weights, which takes as long.
        """
        flops = 2 * self.rows * product.active // self.layer.share
        self.g.compute(
            f"{product.name} gradient" if accumulates else product.name,
            Op("linear", (product.name,)),
            reads=reads,
            writes=writes,
            accumulates=accumulates,
            cost=Cost(flops),
        )

    def _element(
        self,
        name: str,
        op: str,
        count: int,
        *,
        reads: _Parts,
        writes: _Parts = (),
        accumulates: _Parts = (),
    ) -> None:
        """Adds a task that only reads and writes memory: `count` numbers."""
        cost = Cost(0, count * self.layer.input_bytes)
        self.g.compute(name, Op(op), reads=reads, writes=writes, accumulates=accumulates, cost=cost)

    def _rotated(self, core: Attention) -> int:
        """Number of elements read and written to rotate q and k by their positions."""
        heads = core.num_heads + core.num_kv_heads
        return 2 * self.rows * heads * core.head_dim // self.layer.share

    def _recurrence(self, core: RecurrenceSizes) -> RecurrenceGraph:
        return RecurrenceGraph(self.g, self.layer, core, self.agreed, _SUMS.name)

    def _gate(self, sublayer: Sublayer, *, forward: bool, reads: Buffer, writes: Part) -> None:
        """Adds what lies between the two products of a feed-forward."""
        wide, narrow = sublayer.wide, sublayer.narrow
        count = wide + narrow if forward else 2 * wide + narrow
        name = "gate" if forward else "gate back"
        elements = self.rows * count // self.layer.share
        self._element(name, "gate", elements, reads=[reads], writes=[writes])


class _Inserted:
    """The tasks of an attention program inside the graph of a layer.

    bound: the program's inputs and outputs, which tasks before write and tasks after read.
    """

    def __init__(self, of: LayerGraph, program: Program) -> None:
        world, tensor, g = program.problem.world_size, of.layer.tensor, of.g
        self.g, self.graph = g, program.graph(of.group % world, of.lanes)
        self.ranks = range(of.member, world * tensor, tensor)
        sizes: dict[str, list[int]] = defaultdict(list)
        for part in self.graph.parts:
            sizes[part.buffer].append(part.size_bytes)
        # "Core attention" is what Megatron calls it without its projections.
        buffers = {
            name: g.buffer(f"core {name}", parts=len(each), size_bytes=each)
            for name, each in sizes.items()
        }
        self.parts = [buffers[part.buffer][part.index] for part in self.graph.parts]
        self.bound = [self.parts[part.id] for part in self.graph.parts if part.initialised]

    def insert(self, agreed: Buffer) -> None:
        """Adds the program's tasks, except the agreement."""
        agree, *tasks = self.graph.tasks
        assert agree.op == AGREE
        for part in agree.writes:
            self.parts[part] = agreed[0]
        # The collectives of a direction take fewer tags than this: each half has at most five
        # collectives, and one of the five has twice the hops.
        self.g.insert(tasks, self.parts, first_tag=16 * self.g.world_size, ranks=self.ranks)


def _neighbours(place: int, size: int) -> tuple[int, int]:
    """The place after and the place before, round a ring of `size` consecutive places."""
    first, number = place - place % size, place % size
    return first + (number + 1) % size, first + (number - 1) % size
