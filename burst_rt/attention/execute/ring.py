"""Running a plan on tensors: a call's tensors are bound to the plan's parts, and each type of
operation is told what to do to them.

One class a direction. Memory is taken when the call starts and let go when it ends, nothing in
between: the slots, the sums, the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from burst_rt.attention.planner import Plan
from burst_rt.drivers import flat_bytes
from burst_rt.kernels import State, Tile, sum_dtype
from burst_rt.planning.operations import (
    Add,
    BackwardTile,
    Delta,
    Finish,
    ForwardTile,
    Tensors,
    TileOperation,
)
from burst_rt.planning.roles import Role
from burst_rt.planning.strategies import Ring
from burst_rt.runtime.machine import Machine, Slots
from burst_rt.transport.staged import ToDevice, ToHost

__all__ = ["BackwardRun", "ForwardRun", "Run", "dense"]

GRADIENTS = (Role.DQ, Role.DK, Role.DV)


class Run:
    """What both directions share: the plan's parts as tensors.

    `tensors[part]` is a home or own block; `storage[part]` the raw bytes of what travels: of a
    slot, which holds blocks of different owners in turn, viewed with `_view`; of an own block that
    is sent; of a chunk that messages are staged through. `memory[part]` is the same for the
    transport. `slots` goes back to the machine after the run.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        scale: float | None,
        progress: Callable[[], None],
        poison: bool,
    ) -> None:
        self.plan, self.kernel = plan, plan.picked.kernel
        self.ring, self.rank = self.place(plan)
        problem = self.problem = self.ring.problem
        self.scale = 1.0 / math.sqrt(problem.head_dim) if scale is None else scale
        self.progress = progress
        self.wide = sum_dtype(plan.key.dtype)
        self.tensors: dict[int, torch.Tensor] = {}
        # What each type of operation does; a direction adds its own.
        self.operations: dict[type, Callable[..., None]] = {
            ToHost: self._to_host,
            ToDevice: self._to_device,
        }
        self._poison = poison
        self._machine = machine
        self._device = machine.device
        self.slots = machine.take(plan, self._slots)
        self.storage, self.memory = dict(self.slots.storage), dict(self.slots.memory)
        if poison:
            for slot in self.storage.values():
                slot.fill_(255)  # all ones is NaN in every floating type

    def place(self, plan: Plan) -> tuple[Ring, int]:
        """The ring, and this rank's number in it."""
        assert isinstance(plan.choice.program, Ring)
        return plan.choice.program, plan.rank

    def _slots(self) -> Slots:
        """Slots on the device, chunks on the host."""
        pinned = self._device.type != "cpu"
        # Later calls may be outside inference mode, and could not write what was made inside.
        with torch.inference_mode(False):
            slots = {
                part.id: torch.empty(part.size_bytes, dtype=torch.uint8, device=self._device)
                for part in self.plan.slots
            }
            slots |= {
                part.id: torch.empty(part.size_bytes, dtype=torch.uint8, pin_memory=pinned)
                for part in self.plan.chunks
            }
        return Slots(
            slots,
            {part: self._machine.memory(slot) for part, slot in slots.items()},
            self._machine.caller(),
        )

    def fresh(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory; NaN where the context is told to poison."""
        new = torch.empty(shape, dtype=dtype, device=self._device)
        return new.fill_(torch.nan) if self._poison else new

    def part_id(self, role: Role, index: int) -> int:
        """The number of a part."""
        return self.plan.part_ids[role, index]

    def bind_input(self, role: Role, whole: torch.Tensor) -> None:
        """Binds q, k, v or dout of this call."""
        self.bind(role, dense(whole))

    def bind(self, role: Role, whole: torch.Tensor) -> None:
        """Binds a tensor of the shard to its buffer: cut into blocks (along the tokens, dim 1)
        where they travel.
        """
        for index, (start, stop) in enumerate(self.bounds(queries=role.queries)):
            self.bind_part(
                role, index, whole if stop - start == whole.shape[1] else whole[:, start:stop]
            )

    def bind_part(self, role: Role, index: int, block: torch.Tensor) -> None:
        """Binds one part; what travels must be contiguous, and is copied if it is not."""
        part = self.part_id(role, index)
        if part in self.plan.program_graph.sent:
            block = block.contiguous()
            if self.plan.chunks:
                self.storage[part] = flat_bytes(block)
            else:
                self.memory[part] = self._machine.memory(block)
        self.tensors[part] = block

    def bounds(self, *, queries: bool) -> tuple[tuple[int, int], ...]:
        """Where each part of this side stands in the shard."""
        ring = self.ring
        return (ring.travelling_bounds if ring.queries_travel is queries else ring.resident_bounds)[
            self.rank
        ]

    def shape(self, role: Role) -> tuple[int, ...]:
        """The shape of a tensor of this rank's shard."""
        problem = self.problem
        blocks = problem.q_blocks if role.queries else problem.kv_blocks
        length = sum(map(len, blocks[self.rank]))
        heads = problem.num_heads if role.queries else problem.num_kv_heads
        if role is Role.LSE:
            return (problem.batch, heads, length)
        return (problem.batch, length, heads, problem.head_dim)

    def tile(self, op: TileOperation) -> Tile:
        """The tile of a travelling block and the shard at home."""
        moved, stays = (self.ring.travelling[op.owner][op.block],), self.ring.resident[self.rank]
        q, kv = (moved, stays) if self.ring.queries_travel else (stays, moved)
        return Tile(
            pieces=op.pieces,
            q_positions=q,
            kv_positions=kv,
            mask=self.problem.mask,
            scale=self.scale,
            progress=self.progress,
            first=op.first,
            last=op.last,
        )

    def at(self, tensors: Tensors, op: TileOperation) -> dict[Role, torch.Tensor]:
        """The tensors an operation names: bound ones as they are, slots as what their present
        owner's block looks like.
        """
        found = {}
        for role, part in tensors:
            bound = self.tensors.get(part)
            found[role] = self._view(role, part, op.owner, op.block) if bound is None else bound
        return found

    def reads(self, op: TileOperation) -> dict[Role, torch.Tensor]:
        """The tensors a tile reads."""
        return self.at(op.reads, op)

    def sums_at(self, op: TileOperation) -> dict[Role, torch.Tensor]:
        """The sums a tile adds to; those that travel begin with it, if it says so."""
        found = self.at(op.adds, op)
        if op.starts_sums:
            for role, part in op.adds:
                if part not in self.tensors:
                    found[role].zero_()
        return found

    def _view(self, role: Role, part: int, owner: int, block: int) -> torch.Tensor:
        view = self.slots.views.get((part, owner))
        if view is None:
            problem = self.problem
            length = len(self.ring.travelling[owner][block])
            wide = role in (Role.ROWS, Role.DQ, Role.DK, Role.DV)
            dtype = self.wide if wide else self.plan.key.dtype
            heads = problem.num_heads if self.ring.queries_travel else problem.num_kv_heads
            shape = (
                (2, problem.batch, heads, length)
                if role is Role.ROWS
                else (problem.batch, length, heads, problem.head_dim)
            )
            view = self.storage[part][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            self.slots.views[part, owner] = view
        return view

    def _to_host(self, op: ToHost) -> None:
        self.storage[op.chunk][: op.size_bytes].copy_(
            self.storage[op.part][op.offset : op.offset + op.size_bytes], non_blocking=True
        )

    def _to_device(self, op: ToDevice) -> None:
        self.storage[op.part][op.offset : op.offset + op.size_bytes].copy_(
            self.storage[op.chunk][: op.size_bytes], non_blocking=True
        )


class ForwardRun(Run):
    """One forward call. After the run: `out` `[batch, tokens, heads, head_dim]` in q's dtype, `lse`
    `[batch, heads, tokens]`.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        scale: float | None,
        progress: Callable[[], None],
        poison: bool,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        super().__init__(plan, machine, scale, progress, poison)
        for role, x in zip((Role.Q, Role.K, Role.V), tensors, strict=True):
            self.bind_input(role, x)
        dtype = plan.key.dtype
        out = self.fresh(*self.shape(Role.Q), dtype=dtype)
        acc = out if dtype == self.wide else self.fresh(*self.shape(Role.Q), dtype=self.wide)
        m, total, lse = (self.fresh(*self.shape(Role.LSE), dtype=self.wide) for _ in range(3))
        self.state = State(acc, m, total, out, lse)
        self.out, self.lse = out, lse
        self.operations |= {ForwardTile: self._forward, Finish: self._finish}

    def _forward(self, op: ForwardTile) -> None:
        x = self.reads(op)
        self.kernel.forward(x[Role.Q], x[Role.K], x[Role.V], self.tile(op), self.state)

    def _finish(self, _: Finish) -> None:
        """No tile at all: these queries see no key."""
        self.state.start()
        self.state.finish()


class BackwardRun(Run):
    """One backward call. After the run `grads()` are dq, dk, dv in the inputs' dtype; None where
    not needed.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        scale: float | None,
        progress: Callable[[], None],
        poison: bool,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> None:
        super().__init__(plan, machine, scale, progress, poison)
        q, k, v, out, lse = tensors
        self._dout, self._out, self._lse, self._dlse = dense(dout), out, lse, dlse
        for role, x in (
            (Role.Q, q),
            (Role.DOUT, self._dout),
            (Role.K, k),
            (Role.V, v),
        ):
            self.bind_input(role, x)
        batch, heads = self.problem.batch, self.problem.num_heads
        for part, (start, stop) in enumerate(self.bounds(queries=True)):
            rows = self.fresh(2, batch, heads, stop - start, dtype=self.wide)
            self.bind_part(Role.ROWS, part, rows)
        self.sums: dict[Role, torch.Tensor] = {}
        for role, needed in zip(GRADIENTS, self.problem.needs_grad, strict=True):
            if needed:
                self.sums[role] = torch.zeros(
                    self.shape(role), dtype=self.wide, device=self._device
                )
                self.bind(role, self.sums[role])
        self.operations |= {
            BackwardTile: self._backward,
            Delta: self.make_delta,
            Add: self._add,
        }

    def grads(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """dq, dk, dv; the slots are let go first, and each sum as its gradient is cast."""
        del self.slots
        self.storage.clear()
        self.memory.clear()
        self.tensors.clear()
        dtype = self.plan.key.dtype
        dq, dk, dv = (
            self.sums.pop(role).to(dtype) if role in self.sums else None for role in GRADIENTS
        )
        return dq, dk, dv

    def _backward(self, op: BackwardTile) -> None:
        x, sums = self.reads(op), self.sums_at(op)
        lse, delta = x[Role.ROWS]
        self.kernel.backward(
            x[Role.Q], x[Role.K], x[Role.V], x[Role.DOUT], lse, delta, self.tile(op),
            *map(sums.get, GRADIENTS),
        )  # fmt: skip

    def make_delta(self, op: Delta) -> None:
        """What the backward needs of one part of this rank's queries, into its rows."""
        start, stop = self.bounds(queries=True)[op.part]
        self.delta(start, stop, self.tensors[self.part_id(Role.ROWS, op.part)])

    def delta(self, start: int, stop: int, rows: torch.Tensor) -> None:
        """lse and delta of some of this rank's queries into `rows`."""
        dlse = None if self._dlse is None else self._dlse[:, :, start:stop]
        self.kernel.delta(
            self._dout[:, start:stop],
            self._out[:, start:stop],
            self._lse[:, :, start:stop],
            dlse,
            rows,
        )

    def _add(self, op: Add) -> None:
        total = self.tensors[op.own]
        arrived = self.storage[op.arrived][: total.numel() * total.itemsize]
        total += arrived.view(total.dtype).view(total.shape)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Strided views are taken as they are; a broadcast (stride 0) or a last dimension that is not
    contiguous is copied.
    """
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()
