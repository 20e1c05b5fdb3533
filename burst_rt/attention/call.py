"""One attention call: its arguments and the shapes of its tensors, checked once.

A `Call` is immutable, and does not hold the tensors. Whatever comes after the checks (plan,
agreement, backward) reads the `Call`, and looks at no argument again. Calls of the same kind get
the same `Call` from the context's setup, so a training loop checks its first step only. The memory
that the tensors lie in changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NotRequired, TypedDict

import torch

from burst_rt.attention.function_check import cells_said
from burst_rt.attention.mask_check import check_mask
from burst_rt.attention.planner import Plan, PlanKey
from burst_rt.attention.setup import Setup
from burst_rt.attention.sharding import ContextLayout
from burst_rt.errors import InputError
from burst_rt.kernels import DTYPES, QKV, ScoreTerms, deterministic, sum_dtype
from burst_rt.planning.masks import Causal, Full, Mask
from burst_rt.planning.problem import Problem, ScoreOptions
from burst_rt.planning.strategies import check_name
from burst_rt.runtime.agreement import AgreedWhen, Contract
from burst_rt.version import __version__

__all__ = [
    "CAUSAL",
    "FULL",
    "Call",
    "NeedsGrad",
    "Options",
    "check_factors",
    "check_kinds",
    "check_scores",
    "check_values",
    "make_call",
    "needs_of",
]

# The masks of calls that name no mask. They are made once, so that the compiler reads their numbers
# and makes no mask of its own.
FULL, CAUSAL = Full(), Causal()


_WHERE = "burst_attention"

# Whether q, k, v and sinks need gradients.
NeedsGrad = tuple[bool, bool, bool, bool]


class Options(TypedDict):
    """The arguments of `burst_attention` besides q, k, v and `return_lse`."""

    layout: ContextLayout
    kv_layout: NotRequired[ContextLayout | None]
    mask: NotRequired[Mask | None]
    causal: NotRequired[bool]
    scale: NotRequired[float | None]
    softcap: NotRequired[float | None]
    alibi_slopes: NotRequired[torch.Tensor | None]
    sinks: NotRequired[torch.Tensor | None]
    dropout_p: NotRequired[float]
    strategy: NotRequired[str]


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one attention call, and the shape and type of its tensors on this rank.

    alibi_slopes: their shape; sinks: their type. None: there are none.
    """

    layout: ContextLayout
    kv_layout: ContextLayout
    mask: Mask
    scale: float | None
    softcap: float | None
    alibi_slopes: tuple[int, ...] | None
    sinks: torch.dtype | None
    strategy: str
    return_lse: bool
    needs_grad: tuple[bool, bool, bool]  # whether q, k, v need gradients
    sinks_need_grad: bool
    dtype: torch.dtype
    batch: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int  # head dimension of q and k
    v_head_dim: int  # head dimension of v and out
    cells: str = ""  # `cells_said` of the mask

    agreed: ClassVar[AgreedWhen] = AgreedWhen.OPENING

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

    @property
    def needs(self) -> NeedsGrad:
        """The tensors that need gradients."""
        return (*self.needs_grad, self.sinks_need_grad)

    @property
    def setup(self) -> Setup:
        """The setup of the call's context."""
        return self.layout.setup

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
            needs_grad=self.needs_grad,
            v_head_dim=self.v_head_dim,
            scores=ScoreOptions(
                softcap=self.softcap is not None,
                alibi_slopes=self.alibi_slopes is not None,
                sinks=self.sinks is not None,
                sinks_need_grad=self.sinks_need_grad,
            ),
        )

    @cached_property
    def forward_plan(self) -> Plan:
        """The plan of the forward, made on first use.

        Blocks while several kernels are timed, once for each chip. Raises InputError for a call
        that no kernel or strategy can do.
        """
        return self.setup.planner.plan(self._key(forward=True))

    @property
    def backward_plan(self) -> Plan:
        """The plan of the backward; blocks and raises as `forward_plan` does."""
        key = self._key(forward=False)
        plan = self._backward_plans.get(key.deterministic)
        if plan is None:
            plan = self._backward_plans[key.deterministic] = self.setup.planner.plan(key)
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
        setup = self.setup
        return PlanKey(
            forward=forward,
            problem=self.problem,
            strategy=self.strategy,
            kernel=setup.kernel,
            dtype=self.dtype,
            device=setup.runtime.device,
            partials=setup.partials,
            deterministic=not forward and deterministic(),
        )

    def _contract(self, name: str) -> Contract:
        """Everything about the call that must be the same on every rank."""
        words = {
            "call": name,
            "layout": str(self.layout.map),
            "kv_layout": str(self.kv_layout.map),
            "mask": repr(self.mask) + self.cells,
            "batch": str(self.batch),
            "heads": f"{self.num_heads} and {self.num_kv_heads} kv",
            "head_dim": f"{self.head_dim} and {self.v_head_dim} of v",
            "dtype": str(self.dtype),
            "needs_grad (q, k, v)": str(self.needs_grad),
            "needs_grad (sinks)": str(self.sinks_need_grad),
            "scale": "default" if self.scale is None else repr(float(self.scale)),
            "softcap": "none" if self.softcap is None else repr(float(self.softcap)),
            "alibi_slopes": "none" if self.alibi_slopes is None else str(self.alibi_slopes),
            "sinks": "none" if self.sinks is None else str(self.sinks),
            "strategy": self.strategy,
            "return_lse": str(self.return_lse),
            "version": __version__,
        }
        return Contract(words)


def make_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: ContextLayout,
    kv_layout: ContextLayout | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    strategy: str = "auto",
    return_lse: bool = False,
    needs_grad: NeedsGrad | None = None,
) -> Call:
    """The call of `burst_attention` with these arguments. Local; does not block.

    needs_grad: whether q, k, v and sinks need gradients; with None the tensors decide. Raises
    InputError that names the argument, what was expected and what came.
    """
    if not isinstance(layout, ContextLayout):
        check_kinds(layout, kv_layout, mask, causal, return_lse)
    setup = layout.setup
    calls = setup.kept[Call]  # by the arguments that were checked
    if needs_grad is None:
        needs_grad = needs_of(q, k, v, sinks)
    if True in needs_grad:
        _check_not_of_inference(q, k, v, sinks)
    # A mask is compared only where masks of its class are known to be comparable. By its id it is
    # the very same mask: the call keeps the mask alive.
    named = mask if mask is None or type(mask) in setup.comparable else id(mask)
    try:
        kind: object = (
            layout, kv_layout, named, causal, type(causal), scale, type(scale), softcap,
            type(softcap), dropout_p, type(dropout_p), strategy, return_lse, type(return_lse),
            needs_grad,
            q.shape, q.dtype, q.device, q.layout, k.shape, k.dtype, k.device, k.layout,
            v.shape, v.dtype, v.device, v.layout, _kind_of(alibi_slopes), _kind_of(sinks),
        )  # fmt: skip
        call = calls.get(kind)
    except (AttributeError, RuntimeError, TypeError):
        kind = call = None  # an argument has the wrong type; the checks below say which one
    if call is None:
        check_kinds(layout, kv_layout, mask, causal, return_lse, dropout_p, alibi_slopes)
        chosen = mask if mask is not None else CAUSAL if causal else FULL
        kv_layout = kv_layout or layout
        _check_arguments(layout, kv_layout, scale, softcap, strategy)
        _check_tensors(q, k, v, layout, kv_layout, scale)
        check_scores(_WHERE, q, chosen, scale, softcap, alibi_slopes, sinks)
        check_mask(
            chosen,
            layout.seq_len,
            kv_layout.seq_len,
            batch=q.shape[0],
            shared=layout.runtime.world_size > 1,
        )
        sizes = (q.shape[0], q.shape[2], layout.seq_len, kv_layout.seq_len)
        call = Call(
            layout=layout,
            kv_layout=kv_layout,
            mask=chosen,
            scale=scale,
            softcap=softcap,
            alibi_slopes=None if alibi_slopes is None else tuple(alibi_slopes.shape),
            sinks=None if sinks is None else sinks.dtype,
            strategy=strategy,
            return_lse=return_lse,
            needs_grad=needs_grad[:3],
            sinks_need_grad=needs_grad[3],
            dtype=q.dtype,
            batch=q.shape[0],
            num_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            head_dim=q.shape[3],
            cells=cells_said(chosen, sizes, q.device),
            v_head_dim=v.shape[3],
        )
        setup.comparable.add(type(chosen))
        if kind is not None:
            # The call keeps the mask alive, so that no other mask can get the same id.
            calls.put(kind, call)
    elif len(calls) > calls.capacity // 2:
        calls.put(kind, call)  # used again, so it goes last; with few calls none goes soon
    return call


def needs_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> NeedsGrad:
    """Whether each tensor needs a gradient: autograd is on and the tensor requires one."""
    wants = torch.is_grad_enabled()
    needs_q, needs_k, needs_v, needs_sinks = (
        wants and isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v, sinks)
    )
    return needs_q, needs_k, needs_v, needs_sinks


def _check_not_of_inference(*tensors: torch.Tensor | None) -> None:
    """Raises InputError for a tensor that autograd cannot keep for the backward."""
    for name, x in zip(("q", "k", "v", "sinks"), tensors, strict=True):
        if isinstance(x, torch.Tensor) and x.is_inference():
            raise InputError(
                f"{_WHERE}: {name} was made in inference mode, and another argument requires grad; "
                f"pass {name}.clone(), or call under torch.no_grad()"
            )


def _kind_of(x: torch.Tensor | None) -> object:
    """The properties of slopes or sinks on which a call depends, except their values."""
    return x if x is None else (x.shape, x.dtype, x.device, x.layout, x.requires_grad)


def check_kinds(
    layout: object,
    kv_layout: object,
    mask: object,
    causal: object,
    return_lse: object,
    dropout_p: object = 0.0,
    alibi_slopes: object = None,
) -> None:
    """Checks what each of these arguments is. Raises InputError.

    The compiler traces this function: a compiled call reads the numbers of layouts and masks, and
    decides by the two flags, before the op that checks the rest.
    """
    where = _WHERE
    for name, given in (("layout", layout), ("kv_layout", kv_layout)):
        if not isinstance(given, ContextLayout) and (name == "layout" or given is not None):
            raise InputError(
                f"{where}: {name} must come from ctx.layout(...), got {type(given).__name__}"
            )
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise InputError(f"{where}: {name} must be True or False, got {flag!r}")
    if causal and mask is not None:
        raise InputError(
            f"{where}: give mask or causal=True, not both; Causal() & mask combines them"
        )
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or dropout_p != 0:
        raise InputError(
            f"{where}: dropout_p must be 0, got {dropout_p!r}: attention is exact here, and which "
            "probabilities are dropped would depend on the ranks and the strategy; use dropout on "
            "the output instead"
        )
    if isinstance(alibi_slopes, torch.Tensor) and alibi_slopes.requires_grad:
        raise InputError(
            f"{where}: alibi_slopes must not require grad, because their gradient is not computed; "
            "pass alibi_slopes.detach()"
        )
    if mask is not None and not isinstance(mask, Mask):
        raise InputError(
            f"{where}: mask must be a burst_rt.Mask such as burst_rt.Causal(), got "
            f"{type(mask).__name__}"
        )


def _check_arguments(
    layout: ContextLayout,
    kv_layout: ContextLayout,
    scale: float | None,
    softcap: float | None,
    strategy: str,
) -> None:
    """Checks everything else but tensors and the mask. Raises InputError."""
    where = _WHERE
    if layout.setup is not kv_layout.setup:
        raise InputError(
            f"{where}: layout and kv_layout must belong to one context, got layouts of two "
            "contexts; make both with the layout(...) of the same context"
        )
    check_name(strategy)
    check_factors(where, scale, softcap)


def check_factors(where: str, scale: object, softcap: object) -> None:
    """Raises InputError where one of them is neither None nor a number above 0."""
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not _is_positive(number):
            raise InputError(
                f"{where}: {name} must be None or a finite number above 0, got {number!r}"
            )


def _is_positive(scale: object) -> bool:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        return False
    try:
        # Fused kernels mask a score by adding -inf, and scale afterwards. A scale of 0 or less
        # would give NaN where scores are masked.
        return scale > 0 and math.isfinite(scale)
    except OverflowError:  # an int beyond every float
        return False


def _check_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: ContextLayout,
    kv_layout: ContextLayout,
    scale: float | None,
) -> None:
    """Checks this rank's tensors. Raises InputError."""
    device = layout.runtime.device
    for name, x in (("q", q), ("k", k), ("v", v)):
        where = f"{_WHERE}: {name}"
        if not isinstance(x, torch.Tensor):
            raise InputError(f"{where} must be a torch.Tensor, got {type(x).__name__}")
        expected = f"{where} must be a dense tensor [batch, tokens, heads, head_dim], got"
        if x.is_nested:
            raise InputError(f"{expected} a nested one")
        if x.layout != torch.strided or x.ndim != 4:
            raise InputError(f"{expected} {x.layout} of shape {tuple(x.shape)}")
        if x.device != device:
            raise InputError(
                f"{where} must be on {device}, the context's device, got {x.device}; move it with "
                f"{name}.to(ctx.device)"
            )
        if x.dtype not in DTYPES:
            raise InputError(
                f"{where} must be float64, float32, bfloat16 or float16, got {x.dtype}"
            )
        if 0 in (x.shape[0], x.shape[2], x.shape[3]):
            raise InputError(
                f"{where} must have a batch size, a number of heads and a head_dim of at least 1, "
                f"got shape {tuple(x.shape)}"
            )
        own, argument = (layout, "layout") if name == "q" else (kv_layout, "kv_layout")
        if own is layout:
            argument = "layout"
        if x.shape[1] != own.shard_len:
            raise InputError(
                f"{where} must be [batch, this rank's {own.shard_len} of {own.seq_len} tokens, "
                f"heads, head_dim] ({argument}: {own.kind}), got {tuple(x.shape)}; "
                f"{_remedy(name, x, own, argument)}"
            )
        if x.dtype != q.dtype:
            raise InputError(f"{where} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.shape[0] != q.shape[0]:
            raise InputError(f"{where} must have q's batch size {q.shape[0]}, got {x.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise InputError(
            f"burst_attention: k must have q's head_dim {q.shape[3]}, got {k.shape[3]}"
        )
    if v.shape[2] != k.shape[2]:
        raise InputError(f"burst_attention: v must have k's {k.shape[2]} heads, got {v.shape[2]}")
    wide = sum_dtype(q.dtype)
    if scale is not None and not 0 < torch.tensor(scale, dtype=wide).item() < math.inf:
        # Fused kernels would turn masked scores into NaN.
        raise InputError(
            f"burst_attention: scale must be finite and above 0 in {wide}, in which scores are "
            f"computed, got {scale!r}"
        )
    if q.shape[2] % k.shape[2]:
        raise InputError(
            "burst_attention: the number of q's heads must be a multiple of the number of k's "
            f"heads, got {q.shape[2]} and {k.shape[2]}"
        )


def _remedy(name: str, x: torch.Tensor, own: ContextLayout, argument: str) -> str:
    """Advice about a tensor whose dimension 1 is not this rank's tokens."""
    if x.shape[1] != own.seq_len:
        for dim in (2, 0):
            if x.shape[dim] == own.shard_len:
                return f"give {name}.transpose({min(1, dim)}, {max(1, dim)})"
    cut = f"cut the model's inputs with burst_rt.shard_batch or {argument}.shard"
    return f"{cut}, not {name} alone" if own.seq_len in x.shape[:3] else cut


def check_scores(
    where: str,
    q: torch.Tensor,
    mask: Mask,
    scale: float | None,
    softcap: float | None,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Checks what changes the scores; the factors are numbers above 0. Raises InputError."""
    if softcap is not None:
        wide = sum_dtype(q.dtype)
        cap = torch.tensor(softcap, dtype=wide)
        inside = (q.shape[3] ** -0.5 if scale is None else scale) / cap
        if not (0 < cap.item() < math.inf and 0 < inside.item() < math.inf):
            raise InputError(
                f"{where}: softcap, and scale / softcap, must be finite and above 0 in {wide}, in "
                f"which scores are computed, got softcap {softcap!r} and scale {scale!r}"
            )
    if slopes is not None:
        batch, _, heads, _ = q.shape
        _check_of_heads(f"{where}: alibi_slopes", slopes, q, ((heads,), (batch, heads)))
        if mask.mover is not None:
            raise InputError(
                f"{where}: alibi_slopes go by the distance in the whole sequence, and "
                f"{mask.mover!r} moves queries in their documents; give documents of as many "
                "queries as keys"
            )
    if sinks is not None:
        _check_of_heads(f"{where}: sinks", sinks, q, ((q.shape[2],),))


def _check_of_heads(
    where: str, x: torch.Tensor, q: torch.Tensor, shapes: tuple[tuple[int, ...], ...]
) -> None:
    """Checks a tensor that has a number for each head. Raises InputError."""
    allowed = " or ".join(map(str, shapes))
    if not isinstance(x, torch.Tensor):
        raise InputError(
            f"{where} must be a torch.Tensor of shape {allowed}, got {type(x).__name__}"
        )
    if x.is_nested or x.layout != torch.strided or tuple(x.shape) not in shapes:
        got = "a nested one" if x.is_nested else f"{x.layout} of shape {tuple(x.shape)}"
        raise InputError(
            f"{where} must be a dense tensor of shape {allowed}, a number for each of q's heads, "
            f"got {got}"
        )
    if x.dtype not in DTYPES:
        raise InputError(f"{where} must be float64, float32, bfloat16 or float16, got {x.dtype}")
    if x.device != q.device:
        raise InputError(f"{where} must be on {q.device}, q's device, got {x.device}")


def check_values(where: str, qkv: QKV, terms: ScoreTerms) -> None:
    """Raises InputError where a tensor holds a value that is not finite. Reads all values."""
    tensors = qkv._asdict() | {"alibi_slopes": terms.alibi_slopes, "sinks": terms.sinks}
    for name, x in tensors.items():
        if x is not None and not bool(torch.isfinite(x).all()):
            raise InputError(
                f"{where}: {name} must hold finite values (check_finite is on), got inf or NaN"
            )
