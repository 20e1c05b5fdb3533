"""A layer spread over ranks as plain numbers: shapes, rows of a rank, attention's plan.

`layers.py` says in which ways a layer is spread. Its graphs (`layer_graph.py`) and
forecasts start from this module. `sublayers.py` has layers of any model; here is Llama's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

from burst_rt.errors import InputError, InternalError
from burst_rt.launch.plan.shards import Shard
from burst_rt.launch.plan.sublayers import Attention, FeedForward, LayerSizes, Product, Sublayer
from burst_rt.planning.choose import choose
from burst_rt.planning.layouts import FOLLOWING, Layout, make_layout
from burst_rt.planning.masks import Causal, Mask
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import Choice, Program, check_name

__all__ = ["HALVES", "TENSOR_PARALLEL", "LayerShape", "Spread"]

TENSOR_PARALLEL = ("tensor-parallel", "tensor-parallel+sequence")
# The two halves of a layer, and the weights of each: the norm, the product into the half, the
# product out of the half.
HALVES = {
    "attention": ("attention_norm", "qkv", "out"),
    "feed_forward": ("feed_forward_norm", "gate_up", "down"),
}


@dataclass(frozen=True)
class LayerShape:
    """Sizes of Llama's layer. Raises InputError for sizes that do not fit."""

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

    @property
    def sizes(self) -> LayerSizes:
        """This layer among those of other models."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        heads = (self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)
        return LayerSizes(
            self.dim,
            (
                self._sublayer("attention", Attention(*heads), q + 2 * kv, q),
                self._sublayer(
                    "feed_forward", FeedForward((self.ffn_dim,)), 2 * self.ffn_dim, self.ffn_dim
                ),
            ),
        )

    def _sublayer(
        self, half: str, core: Attention | FeedForward, wide: int, narrow: int
    ) -> Sublayer:
        norm, *products = HALVES[half]
        into, out = (Product(name, *2 * [self.num_weights(name)]) for name in products)
        return Sublayer(core, self.num_weights(norm), into, out, wide, narrow)


@dataclass(frozen=True)
class Spread:
    """One layer on a world of ranks: who holds what, and how attention runs.

    Raises InputError for an unknown strategy, and where world_size does not divide the sizes that
    the ranks share.
    """

    shape: LayerShape | LayerSizes
    seq_len: int
    world_size: int
    strategy: str  # one of TENSOR_PARALLEL, or an attention strategy
    batch: int = 1
    input_bytes: int = 2  # size of one number of the activations and weights
    mask: Mask = field(default_factory=Causal)
    # The layout of the sequence, for attention strategies. Tensor parallelism with a split sequence
    # is contiguous.
    kind: str = "zigzag"
    ranks_per_node: int = 1  # 1 where nodes are not equally large
    # The mask that a balanced layout follows, where a layer's own mask allows less. None: `mask`.
    placed_by: Mask | None = None
    shard: Shard = "zero1"
    replicas: int = 1  # groups of `world_size` ranks, each with batches of its own
    # The ranks over which weights are sharded, and gradients summed; None: all that hold the same.
    sharers: int | None = None
    # Neighbouring ranks that split heads and the feed-forward's width, in each of which all tokens
    # of a shard are: a mesh of context x tensor. `world_size` counts such groups.
    tensor: int = 1
    sums: bool = True  # whether a backward sums the gradients, where weights are not gathered

    def __post_init__(self) -> None:
        if self.tensor > 1:
            self._check_tensor()
        if not self.tensor_parallel:
            check_name(self.strategy)
            if self.kind == "striped" and self.sizes.recurrence is not None:
                raise InputError(
                    f"{self.strategy}: a recurrence needs runs of consecutive tokens, and the "
                    "striped layout has none; use another layout"
                )
            return
        for name, count in self._split():
            if count % self.world_size:
                raise InputError(
                    f"{self.strategy}: the number of ranks must divide {name}, got "
                    f"{self.world_size} ranks and {name} {count}; use fewer ranks"
                )

    def _check_tensor(self) -> None:
        if self.tensor_parallel:
            raise InputError(
                f"{self.strategy}: splits heads over all ranks of a context, which --tensor "
                f"{self.tensor} does, too; leave --tensor out"
            )
        if self.sizes.recurrence is not None:
            raise InputError(
                f"--tensor {self.tensor}: a recurrence whose heads are split is not forecast; "
                "leave --tensor out"
            )
        for name, count in self._split():
            if count % self.tensor:
                raise InputError(
                    f"--tensor: expected a divisor of {name}, {count}, got {self.tensor}"
                )

    def _split(self) -> Iterator[tuple[str, int]]:
        """What ranks of tensor parallelism share."""
        for sublayer in self.sizes.sublayers:
            core = sublayer.core
            if isinstance(core, Attention):
                yield "num_heads", core.num_heads
                yield "num_kv_heads", core.num_kv_heads
            elif isinstance(core, FeedForward):
                yield from (("ffn_dim", width) for width in core.widths)
            else:
                yield "num_heads of a recurrence", core.num_heads

    @cached_property
    def sizes(self) -> LayerSizes:
        return self.shape if isinstance(self.shape, LayerSizes) else self.shape.sizes

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
        return self.world_size if self.tensor_parallel else self.tensor

    @property
    def gathers_weights(self) -> bool:
        """Whether a layer's weights are gathered before it computes."""
        return self.shard == "fsdp" and not self.tensor_parallel and self.num_ranks > 1

    @property
    def num_ranks(self) -> int:
        """The ranks of all replicas that hold the same weights, over which these are sharded."""
        return self.sharers or self.world_size * self.replicas

    @property
    def num_spread(self) -> int:
        """The ranks of one replica."""
        return self.world_size * self.tensor

    @property
    def groups_per_node(self) -> int:
        """The groups of `tensor` ranks in a node; 1 where nodes are not equally large."""
        whole = self.ranks_per_node % self.tensor == 0
        return max(1, self.ranks_per_node // self.tensor) if whole else 1

    @property
    def copies(self) -> int:
        """The replicas that are simulated: as few as fill two nodes, between which weights go."""
        if self.tensor_parallel:
            return 1
        wanted = -(-2 * self.ranks_per_node // self.num_spread)
        even = (
            n for n in range(wanted, self.replicas) if not n * self.num_spread % self.ranks_per_node
        )
        return next(even, self.replicas)

    @property
    def ranks_alike(self) -> int:
        """The most groups of a node among which a ring has a place in every context, too."""
        groups = self.groups_per_node
        return gcd(groups, self.world_size) if self.world_size > 1 else groups

    @cached_property
    def layout(self) -> Layout:
        """The layout of the tokens outside attention and feed-forward."""
        if self.strategy == TENSOR_PARALLEL[0]:
            return make_layout("contiguous", self.seq_len, 1)
        kind = "contiguous" if self.gathers else self.kind
        mask = (self.placed_by or self.mask) if kind in FOLLOWING else None
        return make_layout(kind, self.seq_len, self.world_size, mask)

    def own_rows(self, rank: int) -> int:
        """Number of tokens of x that a rank holds, over all batch rows."""
        return self.batch * self.layout.shard_len(self.place(rank))

    def place(self, rank: int) -> int:
        """The place of a rank's tokens in the layout."""
        return rank // self.tensor % self.layout.world_size

    def rows(self, rank: int) -> int:
        """Number of tokens that a rank puts through its weights, over all batch rows."""
        return self.batch * self.seq_len if self.tensor_parallel else self.own_rows(rank)

    def summed(self, half: str) -> tuple[str, ...]:
        """The weights of a half whose gradients are summed over the ranks.

        All ranks hold these weights, and each rank puts other tokens through them.
        """
        names = HALVES[half]
        return names[:1] if self.gathers else () if self.tensor_parallel else names

    def num_summed(self, sublayer: Sublayer) -> int:
        """The number of elements of those weights, in any layer."""
        if self.tensor_parallel:
            return sublayer.vectors if self.gathers else 0
        return self.held_weights(sublayer) if self.sums and not self.gathers_weights else 0

    def held_weights(self, sublayer: Sublayer) -> int:
        """The weights of a sublayer that a rank has while it computes."""
        return sublayer.vectors + (sublayer.weights - sublayer.vectors) // self.share

    def program(self, *, forward: bool) -> Program:
        """Attention's program; see `choice`."""
        return self.choice(forward=forward).program

    def choice(self, *, forward: bool) -> Choice:
        """The strategy that attention runs with. Raises InputError as `choose` does.

        Only for a layer that has attention.

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
        attention = self.sizes.attention
        if attention is None:
            raise InternalError("a layer without attention has no attention strategy")
        problem = Problem(
            q_layout=layout,
            kv_layout=layout,
            mask=self.mask,
            batch=self.batch,
            num_heads=attention.num_heads // self.share,
            num_kv_heads=attention.num_kv_heads // self.share,
            head_dim=attention.head_dim,
            v_head_dim=attention.v_head_dim,
            input_bytes=self.input_bytes,
            sum_bytes=max(4, self.input_bytes),
            needs_grad=(True, True, True),
        )
        strategy = "ring-kv" if self.tensor_parallel else self.strategy
        per_node = gcd(self.groups_per_node, self.world_size)
        return choose(problem, strategy, forward=forward, ranks_per_node=per_node)
