"""`make gpu-check` where there is no GPU: how its steps end is told truly, and it never passes for
want of one.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import STEPS, Step, groups, perform


def _step(source: str, **options: float) -> Step:
    return Step("a step", (sys.executable, "-c", source), options.get("limit_s", 20))


def test_how_a_step_ends(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    good = perform(_step("print('well done', '{out}')"), out, 60)
    assert (good.state, good.tail) == ("ok", f"well done {out}\n")
    bad = perform(_step("import sys; print('dear me'); sys.exit(3)"), out, 60)
    assert (bad.state, bad.tail) == ("failed", "dear me\n")
    for limit_s, left_s in ((0.5, 60), (60, 0.5)):
        late = perform(
            _step("import time; print('here', flush=True); time.sleep(60)", limit_s=limit_s),
            out,
            left_s,
        )
        assert (late.state, late.tail) == ("timed out", "here\n")
        assert 0.5 <= late.took_s < 20


def test_what_is_not_run_says_why(tmp_path: Path) -> None:
    missing = perform(
        Step("a step", ("no-such-program",), 5, needs="no-such-program"), tmp_path / "out.json", 60
    )
    assert (missing.state, missing.tail) == ("not run", "no-such-program is not on this machine")
    assert perform(_step("pass"), tmp_path / "out.json", 0).state == "not run"


def test_all_steps_fit_into_the_time() -> None:
    assert sum(max(step.limit_s for step in group) for group in groups(STEPS)) <= 8 * 60


def test_steps_that_measure_run_alone() -> None:
    assert [step for group in groups(STEPS) for step in group] == list(STEPS)
    for group in groups(STEPS):
        measured = [step for step in group if {"bench", "benchmarks"} & {*step.words}]
        assert not measured or len(group) == 1
    a, b, c = (_step(name) for name in "abc")
    beside = replace(b, beside=True)
    assert list(groups([a, beside, c])) == [[a, beside], [c]]
    assert list(groups([])) == []


def test_the_sanitizers_see_a_tile_such_as_models_have() -> None:
    root = Path(__file__).resolve().parents[2]
    cases = runpy.run_path(str(root / "tests" / "gpu" / "test_rings.py"))["_CASES"]
    collected, *_ = _collected_of_steps(root)
    chosen = [
        cases[found]
        for found in re.findall(r"test_rings_against_the_spec\[(.+)-\d+-\w+\]", collected)
    ]
    assert {(case.dtype, case.head_dim) for case in chosen} == {
        (torch.float32, 16),
        (torch.bfloat16, 128),
    }
    assert len(chosen) <= 8  # a sanitizer is slow


# What pip makes of a prefix: Debian's Python has a scheme of its own.
_LAYOUTS = {
    "usual": ("lib", "site-packages", "bin"),
    "Debian": ("local/lib", "dist-packages", "local/bin"),
}
_PYTHON = """#!/bin/sh
case "$*" in
    *"pip install"*"--prefix build/gpu"*)
        mkdir -p build/gpu/{lib}/python3.12/{packages} build/gpu/{programs}
        touch build/gpu/{lib}/libmpi.so build/gpu/{lib}/libmpi.so.40 ;;
    *"benchmarks gpu-check"*) env > seen ;;
    *) PYTHONPATH=fake exec {python} "$@" ;;
esac
"""


def _make_gpu_check(folder: Path, layout: str, setuptools: str) -> subprocess.CompletedProcess[str]:
    """`make gpu-check` with a Python that installs nothing, but into the right places."""
    lib, packages, programs = _LAYOUTS[layout]
    shutil.copy(Path(__file__).resolve().parents[2] / "Makefile", folder)
    (folder / "fake" / "setuptools").mkdir(parents=True)
    (folder / "fake" / "setuptools" / "__init__.py").write_text(setuptools)
    python = folder / "python"
    python.write_text(
        _PYTHON.format(lib=lib, packages=packages, programs=programs, python=sys.executable)
    )
    python.chmod(0o755)
    words = ["make", "gpu-check", f"GPU_PYTHON={python}"]
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_what_pip_installs_is_found(tmp_path: Path, layout: str) -> None:
    done = _make_gpu_check(tmp_path, layout, "__version__ = '77.0.1'")
    assert done.returncode == 0, done.stderr
    seen = dict(
        line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line
    )
    lib, packages, programs = (tmp_path / "build" / "gpu" / name for name in _LAYOUTS[layout])
    assert seen["PYTHONPATH"] == f"{lib / 'python3.12' / packages.name}:{tmp_path}"
    assert seen["MPI4PY_LIBMPI"] == str(lib / "libmpi.so.40")
    assert str(programs) in seen["PATH"].split(":")


@pytest.mark.parametrize(
    ("setuptools", "has"),
    [
        ("__version__ = '66.1.1'", r"has setuptools 66\.1\.1"),
        ("raise ImportError", "has no setuptools"),
    ],
)
def test_setuptools_that_cannot_build_this_are_noticed_before(
    tmp_path: Path, setuptools: str, has: str
) -> None:
    done = _make_gpu_check(tmp_path, "usual", setuptools)
    assert done.returncode != 0
    assert re.search(rf"gpu-check: .*{has}; .* needs 77 or newer", done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "build").exists()


def test_every_test_of_a_step_is_there() -> None:
    """What pytest is given exists, and no test of the tiles belongs to both halves or to none."""
    root = Path(__file__).resolve().parents[2]
    for step in STEPS:
        assert all((root / word).exists() for word in step.words if word.startswith("tests/"))
    _, *tiles = _collected_of_steps(root)
    whole, *halves = (
        re.search(r"(\d+)(?:/\d+)? tests collected", collected) for collected in tiles
    )
    assert whole is not None
    counts = [int(found[1]) for found in halves if found is not None]
    assert len(counts) == 2
    assert sum(counts) == int(whole[1])


_COLLECT = """
import json, sys, pytest
for words in json.load(sys.stdin):
    if code := pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *words]):
        sys.exit(code)
    print("next")
"""


@cache
def _collected_of_steps(root: Path) -> list[str]:
    """For the sanitizers, of all tiles, and for each step that has tests of tiles."""
    (rings,) = {
        step.words[step.words.index("tests/gpu/test_rings.py") :]
        for step in STEPS
        if step.needs == "compute-sanitizer"
    }
    tiles = ("tests/interpreted/test_tiles.py",)
    chosen = [step.words for step in STEPS if step.name.startswith("tiles")]
    halves = [(*tiles, *words[words.index("-k") :]) for words in chosen]
    return _collected(root, rings, tiles, *halves)


def _collected(root: Path, *calls: Sequence[str]) -> list[str]:
    """What pytest collects, called with these words; all by one process, which takes torch once."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _COLLECT],
        cwd=root,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.split("next\n")[: len(calls)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_fails(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks", "gpu-check", "--out", str(tmp_path / "out.json")]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=root)
    assert done.returncode != 0
    assert "sees no CUDA device" in done.stderr
