"""The planner: from a problem to a verified plan, cached, with its memory formula.

A plan is everything about one direction of a call that does not depend on the tensors' values: the
graph of this rank, its schedule, the kernel, the bytes sent, the memory.

Packed batches bring a new mask with every step. What is verified is how rows go between ranks
(`Program.wiring`), and a wiring that has been verified is not verified again. The tables of a plan
(pieces of tiles, costs) are made from each new mask for this rank alone.

Each rank verifies its share of the world (`check_share`): its own graph, built with the machine's
lanes, and its messages against those that the program states (`Program.messages`). Where the
machine lowers the graphs (staged), the rank also verifies its own lowered graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from burst_rt.attention.predict import predicted_s
from burst_rt.attention.recent import MOST_TABLE_BYTES, Recent
from burst_rt.kernels import Kernel, KernelChoice, Work, pick
from burst_rt.planning.chooser import Chooser
from burst_rt.planning.layouts import Layout
from burst_rt.planning.operations import BackwardTile, Delta, ForwardTile
from burst_rt.planning.problem import Problem
from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.planning.strategies import Choice, Program, Ring
from burst_rt.runtime.observer import Description
from burst_rt.scheduler import (
    HOST_LANES,
    Graph,
    Lane,
    Part,
    Schedule,
    Transfer,
    check_graph,
    check_share,
)  # fmt: skip

if TYPE_CHECKING:
    from burst_rt.scheduler.simulator import Hardware

__all__ = ["Graphs", "KernelPlan", "MemoryNeed", "Plan", "PlanKey", "Planner", "RankPlan"]

# Number of programs whose intermediate data is kept: two calls in both directions. The other
# direction's tables need the data. It grows with the square of the world size.
_DETAILED = 2 * 2
# Maximum number of wirings that are remembered as verified.
_KNOWN_WIRINGS = 4096
# Maximum number of entries that runs keep with their plan. A ring of 1,024 ranks has 2,048 tiles.
_MOST_KEPT = 8192

_V = TypeVar("_V")


class PlanKey(NamedTuple):
    """Everything that a plan depends on, except the rank."""

    forward: bool
    problem: Problem
    strategy: str
    kernel: str
    dtype: torch.dtype
    device: torch.device
    partials: str = "exact"
    # Whether the same inputs must give the same bits every time.
    deterministic: bool = True
    # Whether torch was told so: some backward kernels do it only then.
    told_to_repeat: bool = False


class Graphs(Protocol):
    """The parts of a program that the verifier needs; see `Program`."""

    @property
    def wiring(self) -> Hashable:
        """The program's description of what goes where."""

    def messages(self, rank: int) -> Iterator[Transfer]:
        """All messages that a rank sends or receives."""


class MemoryNeed(NamedTuple):
    """Bytes that one call takes on this rank beyond its inputs and outputs."""

    # Memory that messages are received into and packed in: the double buffer, travelling sums
    # included.
    slots: int
    # Running state, gradient sums that are not outputs themselves, lse and delta.
    sums: int
    copies: int  # copies of this rank's own tensors, where copies must be made
    scratch: int  # the most that one tile allocates
    tables: int  # tables of all tiles; kept for calls to come
    chunks: int  # pinned host memory; 0 where nothing is staged

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The verified graph of one rank: what every plan is."""

    rank: int
    program_graph: Graph  # the graph that the program built
    schedule: Schedule  # schedule of `graph`, which the machine lowered from `program_graph`

    @property
    def graph(self) -> Graph:
        return self.schedule.graph

    @cached_property
    def slots(self) -> tuple[Part, ...]:
        """The slots this rank uses. A short ring may leave some of the double buffer untouched."""
        return self.program_graph.slots

    @cached_property
    def chunks(self) -> tuple[Part, ...]:
        """Pinned host memory that messages are staged through; empty where nothing is staged.

        Lowering appends these parts: the parts of `program_graph` keep their numbers.
        """
        return self.graph.parts[len(self.program_graph.parts) :]

    @cached_property
    def part_ids(self) -> dict[tuple[str, int], int]:
        """The number of each part, by (buffer, index)."""
        return {(part.buffer, part.index): part.id for part in self.program_graph.parts}

    def bytes_sent(self) -> int:
        """Bytes this rank sends in one run: the sum over the graph's messages."""
        return self.graph.wire_bytes

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of this rank's tasks, without what the mask hides."""
        return sum(task.cost.flops for task in self.graph.tasks)


@dataclass(frozen=True, kw_only=True)
class KernelPlan(RankPlan):
    """A plan whose tasks are tiles of a kernel."""

    picked: KernelChoice  # the kernel, and why it was picked

    @cached_property
    def kernel(self) -> Kernel:
        return self.picked.kernel


@dataclass(frozen=True, kw_only=True)
class Plan(KernelPlan):
    """One direction of one call on one rank, verified."""

    key: PlanKey
    choice: Choice  # the strategy, and why it was chosen
    work: Work  # the work for which the kernel was picked
    hardware: Hardware | None  # the machine that was planned with, if there is a file for it
    # What runs of this plan keep for the next ones. Any: each run's own.
    kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def table_bytes(self) -> int:
        """See `Recent`. It is the size of what lies on the host."""
        return self.key.problem.mask.table_bytes

    def explain(self, *, tables: bool = True) -> str:
        """The plan in words: strategy and kernel with the reasons, bytes sent, memory.

        tables: whether a GPU's tables are counted, which takes as long as making them.
        """
        choice, memory = self.choice, self.memory(tables=tables)
        others = ", ".join(f"{strategy} {size:,}" for strategy, size in choice.candidates.items())
        forecast = ", ".join(f"{n} {s:.3g} s" for n, s in (choice.seconds or {}).items())
        name = "" if self.hardware is None else self.hardware.name
        about = self.key.problem.mask.alike
        of = "" if about == self.key.problem.mask else f" under {about!r}, which is alike"
        lines = (
            f"{'forward' if self.key.forward else 'backward'}: strategy {choice.strategy}; "
            f"{choice.program}",
            f"  bytes all ranks send: {others}; this rank sends {self.bytes_sent():,}",
            f"  scores: {scores}" if (scores := str(self.key.problem.scores)) else "",
            f"  forecast{of}: {forecast} ({name})" if forecast else "",
            f"  kernel {self.kernel.name}: {self.picked.reason}",
            f"  memory beyond inputs and outputs: {memory.total:,} bytes (slots "
            f"{memory.slots:,}, sums {memory.sums:,}, "
            f"copies {memory.copies:,}, scratch {memory.scratch:,}"
            + (f", tables {memory.tables:,})" if tables else "; without tables)"),
            f"  {len(self.graph.tasks)} tasks on this rank",
        )
        return "\n".join(filter(None, lines))

    def describe(self) -> Description:
        """See `Subject.describe`."""
        problem, choice, seconds = self.key.problem, self.choice, self.choice.seconds or {}
        layout, head_dim, v_dim = problem.q_layout, problem.head_dim, problem.v_head_dim
        return Description(
            kind="forward" if self.key.forward else "backward",
            explain=self.explain(tables=False),
            predicted_s=predicted_s(choice, self.rank, self.hardware, self.work.device),
            problem=f"layout {layout.kind}, {layout.seq_len:,} tokens, {problem.num_heads} heads "
            f"of {head_dim}{f' / {v_dim}' if v_dim != head_dim else ''} ({problem.num_kv_heads} "
            f"kv), batch {problem.batch}, {self.key.dtype}, {problem.mask!r}",
            strategy=choice.strategy,
            candidates=tuple(
                (name, size, seconds.get(name)) for name, size in choice.candidates.items()
            ),
        )

    def takes(self) -> str:
        """The memory of a call by the formula, in words, and what to do if it is too much."""
        need = self.memory()
        formula = " + ".join(f"{name} {size:,}" for name, size in need._asdict().items() if size)
        return (
            f"this call takes {need.total:,} bytes beyond its inputs and outputs ({formula}). Use "
            "more ranks, use fewer tokens or heads a call, or free other memory of the device"
        )

    def keep(self, key: object, value: _V) -> _V:
        """Keeps a value for the next runs of this plan."""
        if len(self.kept) >= _MOST_KEPT:  # by calls of many scales, say
            self.kept.clear()
        self.kept[key] = value
        return value

    @cached_property
    def straight(self) -> bool:
        """Whether a call needs no driver: its one tile can go to the caller's stream."""
        return self.one_tile and self.graph.has_ordered_lanes

    @cached_property
    def one_tile(self) -> bool:
        """Whether all there is to do is one tile, with nobody to wait for."""
        wanted = (ForwardTile,) if self.key.forward else (Delta, BackwardTile)
        tasks = [task for task in self.graph.tasks if task.lane == "compute"]
        return (
            self.graph.world_size == 1
            and isinstance(self.choice.program, Ring)
            and not self.key.problem.scores.sinks_need_grad
            and tuple(type(task.op) for task in tasks) == wanted
        )

    @cached_property
    def writes_results(self) -> bool:
        """Whether the kernel writes results as they are wanted: there is one tile, and no sum."""
        if not (self.key.forward and self.one_tile):
            return False
        tile = self.choice.program.footprint(self.rank).tile
        return self.kernel.writes_results(self.work, tile)

    @cached_property
    def writes_gradients(self) -> bool:
        """Whether the kernel writes gradients as they are wanted: there is one tile, and no sum."""
        if self.key.forward or self.work.ring_size > 1 or len(self.work.tiles) != 1:
            return False
        tile = self.choice.program.footprint(self.rank).tile
        return self.kernel.writes_gradients(self.work, tile)

    def memory(self, *, tables: bool = True) -> MemoryNeed:
        """The memory of one run, in bytes. A GPU's tables are made to count them, once.

        tables: False leaves them out.
        """
        held = self.choice.program.footprint(self.rank)
        scratch = self.kernel.scratch_bytes(self.key.forward, self.key.dtype, held.tile)
        slots = sum(part.size_bytes for part in self.slots)
        chunks = sum(part.size_bytes for part in self.chunks)
        table_bytes = self._table_bytes if tables else 0
        sums = held.sums - (held.spared if self.writes_gradients else 0)
        if self.writes_results:
            sums = 0
        return MemoryNeed(slots, sums, held.copies, scratch, table_bytes, chunks)

    @cached_property
    def _table_bytes(self) -> int:
        program = self.choice.program
        largest = program.footprint(self.rank).tile
        return self.kernel.table_bytes(self.work, program.tiles(self.rank), largest)


class Planner:
    """Makes plans for one rank, and keeps the `capacity` plans that were used last."""

    def __init__(
        self,
        rank: int,
        lanes: tuple[Lane, ...] = HOST_LANES,
        lower: Callable[[Graph], Graph] = lambda graph: graph,
        ranks_per_node: int = 1,
        hardware: Hardware | None = None,
        capacity: int = 64,
    ) -> None:
        self.num_made = 0
        self._rank = rank
        self._lanes = lanes
        self._lower = lower
        self._chooser = Chooser(hardware, ranks_per_node, capacity)
        self._plans: Recent[PlanKey, Plan] = Recent(capacity, MOST_TABLE_BYTES)
        # Programs of the latest plans, which still hold their intermediate data.
        self._detailed: deque[Program] = deque()
        self._verified: Recent[Hashable, bool] = Recent(_KNOWN_WIRINGS)

    def plan(self, key: PlanKey) -> Plan:
        """The plan for a key, built and verified on first use.

        Local. Blocks while several kernels are timed, once for each chip. Raises InputError for a
        call that no kernel or strategy can do.
        """
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make(key)
            self.num_made += 1
            self._detailed.append(plan.choice.program)
            if len(self._detailed) > _DETAILED:
                self._detailed.popleft().forget()
        self._plans.put(key, plan)
        return plan

    def layout(self, problem: Problem, recurrences: tuple[RecurrenceSizes, ...] = ()) -> Layout:
        """The layout that suits a problem best; see `fastest_layout`. The same on every rank.

        Local; kept by problem. Takes seconds. problem: in any layout.
        """
        return self._chooser.layout(problem, recurrences)

    def whole(self, problem: Problem, token_cells: float) -> Layout:
        """The layout of whole documents that suits a problem; see `whole_layout`. Local."""
        return self._chooser.whole(problem, token_cells)

    def forget(self) -> None:
        """Lets go of all plans, layouts and forecasts."""
        self._detailed.clear()
        self._plans.clear()
        self._chooser.forget()

    def _make(self, key: PlanKey) -> Plan:
        problem = key.problem
        choice = self._chooser.choose(problem, key.strategy, forward=key.forward)
        graph = choice.program.graph(self._rank, self._lanes)
        tiles = tuple(
            task.op.pieces
            for task in graph.tasks
            if isinstance(task.op, (ForwardTile, BackwardTile))
        )
        places = tuple(islice(choice.program.tiles(self._rank), 2))
        work = Work(
            device=key.device, dtype=key.dtype, head_dim=problem.head_dim, mask=problem.mask,
            forward=key.forward, ring_size=choice.program.ring_size, tiles=tiles,
            partials=key.partials, scores=problem.scores, v_head_dim=problem.v_head_dim,
            deterministic=key.deterministic, places=places[0] if len(places) == 1 else None,
            grouped=problem.num_heads > problem.num_kv_heads,
        )  # fmt: skip
        picked = pick(work, choice.kernel or key.kernel)
        schedule = Schedule.of(self.lowered(choice.program, graph))
        return Plan(
            rank=self._rank, picked=picked, program_graph=graph, schedule=schedule,
            key=key, choice=choice, work=work, hardware=self._chooser.hardware,
        )  # fmt: skip

    def lowered(self, program: Graphs, graph: Graph) -> Graph:
        """The lowered graph that the machine makes of `own`, this rank's graph of a program.

        Verifies a wiring that is new. Local. Raises InternalError.
        """
        lowered = self._lower(graph)
        # By its hash: the wirings of large worlds are large.
        wiring = hash((program.wiring, graph.world_size))
        if not self._verified.get(wiring):
            check_share(graph, program.messages(self._rank))
            if lowered is not graph:
                check_graph(lowered)
            self._verified.put(wiring, True)
        return lowered
