"""Forecasts: what a strategy would take on a machine, from its graphs and a simulated run.

Pure Python: no device, no MPI, no torch. The time is the time of `simulate` with the machine's
`Hardware`; bytes and memory are counted from the graphs themselves. A forecast leaves out the
scratch memory of kernels that work in tiles (it is small, and the kernel's own business) and
whatever else lives on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from burst_rt.planning.layouts import Layout
from burst_rt.planning.masks import Rule
from burst_rt.planning.strategies import Choice, Program, Ring
from burst_rt.planning.strategies.hybrid import Hybrid
from burst_rt.planning.strategies.routes import OneRing
from burst_rt.scheduler import Graph, Schedule
from burst_rt.scheduler.simulator import Hardware, Rotated, simulate
from burst_rt.scheduler.trace import exposed

__all__ = [
    "Forecast",
    "fold_of",
    "memory_bytes",
    "of_choice",
    "schedules_of",
    "untiled_bytes",
    "working_bytes",
]

# Number of score matrices that the "untiled" kernel holds at once for a tile.
_SCORE_MATRICES = 6
# The largest world whose spans are kept. Without spans, idle time cannot be told apart into
# transfers and late peers.
_SPANS_UP_TO = 16


@dataclass(frozen=True)
class Forecast:
    """One direction of one strategy on one machine. Every number is the worst rank's."""

    strategy: str
    forward: bool
    time_s: float  # when the last rank ends
    # Seconds for which computing waits for a transfer that is on the wire; in worlds above 16
    # ranks, seconds for which it waits for any reason.
    exposed_s: float
    sent_bytes: int
    memory_bytes: int  # inputs, outputs, sums and slots
    fits: bool  # whether memory_bytes is within the device's memory


def of_choice(choice: Choice, hardware: Hardware) -> Forecast:
    """The forecast of a program that has been chosen."""
    program = choice.program
    world = program.problem.world_size
    in_detail = world <= _SPANS_UP_TO
    fold = 1 if in_detail else fold_of(program, hardware)
    schedules = schedules_of(program, fold)
    device = hardware.device
    run = simulate(
        schedules,
        hardware.folded() if fold > 1 else hardware,
        seconds=lambda task: device.seconds(task, choice.kernel),
        spans=in_detail,
    )
    # Ranks that share a schedule hold the same buffers. Where spans are kept, each rank's own graph
    # is needed.
    graphs: dict[int, Graph] = {}
    for rank, given in zip(range(0, world, fold), schedules, strict=True):
        if not isinstance(given, Rotated):
            graphs[rank] = given.graph
        elif not given.shift:
            graphs[rank] = given.schedule.graph
        elif in_detail:
            graphs[rank] = program.graph(rank)
    if in_detail:
        exposed_s = max(idle.exposed_s for idle in exposed([*graphs.values()], run.spans))
    else:
        exposed_s = max(rank.idle_s for rank in run.ranks)
    memory = max(memory_bytes(choice, rank, graph) for rank, graph in graphs.items())
    sent = max(rank.sent_bytes for rank in run.ranks)
    return Forecast(
        choice.strategy,
        program.forward,
        run.end_s,
        exposed_s,
        sent,
        memory,
        memory <= device.memory_bytes,
    )


def fold_of(program: Program, hardware: Hardware) -> int:
    """The number of consecutive ranks that do the same at the same time; one is simulated.

    Ranks of a node do where they spread the heads among themselves, and only there.
    """
    problem, per_node = program.problem, hardware.node.ranks
    if not isinstance(program, Hybrid) or program.across:
        return 1
    if not program.group_size == per_node < problem.world_size or hardware.folded() is None:
        return 1
    return per_node if problem.q_layout.has_even_shards and problem.kv_layout.has_even_shards else 1


def schedules_of(program: Program, fold: int = 1) -> list[Schedule | Rotated]:
    """The schedules of all ranks. Where all ranks do the same, they share one schedule.

    fold: see `fold_of`.
    """
    world = program.problem.world_size
    if fold > 1:
        firsts = range(0, world, fold)
        return [Rotated(Schedule.of(program.graph(rank)), 0, fold) for rank in firsts]
    first = Schedule.of(program.graph(0))
    if world > 1 and _all_alike(program):
        return [Rotated(first, rank) for rank in range(world)]
    return [first, *(Schedule.of(program.graph(rank)) for rank in range(1, world))]


def memory_bytes(choice: Choice, rank: int, graph: Graph) -> int:
    """Bytes that a rank holds: inputs, outputs, and what it works with."""
    program = choice.program
    problem = program.problem
    q_len, kv_len = problem.q_layout.shard_len(rank), problem.kv_layout.shard_len(rank)
    q_side, kv_side = (
        problem.q_token_bytes + problem.out_token_bytes,
        problem.k_token_bytes + problem.v_token_bytes,
    )
    # q, k, v and out; in a backward dout and the gradients, too.
    tensors = (q_len * q_side + kv_len * kv_side) * (1 if program.forward else 2)
    return tensors + working_bytes(choice, rank, graph)


def working_bytes(choice: Choice, rank: int, graph: Graph) -> int:
    """Bytes that a rank holds beyond inputs and outputs.

    These are slots, sums, copies, and matrices of scores where the kernel makes them. The kernel is
    not known here: one that writes gradients itself takes less, by `Footprint.spared`.
    """
    held = choice.program.footprint(rank)
    scores = untiled_bytes(choice.program, rank) if choice.kernel == "untiled" else 0
    return sum(part.size_bytes for part in graph.slots) + held.sums + held.copies + scores


def untiled_bytes(program: Program, rank: int) -> int:
    """Bytes of the matrices of scores of a tile that is not worked in fast memory."""
    tile = program.footprint(rank).tile
    return (
        _SCORE_MATRICES
        * program.problem.sum_bytes
        * tile.batch
        * tile.num_heads
        * tile.q_len
        * tile.kv_len
    )


def _all_alike(program: Program) -> bool:
    """Whether the ranks of a ring differ in nothing but their place in it."""
    problem = program.problem
    return (
        isinstance(program, Ring)
        and isinstance(program.route, OneRing)
        and problem.mask.rule is Rule.EVERYTHING
        and _is_even(problem.q_layout)
        and _is_even(problem.kv_layout)
    )


def _is_even(layout: Layout) -> bool:
    """Whether the runs of all ranks have the same lengths."""
    lengths = {tuple(map(len, runs)) for runs in layout.runs}
    return len(lengths) == 1
