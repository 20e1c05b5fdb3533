"""What adapters share: whole tensors cut for a rank, and put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from burst_rt.conformance.cases import AttentionCase, NotOffered
from burst_rt.conformance.models import gradients

__all__ = ["attend_spread", "gather_places", "mean_gradients", "only_takes", "rank_places"]

Tensors = dict[str, torch.Tensor]


def only_takes(case: AttentionCase, *fields: str) -> None:
    """Raises NotOffered if a case asks for something other than plain causal attention.

    fields: those of the case that the library has an argument for.
    """
    plain = AttentionCase(
        case.name, case.length, case.batch, case.heads, case.heads, case.head_dim, train=case.train
    )
    for name, value in vars(case).items():
        if name not in fields and value != getattr(plain, name):
            raise NotOffered(f"no argument for {name}")


def rank_places(length: int, *, zigzag: bool = False) -> torch.Tensor:
    """The places of this rank's tokens: consecutive, or the first and last of 2 x ranks chunks.

    Where the length does not divide, the first ranks have one more.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if not zigzag:
        return torch.arange(length, device="cpu").tensor_split(world)[rank]
    chunks = torch.arange(length, device="cpu").tensor_split(2 * world)
    return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]))


def gather_places(shard: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor `[batch, tokens, ...]` whose shards hold these places. Collective."""
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, (shard.detach().cpu(), places.cpu()))
    order = torch.cat([places for _, places in shards])
    whole = torch.cat([shard for shard, _ in shards], 1)
    return whole[:, order.argsort()]


def attend_spread(
    tensors: Tensors,
    places: torch.Tensor,
    attend: Callable[..., torch.Tensor],
    padded: int = 0,
) -> Tensors:
    """The results of a case: attends with this rank's tokens, goes backward, gathers. Collective.

    tensors: q, k, v, and what else of `draw_tensors` the case has; without dout nothing goes
    backward. attend(q, k, v, sinks) returns this rank's out; it gets `[batch, tokens, heads,
    head_dim]`, leaves that require grad where gradients are asked for, and None for no sinks.
    padded: the length to which zeros are added before the cut, for libraries that need one that
    divides by the ranks; default: none are added.
    """
    train = "dout" in tensors
    length = tensors["q"].shape[1]
    more = (0, 0, 0, 0, 0, max(padded - length, 0))
    tensors = {
        n: x if n == "sinks" else torch.nn.functional.pad(x, more) for n, x in tensors.items()
    }
    inputs = [tensors[name][:, places].clone().requires_grad_(train) for name in "qkv"]
    sinks = tensors.get("sinks")
    if sinks is not None:
        sinks = sinks.clone().requires_grad_(train)
    out = attend(*inputs, sinks)
    results = {"out": gather_places(out, places)}
    if train:
        out.backward(tensors["dout"][:, places])
        for name, leaf in zip("qkv", inputs, strict=True):
            if leaf.grad is None:
                raise RuntimeError(f"no gradient of {name}")
            results[f"d{name}"] = gather_places(leaf.grad, places)
        if sinks is not None:
            dsinks = torch.zeros_like(sinks) if sinks.grad is None else sinks.grad.clone()
            dist.all_reduce(dsinks)
            results["dsinks"] = dsinks
    return {name: x if name == "dsinks" else x[:, :length] for name, x in results.items()}


def mean_gradients(model: Any) -> Tensors:
    """The mean of all ranks' gradients, as DDP and FSDP2 give it, by parameter. Collective."""
    named = gradients(model)
    for gradient in named.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return named
