"""Running a plan on tensors: a call's tensors are bound to parts, each operation to a function.

Each direction has a class. Slots, sums and rows are taken when the call starts, and let go when the
call ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from burst_rt.attention.planner import Plan, RankPlan
from burst_rt.drivers import Progress, flat_bytes
from burst_rt.kernels import (
    QKV,
    Gradients,
    Kept,
    Results,
    ScoreOptions,
    State,
    Tile,
    Upstream,
    sum_dtype,
)
from burst_rt.kernels.base import fold
from burst_rt.planning.operations import (
    Add,
    BackwardTile,
    Delta,
    FinishRows,
    ForwardTile,
    MergeRows,
    Tensors,
    TileOperation,
)
from burst_rt.planning.problem import Problem
from burst_rt.planning.roles import GRADIENTS, INPUTS, Role
from burst_rt.planning.strategies import Ring
from burst_rt.runtime.machine import Machine, Slots
from burst_rt.transport.staged import ToDevice, ToHost

__all__ = [
    "RUNS", "BackwardRun", "Binding", "ForwardRun", "Run", "RunTypes", "SlotRun", "dense",
    "placed_tile",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One call of a plan: what a run is made from."""

    plan: Plan
    machine: Machine
    scale: float | None
    progress: Progress  # operations that take long call it now and then
    poison: bool  # whether fresh memory is filled with NaN
    qkv: QKV
    results: Results | None = None  # results of the forward; a backward has them
    score_options: ScoreOptions = field(default_factory=ScoreOptions)  # all heads


class SlotRun:
    """The base of the runs of all plans: slots, and the copies of a staged transport.

    `storage[part]`: the raw bytes of a slot, of an own block that is sent staged, or of a chunk
    that messages are staged through. `memory[part]`: the bytes of a part as the transport takes
    them. `slots`: what goes back to the machine after the run. `operations`: the function for each
    type of operation; each kind of run adds its own types.
    """

    def __init__(self, plan: RankPlan, machine: Machine, *, poison: bool) -> None:
        self.operations: dict[type, Callable[..., None]] = {
            ToHost: self._to_host,
            ToDevice: self._to_device,
        }
        self._plan = plan
        self._poison = poison
        self._machine = machine
        self._device = machine.device
        self.slots = machine.take(plan, self._slots)
        self.storage, self.memory = self.slots.storage, self.slots.memory
        if poison:
            for slot in self.storage.values():
                slot.fill_(255)  # all ones is NaN in every floating type

    def forget(self) -> None:
        """Lets go of the operations. To be called after the run.

        They are the run's own methods, so with them its tensors would live on until Python looks
        for cycles.
        """
        self.operations.clear()

    def fresh(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory; NaN where the context poisons fresh memory."""
        new = torch.empty(shape, dtype=dtype, device=self._device)
        return new.fill_(torch.nan) if self._poison else new

    def on_device(self) -> dict[int, torch.Tensor]:
        """New memory for the plan's slots, by part: uint8."""
        return {
            part.id: torch.empty(part.size_bytes, dtype=torch.uint8, device=self._device)
            for part in self._plan.slots
        }

    def _slots(self) -> Slots:
        """New slots on the device and chunks on the host."""
        pinned = self._device.type != "cpu"
        # A later call outside inference mode could not write to tensors made inside it.
        with torch.inference_mode(False):
            slots = self.on_device() | {
                part.id: torch.empty(
                    part.size_bytes, dtype=torch.uint8, pin_memory=pinned, device="cpu"
                )
                for part in self._plan.chunks
            }
        return Slots(
            slots,
            {part: self._machine.memory(slot) for part, slot in slots.items()},
            self._machine.caller(),
        )

    def _to_host(self, op: ToHost) -> None:
        self.storage[op.chunk][: op.size_bytes].copy_(
            self.storage[op.part][op.offset : op.offset + op.size_bytes], non_blocking=True
        )

    def _to_device(self, op: ToDevice) -> None:
        self.storage[op.part][op.offset : op.offset + op.size_bytes].copy_(
            self.storage[op.chunk][: op.size_bytes], non_blocking=True
        )


class Run(SlotRun):
    """The base of both directions: the plan's parts as tensors.

    `tensors[part]`: the tensor of a block that is at home or is this rank's own. A slot holds
    blocks of different owners in turn; `_view` gives it their shape.
    """

    def __init__(self, binding: Binding) -> None:
        plan = self.plan = binding.plan
        self.kernel = plan.picked.kernel
        self.first_head = 0  # the number in the whole call of the first query head of tiles
        self.ring, self.rank = self.place(plan)
        problem = self.problem = self.ring.problem
        scale = binding.scale
        self.scale = 1.0 / math.sqrt(problem.head_dim) if scale is None else scale
        self.score_options = self.options_of_heads(binding.score_options)
        self.progress = binding.progress
        self.wide = sum_dtype(plan.key.dtype)
        self.tensors: dict[int, torch.Tensor] = {}
        super().__init__(plan, binding.machine, poison=binding.poison)
        # The blocks of this call are added, and the slots outlive it.
        self.storage, self.memory = dict(self.storage), dict(self.memory)

    def place(self, plan: Plan) -> tuple[Ring, int]:
        """The ring, and this rank's number in it."""
        assert isinstance(plan.choice.program, Ring)
        return plan.choice.program, plan.rank

    def options_of_heads(self, score_options: ScoreOptions) -> ScoreOptions:
        """The score options of the heads that this rank's tiles have: of all heads."""
        return score_options

    def part_id(self, role: Role, index: int) -> int:
        """The number of a part."""
        return self.plan.part_ids[role, index]

    def bind_input(self, role: Role, whole: torch.Tensor) -> None:
        """Binds q, k, v or dout of this call, which `dense` may copy first."""
        self.bind(role, dense(whole))

    def bind(self, role: Role, whole: torch.Tensor) -> None:
        """Binds a tensor of the shard to its buffer, cut into blocks along the tokens (dim 1)."""
        for index, (start, stop) in enumerate(self.bounds(queries=role.queries)):
            self.bind_part(
                role, index, whole if stop - start == whole.shape[1] else whole[:, start:stop]
            )

    def bind_part(self, role: Role, index: int, block: torch.Tensor) -> None:
        """Binds one part.

        A part that is sent must be contiguous as it travels, and is copied if it is not.
        """
        part = self.part_id(role, index)
        if part in self.plan.program_graph.sent:
            # All but pairs of numbers travel with their tokens first.
            wire = (block if role.pairs else block.transpose(0, 1)).contiguous()
            block = wire if role.pairs else wire.transpose(0, 1)
            if self.plan.chunks:
                self.storage[part] = flat_bytes(wire)
            else:
                self.memory[part] = self._machine.memory(wire)
        self.tensors[part] = block

    def bounds(self, *, queries: bool) -> tuple[tuple[int, int], ...]:
        """The bounds of each part of this side in the shard: (start, stop) in tokens."""
        ring = self.ring
        return (ring.travelling_bounds if ring.queries_travel is queries else ring.resident_bounds)[
            self.rank
        ]

    def shape(self, role: Role) -> tuple[int, ...]:
        """The shape of a tensor of this rank's shard."""
        problem = self.problem
        length = self.bounds(queries=role.queries)[-1][1]
        heads = problem.num_heads if role.queries else problem.num_kv_heads
        if role is Role.LSE:
            return (problem.batch, heads, length)
        return (problem.batch, length, heads, _head_dim(problem, role))

    def tile(self, op: TileOperation) -> Tile:
        """The tile of a travelling block with the shard at home."""
        kept = self.kept((id(op), self.scale, self.score_options.softcap))
        return placed_tile(
            self.ring, self.rank, op, scale=self.scale, progress=self.progress,
            first_head=self.first_head, score_options=self.score_options, kept=kept,
            in_order=self.plan.key.deterministic,
        )  # fmt: skip

    def kept(self, key: object) -> Kept | None:
        """What the kernel keeps of a task with the plan, where the task's work goes to a stream."""
        driver = self.progress.driver
        if driver is None or driver.stream is None:
            return None
        entries = self.plan.kept.get(key)
        if entries is None:
            entries = self.plan.keep(key, {})
        return Kept(entries, driver.stream)

    def at(self, tensors: Tensors, op: TileOperation) -> dict[Role, torch.Tensor]:
        """The tensors that an operation names.

        A bound tensor is returned as it is, a slot with the shape of the block that is in it.
        """
        sums = {}
        for role, part in tensors:
            bound = self.tensors.get(part)
            sums[role] = self._view(role, part, op.owner, op.block) if bound is None else bound
        return sums

    def reads(self, op: TileOperation) -> dict[Role, torch.Tensor]:
        """The tensors that a tile reads."""
        return self.at(op.reads, op)

    def sums_at(self, op: TileOperation) -> dict[Role, torch.Tensor]:
        """The sums that a tile adds to. With `starts_sums`, travelling sums are zeroed first."""
        sums = self.at(op.adds, op)
        if op.starts_sums:
            for role, part in op.adds:
                if part not in self.tensors:
                    sums[role].zero_()
        return sums

    def _view(self, role: Role, part: int, owner: int, block: int) -> torch.Tensor:
        view = self.slots.views.get((part, owner))
        if view is None:
            problem = self.problem
            length = self.ring.block_len(owner, block)
            dtype = self.wide if role.sums else self.plan.key.dtype
            heads = problem.num_heads if self.ring.queries_travel else problem.num_kv_heads
            shape = (
                (2, problem.batch, heads, length)
                if role.pairs
                else (length, problem.batch, heads, _head_dim(problem, role))
            )
            size = math.prod(shape) * dtype.itemsize
            # A later call outside inference mode could not write to views made inside it.
            with torch.inference_mode(False):
                view = self.storage[part][:size].view(dtype).view(shape)
                # Tokens come first on the wire: some rows of a block are one range of bytes.
                view = view if role.pairs else view.transpose(0, 1)
            self.slots.views[part, owner] = view
        return view


class ForwardRun(Run):
    """One forward call. `out` and `lse` hold the result after the run.

    out: `[batch, tokens, heads, v's head_dim]` in q's dtype. lse: `[batch, heads, tokens]`.
    """

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        for role, x in zip(INPUTS, binding.qkv, strict=True):
            self.bind_input(role, x)
        dtype = self.plan.key.dtype
        out = self.fresh(*self.shape(Role.OUT), dtype=dtype)
        alone = dtype == self.wide or self.plan.writes_results
        acc = out if alone else self.fresh(*self.shape(Role.OUT), dtype=self.wide)
        self.out, self.lse = out, self.fresh(*self.shape(Role.LSE), dtype=self.wide)
        self.operations |= {ForwardTile: self._forward, FinishRows: self._finish}
        self.bind_state(acc)

    def bind_state(self, acc: torch.Tensor) -> None:
        """Makes the running state of this rank's queries around its acc, which may be out."""
        m = total = self.lse
        if not self.plan.writes_results:
            m, total = (self.fresh(*self.shape(Role.LSE), dtype=self.wide) for _ in range(2))
        self.state = State(acc, m, total, self.out, self.lse)

    def _forward(self, op: ForwardTile) -> None:
        x = self.reads(op)
        self.kernel.forward(_qkv(x), self.tile(op), self.state)

    def _finish(self, _: FinishRows) -> None:
        """Finishes queries that have no tile at all, because they see no key."""
        self.state.start(self.score_options.sinks)
        self.state.finish()


class QueriesForwardRun(ForwardRun):
    """One forward call in which queries travel, and their running states with them.

    `states`: of this rank's own queries, block by block. Between tiles m is a score: another rank
    may have another kernel.
    """

    def bind_state(self, acc: torch.Tensor) -> None:
        """Makes and starts the states of this rank's own queries."""
        batch, heads = self.problem.batch, self.problem.num_heads
        self.operations[MergeRows] = self._merge
        self.states: list[State] = []
        for part, (start, stop) in enumerate(self.bounds(queries=True)):
            ml = self.fresh(2, batch, heads, stop - start, dtype=self.wide)
            rows = slice(start, stop)
            state = State(acc[:, rows], ml[0], ml[1], self.out[:, rows], self.lse[:, :, rows])
            state.start(self.score_options.sinks)
            self.states.append(state)
            self.bind_part(Role.ACC, part, state.acc)
            self.bind_part(Role.ML, part, ml)

    def _forward(self, op: ForwardTile) -> None:
        state = _state(self.at(op.adds, op))
        if op.starts_sums:
            state.start()
        tile = self.tile(op)._replace(first=False, last=False)
        scale = self.kernel.m_scale
        if scale != 1.0:
            state.m.mul_(scale)
        self.kernel.forward(_qkv(self.reads(op)), tile, state)
        if scale != 1.0:
            state.m.div_(scale)

    def _merge(self, op: MergeRows) -> None:
        state = self.states[op.block]
        arrived = _state(
            {role: self._view(role, part, self.rank, op.block) for role, part in op.arrived}
        )
        for start, stop in op.rows:
            rows = slice(start, stop)
            acc, m, l = arrived.at(rows)  # noqa: E741
            fold(acc, m, state, rows, weight=l)

    def _finish(self, _: FinishRows) -> None:
        for state in self.states:
            state.finish()


class BackwardRun(Run):
    """One backward call. After the run `grads()` returns dq, dk and dv.

    dsinks: the sum over this rank's queries, float64 `[heads]`; None where it is not needed.
    `sums`: of the gradients; the gradients themselves where the kernel writes them.
    """

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        assert binding.results is not None
        self._results = binding.results._replace(dout=dense(binding.results.dout))
        self.bind_input(Role.DOUT, self._results.dout)
        for role, x in zip(INPUTS, binding.qkv, strict=True):
            self.bind_input(role, x)
        self.bind_rows()
        # lse and delta of each block that a tile has read, by the id of the two in one.
        self._pairs: dict[int, tuple[torch.Tensor, ...]] = {}
        self.sums: dict[Role, torch.Tensor] = {}
        for role, needed in zip(GRADIENTS, self.problem.needs_grad, strict=True):
            if needed:
                self.bind_sums(role)
        self._sinks, self.dsinks = binding.score_options.sinks, None
        if self.plan.key.problem.scores.sinks_need_grad:
            assert self._sinks is not None
            self.dsinks = torch.zeros_like(self._sinks, dtype=torch.float64)
        self.operations |= {
            BackwardTile: self._backward,
            Delta: self.make_delta,
            Add: self._add,
        }

    def bind_rows(self) -> None:
        """Makes and binds lse and delta of this rank's queries."""
        batch, heads = self.problem.batch, self.problem.num_heads
        for part, (start, stop) in enumerate(self.bounds(queries=True)):
            rows = self.fresh(2, batch, heads, stop - start, dtype=self.wide)
            self.bind_part(Role.ROWS, part, rows)

    def bind_sums(self, role: Role) -> None:
        """Makes and binds the sums of a gradient."""
        shape = self.shape(role)
        self.sums[role] = (
            self.fresh(*shape, dtype=self.plan.key.dtype)
            if self.plan.writes_gradients
            else torch.zeros(shape, dtype=self.wide, device=self._device)
        )
        self.bind(role, self.sums[role])

    def grads(self) -> Gradients:
        """dq, dk and dv in the inputs' dtype; None where one is not needed. To be called once.

        Frees the slots first, and each sum once its gradient has been cast.
        """
        del self.slots
        self.storage.clear()
        self.memory.clear()
        self.tensors.clear()
        self._pairs.clear()
        dtype = self.plan.key.dtype
        return Gradients(
            *(self.sums.pop(role).to(dtype) if role in self.sums else None for role in GRADIENTS)
        )

    def _backward(self, op: BackwardTile) -> None:
        x, new = self.reads(op), ""
        if op.starts_sums and self.kernel.starts_sums:
            sums = self.at(op.adds, op)
            if not all(part in self.tensors for _, part in op.adds):
                new = "q" if self.ring.queries_travel else "kv"
        else:
            sums = self.sums_at(op)
        rows = x[Role.ROWS]
        pair = self._pairs.get(id(rows)) or self._pairs.setdefault(id(rows), rows.unbind())
        only = self.plan.writes_gradients  # else what the tile adds to has been zeroed
        tile = self.tile(op)._replace(first=only, last=only, new_sums=new)
        results = self._results
        out = results.out if self.plan.one_tile and results.dlse is None else None
        upstream = Upstream(x[Role.DOUT], pair[0], pair[1], out)
        self.kernel.backward(_qkv(x), upstream, tile, Gradients(*map(sums.get, GRADIENTS)))

    def make_delta(self, op: Delta) -> None:
        """Writes lse and delta of one part of this rank's queries into the part's rows."""
        start, stop = self.bounds(queries=True)[op.part]
        self.delta(start, stop, self.tensors[self.part_id(Role.ROWS, op.part)])

    def delta(self, start: int, stop: int, rows: torch.Tensor) -> None:
        """Writes lse and delta of queries `start` to `stop` of this rank into `rows`."""
        out, lse, dout, dlse = self._results
        results = Results(
            out[:, start:stop],
            lse[:, :, start:stop],
            dout[:, start:stop],
            None if dlse is None else dlse[:, :, start:stop],
        )
        self.kernel.delta(results, rows, self.kept(("delta", start)))
        if self.dsinks is not None:
            assert self._sinks is not None
            # The sink is a key of probability exp(sink - lse) and of value 0: the gradient of its
            # score is that times 0 - delta.
            top, delta = rows
            share = torch.exp(self._sinks[:, None] - top).mul_(delta)
            self.dsinks.sub_(share.sum((0, 2), dtype=torch.float64))

    def _add(self, op: Add) -> None:
        total = self.tensors[op.own]
        arrived = self._view(op.role, op.arrived, self.rank, op.block)
        for start, stop in op.rows:
            total[:, start:stop] += arrived[:, start:stop]


class RunTypes(NamedTuple):
    """The two classes that run one kind of program."""

    forward: Callable[[Binding], ForwardRun]
    backward: Callable[[Binding], BackwardRun]


def _forward_run(binding: Binding) -> ForwardRun:
    travel = binding.plan.choice.program.queries_travel
    return (QueriesForwardRun if travel else ForwardRun)(binding)


RUNS = RunTypes(_forward_run, BackwardRun)


def placed_tile(ring: Ring, rank: int, op: TileOperation, **others: Any) -> Tile:
    """The tile of a travelling block with a rank's shard. others: what the call brings."""
    moved, stays = ring.travelling[op.owner][op.block], ring.resident[rank]
    q, kv = (moved, stays) if ring.queries_travel else (stays, moved)
    return Tile(
        pieces=op.pieces,
        q_positions=q,
        kv_positions=kv,
        mask=ring.problem.mask,
        first=op.first,
        last=op.last,
        **others,
    )


def _head_dim(problem: Problem, role: Role) -> int:
    return problem.v_head_dim if role.values else problem.head_dim


def _qkv(tensors: dict[Role, torch.Tensor]) -> QKV:
    return QKV(tensors[Role.Q], tensors[Role.K], tensors[Role.V])


def _state(tensors: dict[Role, torch.Tensor]) -> State:
    """A state that no tile finishes: in the places of out and lse are acc and m."""
    acc, (m, l) = tensors[Role.ACC], tensors[Role.ML]  # noqa: E741
    return State(acc, m, l, acc, m)


def dense(x: torch.Tensor) -> torch.Tensor:
    """x as kernels take it: itself, or a copy for a broadcast or a strided last dimension."""
    if x.is_contiguous():
        return x
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()
