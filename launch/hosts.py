"""The hosts on which a job is started again: those of mpirun's arguments that still answer.

A host answers if mpirun can run a program there, which is what the job needs.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from burst_rt.launch.host_args import HOST_FILES, find_hosts
from burst_rt.launch.mpirun import MpiLauncher, kill_job

__all__ = ["Placement", "place_again"]

_SLOTS = re.compile(r"(?:(?<![\w-])slots\s*=\s*|:)(\d+)")
# Seconds that a host may take to answer. ssh waits for minutes for one without power.
_ANSWER_S = 30.0


class Placement(NamedTuple):
    """Where ranks go. words: which hosts do not answer, and what follows; "" where all do."""

    num_ranks: int
    mpi_args: Sequence[str]
    words: str = ""


def place_again(
    launcher: MpiLauncher, mpi_args: Sequence[str], num_ranks: int, folder: Path
) -> Placement:
    """Where a job can be started again: on the hosts of `mpi_args` that answer, as many of its
    ranks as they have slots for; a host whose slots are not said has one.

    folder: for files, while the job runs. Blocks for up to 30 s. Nothing changes where no hosts are
    named, and where all answer or none. Raises InputError for a file of hosts that cannot be read.
    """
    hosts = find_hosts(mpi_args)
    names = dict.fromkeys(name for name, _ in hosts.entries) if hosts else {}
    if hosts is None or len(names) < 2:
        return Placement(num_ranks, mpi_args)
    answering = _answering(launcher, hosts.others, names, folder)
    if not answering or len(answering) == len(names):
        return Placement(num_ranks, mpi_args)
    texts = [text for name, text in hosts.entries if name in answering]
    slots = sum(int(found[1]) if (found := _SLOTS.search(text)) else 1 for text in texts)
    value = ",".join(texts)
    if hosts.option in HOST_FILES:
        path = folder / "hosts.txt"
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        value = str(path)
    num = min(num_ranks, slots)
    gone = ", ".join(name for name in names if name not in answering)
    words = f"no answer from {gone}; the other hosts have slots for {num} of {num_ranks} ranks"
    return Placement(num, [*hosts.others, hosts.option, value], words)


def _answering(
    launcher: MpiLauncher, others: Sequence[str], names: Iterable[str], folder: Path
) -> set[str]:
    """Those of the hosts that answer. Blocks for up to 30 s."""
    probes = {
        name: subprocess.Popen(
            launcher.command(["true"], 1, [*others, "--host", name]),
            env=launcher.environment(1, 1, folder, ["--host", name]), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
        )
        for name in names
    }  # fmt: skip
    deadline_s = time.monotonic() + _ANSWER_S
    try:
        for probe in probes.values():
            with suppress(subprocess.TimeoutExpired):
                probe.wait(max(0.0, deadline_s - time.monotonic()))
        return {name for name, probe in probes.items() if probe.poll() == 0}
    finally:
        for probe in probes.values():
            if probe.poll() is None:
                kill_job(probe)
                probe.wait()
