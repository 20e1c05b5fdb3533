"""Tests of the Triton kernels: without a GPU under Triton's interpreter, and the same cases
compiled where there is one.

TRITON_INTERPRET=1 must be set before triton is imported, and changes it for the whole process; so
these are run by themselves: `TRITON_INTERPRET=1 pytest tests/interpreted`. Without the variable
they run on the GPU, and where there is none pytest passes them over.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch

_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = ["test_*.py"]
if _INTERPRETING:
    collect_ignore_glob = []
elif torch.cuda.is_available():
    # `burst-rt bench tune` itself is what tries block sizes on a GPU.
    collect_ignore_glob = ["test_tune.py", "test_fla.py", "test_hopper.py"]


def _spare_work(interpreter: Any) -> None:
    """Spares Triton's interpreter two thirds of its time: what it does again and again for nothing.

    interpreter: its module. The names are private; a release of Triton without them is only slower.
    """
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    # After each sum and product of integers it computes in 64 bits whether they overflowed. The
    # answer is asserted in debug mode alone.
    if not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        builder.options = replace(options, sanitize_overflow=False)
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or not hasattr(interpreter, "_LangPatchScope"):
        return

    # Whenever a kernel calls a function, all of triton.language is searched for what to patch. Here
    # it is searched once for each function, and stays patched between launches: nothing is compiled
    # in this process.
    @cache
    def patch_once(fn: Any) -> Any:
        patch(fn)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = patch_once


if _INTERPRETING:
    _spare_work(import_module("triton.runtime.interpreter"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Under the interpreter no test is passed over."""
    assert not (_INTERPRETING and report.skipped), report.nodeid
