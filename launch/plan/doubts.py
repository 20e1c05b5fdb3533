"""Whether a machine was busy with something else while it was measured.

Jobs would otherwise plan with figures that are of no use.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import psutil

from burst_rt.planning.fit import Sample
from burst_rt.scheduler import Cost
from burst_rt.scheduler.simulator import Hardware

__all__ = ["BusyCores", "doubts"]

# Maximum quotient of the slower quarter's time and the faster quarter's, among equal tasks, in the
# median over the kinds of task that are long enough to tell.
_SPREAD = 1.5
_LEAST_S = 2e-4
_LEAST_SAMPLES = 4
# Maximum number of seconds to start a task or an empty message, which normally takes a thousandth
# to a tenth of this. For whole matrices a fit may find more, but at most _TIMES_SHORTEST times the
# shortest measured task.
_MOST_LAUNCH_S = 1e-2
_TIMES_SHORTEST = 2.0
# Share of each rank's own core that other processes may use, in addition to the cores that the
# ranks leave.
_SHARE_OF_A_RANK = 0.1


class BusyCores:
    """Numbers of cores of this host that were busy since the object was made: in all, and with this
    process.
    """

    def __init__(self) -> None:
        self._began = self._now()

    def so_far(self) -> tuple[float, float]:
        """The mean number of busy cores: of the whole host, and of this process."""
        elapsed_s, busy_s, own_s = (
            now - then for now, then in zip(self._now(), self._began, strict=True)
        )
        return busy_s / max(elapsed_s, 1e-9), own_s / max(elapsed_s, 1e-9)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        # On a virtual machine, time that its neighbours take ("steal") counts as busy too.
        busy = ("user", "nice", "system", "irq", "softirq", "steal")
        return (
            time.monotonic(),
            sum(getattr(times, name, 0.0) for name in busy),
            time.process_time(),
        )


def doubts(
    samples: Iterable[Sample],
    hardware: Hardware,
    others_cores: float,
    free_cores: float,
    num_ranks: int,
) -> Iterator[str]:
    """The reasons not to trust the figures, in words; nothing if they can be trusted.

    others_cores: cores that processes other than the ranks kept busy. free_cores: cores that the
    ranks leave to other processes. num_ranks: ranks on that host.
    """
    if others_cores > free_cores + _SHARE_OF_A_RANK * num_ranks:
        yield (
            f"other processes kept {others_cores:.1f} cores busy, and {num_ranks} ranks leave them "
            f"{free_cores:.0f}"
        )
    equal: dict[tuple[str, Cost], list[float]] = defaultdict(list)
    for sample in samples:
        equal[sample.name, sample.cost].append(sample.seconds)
    spread = _spread(equal.values())
    if spread > _SPREAD:
        yield (
            "the times of equal tasks differ too much (the upper quartile is "
            f"{spread:.1f} times the lower quartile)"
        )
    for name, rate in hardware.device.rates.items():
        shortest_s = min(
            (statistics.median(took) for (of, _), took in equal.items() if of == name), default=0.0
        )
        # Without a speed, launch_s is the time of the only size that was measured.
        has_speed = rate.flops_per_s is not None or rate.bytes_per_s is not None
        if has_speed and rate.launch_s > max(_MOST_LAUNCH_S, _TIMES_SHORTEST * shortest_s):
            yield f"starting {name} would take {rate.launch_s * 1e3:.0f} ms, which is far too long"
    if hardware.node.link.latency_s > _MOST_LAUNCH_S:
        latency_s = hardware.node.link.latency_s
        yield f"an empty message would take {latency_s * 1e3:.0f} ms, which is far too long"


def _spread(equal: Iterable[Sequence[float]]) -> float:
    ratios = []
    for took in equal:
        if len(took) >= _LEAST_SAMPLES and statistics.median(took) >= _LEAST_S:
            faster, _, slower = statistics.quantiles(took, n=4)
            ratios.append(slower / max(faster, 1e-9))
    return statistics.median(ratios) if ratios else 1.0
