"""A mesh of 2 x 2 whose cp groups make contexts at once, as data parallel contexts do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import burst_rt

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
with burst_rt.init(group=mesh["cp"], device="cpu") as ctx:
    layout = ctx.layout(64)
    x = torch.randn(1, layout.shard_len, 2, 16)
    for _ in range(3):
        burst_rt.burst_attention(x, x, x, causal=True, layout=layout)
    dist.barrier()
dist.destroy_process_group()
