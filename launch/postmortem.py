"""`burst-rt postmortem`: says who stopped first in a job that failed, and who waited for whom."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from burst_rt.errors import InputError
from burst_rt.job.folders import ended_jobs, jobs_folder
from burst_rt.job.postmortem import PostMortem

__all__ = ["command", "first_lines"]


def first_lines(folder: Path) -> str:
    """What `burst-rt run` prints of the post-mortem; "" where no rank has a flight record."""
    post_mortem = PostMortem(folder)
    if not post_mortem.flights:
        return ""
    first, *chain = post_mortem.heading()
    # The launcher's own last line says the same.
    said = post_mortem.launched.said if post_mortem.launched is not None else None
    known = [] if said is not None and said[0] == post_mortem.first else [first]
    # Another login need not have the temporary folder of a batch job.
    name = shlex.quote(str(folder)) if "TMPDIR" in os.environ else folder.name
    lines = [*known, *chain, f"more: burst-rt postmortem {name}"]
    return "".join(f"burst-rt: {line}\n" for line in lines)


@click.command()
@click.argument("job", required=False)
def command(job: str | None) -> None:
    """Say who stopped first in a job that failed, where, and who waited for whom.

    JOB: the name of a job's folder, or its path. [default: the newest]

    Jobs of `burst-rt run`, mpirun, srun and torchrun are kept if they fail, the newest ten.
    """
    jobs = ended_jobs()
    if job is None:
        if not jobs:
            raise InputError(f"no job that failed is kept in {jobs_folder()}")
        folder = jobs[0]
    else:
        folder = Path(job) if Path(job).is_dir() else jobs_folder() / job
        if not folder.is_dir():
            kept = ", ".join(each.name for each in jobs) or "none"
            raise InputError(f"no job {job!r} is kept in {jobs_folder()}; kept are: {kept}")
    for line in PostMortem(folder).lines():
        click.echo(line)
    sys.stdout.flush()
