"""A job's folders under `burst-rt run`: one that is kept if the job fails, one in shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from burst_rt.job.folders import (
    SHARED_MEMORY,
    hold_folder,
    new_job_name,
    prune_jobs,
    release_folder,
    shared_memory_of,
)
from burst_rt.job.postmortem import LauncherNote, leave_note
from burst_rt.launch.mpirun import MpiLauncher, one_host

__all__ = ["KeptFolder", "kept_folder", "shared_memory"]


@dataclass
class KeptFolder:
    """The folder of a job, which stays where the job has failed."""

    folder: Path
    failed: bool = False

    def fail(self, launched: LauncherNote) -> None:
        leave_note(self.folder, launched)
        self.failed = True


@contextmanager
def kept_folder() -> Iterator[KeptFolder]:
    """A folder for the job: deleted with it, unless the job fails, or this process is killed."""
    prune_jobs()
    try:
        folder = hold_folder(new_job_name())
    except OSError:
        # Somebody else has the folder of this user's jobs: this job's is not kept.
        with tempfile.TemporaryDirectory(prefix="burst-rt-", ignore_cleanup_errors=True) as name:
            yield KeptFolder(Path(name))
        return
    kept = KeptFolder(folder)
    try:
        yield kept
    finally:
        release_folder(folder, delete=not kept.failed)
        prune_jobs()


@contextmanager
def shared_memory(
    launcher: MpiLauncher, mpi_args: Sequence[str], job: str
) -> Iterator[dict[str, str]]:
    """The variable that gives the memory shared by Open MPI's ranks a folder of this job alone.

    Open MPI leaves the files of killed ranks behind; this folder is deleted with the job. Empty
    where the user has named a folder.
    """
    named = any(
        name.endswith(("btl_sm_backing_directory", "btl_vader_backing_directory"))
        for name in os.environ
    )
    if (
        launcher.family != "Open MPI"
        or not one_host(mpi_args)
        or named
        or not os.access(SHARED_MEMORY, os.W_OK)
    ):
        yield {}
        return
    folder = shared_memory_of(job)
    folder.mkdir(0o700)
    try:
        yield {"OMPI_MCA_btl_sm_backing_directory": str(folder)}
    finally:
        # A rank that has been killed may not be quite gone yet.
        shutil.rmtree(folder, ignore_errors=True)
