"""What all tests share: poisoned memory, one thread of torch's, the modules beside this file, and
MPI jobs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

# Tests import modules of this folder (spec, tolerances, worlds, jobs), which pytest's import mode
# leaves to us. The folder above must stay off the path: its `scheduler` would be importable by that
# name.
sys.path.insert(0, str(Path(__file__).parent))
# Fresh outputs and receive slots hold NaN: what is used before it is written shows. Jobs inherit
# it.
os.environ["BURST_RT_POISON"] = "1"
# What somebody has calibrated on this machine decides nothing here.
os.environ["BURST_RT_HARDWARE"] = "none"
# Ranks are threads or processes on few cores. `make other-cpus` tries more.
torch.set_num_threads(int(os.environ.get("BURST_RT_TEST_THREADS", "1")))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mpi: starts MPI jobs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests under tests/mpi are marked so: `-m 'not mpi'` leaves them out."""
    for item in items:
        if item.path.parent.name == "mpi":
            item.add_marker("mpi")
