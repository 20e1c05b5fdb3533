"""`burst-rt doctor`: what this machine has for a job, and what to do about what is missing.

The doctor looks through a table of checks (`checks.py`). It starts a job of two ranks by each
launcher that needs no batch system: mpirun, and torchrun, which needs no MPI. A CPU job can run
where one of them works. With a GPU another job asks whether MPI takes device memory, and the answer
is remembered for later jobs. The doctor changes nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burst_rt.launch.checks import CHECKS, GPU_CHECKS, JOBS, Finding, Inspection, check

__all__ = ["command", "examine"]

# All ways to start jobs.
_WAYS = ("MPI library", "mpirun", *JOBS.values())
_TRAIN = "burst_rt.launch.train"
_STYLES = {"ok": "green", "warning": "yellow", "missing": "red", "absent": "dim"}


def examine() -> list[Finding]:
    """Look at everything a job needs; blocks for its probes' processes, some 20 s.

    The deadlines of all probes together are 5 minutes.
    """
    return _ways(check(Inspection(), CHECKS | GPU_CHECKS))


def _ways(findings: Sequence[Finding]) -> list[Finding]:
    """If a job has run by one launcher, the other ways to start jobs are not reported missing."""
    if not any(finding.name in JOBS.values() and finding.state == "ok" for finding in findings):
        return list(findings)
    return [
        replace(finding, state="warning")
        if finding.name in _WAYS and finding.state == "missing"
        else finding
        for finding in findings
    ]


@click.command()
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a JSON list of {name, state, found, advice} instead of a table.",
)
def command(as_json: bool) -> None:
    """Check what this machine has and lacks for a job, and say what to do.

    Looks at Python, torch, the MPI library, cores, shared memory, Triton and the CUDA libraries,
    and at each launcher: mpirun, torchrun, burst-rt run, srun and accelerate launch. With mpirun
    and with torchrun it runs a real job of two ranks. Takes some 20 seconds. The exit code is 0 if
    a job can run on the CPU with one of them, else 1.
    """
    console = Console(stderr=True)
    with console.status("examining this machine ..."):
        findings = examine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
    sys.exit(1 if any(finding.state == "missing" for finding in findings) else 0)


def _print_table(findings: Sequence[Finding]) -> None:
    table = Table("", "state")
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        state = f"[{_STYLES[finding.state]}]{finding.state}[/]"
        advice = f"\n[bold]-> {escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(finding.name, state, escape(finding.found) + advice)
    console = Console()
    console.print(table)
    console.print(_summary(findings))


def _summary(findings: Sequence[Finding]) -> str:
    """Whether a CPU job can run, and how it is started."""
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if missing:
        return f"A CPU job cannot run yet: see {', '.join(missing)}."
    ran = {finding.name for finding in findings if finding.state == "ok"}
    by_mpirun, by_torchrun = (JOBS[launcher] in ran for launcher in ("mpirun", "torchrun"))
    if not by_mpirun and "burst-rt run" in ran:
        return (
            "A CPU job can run here, without MPI: burst-rt train -n 2, or torchrun "
            f"--nproc-per-node 2 -m {_TRAIN}"
        )
    if not by_mpirun:
        return (
            "A CPU job can run here, by torchrun only: torchrun --nproc-per-node 2 -m "
            f"{_TRAIN}. For burst-rt run and mpirun see the lines above."
        )
    also = f", or torchrun --nproc-per-node 2 -m {_TRAIN}" if by_torchrun else ""
    return f"A CPU job can run here: burst-rt train -n 2{also}"
