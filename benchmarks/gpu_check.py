"""`make gpu-check`: everything of this project that needs an NVIDIA GPU, within eight minutes.

The steps are: processes that send to each other, correctness (kernels tile by tile, the vendors'
kernels, whole rings), compute-sanitizer on small shapes, block sizes, speed against torch's
kernels, calls under masks, rings on one GPU, staged transfers. Every step is a process of its own
with a deadline, so that a step that hangs or crashes leaves the others alone. Steps that measure
nothing run in parallel: most of their time is compiling. The results go to a JSON file and a table.
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
from burst_rt.launch.measure.report import machine, publish

__all__ = ["STEPS", "Outcome", "Step", "command", "groups", "perform"]

_LIMIT_S = 480.0
_TAIL = 4000


@dataclass(frozen=True)
class Step:
    """One child process."""

    name: str
    words: tuple[str, ...]  # the command; `{out}` is the JSON file of benchmarks
    limit_s: float
    needs: str = ""  # a program that must be on PATH
    beside: bool = False  # starts with the step before it, and does not write to the JSON file


@dataclass(frozen=True)
class Outcome:
    """The result of a step."""

    name: str
    state: str  # "ok", "failed", "timed out" or "not run"
    took_s: float
    tail: str  # the end of the step's output, or why the step did not run


# Most of the time is compiling, so tests run four at a time where pytest-xdist is installed. With
# -v a step that is killed has printed how far it came.
_SHARED = ("-n", "4", "-p", "no:benchmark") if find_spec("xdist") else ()
_PYTEST = (sys.executable, "-m", "pytest", "-v", "--maxfail=8", "-p", "no:cacheprovider")
_GPU = ("-m", "benchmarks", "gpu", "--out", "{out}")
_BENCH = (sys.executable, *_GPU)
_TUNE = (sys.executable, "-m", "burst_rt.launch.main", "bench", "tune", "--out", "{out}")
_RANKS = (sys.executable, "-m", "burst_rt.launch.main", "run", "-n", "2", *_GPU)
# Without torch's cache of memory: inside one of its blocks a tensor may be overrun unseen.
_SANITIZER = (
    "env",
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
    "compute-sanitizer",
    "--error-exitcode",
    "9",
    "--tool",
)
# Plain float32 tiles, and tiles as models have them: with wgmma, and loads that run ahead.
# The only tile of one rank writes its gradients; the tiles of two ranks add to sums.
_FEW = "short and 1-local or 2-local and (three or short)"
_SMALL = (*_PYTEST, "tests/gpu/test_rings.py", "-k", _FEW)
_TILES = "tests/interpreted/test_tiles.py"
_HALF = "bfloat16 or float16 or 16_bit or head_sizes"

STEPS = (
    # First: it needs no compiled kernels beside its own, and proves the most.
    Step(
        "processes that send to each other",
        (*_PYTEST, "--durations=0", "tests/gpu/test_processes.py"),
        140,
    ),
    Step("rings against the spec", (*_PYTEST, *_SHARED, "tests/gpu/test_rings.py"), 140),
    Step(
        "Hopper's kernels against the spec",
        (*_PYTEST, *_SHARED, "tests/gpu/test_hopper.py"),
        140,
        beside=True,
    ),
    Step(
        "tiles against the spec, 32 bits",
        (*_PYTEST, *_SHARED, _TILES, "-k", f"not ({_HALF})"),
        140,
        beside=True,
    ),
    Step(
        "tiles against the spec, 16 bits",
        (*_PYTEST, *_SHARED, _TILES, "-k", _HALF),
        140,
        beside=True,
    ),
    Step(
        "rings of triton tiles",
        (*_PYTEST, *_SHARED, "tests/interpreted/test_rings.py"),
        140,
        beside=True,
    ),
    Step(
        "masks through triton tiles",
        (*_PYTEST, *_SHARED, "tests/interpreted/test_masks.py"),
        140,
        beside=True,
    ),
    Step(
        "scores and decoding",
        (
            *_PYTEST,
            *_SHARED,
            "tests/interpreted/test_scores.py",
            "tests/interpreted/test_decode.py",
        ),
        140,
        beside=True,
    ),
    Step(
        "cuDNN and FlashAttention against the spec",
        (*_PYTEST, *_SHARED, "tests/gpu/test_vendor.py"),
        140,
        beside=True,
    ),
    Step(
        "recurrences, and losses of large vocabularies",
        (
            *_PYTEST,
            *_SHARED,
            "tests/gpu/test_recurrence.py",
            "tests/interpreted/test_losses.py",
        ),
        140,
        beside=True,
    ),
    Step("memcheck", (*_SANITIZER, "memcheck", *_SMALL), 140, "compute-sanitizer", beside=True),
    Step("racecheck", (*_SANITIZER, "racecheck", *_SMALL), 140, "compute-sanitizer", beside=True),
    # The steps after this one use what it finds.
    Step("block sizes", (*_TUNE, "--repeats", "5", "--limit-s", "40"), 60),
    Step("kernel speed", (*_BENCH, "--part", "kernels", "--repeats", "5"), 60),
    Step("calls under masks", (*_BENCH, "--part", "masks", "--repeats", "5"), 30),
    Step("rings on one GPU", (*_BENCH, "--part", "ring", "--repeats", "5"), 30),
    Step("staged transfers", (*_RANKS, "--part", "staged", "--repeats", "5"), 20),
)


def groups(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """The steps in order, in lists of those that start together."""
    group: list[Step] = []
    for step in steps:
        if group and not step.beside:
            yield group
            group = []
        group.append(step)
    if group:
        yield group


def perform(step: Step, out: Path, left_s: float) -> Outcome:
    """Runs one step; blocks until the step has ended, or its limit or `left_s` is up."""
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
            # End the whole session: under a sanitizer, a child of the child holds the GPU.
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
@click.option(
    "--step",
    "wanted",
    multiple=True,
    type=click.Choice([step.name for step in STEPS]),
    help="Only this step; may be repeated.",
)
def command(out: Path, wanted: tuple[str, ...]) -> None:
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
    steps = [step for step in STEPS if not wanted or step.name in wanted]
    for group in groups(steps):
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
        # Write after every group: these results are kept when the machine's time is up.
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
