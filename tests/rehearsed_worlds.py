"""Small rings on made-up machines, to be rehearsed with faults and delays.

`sim/test_faults.py` plays some thousands of seeds, and `make seeds` a million.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from graphs import problem
from simulated_faults import Faults, Rehearsal, rehearse
from simulated_memory import Values, reference

from burst_rt.planning.choose import choose
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks import Causal, Full
from burst_rt.scheduler import DEVICE_LANES, HOST_LANES, NCCL_LANES, Engine, Graph, Schedule
from burst_rt.scheduler.simulator import Hardware
from burst_rt.transport.staged import stage_graph

__all__ = ["DIRECTIONS", "MACHINES", "WORLDS", "World", "ending", "make_world", "rehearse_world"]

DIRECTIONS = {
    "forward": ("burst", True),
    "forward of ring-q": ("ring-q", True),
    "backward of burst": ("burst", False),
    "backward of ring-kv": ("ring-kv", False),
}
MACHINES: dict[str, Callable[[Graph], Graph]] = {
    "host": lambda graph: replace(graph, lanes={lane.name: lane for lane in HOST_LANES}),
    "nccl": lambda graph: replace(graph, lanes={lane.name: lane for lane in NCCL_LANES}),
    "staged on the host": lambda graph: stage_graph(graph, 64),
    "staged": lambda graph: stage_graph(replace(graph,
    lanes={lane.name: lane for lane in DEVICE_LANES}), 64),
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """A ring on a machine, and its right result."""

    name: str
    graphs: tuple[Graph, ...]
    schedules: tuple[Schedule, ...]
    expected: Values
    hardware: Hardware | None


@cache
def make_world(world_size: int, direction: str, machine: str, causal: bool = False) -> World:
    length, mask = 4 * world_size - 1, Causal() if causal else Full()
    small = problem(length, length, world_size, mask=mask, heads=(2, 1), head_dim=4)
    strategy, forward = DIRECTIONS[direction]
    ring = choose(small, strategy, forward=forward).program
    graphs = tuple(MACHINES[machine](ring.graph(rank)) for rank in range(world_size))
    # Without hardware nothing but the seed decides how long things take; with it messages also
    # share links.
    hardware = load_hardware("a100-pcie") if machine.startswith("staged") else None
    name = f"{direction}, {world_size} ranks, {machine}"
    return World(name, graphs, tuple(map(Schedule.of, graphs)), reference(graphs), hardware)


# Staged graphs have several times the tasks: two and three ranks show as much.
WORLDS = [
    (world_size, direction, machine, causal)
    for world_size, direction, machine, causal in product(
        (2, 3, 4, 5), DIRECTIONS, MACHINES, (False, True)
    )
    if world_size <= 3 or not machine.startswith("staged")
]


def rehearse_world(
    world: World,
    faults: Faults,
    engine: Callable[[Schedule], Engine] = Engine,
    *,
    spans: bool = False,
) -> Rehearsal:
    """See `rehearse`."""
    return rehearse(world.schedules, faults, world.hardware, engine=engine, spans=spans)


def ending(rehearsal: Rehearsal) -> set[str]:
    """How a run ended: the names of the errors, else "finished", or "gone" where a rank is lost."""
    return {type(error).__name__ for error in rehearsal.errors if error} or {
        "finished" if all(rehearsal.finished) else "gone"
    }
