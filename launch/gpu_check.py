"""`make gpu-check`: everything of this project that needs an NVIDIA GPU, on a machine that has one,
within eight minutes.

Correctness (kernels tile by tile, the vendors' kernels, whole rings), compute-sanitizer on small
shapes, speed against torch's kernels, block sizes, rings on one GPU, staged transfers. Every step
is a process of its own with a deadline, so that one that hangs or crashes does not take the others
along. Steps that measure nothing run beside each other: most of their time is compiling. What came
out goes to a JSON file and a table.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import click

from burst_rt.errors import ConfigError
from burst_rt.launch.bench.report import machine, publish

__all__ = ["STEPS", "Outcome", "Step", "command", "groups", "perform"]

_LIMIT_S = 480.0
_TAIL = 4000


@dataclass(frozen=True)
class Step:
    """One child process. needs: a program that must be there; `{out}` in the words stands for the
    JSON file of benchmarks. beside: starts with the step before it, and does not write to that
    file.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float
    needs: str = ""
    beside: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a step went: "ok", "failed", "timed out" or "not run" (and why, in `tail`, else the end
    of its output).
    """

    name: str
    state: str
    took_s: float
    tail: str


# What takes the time is compiling: several at once where that can be had. Each test's name as it
# ends: what is killed says how far it was.
_SHARED = ("-n", "4", "-p", "no:benchmark") if find_spec("xdist") else ()
_PYTEST = (sys.executable, "-m", "pytest", "-v", "--maxfail=8", "-p", "no:cacheprovider")
_BENCH = (sys.executable, "-m", "burst_rt.launch.main", "bench", "gpu", "--out", "{out}")
_TUNE = (sys.executable, "-m", "burst_rt.launch.main", "bench", "tune", "--out", "{out}")
_RANKS = (
    sys.executable,
    "-m",
    "burst_rt.launch.main",
    "run",
    "-n",
    "2",
    "-m",
    "burst_rt.launch.main",
    "bench",
    "gpu",
    "--out",
    "{out}",
)
# Without torch's own cache of memory, in whose blocks a small tensor that is overrun runs into
# others, unseen.
_SANITIZER = (
    "env",
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
    "compute-sanitizer",
    "--error-exitcode",
    "9",
    "--tool",
)
# Plain float32 tiles, and such as models have: with wgmma, and loads that run ahead.
_SMALL = (*_PYTEST, "tests/gpu/test_rings.py", "-k", "three or (short and 2-local)")
_TILES = "tests/interpreted/test_tiles.py"
_HALF = "bfloat16 or float16 or 16_bit or head_sizes"

STEPS = (
    Step("rings against the spec", (*_PYTEST, *_SHARED, "tests/gpu/test_rings.py"), 150),
    Step(
        "tiles against the spec, 32 bits",
        (*_PYTEST, *_SHARED, _TILES, "-k", f"not ({_HALF})"),
        150,
        beside=True,
    ),
    Step(
        "tiles against the spec, 16 bits",
        (*_PYTEST, *_SHARED, _TILES, "-k", _HALF),
        150,
        beside=True,
    ),
    Step(
        "rings of triton tiles",
        (*_PYTEST, *_SHARED, "tests/interpreted/test_rings.py"),
        150,
        beside=True,
    ),
    Step(
        "cuDNN and FlashAttention against the spec",
        (*_PYTEST, *_SHARED, "tests/gpu/test_vendor.py"),
        150,
        beside=True,
    ),
    Step("memcheck", (*_SANITIZER, "memcheck", *_SMALL), 60, "compute-sanitizer"),
    Step("racecheck", (*_SANITIZER, "racecheck", *_SMALL), 60, "compute-sanitizer", beside=True),
    Step("kernel speed", (*_BENCH, "--part", "kernels", "--repeats", "5"), 90),
    Step("rings on one GPU", (*_BENCH, "--part", "ring", "--repeats", "5"), 45),
    Step("staged transfers", (*_RANKS, "--part", "staged", "--repeats", "5"), 45),
    # The last, and as far as it gets: every trial compiles.
    Step("block sizes", (*_TUNE, "--head-dim", "128", "--repeats", "5", "--limit-s", "70"), 90),
)


def groups(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Steps that start together, in order."""
    group: list[Step] = []
    for step in steps:
        if group and not step.beside:
            yield group
            group = []
        group.append(step)
    if group:
        yield group


def perform(step: Step, out: Path, left_s: float) -> Outcome:
    """Runs one step; blocks until it has ended or its time, or all time, is up."""
    if step.needs and shutil.which(step.needs) is None:
        return Outcome(step.name, "not run", 0.0, f"{step.needs} is not on this machine")
    limit_s = min(step.limit_s, left_s)
    if limit_s <= 0:
        return Outcome(step.name, "not run", 0.0, "no time was left")
    words = [word.replace("{out}", str(out)) for word in step.words]
    started_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            # All of its session: under a sanitizer what holds the GPU is a child of the child.
            os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        tail = output.read()[-_TAIL:]
    state = "timed out" if code is None else "ok" if code == 0 else "failed"
    return Outcome(step.name, state, time.monotonic() - started_s, tail)


@click.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("gpu-check.json"),
    show_default=True,
    help="Results.",
)
def command(out: Path) -> None:
    """Check this project on this machine's GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"gpu-check: torch {torch.__version__} sees no CUDA device on this machine; see "
            "`burst-rt doctor`"
        )
    out.unlink(missing_ok=True)
    outcomes: list[Outcome] = []
    end_s = time.monotonic() + _LIMIT_S
    for group in groups(STEPS):
        print(f"{', '.join(step.name for step in group)} ...", flush=True)
        left_s = end_s - time.monotonic()
        with ThreadPoolExecutor(len(group)) as pool:
            ended = list(pool.map(lambda step: perform(step, out.absolute(), left_s), group))  # noqa: B023  (awaited within the round)
        outcomes.extend(ended)
        for outcome in ended:
            print(
                f"{outcome.tail}\n{outcome.name}: {outcome.state} after {outcome.took_s:.0f} s\n",
                flush=True,
            )
        # As it goes: what is there when the time of the machine is up is kept.
        results = json.loads(out.read_text()) if out.exists() else {}
        results |= {"machine": machine(), "steps": [asdict(outcome) for outcome in outcomes]}
        out.write_text(json.dumps(results, indent=1) + "\n")
    publish(
        "gpu-check",
        [{"step": o.name, "state": o.state, "s": o.took_s} for o in outcomes],
        None,
        f"all of it: {out}",
    )
    sys.exit(any(outcome.state in ("failed", "timed out") for outcome in outcomes))


if __name__ == "__main__":
    command()
