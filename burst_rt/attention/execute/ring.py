"""Running a plan on tensors: the op binds a call's tensors to the plan's parts, and says what each
operation of the graph does to them.

One class a direction. Memory is taken when the call starts and let go when it ends, nothing in
between: the slots, the sums, the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from burst_rt.attention.planner import Plan
from burst_rt.drivers import Slots, flat_bytes
from burst_rt.kernels import State, Tile, sum_dtype
from burst_rt.planning.masks import Piece
from burst_rt.planning.strategies import Ring, on_query_side
from burst_rt.runtime.machine import Machine

__all__ = ["BackwardRun", "ForwardRun", "Names", "Run", "dense"]

Names = tuple[tuple[str, int], ...]


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
        self.plan = plan
        self.ring, self.rank = self.place(plan)
        problem = self.problem = self.ring.problem
        self.scale = 1.0 / math.sqrt(problem.head_dim) if scale is None else scale
        self.progress = progress
        self.wide = sum_dtype(plan.key.dtype)
        self.tensors: dict[int, torch.Tensor] = {}
        # What each operation does; a direction adds its own.
        self.ops: dict[str, Callable[..., None]] = {
            "to host": self._to_host,
            "to device": self._to_device,
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

    def part_id(self, buffer: str, index: int) -> int:
        """The number of a part."""
        return self.plan.part_ids[buffer, index]

    def bind_input(self, name: str, whole: torch.Tensor) -> None:
        """Binds q, k, v or dout of this call."""
        self.bind(name, dense(whole))

    def bind(self, name: str, whole: torch.Tensor) -> None:
        """Binds a tensor of the shard to the buffer `name`: cut into blocks (along the tokens, dim
        1) where they travel.
        """
        for index, (start, stop) in enumerate(self.bounds(queries=on_query_side(name))):
            self.bind_part(
                name, index, whole if stop - start == whole.shape[1] else whole[:, start:stop]
            )

    def bind_part(self, name: str, index: int, block: torch.Tensor) -> None:
        """Binds one part; what travels must be contiguous, and is copied if it is not."""
        part = self.part_id(name, index)
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

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor of this rank's shard."""
        problem, queries = self.problem, on_query_side(name)
        length = sum(map(len, (problem.q_blocks if queries else problem.kv_blocks)[self.rank]))
        heads = problem.num_heads if queries else problem.num_kv_heads
        return (
            (problem.batch, heads, length)
            if name == "lse"
            else (problem.batch, length, heads, problem.head_dim)
        )

    def tile(self, owner: int, block: int, pieces: tuple[Piece, ...]) -> Tile:
        """The tile of a travelling block and the shard at home."""
        moved, stays = (self.ring.travelling[owner][block],), self.ring.resident[self.rank]
        q, kv = (moved, stays) if self.ring.queries_travel else (stays, moved)
        return Tile(pieces, q, kv, self.problem.mask, self.scale, self.progress)

    def at(self, names: Names, owner: int, block: int) -> dict[str, torch.Tensor]:
        """The tensors an operation names: bound ones as they are, slots as what their present
        owner's block looks like.
        """
        found = {}
        for name, part in names:
            bound = self.tensors.get(part)
            found[name] = self._view(name, part, owner, block) if bound is None else bound
        return found

    def sums_at(self, names: Names, owner: int, block: int, new: bool) -> dict[str, torch.Tensor]:
        """The sums a tile adds to. new: those that travel begin with it."""
        found = self.at(names, owner, block)
        if new:
            for name, part in names:
                if part not in self.tensors:
                    found[name].zero_()
        return found

    def _view(self, name: str, part: int, owner: int, block: int) -> torch.Tensor:
        view = self.slots.views.get((part, owner))
        if view is None:
            problem = self.problem
            length = len(self.ring.travelling[owner][block])
            dtype = self.wide if name in ("rows", "dq", "dk", "dv") else self.plan.key.dtype
            heads = problem.num_heads if self.ring.queries_travel else problem.num_kv_heads
            shape = (
                (problem.batch, length, heads, problem.head_dim)
                if name != "rows"
                else (2, problem.batch, heads, length)
            )
            view = self.storage[part][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            self.slots.views[part, owner] = view
        return view

    def _to_host(self, part: int, offset: int, size_bytes: int, chunk: int) -> None:
        self.storage[chunk][:size_bytes].copy_(
            self.storage[part][offset : offset + size_bytes], non_blocking=True
        )

    def _to_device(self, chunk: int, part: int, offset: int, size_bytes: int) -> None:
        self.storage[part][offset : offset + size_bytes].copy_(
            self.storage[chunk][:size_bytes], non_blocking=True
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
        for name, x in zip(("q", "k", "v"), tensors, strict=True):
            self.bind_input(name, x)
        dtype = plan.key.dtype
        out = self.fresh(*self.shape("q"), dtype=dtype)
        acc = out if dtype == self.wide else self.fresh(*self.shape("q"), dtype=self.wide)
        m, total, lse = (self.fresh(*self.shape("lse"), dtype=self.wide) for _ in range(3))
        self.state = State(acc, m, total, out, lse)
        self.out, self.lse = out, lse
        self.ops |= {"forward": self._forward, "finish": self._finish}

    def _forward(
        self,
        owner: int,
        block: int,
        pieces: tuple[Piece, ...],
        first: bool,
        last: bool,
        reads: Names,
        _: Names,
    ) -> None:
        x = self.at(reads, owner, block)
        tile = self.tile(owner, block, pieces)._replace(first=first, last=last)
        self.plan.kernel.forward(x["q"], x["k"], x["v"], tile, self.state)

    def _finish(self) -> None:
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
        for name, x in (("q", q), ("dout", self._dout), ("k", k), ("v", v)):
            self.bind_input(name, x)
        batch, heads = self.problem.batch, self.problem.num_heads
        for part, (start, stop) in enumerate(self.bounds(queries=True)):
            self.bind_part("rows", part, self.fresh(2, batch, heads, stop - start, dtype=self.wide))
        self.sums: dict[str, torch.Tensor] = {}
        for name, needed in zip(("dq", "dk", "dv"), self.problem.needs_grad, strict=True):
            if needed:
                self.sums[name] = torch.zeros(
                    self.shape(name), dtype=self.wide, device=self._device
                )
                self.bind(name, self.sums[name])
        self.ops |= {"backward": self._backward, "delta": self.make_delta, "add": self._add}

    def grads(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """dq, dk, dv; the slots are let go first, and each sum as its gradient is cast."""
        del self.slots
        self.storage.clear()
        self.memory.clear()
        self.tensors.clear()
        dtype = self.plan.key.dtype
        dq, dk, dv = (
            self.sums.pop(name).to(dtype) if name in self.sums else None
            for name in ("dq", "dk", "dv")
        )
        return dq, dk, dv

    def _backward(
        self,
        owner: int,
        block: int,
        pieces: tuple[Piece, ...],
        new: bool,
        reads: Names,
        adds: Names,
    ) -> None:
        x, sums = self.at(reads, owner, block), self.sums_at(adds, owner, block, new)
        lse, delta = x["rows"]
        tile = self.tile(owner, block, pieces)
        self.plan.kernel.backward(
            x["q"], x["k"], x["v"], x["dout"], lse, delta, tile, sums.get("dq"), sums.get("dk"),
            sums.get("dv")
        )  # fmt: skip

    def make_delta(self, part: int) -> None:
        """What the backward needs of one part of this rank's queries, into its rows."""
        start, stop = self.bounds(queries=True)[part]
        self.delta(start, stop, self.tensors[self.part_id("rows", part)])

    def delta(self, start: int, stop: int, rows: torch.Tensor) -> None:
        """lse and delta of some of this rank's queries into `rows`."""
        dlse = None if self._dlse is None else self._dlse[:, :, start:stop]
        self.plan.kernel.delta(
            self._dout[:, start:stop],
            self._out[:, start:stop],
            self._lse[:, :, start:stop],
            dlse,
            rows,
        )

    def _add(self, own: int, arrived: int) -> None:
        total = self.tensors[own]
        total += (
            self.storage[arrived][: total.numel() * total.itemsize]
            .view(total.dtype)
            .view(total.shape)
        )


def dense(x: torch.Tensor) -> torch.Tensor:
    """Strided views are taken as they are; a broadcast (stride 0) or a last dimension that is not
    contiguous is copied.
    """
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()
