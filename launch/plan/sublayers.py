"""A layer as plain numbers: the sublayers that a residual sum follows each. Pure Python.

A sublayer is a norm, a product into it, what mixes (attention or a recurrence) or gates (a
feed-forward), a product out of it, and the residual sum. A layer has at most one of each; where
two run side by side, as in Falcon-H1, they count one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from burst_rt.planning.masks import Mask
from burst_rt.planning.recurrences import RecurrenceSizes

__all__ = ["Attention", "FeedForward", "LayerSizes", "Product", "Sublayer"]


@dataclass(frozen=True)
class Attention:
    """Softmax attention. Under MLA its heads are those after the projections up."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # q's and k's
    v_head_dim: int  # v's and the output's
    window: Mask | None = None  # what the layer's own mask allows; None: everything

    @property
    def kv_width(self) -> int:
        """Numbers of one token's key and value."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def width(self) -> int:
        """Numbers of one token's q, k, v and output."""
        return self.num_heads * (self.head_dim + self.v_head_dim) + self.kv_width


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward, or a mixture of experts with the experts that all tokens share."""

    # Widths that ranks of tensor parallelism share, each: of the dense one, of an expert.
    widths: tuple[int, ...]
    num_experts: int = 0
    per_token: int = 0  # experts that one token goes to


class Product(NamedTuple):
    """One or more matrix products."""

    name: str
    weights: int
    active: int  # weights that one token is multiplied with


@dataclass(frozen=True)
class Sublayer:
    """What one residual sum follows: sizes for one token, and weights."""

    core: Attention | FeedForward | RecurrenceSizes
    vectors: int  # weights that no product takes: norms, biases, convolutions
    into: Product
    out: Product
    wide: int  # numbers of a token that come out of the product in
    narrow: int  # numbers of a token that go into the product out

    @property
    def name(self) -> str:
        if isinstance(self.core, Attention):
            return "attention"
        return "recurrence" if isinstance(self.core, RecurrenceSizes) else "feed_forward"

    @property
    def weights(self) -> int:
        return self.vectors + self.into.weights + self.out.weights

    @property
    def kept(self) -> int:
        """Numbers of a token, inside the sublayer, that the forward keeps for the backward."""
        kept = self.wide + self.narrow
        return max(kept, self.core.width) if isinstance(self.core, Attention) else kept


@dataclass(frozen=True)
class LayerSizes:
    """Any layer; `LayerShape` is Llama's."""

    dim: int  # width of x
    sublayers: tuple[Sublayer, ...]

    @cached_property
    def attention(self) -> Attention | None:
        cores = (sublayer.core for sublayer in self.sublayers)
        return next((core for core in cores if isinstance(core, Attention)), None)

    @cached_property
    def recurrence(self) -> RecurrenceSizes | None:
        cores = (sublayer.core for sublayer in self.sublayers)
        return next((core for core in cores if isinstance(core, RecurrenceSizes)), None)

    @property
    def num_weights(self) -> int:
        return sum(sublayer.weights for sublayer in self.sublayers)
