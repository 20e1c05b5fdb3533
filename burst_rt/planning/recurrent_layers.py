"""Recurrent layers in a layout: their scans, and what these take on a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from burst_rt.planning.layouts import Layout
from burst_rt.planning.recurrences import STATE_BYTES, RecurrenceSizes
from burst_rt.planning.scan import Scan
from burst_rt.planning.segments import Segment, StageFlops, segments_of, ways_of
from burst_rt.scheduler import Schedule

if TYPE_CHECKING:
    from burst_rt.scheduler.simulator import Hardware

__all__ = ["scan_seconds", "scans_of"]


def scans_of(
    sizes: RecurrenceSizes, layout: Layout, batch: int, branches: Mapping[int, int] | None = None
) -> Iterator[Scan]:
    """The scans of a layer's convolution and of its recurrence, forward and backward.

    branches: see `PrefixTree.branches`. Raises InputError for striped layouts.
    """
    segments, world_size = segments_of(layout, branches or {}), layout.world_size
    if sizes.kernel > 1 and sizes.channels:
        memory = sizes.kernel - 1
        work = RecurrenceSizes(
            rule="convolution", num_heads=sizes.channels, kernel=sizes.kernel
        ).stage_flops
        state_bytes = sizes.halo_bytes(STATE_BYTES, batch)
        yield from _both(segments, world_size, work, state_bytes, memory, batch)
    if sizes.has_state:
        state_bytes = sizes.state_bytes(batch)
        yield from _both(segments, world_size, sizes.stage_flops, state_bytes, None, batch)


def _both(
    segments: tuple[Segment, ...], world_size: int, work: StageFlops, state_bytes: int,
    memory: int | None, batch: int,
) -> Iterator[Scan]:  # fmt: skip
    for forward in (True, False):
        flops = work if forward else work.backward()
        yield Scan(
            world_size=world_size,
            segments=segments,
            ways=ways_of(segments, flops, memory, forward=forward),
            state_bytes=state_bytes,
            flops=flops,
            batch=batch,
            forward=forward,
            shares_last=False,
        )


def scan_seconds(scan: Scan, hardware: Hardware) -> float:
    """Seconds until the last rank has ended, in a simulated run."""
    # Most jobs have no machine file, and do without the simulator.
    from burst_rt.scheduler.simulator import simulate

    schedules = [Schedule.of(scan.graph(rank)) for rank in range(scan.world_size)]
    return simulate(schedules, hardware, seconds=hardware.device.seconds, spans=False).end_s
