"""What `auto` costs on drawn networks: `python tests/auto_points.py [SEED [POINTS]]`.

Each network is one host of four ranks, or two hosts of two with a link of drawn bandwidth, which
are namespaces of this machine (`hosts.py`). On each a job measures its network as any job does,
and `python -m benchmarks auto` times drawn calls. A table for each network goes to stdout, and the
regrets of all to the last line. Needs to be root.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from statistics import median

from hosts import Hosts, hosts

_RATES = ("100mbit", "200mbit", "400mbit", "1gbit", "10gbit")
_CALLS = 5  # on each network
_DEADLINE_S = 1800.0


def _measure(here: Hosts, folder: Path, seed: int, num_hosts: int) -> list[dict[str, object]]:
    out = folder / f"rows-{seed}.json"
    program = ["-m", "benchmarks", "auto", "--points", str(_CALLS), "--seed", str(seed)]
    settings = {
        "BURST_RT_HARDWARE": "", "XDG_CACHE_HOME": str(folder),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }  # fmt: skip
    command = [sys.executable, "-P", *program, "--repeats", "5", "--out", str(out)]
    job = here.mpirun(command, settings, slots=4 // num_hosts)
    assert job.wait(_DEADLINE_S) == 0, job.text
    print(job.out, flush=True)
    written = json.loads(out.read_text(encoding="utf-8"))
    (rows,) = (rows for title, rows in written.items() if title != "machine")
    return list(rows)


def main(seed: int = 0, points: int = 60) -> None:
    numbers = random.Random(seed)
    regrets: list[float] = []
    errors: list[float] = []
    for network in range(-(-points // _CALLS)):
        num_hosts, rate = numbers.choice((1, 2, 2)), numbers.choice(_RATES)
        print(f"network {network}: {num_hosts} hosts, {rate} between them", flush=True)
        with (
            tempfile.TemporaryDirectory() as name,
            hosts(num_hosts, Path(name), rate) as here,
        ):
            rows = _measure(here, Path(name), 1000 * seed + network, num_hosts)
        for row in rows:
            for column, value in row.items():
                if isinstance(value, (int, float)):
                    kept = regrets if column.endswith("regret %") else errors
                    kept.append(float(value) if kept is regrets else abs(float(value)))
    regrets.sort()
    print(
        f"{len(regrets)} calls: regret median {median(regrets):.1f} %, 90th percentile "
        f"{regrets[int(0.9 * (len(regrets) - 1))]:.1f} %; forecasts off by {median(errors):.0f} % "
        "(median)"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
