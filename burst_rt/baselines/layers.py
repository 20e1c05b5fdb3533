"""One transformer layer spread over ranks, as plain numbers and graphs. Pure Python.

The graphs tell how many bytes the layer sends and holds, and how long it takes in the simulator.
The layer is Llama's: x + attention(norm(x)), then x + feed_forward(norm(x)), with RMSNorm, rotary
positions, grouped key/value heads, SwiGLU and no biases. It is spread in one of these ways:

* "tensor-parallel" (Megatron-LM, arXiv 1909.08053; V1 in the BurstAttention paper): heads and the
  feed-forward's width are split, and every rank holds the whole sequence. The forward has an
  all-reduce after attention and after the feed-forward; the backward has them before the two.
* "tensor-parallel+sequence" (Megatron-LM with sequence parallelism, arXiv 2205.05198; V3): the
  weights are split in the same way, but outside attention and feed-forward a rank holds only a part
  of the sequence. An all-gather comes before the two, a reduce-scatter after them. The backward
  does the reverse. It also gathers the inputs once more for the weights' gradients, because
  gathered inputs are not kept, and sums the norms' gradients over the ranks.
* any strategy of `planning/strategies`: the sequence is split and every rank holds all weights.
  Only attention communicates, except that training sums the gradients of all weights over the
  ranks. Here it does so once a backward. Inference has no such sum, and several micro-batches need
  only one.

Sums of activations and gradients travel in the inputs' type, as Megatron's do.

These graphs are for `simulate`, `check_world` and counting bytes. Attention's own tasks are in the
graphs, without the arguments that tell a driver which tensors to take. `tensor_parallel.py` runs
the same layer on tensors. There autograd waits for each collective in turn. Here all tasks that do
not depend on a collective go on: gradients of weights hide transfers, as in Megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from burst_rt.errors import InputError
from burst_rt.planning.choose import choose
from burst_rt.planning.forecast import working_bytes
from burst_rt.planning.layouts import BALANCED, Layout, make_layout
from burst_rt.planning.masks import Causal, Mask
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import AGREE, Choice, Program, check_name
from burst_rt.runtime.collectives import all_gather, all_reduce, even_parts, reduce_scatter
from burst_rt.scheduler import (
    HOST_LANES,
    Buffer,
    Cost,
    Graph,
    GraphBuilder,
    Lane,
    Message,
    Op,
    Part,
    Schedule,
)
from burst_rt.scheduler.simulator import Hardware, Rotated, Simulated, simulate

__all__ = ["HALVES", "TENSOR_PARALLEL", "LayerMemory", "LayerShape", "SpreadLayer"]

_Parts: TypeAlias = "Iterable[Buffer | Part]"

TENSOR_PARALLEL = ("tensor-parallel", "tensor-parallel+sequence")
# The lane on which collectives add up, in parallel with the products, as NCCL's collectives do. On
# the compute lane a sum would wait for a long product to end.
_SUMS = Lane("sums", max_in_flight=1)
# The two halves of a layer, and the weights of each: the norm, the product into the half, the
# product out of the half.
HALVES = {
    "attention": ("attention_norm", "qkv", "out"),
    "feed_forward": ("feed_forward_norm", "gate_up", "down"),
}


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer. Raises InputError for sizes that do not fit."""

    dim: int  # width of x
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even
    ffn_dim: int  # width of the feed-forward

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"LayerShape: {name} must be an integer of at least 1, got {value!r}"
                )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"LayerShape: num_kv_heads must divide num_heads, got {self.num_kv_heads} and "
                f"{self.num_heads}"
            )
        if self.head_dim % 2:
            raise InputError(
                "LayerShape: head_dim must be even (rotary positions turn pairs), got "
                f"{self.head_dim}"
            )

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights, outputs first.

        The rows of "qkv" are the heads of q, then of k, then of v. The rows of "gate_up" are the
        rows of the gate, then the rows of up.
        """
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "attention_norm": (self.dim,), "qkv": (q + 2 * kv, self.dim), "out": (self.dim, q),
            "feed_forward_norm": (self.dim,), "gate_up": (2 * self.ffn_dim, self.dim),
            "down": (self.dim, self.ffn_dim),
        }  # fmt: skip

    def num_weights(self, *names: str) -> int:
        """Number of elements of the named weights; without names, of all weights."""
        sizes = {
            name: shape[0] * (shape[1] if len(shape) > 1 else 1)
            for name, shape in self.weights.items()
        }
        return sum(sizes[name] for name in names or sizes)


class LayerMemory(NamedTuple):
    """Bytes of one layer on one rank. Inference holds weights and working only."""

    weights: int
    gradients: int  # gradients of the weights
    # Tensors that the forward keeps for the backward: x and its normed form, twice; q, k, v; the
    # output of attention with its lse; gate, up and their product; no matrix of scores. Autograd
    # keeps a little more, such as the gate's silu.
    activations: int
    # Temporary memory of attention or of the products, whichever needs more. Attention needs slots,
    # sums and copies; the products need gathered inputs and unsummed outputs.
    working: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class SpreadLayer:
    """One layer on a world of ranks.

    Raises InputError for an unknown strategy, and where world_size does not divide the sizes that
    the ranks share.
    """

    shape: LayerShape
    seq_len: int
    world_size: int
    strategy: str  # one of TENSOR_PARALLEL, or an attention strategy
    batch: int = 1
    input_bytes: int = 2  # size of one number of the activations and weights
    mask: Mask = field(default_factory=Causal)
    # The layout of the sequence, for attention strategies. Tensor parallelism with a split sequence
    # is contiguous.
    kind: str = "zigzag"
    ranks_per_node: int = 1  # as for `choose`

    def __post_init__(self) -> None:
        if not self.tensor_parallel:
            check_name(self.strategy)
            return
        shape, world = self.shape, self.world_size
        for name, count in (
            ("num_heads", shape.num_heads),
            ("num_kv_heads", shape.num_kv_heads),
            ("ffn_dim", shape.ffn_dim),
        ):
            if count % world:
                raise InputError(
                    f"{self.strategy}: the number of ranks must divide {name}, got {world} ranks "
                    f"and {name} {count}; use fewer ranks"
                )

    @property
    def tensor_parallel(self) -> bool:
        """Whether the weights are split."""
        return self.strategy in TENSOR_PARALLEL

    @property
    def gathers(self) -> bool:
        """Whether both the weights and the sequence are split."""
        return self.strategy == TENSOR_PARALLEL[1]

    @property
    def share(self) -> int:
        """Number of ranks that share the heads and the feed-forward's width."""
        return self.world_size if self.tensor_parallel else 1

    @cached_property
    def layout(self) -> Layout:
        """The layout of the tokens outside attention and feed-forward."""
        if self.strategy == TENSOR_PARALLEL[0]:
            return make_layout("contiguous", self.seq_len, 1)
        kind = "contiguous" if self.gathers else self.kind
        mask = self.mask if kind == BALANCED else None
        return make_layout(kind, self.seq_len, self.world_size, mask)

    def own_rows(self, rank: int) -> int:
        """Number of tokens of x that a rank holds, over all batch rows."""
        return self.batch * self.layout.shard_len(rank % self.layout.world_size)

    def rows(self, rank: int) -> int:
        """Number of tokens that a rank puts through its weights, over all batch rows."""
        return self.batch * self.seq_len if self.tensor_parallel else self.own_rows(rank)

    def summed(self, half: str) -> tuple[str, ...]:
        """The weights of a half whose gradients are summed over the ranks.

        All ranks hold these weights, and each rank puts other tokens through them.
        """
        names = HALVES[half]
        return names[:1] if self.gathers else () if self.tensor_parallel else names

    def program(self, *, forward: bool) -> Program:
        """Attention's program; see `choice`."""
        return self.choice(forward=forward).program

    def choice(self, *, forward: bool) -> Choice:
        """The strategy that attention runs with. Raises InputError as `choose` does.

        Under tensor parallelism attention is local: each rank runs the whole sequence with the
        rank's own heads.
        """
        return self._forward_choice if forward else self._backward_choice

    # Every rank's graph asks for them.
    @cached_property
    def _forward_choice(self) -> Choice:
        return self._choose(forward=True)

    @cached_property
    def _backward_choice(self) -> Choice:
        return self._choose(forward=False)

    def _choose(self, *, forward: bool) -> Choice:
        layout = make_layout("contiguous", self.seq_len, 1) if self.tensor_parallel else self.layout
        heads, kv_heads = self.shape.num_heads // self.share, self.shape.num_kv_heads // self.share
        problem = Problem(
            q_layout=layout,
            kv_layout=layout,
            mask=self.mask,
            batch=self.batch,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.shape.head_dim,
            input_bytes=self.input_bytes,
            sum_bytes=max(4, self.input_bytes),
            needs_grad=(True, True, True),
        )
        strategy = "ring-kv" if self.tensor_parallel else self.strategy
        return choose(problem, strategy, forward=forward, ranks_per_node=self.ranks_per_node)

    def graph(
        self,
        rank: int,
        *,
        forward: bool,
        lanes: tuple[Lane, ...] = HOST_LANES,
        attention: bool = True,
    ) -> Graph:
        """The graph of one rank in one direction.

        attention: False for the forward as checkpointing computes it again where it has kept
        attention's outputs: everything but attention.
        """
        builder = _Builder(self, rank, lanes)
        return builder.forward(attention) if forward else builder.backward()

    def schedules(self, *, forward: bool, attention: bool = True) -> list[Schedule | Rotated]:
        """The schedules of all ranks, as `simulate` takes them; attention: as for `graph`.

        All ranks share one schedule where all ranks do the same.
        """
        first = self.graph(0, forward=forward, attention=attention)
        # Under tensor parallelism attention is the same on all ranks; only messages may differ.
        sizes: dict[str, set[int]] = defaultdict(set)
        for part in first.parts:
            sizes[part.buffer].add(part.size_bytes)
        even = all(len(each) == 1 for each in sizes.values())
        schedule = Schedule.of(first)
        if self.tensor_parallel and even and self.world_size > 1:
            return [Rotated(schedule, rank) for rank in range(self.world_size)]
        return [
            schedule,
            *(
                Schedule.of(self.graph(rank, forward=forward, attention=attention))
                for rank in range(1, self.world_size)
            ),
        ]

    def seconds(self, hardware: Hardware, *, forward: bool) -> float:
        """Seconds that one direction takes on a machine: the end of a simulated run."""
        return self.simulated(hardware, forward=forward).end_s

    def simulated(self, hardware: Hardware, *, forward: bool, attention: bool = True) -> Simulated:
        """A simulated run of one direction of all ranks on a machine, without spans.

        attention: as for `graph`.
        """
        kernel = self.choice(forward=forward).kernel
        return simulate(
            self.schedules(forward=forward, attention=attention),
            hardware,
            seconds=lambda task: hardware.device.seconds(task, kernel),
        )

    def sent_bytes(self, rank: int, *, forward: bool) -> int:
        """Bytes that a rank sends in one direction, counted from the graph, so always exact.

        With A = batch x seq_len x dim x input_bytes and W ranks, where W divides everything:

        tensor-parallel           4 (W-1)/W A forward, as much backward
        tensor-parallel+sequence  4 (W-1)/W A forward, 6 (W-1)/W A backward,
                                  and 4 (W-1)/W x dim x input_bytes for the norms
        attention strategies      attention's own, and in the backward
                                  2 (W-1)/W x the bytes of all weights
        """
        return self.graph(rank, forward=forward).wire_bytes

    def memory(self, rank: int, *, backward: bool = True, working: bool = True) -> LayerMemory:
        """The bytes of this layer on one rank; see `LayerMemory`.

        backward: whether there is one. working: False says 0 in their place, and makes no graph.
        """
        shape, size, rows = self.shape, self.input_bytes, self.rows(rank)
        norms = ("attention_norm", "feed_forward_norm")
        products = shape.num_weights("qkv", "out", "gate_up", "down") // self.share
        weights = (shape.num_weights(*norms) + products) * size
        per_row = (
            2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim + 3 * shape.ffn_dim
        ) // self.share
        lse = rows * shape.num_heads // self.share * max(4, size)
        activations = (4 * self.own_rows(rank) * shape.dim + rows * per_row) * size + lse
        # The output of a split weight is one term of a sum, for the whole sequence. With a split
        # sequence the weight's input has been gathered, too.
        whole = rows * shape.dim * size * (2 if self.gathers else 1)
        directions = (True, False) if backward else (True,)
        return LayerMemory(
            weights,
            weights,
            activations,
            max(whole, *(self._attention_bytes(rank, each) for each in directions))
            if working
            else 0,
        )

    def checkpointed_bytes(self, rank: int, *, attention: bool) -> int:
        """Bytes of this layer that checkpointing keeps on one rank until the backward.

        That is the layer's input; with `attention` the output of attention and its lse, too.
        """
        size = self.own_rows(rank) * self.shape.dim * self.input_bytes
        if attention:
            row = self.shape.head_dim * self.input_bytes + max(4, self.input_bytes)
            size += self.rows(rank) * (self.shape.num_heads // self.share) * row
        return size

    def _attention_bytes(self, rank: int, forward: bool) -> int:
        choice = self.choice(forward=forward)
        rank %= choice.program.problem.world_size
        return working_bytes(choice, rank, choice.program.graph(rank))


class _Builder:
    """Builds the graph of one rank. A buffer is named after its half and what the buffer holds."""

    def __init__(self, layer: SpreadLayer, rank: int, lanes: tuple[Lane, ...]) -> None:
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
        own, count = [self._own(dnormed), self._own(dout)], 4 * self.own_rows * self.shape.dim
        self._element(
            f"{half} norm back",
            "norm",
            count,
            reads=own,
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
        here = {
            name: g.buffer(f"core {name}", parts=len(each), size_bytes=each)
            for name, each in sizes.items()
        }
        self.parts = [here[part.buffer][part.index] for part in self.graph.parts]
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
