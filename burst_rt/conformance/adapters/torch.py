"""torch's adapter: `context_parallel` around scaled_dot_product_attention.

Its ring replaces attention's operators for GPUs; torch 2.13 has none for CPUs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from burst_rt.conformance.cases import AttentionCase
from burst_rt.conformance.spread import only_takes

DEVICE = "cuda"

Tensors = dict[str, torch.Tensor]


def attention(case: AttentionCase, tensors: Tensors) -> Tensors:
    """As torch's tutorial has it, with `is_causal`, `scale` and `enable_gqa`."""
    only_takes(case, "causal", "scale", "kv_heads")
    mesh = init_device_mesh(tensors["q"].device.type, (dist.get_world_size(),))
    parts = [x.transpose(1, 2).contiguous() for x in tensors.values()]
    with context_parallel(
        mesh, buffers=parts, buffer_seq_dims=[2] * len(parts), no_restore_buffers=set(parts)
    ):
        q, k, v = (x.requires_grad_(case.train) for x in parts[:3])
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=case.causal, scale=case.scale, enable_gqa=case.kv_heads < case.heads
        )
        results = {"out": out.detach()}
        if case.train:
            grads = torch.autograd.grad(out, (q, k, v), parts[3])
            results |= {f"d{name}": x for name, x in zip("qkv", grads, strict=True)}
    whole = context_parallel_unshard(mesh, list(results.values()), [2] * len(results))
    return {name: x.transpose(1, 2) for name, x in zip(results, whole, strict=True)}
