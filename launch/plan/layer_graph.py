"""The graph of one rank of a spread layer, in one direction.

The graphs are for `simulate`, `check_world` and counting bytes. Attention's own tasks are in the
graphs, without the arguments that tell a driver which tensors to take. All tasks that do not depend
on a collective go on while it runs: gradients of weights hide transfers, as in Megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from burst_rt.launch.plan.layer_sizes import HALVES, Spread
from burst_rt.planning.strategies import AGREE, Program
from burst_rt.runtime.collectives import (
    all_gather,
    all_reduce,
    even_parts,
    reduce_scatter,
)
from burst_rt.scheduler import Buffer, Cost, Graph, GraphBuilder, Lane, Message, Op, Part

__all__ = ["LayerGraph"]

_Parts: TypeAlias = "Iterable[Buffer | Part]"

# The lane on which collectives add up, in parallel with the products, as NCCL's collectives do. On
# the compute lane a sum would wait for a long product to end.
_SUMS = Lane("sums", max_in_flight=1)


class LayerGraph:
    """Builds the graph of one rank. A buffer is named after its half and what the buffer holds."""

    def __init__(self, layer: Spread, rank: int, lanes: tuple[Lane, ...]) -> None:
        self.layer, self.shape, self.rank, self.lanes = layer, layer.shape, rank, lanes
        self.rows, self.own_rows = layer.rows(rank), layer.own_rows(rank)
        self.g = GraphBuilder(rank, layer.world_size, (*lanes, _SUMS))
        self.tag = 0
        self.agreed = self.g.buffer("agreed")
        self.g.compute("agree", AGREE, writes=[self.agreed], lane="control")

    def forward(self, with_attention: bool) -> Graph:
        """The graph of the forward: x becomes the layer's output.

        Without attention, attention's outputs are there already.
        """
        x = self.g.buffer("x", initialised=True)
        for half in HALVES:
            normed, wide = self._tokens(f"{half} normed"), self.g.buffer(f"{half} wide")
            self._element(
                f"{half} norm",
                "norm",
                2 * self.own_rows * self.shape.dim,
                reads=[x],
                writes=[self._own(normed)],
            )
            self._product(half, "in", reads=self._gather(normed), writes=[wide])
            if half == "attention":
                attention = _Inserted(
                    self.g, self.layer.program(forward=True), self.rank, self.lanes
                )
                self._element(
                    "rotate", "rotate", self._rotated(), reads=[wide], writes=attention.bound
                )
                if with_attention:
                    attention.insert(self.agreed)
                narrow: list[Part] = attention.bound
            else:
                narrow = [self.g.buffer("feed_forward narrow")[0]]
                self._element("gate", "gate", 3 * self._ffn(), reads=[wide], writes=narrow)
            out = self._terms(f"{half} out")
            self._product(half, "out", reads=narrow, writes=[out])
            self._reduce(out)
            self._element(
                f"{half} residual",
                "residual",
                3 * self.own_rows * self.shape.dim,
                reads=[self._own(out)],
                accumulates=[x],
            )
        return self.g.build()

    def backward(self) -> Graph:
        """The graph of the backward: "feed_forward dout" becomes "dx".

        These are the gradient of the output and the gradient of x.
        """
        dout = self._tokens("feed_forward dout", initialised=True)
        dx = self.g.buffer("dx")
        after = self._tokens("attention dout")
        self._half_back("feed_forward", dout, after)
        self._half_back("attention", after, dx)
        return self.g.build()

    def _half_back(self, half: str, dout: Buffer, dx: Buffer) -> None:
        """Adds the backward of a half.

        dout: the gradient of the half's output; dx: the gradient of the half's input.
        """
        norm_grad, grads = self._gradients(half)
        whole = self._gather(dout)
        dwide = self.g.buffer(f"{half} dwide")
        if half == "attention":
            attention = _Inserted(self.g, self.layer.program(forward=False), self.rank, self.lanes)
            self._product(half, "out", reads=whole, writes=attention.bound)
            self._product(half, "out", reads=whole, accumulates=[grads])
            attention.insert(self.agreed)
            self._element(
                "rotate back", "rotate", self._rotated(), reads=attention.bound, writes=[dwide]
            )
        else:
            dnarrow = self.g.buffer("feed_forward dnarrow")
            self._product(half, "out", reads=whole, writes=[dnarrow])
            self._product(half, "out", reads=whole, accumulates=[grads])
            self._element("gate back", "gate", 5 * self._ffn(), reads=[dnarrow], writes=[dwide])
        normed = self._tokens(f"{half} normed", initialised=True)
        whole = self._gather(normed, after=dwide)
        dnormed = self._terms(f"{half} dnormed")
        self._product(half, "in", reads=[dwide], writes=[dnormed])
        self._reduce(dnormed)
        self._product(half, "in", reads=[dwide, *whole], accumulates=[grads])
        reads, count = [self._own(dnormed), self._own(dout)], 4 * self.own_rows * self.shape.dim
        self._element(
            f"{half} norm back",
            "norm",
            count,
            reads=reads,
            writes=[self._own(dx)],
            accumulates=[norm_grad],
        )
        if self.layer.summed(half):
            self.tag = all_reduce(
                self.g, norm_grad, tag=self.tag, reads=[self.agreed], lane=_SUMS.name
            )

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
        sizes = self._by_rank() if self.layer.gathers else self._evenly(self.rows * self.shape.dim)
        return self.g.buffer(name, parts=self.layer.world_size, size_bytes=sizes)

    def _own(self, buffer: Buffer) -> Buffer | Part:
        return buffer[self.rank] if self.layer.gathers and len(buffer.parts) > 1 else buffer

    def _by_rank(self) -> list[int]:
        return [
            self.layer.own_rows(rank) * self.shape.dim * self.layer.input_bytes
            for rank in range(self.layer.world_size)
        ]

    def _evenly(self, count: int) -> list[int]:
        return [part * self.layer.input_bytes for part in even_parts(count, self.layer.world_size)]

    def _gradients(self, half: str) -> tuple[Buffer, Buffer]:
        """Buffers of gradients: of the norm's weight, and of the two products' weights.

        The two are one buffer where both are summed over the ranks, or neither is.
        """
        summed = self.layer.summed(half)
        sizes = self._evenly(self.shape.num_weights(*summed)) if summed else [0]
        norm = self.g.buffer(
            f"{half} gradients", parts=len(sizes), size_bytes=sizes, initialised=True
        )
        return norm, norm if len(summed) != 1 else self.g.buffer(
            f"{half} gradients of products", initialised=True
        )

    # Tasks.

    def _gather(self, tokens: Buffer, after: Buffer | None = None) -> list[Part]:
        """Gathers the tokens where the sequence is split. Returns the parts that hold tokens."""
        if not self.layer.gathers:
            return list(tokens.parts)
        self.tag = all_gather(
            self.g, tokens, tag=self.tag, reads=[self.agreed, *([after] if after else [])]
        )
        return [part for part in tokens.parts if part.size_bytes]

    def _reduce(self, terms: Buffer) -> None:
        if self.layer.tensor_parallel:
            collective = reduce_scatter if self.layer.gathers else all_reduce
            self.tag = collective(self.g, terms, tag=self.tag, reads=[self.agreed], lane=_SUMS.name)

    def _product(
        self, half: str, side: str, *, reads: _Parts, writes: _Parts = (), accumulates: _Parts = ()
    ) -> None:
        """Adds a product of all rows with one of the half's weights.

        With accumulates, adds the gradient of that weight, which takes as long.
        """
        weight = HALVES[half][1 if side == "in" else 2]
        flops = 2 * self.rows * self.shape.num_weights(weight) // self.layer.share
        name = f"{weight} gradient" if accumulates else weight
        self.g.compute(
            name,
            Op("linear", (weight,)),
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

    def _rotated(self) -> int:
        """Number of elements read and written to rotate q and k by their positions."""
        return (
            2
            * self.rows
            * (self.shape.num_heads + self.shape.num_kv_heads)
            * self.shape.head_dim
            // self.layer.share
        )

    def _ffn(self) -> int:
        return self.rows * self.shape.ffn_dim // self.layer.share


class _Inserted:
    """The tasks of an attention program inside the graph of a layer.

    bound: the program's inputs and outputs, which tasks before write and tasks after read.
    """

    def __init__(
        self, g: GraphBuilder, program: Program, rank: int, lanes: tuple[Lane, ...]
    ) -> None:
        self.g, self.graph = g, program.graph(rank % program.problem.world_size, lanes)
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
        # The collectives of a direction take fewer tags than this: each half has at most five
        # collectives, and one of the five has twice the hops.
        first_tag = 16 * self.g.world_size
        for task in self.graph.tasks:
            if task.op == AGREE:
                for part in task.writes:
                    self.parts[part] = agreed[0]
                continue
            reads = self._here(task.reads)
            if task.op is not None:
                op = Op(task.op.name)
                self.g.compute(
                    task.name,
                    op,
                    reads=reads,
                    writes=self._here(task.writes),
                    accumulates=self._here(task.accumulates),
                    cost=task.cost,
                    lane=task.lane,
                    hop=task.hop,
                )
                continue
            tag = first_tag + max(m.tag for m in (*task.sends, *task.recvs))
            self.g.exchange(
                task.name,
                sends=self._messages(task.sends),
                recvs=self._messages(task.recvs),
                tag=tag,
                reads=reads,
                lane=task.lane,
                hop=task.hop,
            )

    def _here(self, parts: Iterable[int]) -> list[Part]:
        return [self.parts[part] for part in parts]

    def _messages(self, of: Sequence[Message]) -> list[tuple[Part, int, int, int]]:
        return [(self.parts[m.part], m.peer, m.size_bytes, m.offset) for m in of]
