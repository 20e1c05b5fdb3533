"""Rank program: attention of DTensors on a mesh of cp x tp, and what is refused of them.

Each rank prints "fine" where values and gradients are those of whole tensors.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from plain_models import Decoder
from tolerances import ERROR
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn import functional

import burst_rt
from burst_rt import Context
from burst_rt.errors import InputError

_TOKENS, _HEADS = 12, 4


def _whole(heads: int, seed: int, tokens: int = _TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, heads, 8, generator=generator, dtype=torch.float64)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert isinstance(found, DTensor)
    error = (found.full_tensor() - expected).norm() / expected.norm()
    assert error.item() < ERROR[torch.float64]


def values(ctx: Context, mesh: DeviceMesh, over_tp: Placement) -> None:
    """Causal attention with grouped heads; the loss reads out and lse."""
    whole = [_whole(heads, seed) for seed, heads in enumerate((_HEADS, 2, 2))]
    parts = [distribute_tensor(x, mesh, [Shard(1), over_tp]).requires_grad_() for x in whole]
    layout = ctx.layout(_TOKENS, "contiguous")
    out, lse = burst_rt.burst_attention(*parts, layout=layout, causal=True, return_lse=True)
    assert isinstance(out, DTensor)
    assert isinstance(lse, DTensor)
    assert out.placements == (Shard(1), over_tp)
    assert lse.placements == (Shard(2), Shard(1) if over_tp == Shard(2) else over_tp)
    for x in whole:
        x.requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in whole)
    right = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    hidden = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).triu(1)
    right_lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    _close(out, right.transpose(1, 2))
    _close(lse, right_lse)
    (right.sin().sum() + right_lse.cos().sum()).backward()
    loss = out.sin().sum() + lse.cos().sum()
    assert isinstance(loss, DTensor)
    loss.full_tensor().backward()
    for part, x in zip(parts, whole, strict=True):
        assert part.grad is not None
        assert x.grad is not None
        _close(part.grad, x.grad)


def compiled(ctx: Context, mesh: DeviceMesh) -> None:
    """A compiled program breaks at the call."""
    x: torch.Tensor = distribute_tensor(_whole(2, 0), mesh, [Shard(1), Replicate()])
    layout = ctx.layout(_TOKENS, "contiguous")

    def attend(x: torch.Tensor) -> torch.Tensor:
        return burst_rt.burst_attention(x * 2, x, x, layout=layout)

    found = torch.compile(attend, backend="aot_eager")(x)
    assert isinstance(found, DTensor)
    eager = attend(x)
    assert isinstance(eager, DTensor)
    _close(found, eager.full_tensor())


def of_a_model(ctx: Context, mesh: DeviceMesh) -> None:
    """A plain model whose tokens are DTensors, inside `over_ranks`."""
    torch.manual_seed(0)
    model = Decoder().double()
    x = torch.randn(1, _TOKENS, 16, dtype=torch.float64)
    expected = model(x)
    for parameter_name, parameter in list(model.named_parameters()):
        owner_name, _, name = parameter_name.rpartition(".")
        replicated = distribute_tensor(parameter.detach(), mesh, [Replicate(), Replicate()])
        setattr(model.get_submodule(owner_name), name, torch.nn.Parameter(replicated))
    with burst_rt.over_ranks(ctx, ctx.layout(_TOKENS, "contiguous")):
        found = model(distribute_tensor(x, mesh, [Shard(1), Replicate()]))
    _close(found, expected)


def refusals(ctx: Context, mesh: DeviceMesh) -> None:
    layout = ctx.layout(_TOKENS, "contiguous")

    def refused(words: str, *qkv: torch.Tensor, **options: object) -> None:
        given = {"layout": layout} | options
        with pytest.raises(InputError, match=words):
            burst_rt.burst_attention(*qkv, **given)  # type: ignore[call-overload]

    def part(*placements: Placement, tokens: int = _TOKENS) -> torch.Tensor:
        return distribute_tensor(_whole(2, 0, tokens), mesh, placements)

    good, other_axis = part(Shard(1), Replicate()), part(Replicate(), Shard(1))
    refused("sharded over the context's ranks, which are the processes", *(other_axis,) * 3)
    refused("must be sharded over one axis", *(part(Replicate(), Replicate()),) * 3)
    refused("must be sharded over one axis", *(part(Shard(1), Shard(1)),) * 3)
    refused(r"must be Shard\(1\)", *(part(Shard(1), Shard(3)),) * 3)
    summed = DTensor.from_local(good.to_local(), mesh, [Shard(1), Partial()])  # type: ignore[attr-defined]
    refused(r"must be Shard\(1\)", *(summed,) * 3)
    refused("k must have q's mesh and placements", good, other_axis, good)
    refused("got plain k", good, good.to_local(), good)  # type: ignore[attr-defined]
    refused("sinks must be a plain tensor", *(good,) * 3, sinks=other_axis)
    odd = ctx.layout(13, "contiguous")
    refused("DTensor cuts as torch.chunk does", *(part(Shard(1), Replicate(), tokens=13),) * 3,
            layout=odd)  # fmt: skip


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    with burst_rt.init(group=mesh["cp"], timeout_s=120) as ctx:
        values(ctx, mesh, Shard(2))
        values(ctx, mesh, Shard(0))
        values(ctx, mesh, Replicate())
        refusals(ctx, mesh)
        compiled(ctx, mesh)
        of_a_model(ctx, mesh)
        print(f"rank {dist.get_rank()} is fine")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
