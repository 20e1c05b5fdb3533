"""flash-linear-attention's Triton kernels as the stages of a segment.

Its inner functions divide the work of a chunked recurrence as the stages do: what needs no state,
the pass of the state through the chunks, and the reading of the states. The map of a segment is a
pass too, of K more columns: zeros for values, and the identity for a state.

Documents are decays: the first token of one has the decay exp(-80), which leaves 2e-35 of the state
before it. So the rows of a batch may have documents of their own, and nothing waits for the device.

These functions are no public interface of the library: `kernels.py` tries them before they are
used. Known here are those of fla-core 0.6.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import e, log2
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.nn.functional import pad

from burst_rt.kernels.conditions import too_old
from burst_rt.recurrence.base import (
    Recurrence,
    RecurrenceWork,
    SegmentGrads,
    SegmentTensors,
    Stages,
)
from burst_rt.recurrence.matrix import DeltaRule, LinearAttention

__all__ = ["FlaStages", "refuses", "serves", "stage_bytes"]

Tensor = torch.Tensor
_Matrices: TypeAlias = DeltaRule | LinearAttention

_CHUNK = 64  # tokens
# The logarithm of the smallest decay, whose exp is about `maps.LEAST`. Sums of logarithms in a
# chunk are float32: lower ones would cost the digits of those that follow.
_LOWEST = -80.0
# Ranks may be threads, and neither Triton's tuner nor its interpreter expects that.
_one_at_a_time = threading.RLock()
# Tests under Triton's interpreter set others.
_DEVICE_TYPE = "cuda"
_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)


def serves(recurrence: Recurrence) -> TypeGuard[_Matrices]:
    """Whether the library has kernels for a recurrence."""
    return isinstance(recurrence, _Matrices)


def refuses(work: RecurrenceWork) -> str | None:
    """The first reason why the kernels cannot do some work, or None."""
    (q, q_dtype), (_, k_dtype), (v, _) = work.tokens[:3]
    types = {q_dtype, k_dtype, work.dtype}
    if work.device.type != _DEVICE_TYPE:
        return f"the fla kernel takes {_DEVICE_TYPE.upper()} tensors, got {work.device}"
    if len(types) > 1 or not types <= set(_DTYPES):
        got = ", ".join(sorted(map(str, types)))
        return f"the fla kernel takes tensors of bfloat16, or of float16, got {got}"
    if q[-1] % 16 or v[-1] % 16 or q[-1] > 256:
        return (
            "the fla kernel takes K and V that are multiples of 16, and K up to 256, got "
            f"{q[-1]} and {v[-1]}"
        )
    if find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install fla-core)"
    return too_old("fla", work.device) if work.device.type == "cuda" else None


def stage_bytes(work: RecurrenceWork, num_tokens: int, *, forward: bool) -> int:
    """About the most bytes that the stages of so many tokens take at a time, all rows counted.

    By the library's allocations, which run on no device without data.
    """
    (q, dtype), _, (v, _), (g, _), *_ = work.tokens
    heads, value_dim, key_dim = *v, q[-1]
    keys, values, squares, states, decays = _SCRATCH[len(work.tokens), len(g)][forward]
    columns = keys * key_dim + values * value_dim + squares * _CHUNK
    numbers = heads * (columns + states * key_dim * value_dim // _CHUNK)
    if _normalises(work.recurrence):
        numbers += 2 * q[0] * key_dim
    return num_tokens * (dtype.itemsize * numbers + 4 * heads * decays * (g[1:] or (1,))[0])


def _normalises(recurrence: Recurrence) -> bool:
    return isinstance(recurrence, DeltaRule) and recurrence.normalised


@dataclass(frozen=True)
class FlaStages:
    """See `StageMaker`. It takes tensors as they were given."""

    recurrence: _Matrices

    def forward(self, segment: SegmentTensors, out: Tensor) -> Stages:
        """See `StageMaker.forward`."""
        return _Forward(self.recurrence, segment, out)

    def backward(
        self, segment: SegmentTensors, before: Tensor, dout: Tensor, grads: SegmentGrads
    ) -> Stages:
        """See `StageMaker.backward`."""
        return _Backward(self.recurrence, segment, before, dout, grads)


@cache
def _function(path: str) -> Any:
    module, _, name = f"fla.{path}".rpartition(".")
    return getattr(import_module(module), name)


def _call(path: str, **arguments: Any) -> Any:
    """What a function of the library makes, in chunks of 64. Waits for no device."""
    device = next(x.device for x in arguments.values() if isinstance(x, Tensor))
    with _one_at_a_time, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _function(path)(**arguments)


class _Delta:
    """A segment of a recurrence with a decay for each head, whose tokens have met within chunks.

    qk: q and k as given. values: `[batch, tokens, heads, V]`, what the pass of the state adds to
    it, less what the state already gives for the keys: w times the state, 0 in linear attention.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float
    ) -> None:
        self.qk = self._q, self._k = q, k
        self._v, self._beta, self._scale = v, beta, scale
        # The kernels take powers of 2.
        self._g: Tensor = _call(
            "ops.utils.chunk_local_cumsum", g=g, chunk_size=_CHUNK, scale=log2(e)
        )
        # What the pass of the state takes.
        self._passing = {"q": q, "k": k, "g": self._g}
        self._meet()

    def _meet(self) -> None:
        if self._beta is None:
            self._w, self.values = self._k.new_zeros(*self._v.shape[:3], self._k.shape[3]), self._v
            return
        self._w, self.values, self._a = _call(
            "ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_intra",
            k=self._k, v=self._v, g=self._g, beta=self._beta,
        )  # fmt: skip

    def states(self, values: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states before the chunks, what tokens add to them, and the state after the segment.

        Every column of V goes by itself, so values and state may have more of them.
        """
        given = {name: x for name, x in self._passing.items() if name != "q"}
        made: tuple[Tensor, Tensor, Tensor] = _call(
            "ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_h", **given, w=self._w, u=values,
            initial_state=before, output_final_state=True,
        )  # fmt: skip
        return made

    def read(self, states: Tensor, added: Tensor) -> Tensor:
        """The results of the tokens."""
        out: Tensor = _call(
            "ops.common.chunk_o.chunk_fwd_o", **self._passing, v=added, h=states, scale=self._scale
        )
        return out

    def local(self, added: Tensor, dout: Tensor) -> Tensor:
        """The gradient of `added` from the results of the same chunk."""
        dadded: Tensor = _call(
            "ops.common.chunk_o.chunk_bwd_dv_local", **self._passing, do=dout, scale=self._scale
        )
        return dadded

    def dstates(self, dout: Tensor, dadded: Tensor, dlast: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the states after the chunks, of `added`, and of the first state."""
        dstates, dfirst, dadded = _call(
            "ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_dhu", **self._passing, w=self._w,
            do=dout, dv=dadded, h0=dlast, dht=dlast, scale=self._scale,
        )  # fmt: skip  # of h0 it takes the shape
        return dstates, dadded, dfirst

    def grads(
        self, states: Tensor, added: Tensor, dout: Tensor, dstates: Tensor, dadded: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of q, k, v, the sums of g, and beta."""
        dq, dk, dw, dg = _call(
            "ops.common.chunk_o.chunk_bwd_dqkwg", **self._passing, v=added, w=self._w, do=dout,
            h=states, dh=dstates, dv=dadded, scale=self._scale,
        )  # fmt: skip
        if self._beta is None:
            return dq, dk, dadded, dg
        more_dk, dv, dbeta, more_dg = _call(
            "ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd", k=self._k, v=self._v, g=self._g,
            beta=self._beta, A=self._a, dw=dw, du=dadded,
        )  # fmt: skip
        return dq, dk + more_dk, dv, dg + more_dg, dbeta


class _DeltaByChannel(_Delta):
    """A segment of the delta rule with a decay for each key channel."""

    def _meet(self) -> None:
        self._w, self.values, q, k, self._seen, self._a = _call(
            "ops.kda.chunk_intra.chunk_kda_fwd_intra", q=self._q, k=self._k, v=self._v, gk=self._g,
            beta=self._beta, scale=self._scale, disable_recompute=True,
        )  # fmt: skip
        self._passing = {"q": q, "k": k, "gk": self._g}

    def read(self, states: Tensor, added: Tensor) -> Tensor:
        out: Tensor = _call(
            "ops.gla.chunk.chunk_gla_fwd_o_gk", q=self._q, v=added, g=self._g, A=self._seen,
            h=states, scale=self._scale,
        )  # fmt: skip
        return out

    def local(self, added: Tensor, dout: Tensor) -> Tensor:
        self._dseen, dadded = _call(
            "ops.kda.chunk_bwd.chunk_kda_bwd_dAv", q=self._q, k=self._k, v=added, do=dout,
            A=self._seen, scale=self._scale,
        )  # fmt: skip
        return torch.as_tensor(dadded)

    def grads(
        self, states: Tensor, added: Tensor, dout: Tensor, dstates: Tensor, dadded: Tensor
    ) -> tuple[Tensor, ...]:
        given = {"q": self._q, "k": self._k, "g": self._g, "beta": self._beta}
        dq, dk, dv, dbeta, dg, da = _call(
            "ops.kda.chunk_bwd.chunk_kda_bwd_wy_dqkg_fused", **given, v=self._v, v_new=added,
            A=self._a, h=states, do=dout, dh=dstates, dv=dadded, scale=self._scale,
        )  # fmt: skip
        dq, dk, dbeta, dg = _call(
            "ops.kda.chunk_intra.chunk_kda_bwd_intra", **given, dAqk=self._dseen, dAkk=da, dq=dq,
            dk=dk, db=dbeta, dg=dg,
        )  # fmt: skip
        key_heads = self._q.shape[2]
        dq, dk = (dx.unflatten(2, (key_heads, -1)).sum(3) for dx in (dq, dk))
        return dq, dk, dv, dg, dbeta


# By the number of tensors of tokens and the axes of g, backward and forward: how many tensors of
# the inputs' type there are at a time with K columns for each token and head, with V, with a
# chunk's tokens; how many states of all chunks; and how many tensors of float32 that are like g.
_SCRATCH = {
    (4, 1): ((5, 2, 0, 2, 4), (1, 2, 0, 1, 1)),
    (5, 1): ((6, 4, 1, 2, 5), (1, 3, 1, 1, 1)),
    (5, 2): ((11, 4, 6, 2, 4), (3, 3, 2, 1, 1)),
}


class _Segment:
    """What the stages of both directions share."""

    def __init__(self, recurrence: _Matrices, segment: SegmentTensors) -> None:
        self._of, self._segment = recurrence, segment
        self._state = recurrence.state_shape(segment.tokens, ())

    def _prepared(self) -> _Delta:
        q, k, v, g, *beta = self._segment.tokens
        q, k = q.contiguous(), k.contiguous()
        if _normalises(self._of):
            made = (_call("modules.norm.l2norm.l2norm_fwd", x=x) for x in (q, k))
            (q, k), self._rsqrts = zip(*made, strict=True)
        g = self._at_begins(g.float().clamp(min=_LOWEST), _LOWEST).contiguous()
        strength = beta[0].float().contiguous() if beta else None
        kind = _DeltaByChannel if g.ndim == 4 else _Delta
        return kind(q, k, v.to(q.dtype).contiguous(), g, strength, self._of.scale)

    def _at_begins(self, g: Tensor, value: float) -> Tensor:
        """g, with this value where documents begin."""
        begins = self._segment.begins
        if begins is None:
            return g
        return g.masked_fill(begins.view(*begins.shape, *(1,) * (g.ndim - 2)), value)

    def _compose(self, run: Callable[[Tensor], Tensor]) -> None:
        """run: a pass of a state with K more columns."""
        *batch, key_dim, value_dim = self._state
        device = self._segment.tokens[0].device
        begun = pad(torch.eye(key_dim, dtype=torch.float32, device=device), (value_dim, 0))
        ended = run(begun.expand(*batch, -1, -1).contiguous())
        self._map = ended[..., value_dim:], ended[..., :value_dim]
        self._segment.progress()

    def fold(self, before: Tensor | None, after: Tensor) -> None:
        assert before is not None
        a, b = self._map
        torch.add(a @ before, b, out=after)


class _Forward(_Segment):
    """The forward of a segment."""

    def __init__(self, recurrence: _Matrices, segment: SegmentTensors, out: Tensor) -> None:
        super().__init__(recurrence, segment)
        self._out = out

    def prepare(self) -> None:
        self._made = self._prepared()
        self._segment.progress()

    def compose(self) -> None:
        made = self._made
        values = pad(made.values, (0, self._state[2]))
        self._compose(lambda begun: made.states(values, begun)[2])

    def advance(self, before: Tensor, after: Tensor | None) -> None:
        self._states, self._added, last = self._made.states(self._made.values, before)
        if after is not None:
            after.copy_(last)

    def emit(self) -> None:
        self._out.copy_(self._made.read(self._states, self._added))
        del self._made, self._states, self._added
        self._segment.progress()


class _Backward(_Segment):
    """The backward of a segment."""

    def __init__(
        self, recurrence: _Matrices, segment: SegmentTensors, before: Tensor, dout: Tensor,
        grads: SegmentGrads,
    ) -> None:  # fmt: skip
        super().__init__(recurrence, segment)
        self._before, self._dout, self._sums = before, dout, grads.tokens

    def prepare(self) -> None:
        self._made = made = self._prepared()
        self._dout = self._dout.to(made.values.dtype).contiguous()
        self._states, self._added, _ = made.states(made.values, self._before)
        self._dadded = made.local(self._added, self._dout)
        self._segment.progress()

    def compose(self) -> None:
        made = self._made
        dout, dadded = (pad(x, (0, self._state[2])) for x in (self._dout, self._dadded))
        self._compose(lambda begun: made.dstates(dout, dadded, begun)[2])

    def advance(self, before: Tensor, after: Tensor | None) -> None:
        self._dstates, self._dadded, first = self._made.dstates(self._dout, self._dadded, before)
        if after is not None:
            after.copy_(first)

    def emit(self) -> None:
        dq, dk, dv, dg, *others = self._made.grads(
            self._states, self._added, self._dout, self._dstates, self._dadded
        )
        if _normalises(self._of):
            dq, dk = (
                _call("modules.norm.l2norm.l2norm_bwd", y=y, rstd=rsqrt, dy=dy.contiguous())
                for y, rsqrt, dy in zip(self._made.qk, self._rsqrts, (dq, dk), strict=True)
            )
        dg = _call("ops.utils.chunk_local_cumsum", g=dg, chunk_size=_CHUNK, reverse=True)
        dg = self._at_begins(dg, 0.0)
        for total, dx in zip(self._sums, (dq, dk, dv, dg, *others), strict=True):
            if total is not None:
                total.add_(dx)
        del self._made, self._dout, self._states, self._added, self._dstates, self._dadded
        self._segment.progress()
