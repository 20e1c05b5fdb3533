"""Drawn calls that fit flash-linear-attention's kernels, and its own calls on whole sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from recurrences import Drawn, attend, drawn, errors, truth

import burst_rt

__all__ = ["KINDS", "fitting", "run", "worse_than_its_own"]

Tensor = torch.Tensor
KINDS = ("delta rule", "delta rule by channel", "linear attention", "state space")
# Of numbers of the usual size, so that the delta rule does not grow without bounds.
_SIZES = {"q": 0.5, "k": 0.25, "v": 1.0, "x": 1.0, "B": 0.5, "C": 0.5}


def fitting(
    seed: int, kind: str, world_size: int | None = None, dtype: torch.dtype = torch.float64
) -> Drawn:
    """A drawn call with heads of 16 channels, and numbers of this type."""
    case, gen = drawn(seed, kind, world_size), torch.Generator().manual_seed(seed)

    def wide(*shape: int) -> Tensor:
        return torch.randn(*shape, 16, generator=gen, dtype=torch.float64)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    tokens = {
        name: _SIZES[name] * wide(*x.shape[:-1]) if name in _SIZES else x
        for name, x in case.tokens.items()
    }
    if "channel" in kind:
        tokens["g"] = tokens["g"][..., :1] * torch.rand(16, generator=gen, dtype=torch.float64)
    heads = case.dstate.shape[:2]
    return replace(
        case,
        tokens={name: rounded(x) for name, x in tokens.items()},
        shared={name: rounded(x) for name, x in case.shared.items()},
        state=None if case.state is None else rounded(wide(*heads, 16)),
        dout=rounded(wide(*case.dout.shape[:-1])),
        dstate=rounded(wide(*heads, 16)),
    )


def run(case: Drawn, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """The first rank's results of a call by the library's kernels."""
    return burst_rt.run_local(
        case.world_size, lambda ctx: attend(ctx, case, dtype), device=device,
        recurrence_kernel="fla", timeout_s=120,
    )[0]  # fmt: skip


def worse_than_its_own(
    case: Drawn, dtype: torch.dtype, device: str
) -> dict[str, tuple[float, float]]:
    """Errors that are more than 1.5 times those of the library's own call, and these."""
    true = truth(case)
    ours = errors(run(case, dtype, device), true)
    theirs = errors(_whole_sequence(case, dtype, torch.device(device)), true)
    assert ours.keys() == theirs.keys()
    return {name: (e, theirs[name]) for name, e in ours.items() if not e < 1.5 * theirs[name]}


def _whole_sequence(case: Drawn, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """What the library's own functions make of a call with one row, named as the spec names it."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    leaves = {name: x.to(device, dtype).requires_grad_() for name, x in case.tokens.items()}
    begins = case.begins()[0].clone()
    begins[0] = False  # the sequence goes on from the initial state, unless a document begins
    bounds = torch.tensor([0, *begins.nonzero()[:, 0].tolist(), case.seq_len], device=device)
    states = torch.zeros(len(bounds) - 1, *case.dstate.shape[1:], device=device)
    state = None if case.state is None else case.state.to(device, torch.float32).requires_grad_()
    if state is not None and not case.begins()[0, 0]:
        states = torch.cat([state, states[1:]])
    options: dict[str, Any] = {"scale": case.options["scale"]}
    given, heads = dict(leaves), case.dstate.shape[1]
    if case.function == "linear_attention":
        function = chunk_simple_gla
        for name in ("q", "k"):
            x = leaves[name]
            given[name] = x.repeat_interleave(heads // x.shape[2], 2)
    else:
        function = chunk_kda if leaves["g"].ndim == 4 else chunk_gated_delta_rule
        options["use_qk_l2norm_in_kernel"] = case.options["use_qk_l2norm"]
    out, lasts = function(
        **given, **options, initial_state=states, output_final_state=True, cu_seqlens=bounds
    )
    loss = (out.double() * case.dout.to(device)).sum()
    if case.returns_state:
        loss = loss + case.world_size * (lasts[-1:].double() * case.dstate.to(device)).sum()
    loss.backward()
    found = {"out": out} | {f"d{name}": x.grad for name, x in leaves.items()}
    if case.returns_state:
        found["state"] = lasts[-1:]
    if state is not None:
        found["dinitial"] = torch.zeros_like(state) if state.grad is None else state.grad
    return {name: x.detach().cpu() for name, x in found.items() if x is not None}
