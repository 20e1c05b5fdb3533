"""A decode on tensors: the rank's own block, and the merge of all ranks' blocks.

A block is the `Partial` of a rank's keys, as one stretch of the sums' type: out, then lse.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from burst_rt.attention.execute.ring import SlotRun, dense
from burst_rt.attention.run import check_not_captured
from burst_rt.attention.state import AttentionState
from burst_rt.drivers import is_out_of_memory
from burst_rt.errors import DeviceError
from burst_rt.kernels import QKV, ScoreOptions, sum_dtype
from burst_rt.kernels.decode import Partial, SeenColumns
from burst_rt.runtime.agreement import AgreedWhen, Contract
from burst_rt.runtime.bound_schedule import BoundSchedule
from burst_rt.runtime.machine import Machine
from burst_rt.serving.decode_graph import Attend, Merge
from burst_rt.serving.decode_plan import DecodePlan

__all__ = ["DecodeRun", "run_decode"]


def run_decode(
    attention: AttentionState,
    contract: Contract,
    plan: DecodePlan,
    qkv: QKV,
    seen: SeenColumns,
    *,
    scale: float | None,
    score_options: ScoreOptions,
) -> torch.Tensor:
    """Attention of a few queries to the keys of all ranks, under `plain_math`. Collective.

    The ranks must have agreed on the call before: nothing is compared here. Blocks until this
    rank's part is done, or issued; no rank may stay away for longer than the runtime's timeout_s.

    contract: has the call's name. plan: made by `plan_decode` for these shapes, type and options.
    q: `[batch, q_len, heads, d]`, the same on every rank. k and v: this rank's shard, `[batch,
    columns, kv heads, d and v's d]`; columns may be 0, and differ from rank to rank. seen: which
    columns of the shard each query sees. score_options: softcap and sinks.

    Returns out `[batch, q_len, heads, v's d]` in q's type, the same bits on every rank; 0 in a row
    that sees no key on any rank. Raises InputError under a CUDA graph, DeviceError where memory
    runs out, PeerLost and Stalled.
    """
    runtime = attention.runtime
    check_not_captured(runtime.device)
    try:
        run = DecodeRun(
            plan, runtime.machine, qkv, seen,
            scale=1.0 / math.sqrt(plan.program.head_dim) if scale is None else scale,
            score_options=_bound(score_options, qkv.q.dtype),
            poison=attention.poison,
        )  # fmt: skip
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        message = f"{contract.call}: out of memory on {runtime.device}; {plan.explain()}"
        failed = DeviceError(message, rank=runtime.rank)
        failed.__cause__ = error
        runtime.fail(failed)
    bound = BoundSchedule(
        plan.schedule, run.operations, run.memory, subject=plan, takes=plan.explain
    )
    _, free = runtime.perform(contract, bound, AgreedWhen.WITH_OTHERS)
    runtime.machine.give_back(plan, run.slots, free)
    run.forget()
    return run.out


class _Blocks(NamedTuple):
    """Views of the slots, of the sums' type."""

    own_out: torch.Tensor  # out of this rank's block, `[batch, heads, q_len, v's head_dim]`
    own_lse: torch.Tensor  # `[batch, heads, q_len]`
    flat: torch.Tensor  # `[world, ...]`: block j is that of rank (rank + j) % world
    by_rank: torch.Tensor  # memory for the blocks in the order of ranks
    out: torch.Tensor  # out of by_rank, `[world, batch, heads, q_len, v's head_dim]`
    lse: torch.Tensor  # `[world, batch, heads, q_len, 1]`


def _bound(options: ScoreOptions, dtype: torch.dtype) -> ScoreOptions:
    """The options as kernels take them; without sinks there is no tensor to prepare."""
    return options if options.sinks is None else options.bound(dtype, 1)


class DecodeRun(SlotRun):
    """One decode. After the run `out` `[batch, q_len, heads, v's head_dim]` holds the result."""

    def __init__(
        self,
        plan: DecodePlan,
        machine: Machine,
        qkv: QKV,
        seen: SeenColumns,
        *,
        scale: float,
        score_options: ScoreOptions,
        poison: bool,
    ) -> None:
        super().__init__(plan, machine, poison=poison)
        self._kernel, self._program, self._rank = plan.kernel, plan.program, plan.rank
        self._qkv, self._seen, self._scale, self._score_options = qkv, seen, scale, score_options
        batch, heads, q_len, channels = self._shape = (
            self._program.batch,
            self._program.num_heads,
            self._program.num_queries,
            self._program.v_head_dim,
        )
        q = dense(qkv.q)
        if q is not qkv.q:
            self._qkv = qkv._replace(q=q)
        dtype = q.dtype
        self._blocks = self._views(dtype)
        self.out = self.fresh(batch, q_len, heads, channels, dtype=dtype)
        self.operations |= {Attend: self._attend, Merge: self._merge}

    def on_device(self) -> dict[int, torch.Tensor]:
        """See `SlotRun.on_device`. One tensor, of which every part is a piece."""
        sizes = [part.size_bytes for part in self._plan.slots]
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        pieces = whole.split(sizes)
        return {part.id: piece for part, piece in zip(self._plan.slots, pieces, strict=True)}

    def _views(self, dtype: torch.dtype) -> _Blocks:
        """The blocks of this run. Made once for a set of slots."""
        part = self._plan.slots[0].id
        blocks: _Blocks | None = self.slots.views.get((part, self._rank))
        if blocks is None:
            # A later call outside inference mode could not write to tensors made inside it.
            with torch.inference_mode(False):
                blocks = self._new_blocks(part, sum_dtype(dtype))
            self.slots.views[part, self._rank] = blocks
        return blocks

    def _new_blocks(self, part: int, wide: torch.dtype) -> _Blocks:
        world, own = self._program.world_size, self.storage[part]
        # The parts lie one after another, and so do the blocks.
        flat = own.as_strided((world * own.numel(),), (1,)).view(wide).view(world, -1)
        # Two numbers have the same sum in either order.
        by_rank = flat if world <= 2 else torch.empty_like(flat)
        sizes = [math.prod(self._shape), math.prod(self._shape[:3])]
        own_out, own_lse = flat[0].split_with_sizes(sizes)
        out, lse = by_rank.split_with_sizes(sizes, 1)
        rows = self._shape[:3]
        return _Blocks(
            own_out.view(self._shape), own_lse.view(rows), flat, by_rank,
            out.view(world, *self._shape), lse.view(world, *rows, 1),
        )  # fmt: skip

    def _attend(self, _: Attend) -> None:
        into = Partial(self._blocks.own_out, self._blocks.own_lse)
        self._kernel.decode(self._qkv, self._seen, self._scale, self._score_options.softcap, into)

    def _merge(self, _: Merge) -> None:
        """out = sum over ranks of softmax(lse) * the rank's out; a sink is one more rank, of out 0.

        Every rank does the same on the same numbers in one order, so all get the same bits.
        """
        blocks, world, sinks = self._blocks, self._program.world_size, self._score_options.sinks
        out = self.out.transpose(1, 2)
        if world == 1 and sinks is None:
            out.copy_(blocks.own_out)
            return
        if blocks.by_rank is not blocks.flat:
            blocks.by_rank.copy_(blocks.flat.roll(self._rank, 0))
        if sinks is None:
            weights = blocks.lse.softmax(0)
        else:
            also = sinks[:, None, None].expand_as(blocks.lse[:1])
            weights = torch.cat([blocks.lse, also]).softmax(0)[:world]
        parts = blocks.out * weights  # not in place: a block may still be under way to a rank
        if out.dtype == parts.dtype:
            torch.sum(parts, 0, out=out)
        else:  # with such an out, `torch.sum` would add in its type
            out.copy_(parts.sum(0))
