"""What the ranks must agree on before a call sends anything, and how they find out that they do
not.

`check_call` looks at one rank's arguments. `Agreement` compares all ranks': one small non-blocking
allreduce opens every call. If a rank brings an error or a different description, a second round
tells everybody, and every rank raises the same class. Nothing has been sent then, and the context
stays usable.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from burst_rt import errors
from burst_rt.attention.mask_check import check_mask
from burst_rt.errors import BurstError, ContractMismatch, InputError
from burst_rt.kernels import sum_dtype
from burst_rt.planning.masks import Mask
from burst_rt.planning.strategies import check_name
from burst_rt.transport import ControlGroup

if TYPE_CHECKING:
    from burst_rt.attention.sharding import ContextLayout
    from burst_rt.drivers import Watch

__all__ = ["Agreement", "CallSpec", "check_call", "check_spec", "digest_of"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class CallSpec:
    """The arguments of one attention call that are not tensors. Immutable; `needs_grad` is for q,
    k, v.
    """

    layout: ContextLayout
    kv_layout: ContextLayout
    mask: Mask
    scale: float | None
    strategy: str
    return_lse: bool
    needs_grad: tuple[bool, bool, bool]


def check_spec(spec: CallSpec) -> None:
    """Checks everything but tensors. Raises InputError."""
    where = "burst_attention"
    if spec.layout.context is not spec.kv_layout.context:
        raise InputError(
            f"{where}: layout and kv_layout belong to different contexts; make both with the same "
            "ctx.layout(...)"
        )
    if not isinstance(spec.mask, Mask):
        raise InputError(
            f"{where}: mask must be a burst_rt.Mask such as burst_rt.Causal(), got "
            f"{type(spec.mask).__name__}"
        )
    check_mask(
        spec.mask,
        spec.layout.seq_len,
        spec.kv_layout.seq_len,
        shared=spec.layout.context.world_size > 1,
    )
    check_name(spec.strategy)
    if spec.scale is not None and not _is_positive(spec.scale):
        raise InputError(
            f"{where}: scale must be None or a finite number above 0, got {spec.scale!r}"
        )
    if not isinstance(spec.return_lse, bool):
        raise InputError(f"{where}: return_lse must be True or False, got {spec.return_lse!r}")


def _is_positive(scale: object) -> bool:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        return False
    try:
        # Fused kernels mask by adding -inf and then scale: 0 and less would make NaN of what is
        # masked.
        return scale > 0 and math.isfinite(scale)
    except OverflowError:  # an int beyond every float
        return False


def check_call(
    spec: CallSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, values: bool = True
) -> None:
    """Checks this rank's tensors against the spec. Raises InputError that names the argument, what
    was expected and what came.

    values: whether also what they hold, where the context is told to check that it is finite.
    """
    ctx = spec.layout.context
    for name, x in (("q", q), ("k", k), ("v", v)):
        where = f"burst_attention: {name}"
        if not isinstance(x, torch.Tensor):
            raise InputError(f"{where} must be a torch.Tensor, got {type(x).__name__}")
        if x.is_nested:
            raise InputError(
                f"{where} must be a dense tensor [batch, tokens, heads, head_dim], got a nested one"
            )
        if x.layout != torch.strided or x.ndim != 4:
            raise InputError(
                f"{where} must be a dense tensor [batch, tokens, heads, head_dim], got {x.layout} "
                f"of shape {tuple(x.shape)}"
            )
        if x.device != ctx.device:
            raise InputError(
                f"{where} must be on {ctx.device}, the context's device, got {x.device}; move it "
                f"with {name}.to(ctx.device)"
            )
        if x.dtype not in DTYPES:
            raise InputError(
                f"{where} must be float64, float32, bfloat16 or float16, got {x.dtype}"
            )
        if 0 in (x.shape[0], x.shape[2], x.shape[3]):
            raise InputError(
                f"{where} must have at least one batch row, one head and one head_dim, got shape "
                f"{tuple(x.shape)}"
            )
        layout, argument = (
            (spec.layout, "layout")
            if name == "q"
            else (spec.kv_layout, "kv_layout" if spec.kv_layout is not spec.layout else "layout")
        )
        if x.shape[1] != layout.shard_len:
            raise InputError(
                f"{where} must hold this rank's {layout.shard_len} of {layout.seq_len} tokens "
                f"({argument}: {layout.kind}), "
                f"got {x.shape[1]}; cut it with {argument}.shard({name})"
            )
        if x.dtype != q.dtype:
            raise InputError(f"{where} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.shape[0] != q.shape[0]:
            raise InputError(f"{where} must have q's batch size {q.shape[0]}, got {x.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise InputError(
            f"burst_attention: k must have q's head_dim {q.shape[3]}, got {k.shape[3]}"
        )
    if v.shape[3] != k.shape[3]:
        raise InputError(
            "burst_attention: v with another head_dim than k is not supported: k has "
            f"{k.shape[3]}, v {v.shape[3]}"
        )
    if v.shape[2] != k.shape[2]:
        raise InputError(f"burst_attention: v must have k's {k.shape[2]} heads, got {v.shape[2]}")
    if (
        spec.scale is not None
        and not 0 < torch.tensor(spec.scale, dtype=sum_dtype(q.dtype)).item() < math.inf
    ):
        # Fused kernels would make NaN of what is masked.
        raise InputError(
            f"burst_attention: scale {spec.scale!r} is 0 or infinite in {sum_dtype(q.dtype)}, in "
            "which scores are computed"
        )
    if q.shape[2] % k.shape[2]:
        raise InputError(
            "burst_attention: q's heads must be a multiple of k's (grouped heads), got "
            f"{q.shape[2]} and {k.shape[2]}"
        )
    if values and ctx.check_finite:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not bool(torch.isfinite(x).all()):
                raise InputError(
                    f"burst_attention: {name} holds values that are not finite (check_finite is on)"
                )


def digest_of(description: Mapping[str, str]) -> int:
    """A 62-bit digest of a description, the same on every rank and in every process."""
    text = repr(sorted(description.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


class Agreement:
    """One rank's side of agreeing on a call. `description` says in words what the call is; `error`
    is what this rank has to complain of.

    Serves as the `Opening` of a driver: `start`, `test`, `failure`. When it fails, `settle`
    (collective) raises the common error.
    """

    def __init__(
        self,
        control: ControlGroup,
        number: int,
        description: Mapping[str, str],
        digest: int,
        error: BurstError | None = None,
    ) -> None:
        self._control = control
        self.number = number
        self._description = description
        self._digest = digest
        self._error = error
        self._verdict: list[int] | None = None

    def start(self) -> None:
        """Begins the allreduce. Never blocks."""
        code = 1 if self._error else 0
        self._pending = self._control.allreduce_max(
            [code, self.number, -self.number, self._digest, -self._digest]
        )

    def test(self) -> bool:
        """True once all ranks have entered. Never blocks."""
        if self._verdict is None and self._pending.test():
            self._verdict = self._pending.result()
        return self._verdict is not None

    def failure(self) -> BurstError | None:
        """After `test`: a ContractMismatch if the ranks do not agree (`settle` finds out more), or
        None.
        """
        assert self._verdict is not None
        code, high_number, low_number, high_digest, low_digest = self._verdict
        if code == 0 and high_number == -low_number and high_digest == -low_digest:
            return None
        return ContractMismatch("the ranks do not agree on this call", rank=self._control.rank)

    def settle(self, watch: Watch, timeout_s: float) -> BurstError:
        """Collective, after `failure` on every rank: what every rank is to raise. Blocks at most
        `timeout_s`.
        """
        mine = {
            "error": None
            if self._error is None
            else [type(self._error).__name__, self._error.message],
            "number": self.number,
            "call": dict(self._description),
        }
        pending = self._control.allgather(json.dumps(mine).encode())
        watch.wait_for(pending, timeout_s, "the comparison of their calls")
        return _common_error([json.loads(text) for text in pending.result()], self._control.rank)


def _common_error(said: list[dict[str, object]], rank: int) -> BurstError:
    """The error all ranks raise: the first one a rank brought, else what differs and where."""
    for peer, word in enumerate(said):
        brought = word["error"]
        if isinstance(brought, list):
            error: BurstError = getattr(errors, brought[0])(
                f"rank {peer}: {brought[1]}", rank=rank, peer=peer
            )
            return error
    calls = [dict(call) if isinstance(call := word["call"], dict) else {} for word in said]
    for call, word in zip(calls, said, strict=True):
        call["number of the call"] = str(word["number"])
    differences = []
    odd: set[int] = set()
    for field in sorted({name for call in calls for name in call}):
        values = [call.get(field, "nothing") for call in calls]
        if len(set(values)) > 1:
            common, count = Counter(values).most_common(1)[0]
            others = [r for r, value in enumerate(values) if value != common]
            odd.update(others)
            # Where there is no majority every rank's value is told.
            has_majority = 2 * count > len(values)
            told = ", ".join(
                f"{values[r]} on rank {r}" for r in (others if has_majority else range(len(values)))
            )
            differences.append(
                f"{field}: {common} on most ranks, {told}" if has_majority else f"{field}: {told}"
            )
    message = (
        f"the ranks entered one call with different arguments ({'; '.join(differences)}). "
        "Every rank must pass the same"
    )
    return ContractMismatch(message, rank=rank, peer=min(odd, default=None))
