"""One rank's result for the next token, on every rank: logits, random state, the end of a text.

All ranks then choose the same token, greedily, by chance or among beams, and stop at the same.
"""

from __future__ import annotations

from typing import Any

import torch

from burst_rt.context import Context

__all__ = ["bytes_of", "of_rank_0", "spread"]


def spread(ctx: Context, logits: torch.Tensor, source: int) -> torch.Tensor:
    """The logits of rank `source` and the random state of rank 0, on every rank. Collective."""
    if ctx.world_size == 1:
        return logits
    random = _random_state(ctx.device)
    payload = (bytes(bytes_of(random)) if ctx.rank == 0 else b"") + (
        bytes(bytes_of(logits)) if ctx.rank == source else b""
    )
    everyones = _gathered(ctx, "logits", logits, payload)
    if ctx.rank:
        _set_random_state(ctx.device, _tensor_of(everyones[0][: len(random)], torch.uint8))
    if ctx.rank == source:
        return logits
    found = everyones[source][0 if source else len(random) :]
    return _tensor_of(found, logits.dtype).view(logits.shape).to(logits.device)


def of_rank_0(ctx: Context, x: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor on every rank; the others have one of its shape and dtype. Collective."""
    payload = bytes(bytes_of(x)) if ctx.rank == 0 else b""
    everyones = _gathered(ctx, "stopping criteria", x, payload)
    return x if ctx.rank == 0 else _tensor_of(everyones[0], x.dtype).view(x.shape)


def _gathered(ctx: Context, what: str, x: torch.Tensor, payload: bytes) -> list[bytes]:
    """Every rank's bytes, once the ranks agree on what they are of. Collective."""
    runtime = ctx.runtime
    about = {"call": f"hf.Cache {what}", "shape": f"{x.dtype} {tuple(x.shape)}"}
    return runtime.collective(about, lambda: runtime.control.allgather(payload)).result()


def _tensor_of(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)


def _random_state(device: torch.device) -> torch.Tensor:
    """The states of the CPU's generator and of the device's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    own = len(torch.get_rng_state())
    torch.set_rng_state(state[:own])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[own:], device)


def bytes_of(x: torch.Tensor) -> Any:
    """A tensor's values, as a buffer of bytes."""
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
