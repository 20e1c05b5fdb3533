"""Forecasts: what a strategy would take on a machine, from its graphs and a simulated run. Pure Python: no device, no MPI, no torch.

The time is that of `scheduler.simulate` with the machine's `Hardware`; bytes and memory are counted from the graphs themselves. What is
left out: the scratch of kernels that work in tiles (small, and the kernel's own business), and whatever else lives on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from burst_rt.attention.masks import Full
from burst_rt.attention.problem import Problem
from burst_rt.attention.strategies import Choice, Program, Ring, choose
from burst_rt.attention.strategies.routes import OneRing
from burst_rt.errors import InputError
from burst_rt.scheduler import Graph, Schedule
from burst_rt.scheduler.hardware import Hardware
from burst_rt.scheduler.simulate import Rotated, simulate
from burst_rt.scheduler.trace import exposed

__all__ = ["CANDIDATES", "FORECAST_UP_TO", "Forecast", "fastest", "forecast", "rank_forecasts", "schedules_of", "untiled_bytes"]

# What a planner weighs against each other; the paper's baselines are for comparing only.
CANDIDATES = ("ring-kv", "burst", "bidirectional", "two-level", "all-to-all", "hybrid")
# In larger worlds a forecast takes longer than a call may wait for its plan.
FORECAST_UP_TO = 64
# What the "untiled" kernel holds of a tile at once.
_SCORE_MATRICES = 6
# Closer forecasts than this are equal: then the fewer bytes are taken.
_SAME = 0.02
# Of larger worlds no spans are kept: idle time is then not told apart into transfers and late peers.
_SPANS_UP_TO = 16


@dataclass(frozen=True)
class Forecast:
    """One direction of one strategy on one machine; of the worst rank each.

    time_s: of the last rank to end. exposed_s: computing stands still while a transfer it needs is on the wire (in worlds above 16: all
    standing still). sent_bytes; memory_bytes: inputs, outputs, sums and slots. fits: whether that is within the device's memory.
    """

    strategy: str
    forward: bool
    time_s: float
    exposed_s: float
    sent_bytes: int
    memory_bytes: int
    fits: bool


def forecast(problem: Problem, strategy: str, hardware: Hardware, *, forward: bool, ranks_per_node: int | None = None) -> Forecast:
    """Simulates one direction. ranks_per_node: as for `choose`; None: as many as the machine's nodes have.

    Raises InputError for a strategy that this problem does not allow.
    """
    per_node = ranks_per_node or min(hardware.node.ranks, problem.world_size)
    return of_choice(choose(problem, strategy, forward=forward, ranks_per_node=per_node), hardware)


def fastest(problem: Problem, hardware: Hardware, *, forward: bool, ranks_per_node: int) -> Choice:
    """The program that is forecast to be done first, of those that fit into memory (of all, if none does)."""
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
    taken, _ = min((each for each in able if each[1].time_s <= limit_s), key=lambda each: each[1].sent_bytes)
    candidates = {label: size for choice, _ in found for label, size in choice.candidates.items()}
    return taken._replace(candidates=candidates, seconds={choice.strategy: about.time_s for choice, about in found})


def of_choice(choice: Choice, hardware: Hardware) -> Forecast:
    """The forecast of a program that has been chosen."""
    program = choice.program
    world = program.problem.world_size
    schedules = schedules_of(program)
    in_detail = world <= _SPANS_UP_TO
    device = hardware.device
    run = simulate(schedules, hardware, seconds=lambda task: device.seconds(task, choice.kernel), spans=in_detail)
    if in_detail:
        graphs = [program.graph(rank) for rank in range(world)]
        exposed_s = max(idle.exposed_s for idle in exposed(graphs, run.spans))
    else:
        exposed_s = max(rank.idle_s for rank in run.ranks)
    firsts = [(rank, given.schedule.graph if isinstance(given, Rotated) else given.graph) for rank, given in enumerate(schedules)]
    memory = max(memory_bytes(program, rank, graph) for rank, graph in (firsts[:1] if isinstance(schedules[-1], Rotated) else firsts))
    if choice.kernel == "untiled":
        memory += max(untiled_bytes(program, rank) for rank in range(world))
    sent = max(rank.sent_bytes for rank in run.ranks)
    return Forecast(choice.strategy, program.forward, run.end_s, exposed_s, sent, memory, memory <= device.memory_bytes)


def rank_forecasts(
    problem: Problem, hardware: Hardware, *, directions: Sequence[bool] = (True, False), strategies: Iterable[str] = CANDIDATES
) -> list[tuple[str, tuple[Forecast, ...] | str]]:
    """Each strategy's forecasts, one a direction, the fastest that fits first; those that the problem does not allow last, with why."""
    found: list[tuple[str, tuple[Forecast, ...]]] = []
    refused: list[tuple[str, tuple[Forecast, ...] | str]] = []
    for strategy in strategies:
        try:
            found.append((strategy, tuple(forecast(problem, strategy, hardware, forward=forward) for forward in directions)))
        except InputError as error:
            refused.append((strategy, error.message))
    found.sort(key=lambda item: (not all(f.fits for f in item[1]), sum(f.time_s for f in item[1]), item[0]))
    return [*found, *refused]


def schedules_of(program: Program) -> list[Schedule | Rotated]:
    """The schedules of all ranks; one that all share where all ranks do the same."""
    world = program.problem.world_size
    first = Schedule.of(program.graph(0))
    if world > 1 and _all_alike(program):
        return [Rotated(first, rank) for rank in range(world)]
    return [first, *(Schedule.of(program.graph(rank)) for rank in range(1, world))]


def memory_bytes(program: Program, rank: int, graph: Graph) -> int:
    """What a rank holds: inputs and outputs, sums, copies, and what its graph receives into."""
    problem = program.problem
    q_len, kv_len = problem.q_layout.shard_len(rank), problem.kv_layout.shard_len(rank)
    tensors = 2 * (q_len * problem.q_token_bytes + kv_len * problem.kv_token_bytes)
    if not program.forward:
        # dout and the gradients; q, k, v and out are counted above.
        tensors += 2 * q_len * problem.q_token_bytes + 2 * kv_len * problem.kv_token_bytes
    held = program.footprint(rank)
    slots = sum(part.size_bytes for part in graph.parts if part.id in graph.written and not part.initialised)
    return tensors + held.sums + held.copies + slots


def untiled_bytes(program: Program, rank: int) -> int:
    """What a tile takes that is not worked in fast memory: whole matrices of scores."""
    batch, num_heads, _, _, q_len, kv_len = program.footprint(rank).tile
    return _SCORE_MATRICES * program.problem.sum_bytes * batch * num_heads * q_len * kv_len


def _all_alike(program: Program) -> bool:
    """Whether the ranks of a ring differ in nothing but their place in it."""
    layouts = (program.problem.q_layout, program.problem.kv_layout)
    one_ring = isinstance(program, Ring) and isinstance(program.route, OneRing)
    return (
        one_ring and isinstance(program.problem.mask, Full) and all(len({tuple(map(len, own)) for own in of.blocks}) == 1 for of in layouts)
    )
