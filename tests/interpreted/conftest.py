"""Tests of the Triton kernels: without a GPU under Triton's interpreter, and the same cases
compiled where there is one.

TRITON_INTERPRET=1 must be set before triton is imported, and changes it for the whole process; so
these are run by themselves: `TRITON_INTERPRET=1 pytest tests/interpreted`. Without the variable
they run on the GPU, and where there is none pytest passes them over.
"""

from __future__ import annotations

import os
from importlib import import_module

import pytest
import torch
from interpreting import spare_work

_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = ["test_*.py"]
if _INTERPRETING:
    collect_ignore_glob = []
elif torch.cuda.is_available():
    # `burst-rt bench tune` itself is what tries block sizes on a GPU.
    collect_ignore_glob = ["test_tune.py", "test_fla.py", "test_hopper.py"]


if _INTERPRETING:
    spare_work(import_module("triton.runtime.interpreter"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Under the interpreter no test is passed over."""
    assert not (_INTERPRETING and report.skipped), report.nodeid
