"""What may wait for another rank, a process or a device says so where it is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("burst_rt/attention", "burst_rt/runtime", "burst_rt/drivers", "transport")
_FILES = ("burst_rt/context.py", "burst_rt/local.py", "scheduler/loop.py")

# What waits by itself, as it is called.
_WAITS = {
    "agree", "all_reduce", "allgather_all", "collective", "first_pairs", "perform", "refuse",
    "run_backward", "run_forward", "settle", "sleep", "start_mpi", "wait", "wait_for",
}  # fmt: skip
# What waits through private functions.
_THROUGH_OTHERS = ("Runtime.agree", "Runtime.perform", "Watch.wait_for", "join")
# Public functions that call one of these names and still wait for nobody, and why.
_NEVER = {
    "CudaDriver.join": "`wait` is of one stream for another",
    "SlotPool.take": "`wait` is of one stream for another",
    "StreamDevice.wait": "one stream waits for another; the host goes on",
    "TorchDevice.wait": "one stream waits for another; the host goes on",
    "Backoff.pause": "at most 0.5 ms",
}
_SAID = re.compile(r"\b[Bb]lock|\bCollective\b|\bcollective\b|\bwaits?\b|\bSee `")


def _functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every public function and method of the rooms that wait, by its name in its module."""
    paths = [path for folder in _FOLDERS for path in sorted((_ROOT / folder).rglob("*.py"))]
    for path in [*paths, *(_ROOT / name for name in _FILES)]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for member in members:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield prefix + member.name, member


def _calls(function: ast.FunctionDef) -> set[str]:
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            called = node.func
            names.add(
                called.attr
                if isinstance(called, ast.Attribute)
                else called.id
                if isinstance(called, ast.Name)
                else ""
            )
    return names


_WAITING = {
    name: function
    for name, function in _functions()
    if (_calls(function) & _WAITS or name in _THROUGH_OTHERS) and name not in _NEVER
}


def test_what_waits_is_found() -> None:
    wanted = {
        "Runtime.perform", "Runtime.agree", "Runtime.collective", "Runtime.refuse", "refuse",
        "ContextLayout.unshard", "Pipeline.run", "Context.all_reduce", "init", "run", "join",
        "run_forward", "run_backward", "Agreement.settle", "Watch.wait_for",
    }  # fmt: skip
    assert wanted - set(_WAITING) == set()


@pytest.mark.parametrize("name", sorted(_WAITING))
def test_what_may_block_says_so(name: str) -> None:
    said = ast.get_docstring(_WAITING[name]) or ""
    assert _SAID.search(said), f"{name} calls {sorted(_calls(_WAITING[name]) & _WAITS)}: {said!r}"
