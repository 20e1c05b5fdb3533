"""Simulated runs with delays, stalled and lost ranks, from many seeds: `make seeds`.

Each seed is a run of real engines (`simulated_faults.py`) in one of the worlds of
`rehearsed_worlds.py`. All must end, with the right result or a typed error; `sim/test_faults.py`
shows that planted bugs are caught. A seed that fails is printed, and gives the same run again:

    python tests/seeds.py --first SEED --count 1
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from rehearsed_worlds import WORLDS, ending, make_world, rehearse_world
from simulated_faults import Faults, verdict

from burst_rt.errors import BurstError

_BATCH = 2000
_LINE_S = 60.0  # between two lines of progress


def _play(first: int, count: int) -> tuple[Counter[str], list[str]]:
    """How the runs of these seeds ended, and what is wrong with some, in words."""
    endings: Counter[str] = Counter()
    wrong = []
    for seed in range(first, first + count):
        world = make_world(*WORLDS[seed % len(WORLDS)])
        faults = Faults.draw(seed, len(world.graphs))
        try:
            rehearsal = rehearse_world(world, faults)
        except BurstError as error:  # a deadlock, or a check inside the run
            wrong.append(f"seed {seed}: {world.name}: {type(error).__name__}: {error}")
            continue
        endings.update(ending(rehearsal))
        if words := verdict(rehearsal, faults, world.expected):
            wrong.append(f"seed {seed}: {world.name}: {words}")
    return endings, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    starts = range(options.first, options.first + options.count, _BATCH)
    counts = [min(_BATCH, options.first + options.count - start) for start in starts]
    endings: Counter[str] = Counter()
    num_wrong, began_s, said_s = 0, time.monotonic(), time.monotonic()
    with ProcessPoolExecutor(options.processes) as pool:
        for start, count, (ended, wrong) in zip(
            starts, counts, pool.map(_play, starts, counts), strict=True
        ):
            endings += ended
            num_wrong += len(wrong)
            for line in wrong:
                print(line, flush=True)
            if time.monotonic() - said_s > _LINE_S:
                said_s = time.monotonic()
                print(f"{start + count - options.first:,} of {options.count:,}", flush=True)
    took_s = time.monotonic() - began_s
    how = ", ".join(f"{number:,} {name}" for name, number in endings.most_common())
    print(f"{options.count:,} seeds in {took_s / 60:.1f} min: {num_wrong} wrong; {how}")
    return int(bool(num_wrong))


if __name__ == "__main__":
    sys.exit(main())
