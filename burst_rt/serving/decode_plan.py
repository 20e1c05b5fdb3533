"""The plan of a decode: a few new queries, which every rank has, and keys spread over the ranks.

A plan depends on shapes and on a bucket of lengths, never on a length or on what is seen: a cache
that grows by thousands of tokens takes a few plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from burst_rt.attention.planner import KernelPlan
from burst_rt.attention.state import AttentionState
from burst_rt.errors import InputError
from burst_rt.kernels import Work, pick_decode, sum_dtype
from burst_rt.planning.masks import Full
from burst_rt.planning.problem import ScoreFlags
from burst_rt.runtime.observer import Description
from burst_rt.scheduler import Schedule
from burst_rt.serving.decode_graph import Decode

__all__ = ["DecodePlan", "bucket_of", "plan_decode"]

# The smallest bucket: with so few keys a decode takes as long as its messages.
_FEW_KEYS = 1024


@dataclass(frozen=True, kw_only=True)
class DecodePlan(KernelPlan):
    """A decode on one rank, verified."""

    program: Decode

    def explain(self) -> str:
        """The plan in words."""
        memory = sum(part.size_bytes for part in (*self.slots, *self.chunks))
        return (
            f"decode: {self.program}\n"
            f"  this rank sends {self.bytes_sent():,} bytes\n"
            f"  kernel {self.kernel.name}: {self.picked.reason}\n"
            f"  slots {memory:,} bytes\n"
            f"  {len(self.graph.tasks)} tasks on this rank"
        )

    def describe(self) -> Description:
        """See `Subject.describe`."""
        return Description(kind="decode", explain=self.explain(), problem=str(self.program))


def bucket_of(keys: int) -> int:
    """The number of keys that a plan is made for: the next power of two, and not a small one."""
    return max(_FEW_KEYS, 1 << max(0, keys - 1).bit_length())


def plan_decode(
    attention: AttentionState,
    q_shape: tuple[int, ...],
    num_kv_heads: int,
    v_head_dim: int,
    dtype: torch.dtype,
    *,
    keys: int,
    scores: ScoreFlags,
) -> DecodePlan:
    """The plan of a decode: kept, or made and verified. Local.

    keys: the most that a sequence may have over all ranks, the same on every rank. Raises
    InputError for ALiBi, and where no kernel fits.
    """
    if scores.alibi_slopes:
        raise InputError(
            "a decode has no ALiBi, got alibi_slopes; use a model with other positions"
        )
    runtime, bucket = attention.runtime, bucket_of(keys)
    key = (q_shape, num_kv_heads, v_head_dim, dtype, bucket, scores)
    plans = attention.kept[DecodePlan]
    plan = plans.get(key)
    if plan is None:
        batch, q_len, heads, head_dim = q_shape
        program = Decode(
            world_size=runtime.world_size, batch=batch, num_queries=q_len, num_heads=heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
            input_bytes=dtype.itemsize, sum_bytes=sum_dtype(dtype).itemsize, keys=bucket,
        )  # fmt: skip
        work = Work(runtime.device, dtype, head_dim, Full(), scores=scores, v_head_dim=v_head_dim)
        picked = pick_decode(work, attention.kernel)
        own = program.graph(runtime.rank, runtime.machine.lanes)
        schedule = Schedule.of(attention.planner.lowered(program, own))
        plan = DecodePlan(
            rank=runtime.rank, picked=picked, program_graph=own, schedule=schedule, program=program
        )
    plans.put(key, plan)
    return plan
