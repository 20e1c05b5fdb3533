"""The conformance kit: burst_rt's own adapter, and adapters that are wrong, raise, hang and end."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burst_rt.conformance import AttentionCase, all_cases

_ROOT = Path(__file__).resolve().parents[2]
# An adapter without ranks' work: it computes the truth, and spoils it by what the case asks for.
_SPOILT = """
import os
import time
from dataclasses import replace

import torch.distributed as dist

from burst_rt.conformance import NotOffered
from burst_rt.conformance.attention import true_attention


def attention(case, tensors):
    if "prefix/" in case.name:
        time.sleep(3600)
    if case.documents and dist.get_rank() == 1:
        os.abort()
    if case.documents:
        dist.barrier()
    if case.window:
        raise ValueError(f"windows of {case.window} keys are refused")
    if case.sinks:
        raise NotOffered("no argument for sinks")
    tensors = {"dout": tensors["q"], **tensors}
    return true_attention(replace(case, softcap=None), tensors)
"""


def _run(*words: object, timeout_s: int = 300) -> tuple[int, str]:
    """The exit code, and what was written."""
    command = [sys.executable, "-P", "-m", "burst_rt.conformance", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    return done.returncode, done.stdout + done.stderr


def _outcomes(path: Path) -> dict[str, dict[str, Any]]:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["case"]: line for line in lines}


def _exact(world: int, pattern: str, lines: Path) -> int:
    code, text = _run("burst_rt", "-n", world, "--case", pattern, "--json", lines)
    ended = _outcomes(lines)
    assert {outcome["kind"] for outcome in ended.values()} == {"exact"}, text
    assert code == 0, text
    return len(ended)


@pytest.mark.parametrize("pattern", ["attention/*odd/train", "model/*/packed/train"])
def test_burst_rt_is_exact(pattern: str, tmp_path: Path) -> None:
    assert _exact(2, pattern, tmp_path / "lines") > 4


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_burst_rt_is_exact_in_every_case(world: int, tmp_path: Path) -> None:
    assert _exact(world, "*", tmp_path / "lines") == len(list(all_cases()))


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter") / "spoilt.py"
    path.write_text(_SPOILT, encoding="utf-8")
    return path


def test_outcomes_are_told_apart(spoilt: Path, tmp_path: Path) -> None:
    lines, out = tmp_path / "lines", tmp_path / "out"
    names = ("causal", "causal+softcap", "causal+sinks", "window", "prefix", "documents")
    cases = [word for name in names for word in ("--case", f"attention/{name}/eval")]
    code, text = _run(spoilt, *cases, "--json", lines, "--out", out, "--deadline", 5)
    ended = _outcomes(lines)
    assert code == 1, text
    assert [ended[f"attention/{name}/eval"]["kind"] for name in names] == [
        "exact", "wrong", "not offered", "refused", "hung", "crashed",
    ]  # fmt: skip
    assert "ValueError: windows of 9 keys are refused" in text
    assert ended["attention/documents/eval"]["told"].startswith("SIGABRT")
    wrong = ended["attention/causal+softcap/eval"]
    assert wrong["told"] == "off: out"
    assert wrong["error"] > 0.1

    # The input is smaller than the case's, has the truth in it, and is wrong again.
    kept = out / "spoilt" / "attention.causal+softcap.eval.npz"
    with np.load(kept) as arrays:
        assert arrays["q"].shape == arrays["truth.out"].shape == (1, 6, 1, 8)
    code, text = _run(spoilt, "--case", kept, "--json", lines)
    assert code == 1, text
    assert [outcome["kind"] for outcome in _outcomes(lines).values()] == ["wrong"]
    assert _run("burst_rt", "--case", kept)[0] == 0


@pytest.mark.parametrize(
    ("adapter", "pattern", "expected", "said"),
    [
        ("spoilt", "attention/window/eval", 0, "refused"),
        ("import no_such_library", "attention/full/eval", 2, "No module named 'no_such_library'"),
        ("DEVICE = 'cuda'\ndef attention(*_): ...", "attention/full/eval", 2, "needs 2 GPUs"),
        ("", "model/Llama/plain/eval", 0, "the adapter has no function for this"),
        ("no file", "*", 2, "is no .py file and none of burst_rt, torch,"),
        ("spoilt", "nothing", 2, "no case has a name like 'nothing'"),
        ("spoilt", "missing.npz", 2, "missing.npz is no file of --out"),
    ],
)
def test_exit_codes(
    adapter: str, pattern: str, expected: int, said: str, spoilt: Path, tmp_path: Path
) -> None:
    path = spoilt if adapter == "spoilt" else tmp_path / "adapter.py"
    if adapter not in ("spoilt", "no file"):
        path.write_text(adapter, encoding="utf-8")
    code, text = _run(path, "--case", pattern)
    assert code == expected, text
    assert said in " ".join(text.split()), text


def test_truth_and_cases_know_nothing_of_burst_rt() -> None:
    for path in (_ROOT / "burst_rt" / "conformance").rglob("*.py"):
        if path.name == "burst_rt.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [x.name for x in node.names] if isinstance(node, ast.Import) else []
            for name in filter(None, names):
                assert not f"{name}.".startswith("burst_rt.") or "conformance" in name, path


def test_cases_cover_what_they_promise() -> None:
    cases = list(all_cases())
    assert len({case.name for case in cases}) == len(cases)
    calls = [case for case in cases if isinstance(case, AttentionCase)]
    for case in calls:
        assert sum(case.documents) in (0, case.length), case.name
    assert all(any(case.train is train for case in cases) for train in (False, True))
