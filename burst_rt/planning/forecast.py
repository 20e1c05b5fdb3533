"""Forecasts: what a strategy would take on a machine, from its graphs and a simulated run. Pure
Python: no device, no MPI, no torch.

The time is that of `simulate` with the machine's `Hardware`; bytes and memory are counted
from the graphs themselves. What is left out: the scratch of kernels that work in tiles (small, and
the kernel's own business), and whatever else lives on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from burst_rt.errors import InputError
from burst_rt.planning.masks import Rule
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import Choice, Program, Ring, choose
from burst_rt.planning.strategies.routes import OneRing
from burst_rt.scheduler import Graph, Schedule
from burst_rt.scheduler.simulator import Hardware, Rotated, simulate
from burst_rt.scheduler.trace import exposed

__all__ = [
    "CANDIDATES",
    "FORECAST_UP_TO",
    "Forecast",
    "fastest",
    "forecast",
    "schedules_of",
    "untiled_bytes",
    "working_bytes",
]

# What a planner weighs against each other; the paper's baselines are for comparing only.
CANDIDATES = ("ring-kv", "burst", "bidirectional", "two-level", "all-to-all", "hybrid")
# Up to here a shape that is new takes a second or two to plan; at 64 ranks it takes ten.
FORECAST_UP_TO = 32
# What the "untiled" kernel holds of a tile at once.
_SCORE_MATRICES = 6
# Closer forecasts than this are equal: then the fewer bytes are taken.
_SAME = 0.02
# Of larger worlds no spans are kept: idle time is then not told apart into transfers and late
# peers.
_SPANS_UP_TO = 16


@dataclass(frozen=True)
class Forecast:
    """One direction of one strategy on one machine; of the worst rank each.

    time_s: of the last rank to end. exposed_s: computing stands still while a transfer it needs is
    on the wire (in worlds above 16: all standing still). sent_bytes; memory_bytes: inputs, outputs,
    sums and slots. fits: whether that is within the device's memory.
    """

    strategy: str
    forward: bool
    time_s: float
    exposed_s: float
    sent_bytes: int
    memory_bytes: int
    fits: bool


def forecast(
    problem: Problem,
    strategy: str,
    hardware: Hardware,
    *,
    forward: bool,
    ranks_per_node: int | None = None,
) -> Forecast:
    """Simulates one direction. ranks_per_node: as for `choose`; None: as many as the machine's
    nodes have.

    Raises InputError for a strategy that this problem does not allow.
    """
    per_node = ranks_per_node or min(hardware.node.ranks, problem.world_size)
    return of_choice(choose(problem, strategy, forward=forward, ranks_per_node=per_node), hardware)


def fastest(problem: Problem, hardware: Hardware, *, forward: bool, ranks_per_node: int) -> Choice:
    """The program that is forecast to be done first, of those that fit into memory (of all, if none
    does).
    """
    found: list[tuple[Choice, Forecast]] = []
    for strategy in CANDIDATES:
        try:
            choice = choose(problem, strategy, forward=forward, ranks_per_node=ranks_per_node)
        except InputError:
            continue  # not for this problem
        if all(choice.program != other.program for other, _ in found):
            found.append((choice, of_choice(choice, hardware)))
    able = [each for each in found if each[1].fits] or found
    limit_s = min(about.time_s for _, about in able) * (1 + _SAME)
    taken, _ = min(
        (each for each in able if each[1].time_s <= limit_s), key=lambda each: each[1].sent_bytes
    )
    candidates = {label: size for choice, _ in found for label, size in choice.candidates.items()}
    return taken._replace(
        candidates=candidates, seconds={choice.strategy: about.time_s for choice, about in found}
    )


def of_choice(choice: Choice, hardware: Hardware) -> Forecast:
    """The forecast of a program that has been chosen."""
    program = choice.program
    world = program.problem.world_size
    schedules = schedules_of(program)
    in_detail = world <= _SPANS_UP_TO
    device = hardware.device
    run = simulate(
        schedules,
        hardware,
        seconds=lambda task: device.seconds(task, choice.kernel),
        spans=in_detail,
    )
    # Ranks that share a schedule hold the same; in detail, each rank's own graph is needed.
    graphs = [
        program.graph(rank) if isinstance(given, Rotated) else given.graph
        for rank, given in enumerate(schedules)
        if in_detail or not isinstance(given, Rotated) or rank == 0
    ]
    exposed_s = (
        max(idle.exposed_s for idle in exposed(graphs, run.spans))
        if in_detail
        else max(rank.idle_s for rank in run.ranks)
    )
    memory = max(memory_bytes(choice, rank, graph) for rank, graph in enumerate(graphs))
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


def schedules_of(program: Program) -> list[Schedule | Rotated]:
    """The schedules of all ranks; one that all share where all ranks do the same."""
    world = program.problem.world_size
    first = Schedule.of(program.graph(0))
    if world > 1 and _all_alike(program):
        return [Rotated(first, rank) for rank in range(world)]
    return [first, *(Schedule.of(program.graph(rank)) for rank in range(1, world))]


def memory_bytes(choice: Choice, rank: int, graph: Graph) -> int:
    """What a rank holds: inputs, outputs, and what it works with."""
    program = choice.program
    problem = program.problem
    q_len, kv_len = problem.q_layout.shard_len(rank), problem.kv_layout.shard_len(rank)
    tensors = 2 * (q_len * problem.q_token_bytes + kv_len * problem.kv_token_bytes)
    if not program.forward:
        # dout and the gradients; q, k, v and out are counted above.
        tensors += 2 * q_len * problem.q_token_bytes + 2 * kv_len * problem.kv_token_bytes
    return tensors + working_bytes(choice, rank, graph)


def working_bytes(choice: Choice, rank: int, graph: Graph) -> int:
    """What a rank holds beyond inputs and outputs: slots, sums and copies, and matrices of scores
    where the kernel makes them.
    """
    held = choice.program.footprint(rank)
    scores = untiled_bytes(choice.program, rank) if choice.kernel == "untiled" else 0
    return sum(part.size_bytes for part in graph.slots) + held.sums + held.copies + scores


def untiled_bytes(program: Program, rank: int) -> int:
    """What a tile takes that is not worked in fast memory: whole matrices of scores."""
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
    layouts = (program.problem.q_layout, program.problem.kv_layout)
    one_ring = isinstance(program, Ring) and isinstance(program.route, OneRing)
    return (
        one_ring
        and program.problem.mask.rule is Rule.EVERYTHING
        and all(len({tuple(map(len, own)) for own in of.blocks}) == 1 for of in layouts)
    )
