"""One attention call: its options and the shapes of its tensors, checked once.

A `Call` is immutable, and does not hold the tensors. Whatever comes after the checks (plan,
agreement, backward) reads the `Call`, and looks at no argument again. Calls of the same kind get
the same `Call` from the context, so a training loop checks its first step only. The memory that the
tensors lie in changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Unpack

import torch

from burst_rt.arguments import check_kinds
from burst_rt.attention.function_check import cells_said
from burst_rt.attention.mask_check import check_mask
from burst_rt.attention.options import (
    PLAIN,
    NeedsGrad,
    OptionArguments,
    Options,
    check_options,
    check_types,
)
from burst_rt.attention.planner import Plan, PlanKey
from burst_rt.attention.sharding import ContextLayout
from burst_rt.attention.state import AttentionState
from burst_rt.attention.tensor_check import (
    check_not_of_inference,
    check_scores,
    check_tensors,
)
from burst_rt.kernels import QKV, ScoreOptions, sum_dtype, told_to_repeat
from burst_rt.planning.masks import Mask
from burst_rt.planning.problem import Problem, ScoreFlags
from burst_rt.runtime.agreement import AgreedWhen, Contract
from burst_rt.version import __version__

__all__ = ["Call", "call_of", "key_of", "make_call", "needs_of"]

_WHERE = "burst_attention"


@dataclass(frozen=True, kw_only=True)
class Call:
    """The options of one attention call, and the shape and type of its tensors on this rank.

    options: resolved, and without tensors. slopes_shape: of alibi_slopes; sinks_dtype: of sinks;
    None: there are none.
    """

    options: Options
    slopes_shape: tuple[int, ...] | None
    sinks_dtype: torch.dtype | None
    needs: NeedsGrad  # whether q, k, v and sinks need gradients
    dtype: torch.dtype
    batch: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int  # head dimension of q and k
    v_head_dim: int  # head dimension of v and out
    cells: str = ""  # `cells_said` of the mask

    agreed: ClassVar[AgreedWhen] = AgreedWhen.OPENING

    @property
    def layout(self) -> ContextLayout:
        """The layout of the queries."""
        return self.options.layout

    @cached_property
    def kv_layout(self) -> ContextLayout:
        """The layout of the keys."""
        return self.options.kv_layout or self.layout

    @cached_property
    def mask(self) -> Mask:
        """Which query sees which key."""
        assert self.options.mask is not None  # the options are resolved
        return self.options.mask

    @property
    def table_bytes(self) -> int:
        """See `Recent`."""
        return self.mask.table_bytes

    @property
    def scale(self) -> float | None:
        """The factor of the scores; None: 1 / sqrt(head_dim)."""
        return self.options.scale

    @cached_property
    def q_shape(self) -> tuple[int, int, int, int]:
        """The shape of q on this rank."""
        return (self.batch, self.layout.shard_len, self.num_heads, self.head_dim)

    @cached_property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """The shape of k on this rank."""
        return (self.batch, self.kv_layout.shard_len, self.num_kv_heads, self.head_dim)

    @cached_property
    def v_shape(self) -> tuple[int, int, int, int]:
        """The shape of v on this rank."""
        return (*self.kv_shape[:3], self.v_head_dim)

    @cached_property
    def attention(self) -> AttentionState:
        """What the calls of this call's context share."""
        return self.options.layout.attention

    @cached_property
    def problem(self) -> Problem:
        """The call over all ranks, as plain numbers."""
        return Problem(
            q_layout=self.layout.map,
            kv_layout=self.kv_layout.map,
            mask=self.mask.bound(self.layout.seq_len, self.kv_layout.seq_len),
            batch=self.batch,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            input_bytes=self.dtype.itemsize,
            sum_bytes=sum_dtype(self.dtype).itemsize,
            needs_grad=self.needs[:3],
            v_head_dim=self.v_head_dim,
            scores=ScoreFlags(
                softcap=self.options.softcap is not None,
                alibi_slopes=self.slopes_shape is not None,
                sinks=self.sinks_dtype is not None,
                sinks_need_grad=self.needs[3],
            ),
        )

    def score_options(
        self, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> ScoreOptions:
        """The values of the call's score options, with these tensors."""
        return ScoreOptions(self.options.softcap, alibi_slopes, sinks)

    @cached_property
    def forward_plan(self) -> Plan:
        """The plan of the forward, made on first use.

        Blocks while several kernels are timed, once for each chip. Raises InputError for a call
        that no kernel or strategy can do.
        """
        return self.attention.plan(self._key(forward=True))

    @property
    def backward_plan(self) -> Plan:
        """The plan of the backward; blocks and raises as `forward_plan` does."""
        key = self._key(forward=False)
        plan = self._backward_plans.get(key.told_to_repeat)
        if plan is None:
            plan = self._backward_plans[key.told_to_repeat] = self.attention.plan(key)
        return plan

    @cached_property
    def _backward_plans(self) -> dict[bool, Plan]:
        return {}

    @cached_property
    def forward_contract(self) -> Contract:
        """The words that the ranks compare before the forward."""
        return self._contract("burst_attention")

    @cached_property
    def backward_contract(self) -> Contract:
        """The words that the ranks compare before the backward."""
        return self._contract("backward of burst_attention")

    def _key(self, *, forward: bool) -> PlanKey:
        attention = self.attention
        told = not forward and told_to_repeat()
        return PlanKey(
            forward=forward,
            problem=self.problem,
            strategy=self.options.strategy,
            kernel=attention.kernel,
            dtype=self.dtype,
            device=attention.runtime.device,
            partials=attention.partials,
            deterministic=attention.deterministic or told,
            told_to_repeat=told,
        )

    def _contract(self, name: str) -> Contract:
        """Everything about the call that must be the same on every rank."""
        plain = zip(PLAIN, self.options.plain, strict=True)
        words = {
            "call": name,
            "layout": str(self.layout.map),
            "kv_layout": str(self.kv_layout.map),
            "mask": repr(self.mask) + self.cells,
            **{option: _in_words(option, value) for option, value in plain},
            "alibi_slopes": _in_words("alibi_slopes", self.slopes_shape),
            "sinks": _in_words("sinks", self.sinks_dtype),
            "batch": str(self.batch),
            "heads": f"{self.num_heads} and {self.num_kv_heads} kv",
            "head_dim": f"{self.head_dim} and {self.v_head_dim} of v",
            "dtype": str(self.dtype),
            "needs_grad (q, k, v)": str(self.needs[:3]),
            "needs_grad (sinks)": str(self.needs[3]),
            "version": __version__,
        }
        return Contract(words)


def _in_words(option: str, value: object) -> str:
    """An option's value as ranks compare it: the number 1 may be an int or a float."""
    if value is None:
        return "default" if option == "scale" else "none"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(float(value))
    return str(value)


@check_kinds
def make_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: ContextLayout,
    return_lse: bool = False,
    needs_grad: NeedsGrad | None = None,
    **options: Unpack[OptionArguments],
) -> Call:
    """The call of `burst_attention` with these arguments. Local; does not block.

    needs_grad: whether q, k, v and sinks need gradients; with None the tensors decide. Raises
    InputError that names the argument, what was expected and what came.
    """
    given = Options(layout=layout, return_lse=return_lse, **options)
    return call_of(QKV(q, k, v), given, needs_grad)


def call_of(qkv: QKV, options: Options, needs: NeedsGrad | None = None) -> Call:
    """`make_call` for options as one record."""
    if not isinstance(options.layout, ContextLayout):
        check_types(options)
    attention = options.layout.attention
    calls = attention.kept[Call]  # by the arguments that were checked
    if needs is None:
        needs = needs_of(*qkv, options.sinks)
    if True in needs:
        check_not_of_inference(*qkv, options.sinks)
    q, k, v = qkv
    # A mask is compared only where masks of its class are known to be comparable. By its id it is
    # the very same mask: the call keeps the mask alive.
    mask: object = options.mask
    if mask is not None and type(mask) not in attention.comparable:
        mask = id(mask)
    try:
        key: object = (
            key_of(options, mask), needs,
            q.shape, q.dtype, q.device, q.layout, k.shape, k.dtype, k.device, k.layout,
            v.shape, v.dtype, v.device, v.layout,
        )  # fmt: skip
        call = calls.get(key)
    except (AttributeError, RuntimeError, TypeError):
        key = call = None  # an argument has the wrong type; the checks below say which one
    if call is None:
        call = _checked(qkv, options, needs)
        attention.comparable.add(type(call.mask))
        if key is not None:
            # The call keeps the mask alive, so that no other mask can get the same id.
            calls.put(key, call)
    elif len(calls) > calls.capacity // 2:
        calls.put(key, call)  # used again, so it goes last; with few calls none goes soon
    return call


def key_of(options: Options, mask: object) -> tuple[object, ...]:
    """Everything about the options that a checked call depends on.

    mask: what the mask is compared by. Equal numbers of other types are other options, because
    True is no number here; of tensors all but the values counts.
    """
    plain = options[3:-2]  # `Options.plain`, without another call
    slopes, sinks = options[-2:]
    return (*options[:2], mask, *plain, *map(type, plain), _look(slopes), _look(sinks))


def _look(x: torch.Tensor | None) -> object:
    """The properties of slopes or sinks on which a call depends, except their values."""
    return x if x is None else (x.shape, x.dtype, x.device, x.layout, x.requires_grad)


def _checked(qkv: QKV, options: Options, needs: NeedsGrad) -> Call:
    """The call with these arguments, which are checked here. Raises InputError."""
    check_options(options)
    check_tensors(qkv, options)
    q, k, v = qkv
    slopes, sinks = options.alibi_slopes, options.sinks
    resolved = options.resolved().without_tensors()
    layout, kv_layout, mask = resolved.layout, resolved.kv_layout, resolved.mask
    assert kv_layout is not None
    assert mask is not None
    score_options = ScoreOptions(options.softcap, slopes, sinks)
    check_scores(_WHERE, q, mask, options.scale, score_options)
    lengths = (layout.seq_len, kv_layout.seq_len)
    check_mask(mask, *lengths, batch=q.shape[0], shared=layout.runtime.world_size > 1)
    return Call(
        options=resolved,
        slopes_shape=None if slopes is None else tuple(slopes.shape),
        sinks_dtype=None if sinks is None else sinks.dtype,
        needs=needs,
        dtype=q.dtype,
        batch=q.shape[0],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        cells=cells_said(mask, (q.shape[0], q.shape[2], *lengths), q.device),
    )


def needs_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> NeedsGrad:
    """Whether each tensor needs a gradient: autograd is on and the tensor requires one."""
    if not torch.is_grad_enabled():
        return False, False, False, False
    return _needs(q), _needs(k), _needs(v), _needs(sinks)


def _needs(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad
