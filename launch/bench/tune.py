"""`burst-rt bench tune`: the Triton kernels' block sizes, measured on this machine and kept.

Warps, stages and ways to load are measured, too, on this machine's GPU.

For every kernel and head size the candidates of `kernels/triton/tuned.py` are compiled by several
processes, checked against the table's own configuration and timed, full and causal together. The
fastest is checked once more, on a tile of a ring whose length no block divides. It is written where
later jobs on this chip find it, and printed in the form of `configs.py`.

A kernel that is compiled wrongly may never end. The measuring then ends there, and what was found
for other kernels before is kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from burst_rt.errors import ConfigError
from burst_rt.kernels import KERNELS, Work
from burst_rt.kernels.speed import KIND, TileProblem, error_in_words, failures, issue_timed
from burst_rt.kernels.triton.configs import Config, arch_of
from burst_rt.kernels.triton.tuned import TUNED, candidates, keep, trial_of
from burst_rt.launch.bench.one_pass import sums_of
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.planning.masks import Causal, Full
from burst_rt.remembered import forget

__all__ = [
    "KernelRequest", "Trial", "best_of", "compile_beside", "faster_if_right", "main", "paste",
]  # fmt: skip

# Minimum gain: a smaller one is noise, and the table's own configuration stays.
_WORTH = 0.02
# Maximum difference of two configurations: they add up in different orders and round different
# probabilities to 16 bits. A wrong configuration differs by far more.
_SAME = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.004}
# Maximum number of processes that compile at a time, each with a CUDA context of its own (some 0.5
# GB of the device).
_MOST_PROCESSES = 12
# Seconds until a busy device counts as stuck: a tile takes milliseconds.
_STUCK_S = 10.0
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NEEDS = {
    "forward": (True, True, True), "dq": (True, False, False), "dkdv": (False, True, True),
    "backward": (True, True, True),
}  # fmt: skip


class Trial(NamedTuple):
    """The result of a configuration."""

    config: Config
    seconds: float | None  # sum of a full and a causal tile; None if it did not run
    why: str = ""  # why the configuration has no seconds
    stuck: bool = False  # whether the device has not come back from it


class KernelRequest(NamedTuple):
    """A kernel to compile: see `main` for the fields."""

    kind: str
    device: str
    dtype: str
    head_dim: int
    config: Config


class Stuck(Exception):
    """The device is still busy long after its work should have ended."""


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The fastest trial; None where none ran.

    The first trial is the table's own configuration. It stays unless another trial is faster by
    more than noise.
    """
    ran = [trial for trial in trials if trial.seconds is not None]
    if not ran:
        return None
    best = min(ran, key=lambda trial: trial.seconds or 0.0)
    own = trials[0]
    return (
        own
        if own.seconds is not None and (best.seconds or 0.0) > (1 - _WORTH) * own.seconds
        else best
    )


def paste(kind: str, arch: int, head_dim: int, trials: Sequence[Trial], best: Trial) -> str:
    """The line for configs.py."""
    default, fastest = trials[0], best.config
    was = (
        f"; {default.config!r} took {1e3 * default.seconds:.3f}"
        if default.seconds is not None and default is not best
        else ""
    )
    return (
        f'("{kind}", {arch}), head sizes up to {head_dim}: {fastest!r}  # '
        f"{1e3 * (best.seconds or 0.0):.3f} ms{was}"
    )


class Tuning(NamedTuple):
    """What `main` was asked for: the GPU, its inputs' type, and runs of each configuration."""

    device: torch.device
    dtype: str  # a name of `_DTYPES`
    repeats: int


class Search(NamedTuple):
    """One kernel at one head size, and its candidates; the first is the table's own."""

    head_dim: int
    kind: str
    configs: Sequence[Config]


class Tuned(NamedTuple):
    """The result of a search."""

    trials: list[Trial]
    best: Trial | None  # None: no trial ran, or one got stuck
    line: str = ""  # the best one for configs.py


def main(
    head_dims: Sequence[int], dtype: str, repeats: int, limit_s: float, out: Path | None
) -> None:
    """Measures, prints the tables, and keeps the fastest configurations for later jobs.

    Blocks for about `limit_s`: after that time no trial is begun, except the first of each search
    and the check of its fastest. Raises ConfigError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench tune: torch sees no CUDA device; see `burst-rt doctor`")
    device = torch.device("cuda", torch.cuda.current_device())
    arch = arch_of(torch.cuda.get_device_capability(device))
    tuning = Tuning(device, dtype, repeats)
    searches = [
        Search(head_dim, kind, configs)
        for head_dim in head_dims
        for kind in (*TUNED, "backward")
        if (configs := candidates(kind, arch, head_dim, _DTYPES[dtype].itemsize))
    ]
    end_s = time.monotonic() + limit_s
    _compile_all(tuning, searches, limit_s / 2)
    tuned: list[Tuned] = []
    for i, search in enumerate(searches):
        # Each search that is still to come gets an even share of the time that is left.
        now_s = time.monotonic()
        share_ends_s = now_s + (end_s - now_s) / (len(searches) - i)
        tuned.append(_tune(tuning, search, arch, _after(share_ends_s)))
        if any(trial.stuck for trial in tuned[-1].trials):
            break
    # The remembered speeds of kernels no longer hold.
    forget(KIND)
    publish(
        f"block sizes on {torch.cuda.get_device_name(device)}, sm_{arch}, {dtype}",
        [
            _row(search, trial, trial is result.best)
            for search, result in zip(searches, tuned, strict=False)
            for trial in result.trials
        ],
        out,
        f"medians of {repeats}; a full and a causal tile of 4,096 x 4,096 together",
    )
    print(
        "For burst_rt/kernels/triton/configs.py (jobs on this machine use them from now on):",
        *(result.line for result in tuned if result.line),
        sep="\n",
    )
    stuck = next((trial for result in tuned for trial in result.trials if trial.stuck), None)
    if stuck:
        _end_early(stuck)


def _compile_all(tuning: Tuning, searches: Sequence[Search], limit_s: float) -> None:
    wanted = [
        KernelRequest(search.kind, str(tuning.device), tuning.dtype, search.head_dim, config)
        for search in searches
        for config in search.configs
    ]
    failed = sum(code > 0 for code in compile_beside(wanted, limit_s))
    if failed:
        print(
            f"bench tune: {failed} processes failed; trials compile by themselves", file=sys.stderr
        )


def _tune(tuning: Tuning, search: Search, arch: int, out_of_time: Callable[[], bool]) -> Tuned:
    """Tries a search's candidates, checks the fastest once more, and keeps it."""
    head_dim, kind, dtype = search.head_dim, search.kind, _DTYPES[tuning.dtype]
    works = [
        Work(tuning.device, dtype, head_dim, mask, kind == "forward") for mask in (Full(), Causal())
    ]
    trials = trials_of(
        kind,
        [TileProblem(work) for work in works],
        search.configs,
        lambda run: _seconds(run, tuning.repeats),
        out_of_time,
        settle=_settle,
    )
    best = None if trials[-1].stuck else confirmed(kind, works[-1], trials, settle=_settle)
    if best is None:
        return Tuned(trials, None)
    if kind == "backward":
        if best is not trials[0]:
            best = faster_if_right(tuning.device, dtype, trials, best, settle=_settle)
        line = f"backward: in {'one pass' if best.config.loads == 'producer' else 'two passes'}"
    else:
        line = paste(kind, arch, head_dim, trials, best)
    if not keep(kind, tuning.device, head_dim, dtype, best.config):
        line += "  not remembered: the cache folder cannot be written"
    return Tuned(trials, best, line)


def _end_early(stuck: Trial) -> NoReturn:
    print(f"bench tune: ended early: {stuck.config} {stuck.why}", file=sys.stderr)
    # Anything that asks the device would wait for ever, Python's own exit too. When this process
    # is gone, the driver ends what the process has started.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def compile_beside(wanted: Sequence[KernelRequest], limit_s: float) -> list[int]:
    """Compiles configurations in several processes, into Triton's cache. Blocks `limit_s` at most.

    A configuration that fails here, or is not reached, is compiled by its trial, which also says
    why it fails. Returns the processes' exit codes, -SIGKILL of those that were ended.
    """
    num_processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1)
    if num_processes < 2:
        return []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    children: list[subprocess.Popen[bytes]] = []
    end_s = time.monotonic() + limit_s
    try:
        for i in range(num_processes):
            with tempfile.TemporaryFile("w+") as share:
                json.dump(wanted[i::num_processes], share)
                share.seek(0)
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "burst_rt.launch.bench.tune"],
                        stdin=share,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=environment,
                    )
                )
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end_s - time.monotonic()))
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [child.returncode for child in children]


def _compile_share() -> None:
    """A child of `compile_beside`: runs once the configurations that standard input asks for, as
    JSON.
    """
    problems: dict[tuple[str, int], list[TileProblem]] = {}
    for kind, device, dtype, head_dim, config in json.load(sys.stdin):
        if (kind, head_dim) not in problems:
            problems[kind, head_dim] = [
                TileProblem(
                    Work(torch.device(device), _DTYPES[dtype], head_dim, mask, kind == "forward")
                )
                for mask in (Full(), Causal())
            ]
        with suppress(*failures()), trial_of(kind, Config(*config)):
            for problem in problems[kind, head_dim]:
                problem.run(KERNELS["triton"], _NEEDS[kind])


def _settle() -> None:
    """Blocks until the device has done all its work; raises Stuck after 10 s."""
    event = torch.cuda.Event()
    event.record()
    stuck_at_s = time.monotonic() + _STUCK_S
    while not event.query():
        if time.monotonic() > stuck_at_s:
            raise Stuck(f"does not end (within {_STUCK_S:g} s)")
        time.sleep(1e-3)


def _after(moment_s: float) -> Callable[[], bool]:
    return lambda: time.monotonic() > moment_s


def confirmed(
    kind: str,
    work: Work,
    trials: list[Trial],
    tokens: int = 4089,
    settle: Callable[[], None] = lambda: None,
) -> Trial | None:
    """The fastest trial that is also right on a tile of a ring, of a length that no block divides.

    It is checked against the first trial that ran. A trial that is wrong there gets the reason
    instead of its seconds. None where no trial is left, or one got stuck.
    """
    odd = [TileProblem(work, tokens=tokens, alone=False)]
    while (best := best_of(trials)) is not None:
        first = next(trial for trial in trials if trial.seconds is not None)
        if best is first:
            break
        both = [first.config, best.config]
        found = trials_of(kind, odd, both, lambda run: 0.0, lambda: False, settle=settle)
        wrong = next((trial for trial in found if trial.seconds is None), None)
        if wrong is None:
            break
        trials[[trial.config for trial in trials].index(wrong.config)] = wrong
        if wrong.stuck:
            return None
    return best


def faster_if_right(
    device: torch.device,
    dtype: torch.dtype,
    trials: list[Trial],
    best: Trial,
    settle: Callable[[], None] = lambda: None,
) -> Trial:
    """The faster of the backwards in one pass and in two, if both give the same in all that calls
    ask of them; else that in two, and the other trial gets the reason instead of its seconds.

    trials: that in two passes, and `best`. settle: waits for the device.
    """
    apart = 0.0
    try:
        for new_sums in ("", "q", "kv"):
            given = sums_of(device, dtype, trials[0].config, new_sums)
            found = sums_of(device, dtype, best.config, new_sums)
            settle()
            apart = max(apart, *map(_apart, found, given))
    except Stuck as error:
        trials[1:] = [Trial(best.config, None, str(error), stuck=True)]
        return trials[0]
    if apart < _SAME[dtype]:
        return best
    trials[1:] = [Trial(best.config, None, f"wrong: differs by {apart:.1e} from two passes")]
    return trials[0]


def trials_of(
    kind: str,
    problems: Sequence[TileProblem],
    configs: Sequence[Config],
    seconds: Callable[[Callable[[], None]], float],
    out_of_time: Callable[[], bool],
    settle: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Tries every configuration in turn on some tiles.

    The results of the first configuration are what the results of the others are checked against.
    settle: waits for the device. Where `settle` or `seconds` raises Stuck, no more configurations
    are tried.
    """
    kernel = KERNELS["triton"]
    wanted: list[list[torch.Tensor]] = []
    trials: list[Trial] = []
    for config in configs:
        if trials and out_of_time():
            trials.append(Trial(config, None, "not tried: no time was left"))
            continue
        try:
            with trial_of(kind, config):
                results = [problem.results(kernel, _NEEDS[kind]) for problem in problems]
                settle()
                wanted = wanted or results
                apart = max(
                    _apart(x, y)
                    for found, right in zip(results, wanted, strict=True)
                    for x, y in zip(found, right, strict=True)
                )
                if not apart < _SAME[problems[0].dtype]:
                    trials.append(
                        Trial(
                            config,
                            None,
                            f"wrong: differs by {apart:.1e} from the first configuration",
                        )
                    )
                    continue
                took = sum(
                    seconds(partial(problem.run, kernel, _NEEDS[kind])) for problem in problems
                )
        except Stuck as error:
            trials.append(Trial(config, None, str(error), stuck=True))
            break
        except failures() as error:
            trials.append(Trial(config, None, error_in_words(error)))
        else:
            trials.append(Trial(config, took))
    return trials


def _apart(x: torch.Tensor, right: torch.Tensor) -> float:
    """The relative difference in the Frobenius norm; infinite where a result has a NaN."""
    right = right.double()
    apart = torch.linalg.vector_norm(x.double() - right) / torch.linalg.vector_norm(right)
    return float(apart.nan_to_num(nan=torch.inf))  # the maximum of others and NaN may be either


def _seconds(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        runs = issue_timed(run)
        _settle()
        times.append(runs.seconds())
    return median(times)


def _row(search: Search, trial: Trial, best: bool) -> dict[str, Cell]:
    config = trial.config
    return {
        "kernel": search.kind,
        "head_dim": search.head_dim,
        "block": f"{config.block_m} x {config.block_n}",
        "warps": config.num_warps,
        "stages": config.num_stages,
        "loads": config.loads,
        "ms": None if trial.seconds is None else 1e3 * trial.seconds,
        "": "taken" if best else trial.why[:60],
    }


if __name__ == "__main__":
    _compile_share()
