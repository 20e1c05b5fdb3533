"""A plain torch model over ranks: inside `over_ranks`, torch's own attention is `burst_attention`.

A TorchFunctionMode sees `scaled_dot_product_attention` wherever a model calls it, also in torch's
own modules and in compiled programs. What else in torch computes attention is refused by name,
because it would see this rank's tokens only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from types import FunctionType, TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from burst_rt.arguments import describe_value, holds_values
from burst_rt.attention.api import burst_attention
from burst_rt.attention.options import CAUSAL, FULL
from burst_rt.attention.sharding import ContextLayout
from burst_rt.context import Context, require_context
from burst_rt.errors import InputError
from burst_rt.planning.masks import BlockSparse, Mask, SameKeys
from burst_rt.planning.strategies import check_name
from burst_rt.runtime.refusing import refuse, refuse_kinds

__all__ = ["over_ranks"]

_SDPA = "scaled_dot_product_attention"
_Tensor = torch.Tensor


@refuse_kinds
def over_ranks(
    ctx: Context,
    layout: ContextLayout,
    *,
    mask: Mask | None = None,
    strategy: str = "auto",
) -> AbstractContextManager[None]:
    """Inside, `torch.nn.functional.scaled_dot_product_attention` is attention over ctx's ranks.

        with burst_rt.over_ranks(ctx, layout):
            loss = model(tokens, positions)  # this rank's tokens, and their positions
            loss.backward()

    A model's forward and backward go into the block, on every rank alike. Calls in it take q, k and
    v `[..., heads, tokens, head_dim]` of this rank's tokens in `layout`'s order, and are
    `burst_attention`: exact, for any length, differentiable, and with its deadlines. `is_causal`,
    `scale`, `enable_gqa` and autocast mean what they mean in torch. A boolean `attn_mask` is one of
    the whole sequence, `[..., seq_len or 1, seq_len]` in the sequence's order, equal for all heads
    and on every rank. Torch's choice of a backend (`sdpa_kernel`) changes nothing.

    ctx: the context whose ranks attend together. layout: the tokens that each rank holds; of ctx.
    mask: what queries see at most, beside what each call says. With mask=Documents(...) a call with
        is_causal=True is causal in each document.
    strategy: as in `burst_attention`.

    torch.nn.MultiheadAttention and TransformerEncoderLayer work, in train and eval mode, with
    need_weights=False. So do torch.compile, and activation checkpointing whose backward is in the
    block: outside of it the second forward would attend to this rank's tokens, and the backward
    raises instead. The block is of this thread; the innermost one counts.

    Local; does not block, unless an argument is wrong. Raises InputError for a wrong argument, on
    every rank that waits for this one, as `Context.layout` does. In the block, InputError on every
    rank, before anything is sent, for what is not done: dropout, float masks, attention weights
    (need_weights=True), other lengths than the layout's, reentrant checkpointing,
    flex_attention; and at its end where nothing in it called torch's attention. Modules of
    torch.jit hide their calls, and are not seen.
    """
    require_context(ctx, "over_ranks")
    if layout.attention is not ctx.attention:
        error = InputError(
            f"over_ranks: layout: expected one of this context ({ctx!r}), got one of another; make "
            "it with ctx.layout(...)"
        )
        refuse("over_ranks", error, ctx.runtime)
    try:
        check_name(strategy)
    except InputError as error:
        refuse("over_ranks", error, ctx.runtime)
    return _OverRanks(layout, mask, strategy)


class _Given(NamedTuple):
    """The arguments of torch's function."""

    query: _Tensor
    key: _Tensor
    value: _Tensor
    attn_mask: _Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class _OverRanks(TorchFunctionMode):
    """The block, which sees every torch function that is called in it."""

    def __init__(self, layout: ContextLayout, mask: Mask | None, strategy: str) -> None:
        super().__init__()
        self.layout = layout
        self.shard_len, self.seq_len, self.kind = layout.shard_len, layout.seq_len, layout.kind
        self.strategy = strategy
        # By is_causal. They are made once, so that calls and compiled programs know them again.
        both = CAUSAL if mask is None or mask == CAUSAL else CAUSAL & mask
        self.masks = {False: FULL if mask is None else mask, True: both}
        self.seen = False
        # The mask that was made of an attn_mask, which mostly comes with every layer.
        self.of_tensor: tuple[_Tensor, int, Mask] | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if error is None and not self.seen:
            self.refuse(
                f"expected torch's {_SDPA} in the block, got none: whatever attention "
                "is in it saw this rank's tokens only; call burst_rt.burst_attention in the model"
            )

    def __torch_function__(
        self,
        func: Any,  # torch's functions have no type of their own
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func in _ATTENTION:
            return self.attend(_Given(*args, **options))
        if getattr(func, "__name__", "") in _OTHERS:
            self.refuse(
                f"expected {_SDPA}, got {func.__name__}, in which attention would be to this "
                "rank's tokens only; leave it out, or, where a compiled program calls it, compile "
                "what is in it instead"
            )
        if func not in _BODIES:
            if func is _Tensor.unflatten and torch.compiler.is_compiling():
                return _unflatten(*args, **options)
            return func(*args, **options)
        if func is functional.multi_head_attention_forward and options.get("need_weights", True):
            self.refuse(
                "nn.MultiheadAttention: need_weights: expected False, got True: the weights are "
                "those of all tokens, which no rank has; call it with need_weights=False"
            )
        with self:
            return _BODIES[func](*args, **options)

    def attend(self, given: _Given) -> _Tensor:
        """torch's function, over ranks."""
        self.seen = True
        self.check(given)
        query, key, value, attn_mask, _, is_causal, scale, _ = given
        mask = self.masks[is_causal]
        if attn_mask is not None:
            mask = mask & self.mask_of(attn_mask, query)
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            to = torch.get_autocast_dtype(kind)
            query, key, value = (
                x if x.dtype == torch.float64 else x.to(to) for x in (query, key, value)
            )
        lead = query.shape[:-3]
        q, k, v = (_tokens_first(x) for x in (query, key, value))
        out = burst_attention(
            q, k, v, layout=self.layout, mask=mask, scale=scale, strategy=self.strategy
        )
        if out.requires_grad and not torch.compiler.is_compiling():
            out = _Marked.apply(out, self.layout, mask)  # type: ignore[no-untyped-call]
        out = out.transpose(1, 2)
        if query.ndim == 4:
            return out
        return out.reshape(*lead, *out.shape[1:]) if query.ndim > 2 else out[0, 0]

    def check(self, given: _Given) -> None:
        """Refuses what torch's function takes and this one does not."""
        query, key, value = given[:3]
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.is_nested or x.ndim < 2:
                self.refuse(
                    f"{name}: expected a tensor [..., heads, tokens, head_dim], got "
                    f"{describe_value(x)}"
                )
            # A compiled program would be for one length; there, `burst_attention` looks.
            known = _is_plain(x) and not torch.compiler.is_compiling()
            if known and x.shape[-2] != self.shard_len:
                self.refuse(
                    f"{name}: expected [..., heads, this rank's {self.shard_len} of "
                    f"{self.seq_len} tokens, head_dim] (layout: {self.kind}), got "
                    f"{tuple(x.shape)}; cut the model's inputs with layout.shard; attention to "
                    "other tokens (a cache, cross-attention to another length) goes outside of the "
                    "block, or to burst_attention with a kv_layout"
                )
            if x.shape[:-3] != query.shape[:-3] or x.ndim != query.ndim:
                self.refuse(
                    f"{name}: expected query's batch {tuple(query.shape[:-3])} before heads, "
                    f"tokens and head_dim, got shape {tuple(x.shape)}"
                )
        if given.dropout_p != 0:
            self.refuse(
                f"dropout_p: expected 0, got {given.dropout_p}: attention is exact; which weights "
                "are dropped would depend on the ranks; make the model's attention with dropout=0"
            )
        if query.ndim > 2 and key.shape[-3] != query.shape[-3] and not given.enable_gqa:
            self.refuse(
                f"key: expected query's {query.shape[-3]} heads, got {key.shape[-3]}; say "
                "enable_gqa=True where several query heads share a key head"
            )
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling() and _in_reentrant():
            self.refuse(
                "torch.utils.checkpoint: use_reentrant: expected False, got True, under which "
                "nothing says in the backward how attention was computed in the forward"
            )

    def mask_of(self, attn_mask: _Tensor, query: _Tensor) -> Mask:
        """The mask that a boolean tensor of the whole sequence means."""
        tokens = self.seq_len
        if torch.compiler.is_compiling():
            self.refuse(
                "attn_mask: expected None in a compiled program, got a tensor, whose values are "
                "not known there; give over_ranks(..., mask=...) what it says"
            )
        shape, lead = attn_mask.shape, attn_mask.shape[:-2]
        if not holds_values(attn_mask) or attn_mask.dtype != torch.bool or attn_mask.ndim < 2:
            self.refuse(
                f"attn_mask: expected booleans [..., {tokens} or 1, {tokens}], got "
                f"{describe_value(attn_mask)}; a bias that is added to scores is not done, and one "
                "of 0 and -inf is the boolean mask bias == 0"
            )
        if shape[-1] != tokens or shape[-2] not in (1, tokens):
            self.refuse(
                f"attn_mask: expected the mask of the whole sequence, [..., {tokens} or 1, "
                f"{tokens}], equal on every rank, got {tuple(shape)}"
            )
        if lead[-1:] not in ((), (1,)) or (prod(lead) != 1 and lead[:-1] != query.shape[:-3]):
            self.refuse(
                f"attn_mask: expected one for all heads and for query's batch "
                f"{tuple(query.shape[:-3])} or all of it, got shape {tuple(shape)}"
            )
        kept = self.of_tensor
        # Nobody counts the changes of tensors that are made in inference mode.
        version = -1 if attn_mask.is_inference() else attn_mask._version
        if kept is None or kept[0] is not attn_mask or kept[1] != version or version < 0:
            table = attn_mask.detach().reshape(-1, *shape[-2:])
            made = SameKeys(table) if shape[-2] < tokens else BlockSparse(table, 1)
            kept = self.of_tensor = (attn_mask, version, made)
        return kept[2]

    def refuse(self, words: str) -> NoReturn:
        """Raises InputError on every rank that waits for this one; blocks as `refuse` does."""
        if torch.compiler.is_compiling():
            # The program goes on without the compiler, and comes here again.
            torch._dynamo.graph_break(f"over_ranks: {words}")
        refuse("over_ranks", InputError(f"over_ranks: {words}"), self.layout.runtime)


def _is_plain(x: _Tensor) -> bool:
    """Whether the shape is this rank's own. A DTensor's is that of all ranks."""
    return type(x) in (_Tensor, torch.nn.Parameter)


def _tokens_first(x: _Tensor) -> _Tensor:
    """`[..., heads, tokens, head_dim]` as `[batch, tokens, heads, head_dim]`."""
    if x.ndim != 4:
        x = x.reshape(prod(x.shape[:-3]), *((1,) * (3 - x.ndim)), *x.shape[-3:])
    return x.transpose(1, 2)


class _Marked(torch.autograd.Function):
    """The result itself, with a mark that says by which layout and mask it came.

    Activation checkpointing replaces what the forward has saved by what its second forward saves.
    The backward looks at the mark before anything is sent: outside of the block the second forward
    has attended to this rank's tokens only, and there is no mark, or another.
    """

    @staticmethod
    def forward(ctx: Any, out: _Tensor, layout: ContextLayout, mask: Mask) -> _Tensor:
        # By its words, which say all about a mask: each call with an attn_mask makes another one.
        ctx.layout, ctx.expected = layout, [layout.number, hash(repr(mask))]
        ctx.save_for_backward(torch.tensor(ctx.expected, device="cpu"))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: _Tensor) -> tuple[_Tensor, None, None]:
        (mark,) = ctx.saved_tensors
        if mark.dtype != torch.int64 or mark.tolist() != ctx.expected:
            error = InputError(
                "over_ranks: backward: activation checkpointing has computed attention again "
                "outside of the block, or in one with another layout or mask; call backward() in "
                "the block of the forward"
            )
            refuse("backward of over_ranks", error, ctx.layout.runtime)
        return dout, None, None


def _in_reentrant() -> bool:
    """Whether the forward of torch's reentrant checkpointing is under way in this thread."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
    return False


def _body(function: Any) -> Callable[..., Any]:
    """The function without its first question, whether a mode wants to see it.

    In a mode's turn torch takes the mode away, and the mode would see nothing of what the function
    calls. With the mode put back the question would come again.
    """
    asks = {name: _nobody for name in function.__globals__ if name.startswith("has_torch_function")}
    body = FunctionType(
        function.__code__, function.__globals__ | asks, function.__name__, function.__defaults__
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _unflatten(x: _Tensor, dim: int, sizes: Sequence[int]) -> _Tensor:
    """torch's method, which the compiler (torch 2.13) cannot trace under a mode."""
    at = dim % x.ndim
    return x.reshape(*x.shape[:at], *sizes, *x.shape[at + 1 :])


def _nobody(*_: object) -> bool:
    return False


_ATTENTION = {
    torch._C._nn.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
# Names of torch's other attention, and of operators in whose functions the compiler, which traces
# them, shows a mode nothing. "tag_activation_checkpoint" is torch's checkpoint.
_OTHERS = {
    "_native_multi_head_attention", "_transformer_encoder_layer_fwd", "flex_attention",
    "tag_activation_checkpoint", "cond", "while_loop", "scan", "associative_scan", "map_impl",
}  # fmt: skip
# Functions of torch's that call attention inside; those of autograd do where layers are
# checkpointed.
_BODIES = {
    function: _body(function)
    for function in (
        functional.multi_head_attention_forward,
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
    )
}
