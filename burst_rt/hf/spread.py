"""One rank's result for the next token, on every rank: logits, random state, the end of a text.

All ranks then choose the same token, greedily, by chance or among beams, and stop at the same.
"""

from __future__ import annotations

import torch

from burst_rt.context import Context
from burst_rt.runtime.objects import all_gather, bytes_of

__all__ = ["of_rank_0", "spread"]


def spread(ctx: Context, logits: torch.Tensor, source: int) -> torch.Tensor:
    """The logits of rank `source` and the random state of rank 0, on every rank. Collective."""
    if ctx.world_size == 1:
        return logits
    gathered = _gather(
        ctx,
        "logits",
        logits,
        random=_random_state(ctx.device) if ctx.rank == 0 else None,
        logits=logits if ctx.rank == source else None,
    )
    if ctx.rank:
        _set_random_state(ctx.device, _tensor_of(gathered[0]["random"], torch.uint8))
    if ctx.rank == source:
        return logits
    values = _tensor_of(gathered[source]["logits"], logits.dtype)
    return values.view(logits.shape).to(logits.device)


def of_rank_0(ctx: Context, x: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor on every rank; the others have one of its shape and dtype. Collective."""
    gathered = _gather(ctx, "stopping criteria", x, answer=x if ctx.rank == 0 else None)
    return x if ctx.rank == 0 else _tensor_of(gathered[0]["answer"], x.dtype).view(x.shape)


def _gather(
    ctx: Context, what: str, x: torch.Tensor, **tensors: torch.Tensor | None
) -> list[dict[str, bytes]]:
    """The bytes of every rank's tensors, once the ranks agree on the form of x. Collective."""
    about = {"call": f"hf.Cache {what}", "shape": f"{x.dtype} {tuple(x.shape)}"}
    values = {name: bytes(bytes_of(y)) for name, y in tensors.items() if y is not None}
    return all_gather(ctx.runtime, values, about)


def _tensor_of(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)


def _random_state(device: torch.device) -> torch.Tensor:
    """The states of the CPU's generator and of the device's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)
