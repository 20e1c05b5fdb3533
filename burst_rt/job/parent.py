"""A rank that torchrun started ends when torchrun's process is gone, however that ended.

A launcher that is killed by SIGKILL ends nobody. mpirun's helpers see it and end their ranks;
torchrun's ranks would go on without it, and nobody would see how they end. Standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time

from burst_rt.job.processes import open_process
from burst_rt.job.telling import tell

__all__ = ["end_with_torchrun"]

# Seconds that a rank has after SIGTERM, as torchrun itself gives.
_GRACE_S = 30.0
# The process that started this one: torchrun's agent. It may be gone when `init` is called.
_agent = 0


def _note_parent() -> None:
    global _agent
    _agent = os.getppid()


_note_parent()
os.register_at_fork(after_in_child=_note_parent)


def end_with_torchrun() -> None:
    """Has this process get SIGTERM once its parent is gone, and SIGKILL 30 s later. Never blocks.

    Does nothing where torchrun did not start it, and on a kernel without pidfd (before Linux 5.3).
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    try:
        agent = open_process(_agent)
    except ProcessLookupError:
        agent = None
    except OSError:
        return
    threading.Thread(
        target=_watch, args=(agent,), name="burst_rt torchrun's end", daemon=True
    ).start()


def _watch(agent: int | None) -> None:
    """Blocks until the agent has ended. None: it has."""
    if agent is not None:
        poller = select.poll()
        poller.register(agent, select.POLLIN)
        poller.poll()
    tell(
        f"burst-rt: rank {os.environ.get('RANK', '?')}: torchrun, which started this process, is "
        "gone, so the process ends"
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
