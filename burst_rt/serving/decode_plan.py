"""Decode: attention of a few new queries, which every rank has, to keys spread over the ranks.

The plan of a decode depends on shapes and on a bucket of lengths, never on a length or on what is
seen: a cache that grows by thousands of tokens takes a few plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from burst_rt.attention.planner import RankPlan
from burst_rt.attention.run import check_not_captured
from burst_rt.attention.setup import Setup
from burst_rt.drivers import is_out_of_memory
from burst_rt.errors import DeviceError, InputError
from burst_rt.kernels import QKV, ScoreTerms, Work, pick_decode, sum_dtype
from burst_rt.kernels.decode import Seen
from burst_rt.planning.masks import Full
from burst_rt.planning.problem import ScoreOptions
from burst_rt.runtime.agreement import AgreedWhen, Contract
from burst_rt.scheduler import Schedule
from burst_rt.serving.decode_graph import Decode
from burst_rt.serving.decode_run import DecodeRun

__all__ = ["DecodePlan", "bucket_of", "plan_decode", "run_decode"]

# The smallest bucket: with so few keys a decode takes as long as its messages.
_FEW_KEYS = 1024


@dataclass(frozen=True, kw_only=True)
class DecodePlan(RankPlan):
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


def bucket_of(keys: int) -> int:
    """The number of keys that a plan is made for: the next power of two, and not a small one."""
    return max(_FEW_KEYS, 1 << max(0, keys - 1).bit_length())


def run_decode(
    setup: Setup,
    contract: Contract,
    plan: DecodePlan,
    qkv: QKV,
    seen: Seen,
    *,
    scale: float | None,
    terms: ScoreTerms,
) -> torch.Tensor:
    """Attention of a few queries to the keys of all ranks, under `plain_math`. Collective.

    The ranks must have agreed on the call before: nothing is compared here. Blocks until this
    rank's part is done, or issued; no rank may stay away for longer than the runtime's timeout_s.

    contract: has the call's name. plan: made by `plan_decode` for these shapes, type and terms.
    q: `[batch, q_len, heads, d]`, the same on every rank. k and v: this rank's shard, `[batch,
    columns, kv heads, d and v's d]`; columns may be 0, and differ from rank to rank. seen: which
    columns of the shard each query sees. terms: softcap and sinks.

    Returns out `[batch, q_len, heads, v's d]` in q's type, the same bits on every rank; 0 in a row
    that sees no key on any rank. Raises InputError under a CUDA graph, DeviceError where memory
    runs out, PeerLost and Stalled.
    """
    runtime = setup.runtime
    check_not_captured(runtime.device)
    try:
        run = DecodeRun(
            plan, runtime.machine, qkv, seen,
            scale=1.0 / math.sqrt(plan.program.head_dim) if scale is None else scale,
            terms=terms if terms.sinks is None else terms.bound(qkv.q.dtype, 1),
            poison=setup.poison,
        )  # fmt: skip
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        message = f"{contract.call}: out of memory on {runtime.device}; {plan.explain()}"
        failed = DeviceError(message, rank=runtime.rank)
        failed.__cause__ = error
        runtime.fail(failed)
    _, free = runtime.perform(
        contract, plan.schedule, run.operations, run.memory,
        subject=plan, takes=plan.explain, agreed=AgreedWhen.WITH_OTHERS,
    )  # fmt: skip
    runtime.machine.give_back(plan, run.slots, free)
    run.forget()
    return run.out


def plan_decode(
    setup: Setup,
    q_shape: tuple[int, ...],
    num_kv_heads: int,
    v_head_dim: int,
    dtype: torch.dtype,
    *,
    keys: int,
    scores: ScoreOptions,
) -> DecodePlan:
    """The plan of a decode: kept, or made and verified. Local.

    keys: the most that a sequence may have over all ranks, the same on every rank. Raises
    InputError for ALiBi, and where no kernel fits.
    """
    if scores.alibi_slopes:
        raise InputError(
            "a decode has no ALiBi, got alibi_slopes; use a model with other positions"
        )
    runtime, bucket = setup.runtime, bucket_of(keys)
    key = (q_shape, num_kv_heads, v_head_dim, dtype, bucket, scores)
    plans = setup.kept[DecodePlan]
    plan = plans.get(key)
    if plan is None:
        batch, q_len, heads, head_dim = q_shape
        program = Decode(
            world_size=runtime.world_size, batch=batch, num_queries=q_len, num_heads=heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
            input_bytes=dtype.itemsize, sum_bytes=sum_dtype(dtype).itemsize, keys=bucket,
        )  # fmt: skip
        work = Work(runtime.device, dtype, head_dim, Full(), scores=scores, v_head_dim=v_head_dim)
        picked = pick_decode(work, setup.kernel)
        own = program.graph(runtime.rank, runtime.machine.lanes)
        schedule = Schedule.of(setup.planner.lowered(program, own))
        plan = DecodePlan(
            rank=runtime.rank, picked=picked, program_graph=own, schedule=schedule, program=program
        )
    plans.put(key, plan)
    return plan
