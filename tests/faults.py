"""Faults drawn from a seed, against real jobs: `make faults`, or `python tests/faults.py --help`.

Ranks and launchers die or stop, calls are bad, children are forked, checkpoints are damaged.

A case is one line of words from which it can be repeated, by `--case` or by `--seed S --only K`:

    run 4 rank 2 sigkill tile               launcher, ranks, who, how, when
                                            (in `mpi/programs/faults_program.py`)
    telemetry 3 launcher sigkill awaited    the launcher is killed in that phase
    agents 4 launcher sigkill tile          of two agents of torchrun the second
    run 2 rank 1 sigcont tile               stopped for a while: no alarm may be raised
    run 2 calls seed 17                     bad calls, from `mpi/programs/attention_bad_input.py`
    checkpoint seed 17                      a damage, from `unit/test_checkpoint.py`

What must hold: the job ends within 5 s of the fault, and with an error unless nobody needed the
rank any more. No process and no file of the job is left. Under `burst-rt run` the last line names
the rank, how it ended, and the call and task that it was in.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from burst_rt.launch.mpirun import find_launcher

__all__ = ["Case", "Outcome", "draw", "parse", "perform"]

_TESTS = Path(__file__).parent
_PROGRAMS = _TESTS / "mpi" / "programs"
_MARK = "BURST_RT_TESTS_CASE"

# "agents" are two of torchrun's, as on two hosts.
_LAUNCHERS = ("run", "telemetry", "mpirun", "torchrun", "agents")
_TORCH = ("torchrun", "agents")
_BARE = ("mpirun", *_TORCH)  # these know nothing of burst_rt, and say nothing of the rank
# When the fault comes, in the order of the program. Up to "started" the ranks have not joined.
_BEFORE_JOINING = ("start", "starting", "started")
_IN_A_CALL = {
    "waiting": "burst_attention",
    "tile": "burst_attention",
    "later-tile": "burst_attention",
    "backward": "backward of burst_attention",
    "sum": "all_reduce",
    "decode": "Step.attend",
    "generate": "Step.attend",
    "pipeline": "Pipeline.run",
}
_PHASES = (
    *_BEFORE_JOINING, "joined", "between", "before", "awaited", *_IN_A_CALL, "layer",
    "trainer", "checkpoint", "exit",
)  # fmt: skip
_SIGNALS = {"sigkill": 9, "sigterm": 15}
_CRASHES = {"sigsegv": 11, "sigabrt": 6}
_WAYS = (
    "sigkill",
    "sigterm",
    "sigsegv",
    "sigabrt",
    "exit-0",
    "exit-3",
    "os-exit-0",
    "os-exit-3",
    "raise",
    "memory",
)
# What a job must bear: a rank that is stopped for a while, one that holds Python's lock for longer
# than `stall_s`, or is late by more, between calls, one that is a hundred times slower. A batch
# system that suspends the job stops all of its processes, here for longer than `stall_s`.
_BORNE = ("slow", "slower", "late", "lock", "sigcont", "suspend")
# Once MPI has been finalized, Python ignores exceptions.
_FINAL_WAYS = (*_SIGNALS, *_CRASHES, "os-exit-0", "os-exit-3")
_HELD_PHASES = ("before", "between", "awaited", *_IN_A_CALL, "layer")
_BETWEEN_CALLS = ("before", "between", "awaited", "layer")

# From the fault, or from the deadline that ends a wait, to the end of the job.
_DEADLINE_S = 5.0
_JOIN_S = 3.0
# timeout_s and stall_s of jobs in which a rank stops, and of those that must bear one.
_LIMITS_S = (5.0, 3.0)
_BORNE_S = (60.0, 3.0)
_SUSPENDED_S = 5.0
# Starting may take long on a busy machine.
_STARTING_S = 300.0
# How much longer a job that has not ended in time is watched.
_PATIENCE_S = 15.0
# How long torchrun waits for a rank to end by SIGTERM. A rank that is stopped does not.
_TORCHRUN_WAITS_S = 30.0
_NUM_BAD_CALLS = 20


@dataclass(frozen=True)
class Case:
    """One fault. Its name (`str`) is one line, which `parse` reads."""

    launcher: str  # of `_LAUNCHERS`; "checkpoint" for a damaged checkpoint
    ranks: int = 0
    victim: str = ""  # a rank's number, "launcher", "mpirun" (its child), or "" with a seed
    how: str = ""
    phase: str = ""
    seed: int = -1  # of bad calls, or of a checkpoint's damage

    def __str__(self) -> str:
        if self.launcher == "checkpoint":
            return f"checkpoint seed {self.seed}"
        if self.how == "calls":
            return f"{self.launcher} {self.ranks} calls seed {self.seed}"
        who = f"rank {self.victim}" if self.victim.isdigit() else self.victim
        return f"{self.launcher} {self.ranks} {who} {self.how} {self.phase}"

    @property
    def harmless(self) -> bool:
        """Whether the job must go on as if nothing had happened."""
        return (
            self.how.startswith("fork-")
            or self.how in _BORNE
            or (self.how, self.phase) == ("exit-0", "exit")
        )

    @property
    def free(self) -> bool:
        """Whether nobody needs the rank any more, so that any exit code will do."""
        return (self.how, self.phase) in (("os-exit-0", "exit"), ("os-exit-0", "finalized"))

    @property
    def waits_s(self) -> float:
        """How long the other ranks may wait before they know of the fault."""
        if self.how == "sigstop":
            return max(_LIMITS_S) + (_TORCHRUN_WAITS_S if self.launcher in _TORCH else 0.0)
        return _JOIN_S if self.launcher in _BARE and self.phase in _BEFORE_JOINING else 0.0


@dataclass
class Outcome:
    """What came of a case."""

    case: Case
    problems: list[str] = field(default_factory=list)  # what should not be, in words
    seconds: float | None = None  # from the fault to the end of the job
    in_time: bool = True
    left_alive: int = 0
    wrong_last_line: bool = False
    text: str = ""


def parse(name: str) -> Case:
    """The case that a name such as "run 4 rank 2 sigkill tile" stands for. Raises ValueError."""
    words = name.split()
    match words:
        case ["checkpoint", "seed", seed]:
            return Case("checkpoint", seed=int(seed))
        case [launcher, ranks, "calls", "seed", seed] if launcher in _LAUNCHERS:
            return Case(launcher, int(ranks), how="calls", seed=int(seed))
        case [launcher, ranks, "rank", victim, how, phase] if launcher in _LAUNCHERS and int(
            victim
        ) < int(ranks):
            return Case(launcher, int(ranks), victim, how, phase)
        case [launcher, ranks, ("launcher" | "mpirun") as victim, "sigkill", phase] if (
            launcher in _LAUNCHERS
        ):
            return Case(launcher, int(ranks), victim, "sigkill", phase)
    raise ValueError(f"no case: {name!r}")


def draw(chance: random.Random) -> Case:
    """Draws a case."""
    launcher, ranks = chance.choice(_LAUNCHERS), chance.choices((2, 3, 4), (5, 3, 2))[0]
    if launcher == "agents":
        ranks += ranks % 2
    victim = str(chance.randrange(ranks))
    match chance.choices(
        ("dies", "launcher", "mpirun", "stops", "borne", "forks", "calls", "checkpoint"),
        (60, 8, 3, 6, 12, 4, 2, 4),
    )[0]:
        case "launcher":
            if launcher in _TORCH:
                return Case(launcher, ranks, "launcher", "sigkill", chance.choice(_HELD_PHASES))
            return Case(
                chance.choice(_LAUNCHERS[:2]), ranks, "launcher", "sigkill", chance.choice(_PHASES)
            )
        case "mpirun":
            return Case(
                chance.choice(_LAUNCHERS[:2]), ranks, "mpirun", "sigkill", chance.choice(_PHASES)
            )
        case "stops":
            if launcher == "agents":
                # An agent whose only rank is stopped waits for it, whatever the others do.
                ranks = 4
            return Case(launcher, ranks, victim, "sigstop", chance.choice(_HELD_PHASES))
        case "borne":
            how = chance.choice(_BORNE)
            # One that holds the lock inside a call for longer than `stall_s` is a stalled rank.
            phases = _BETWEEN_CALLS if how in ("late", "lock") else _HELD_PHASES
            if how == "suspend":
                phases = (*_BEFORE_JOINING[1:], *_HELD_PHASES)
            return Case(launcher, ranks, victim, how, chance.choice(phases))
        case "forks":
            return Case(launcher, ranks, victim, f"fork-{chance.choice(_WAYS)}", "forked")
        case "calls":
            return Case(launcher, ranks, how="calls", seed=chance.randrange(1000))
        case "checkpoint":
            return Case("checkpoint", seed=chance.randrange(100_000))
    if chance.random() < 0.05:
        return Case(launcher, ranks, victim, chance.choice(_FINAL_WAYS), "finalized")
    phase, how = chance.choice(_PHASES), chance.choice(_WAYS)
    if phase == "checkpoint":
        victim = "0"
        if how == "sigterm":  # asks `burst-rt train` for a last checkpoint
            how = "sigkill"
    return Case(launcher, ranks, victim, how, phase)


def perform(case: Case) -> Outcome:
    """Runs a case; blocks until its job has ended, at most some two minutes."""
    outcome = Outcome(case)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "mpirun").mkdir()
        try:
            if case.launcher == "checkpoint":
                _damage(case, folder)
            else:
                _run(case, folder, outcome)
        except Exception:  # noqa: BLE001  (whatever it is, it is this case's, and the others are to run)
            outcome.problems.append("an error of the test itself, or of what it calls")
            outcome.text += traceback.format_exc()
    return outcome


# Damage is reported through a logger, which all threads share: one case at a time.
_damaging = threading.Lock()


def _damage(case: Case, folder: Path) -> None:
    from unit.test_checkpoint import outcome_of_damage, whole_run

    with _damaging:
        outcome_of_damage(case.seed, folder / "run", whole_run(folder / "run"))


def _run(case: Case, folder: Path, outcome: Outcome) -> None:
    mark = uuid.uuid4().hex
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        command, environment = _command(case, folder)
        job = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {_MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        fault_at_s = _fault(case, folder, job, mark)
        wanted_s = fault_at_s + _DEADLINE_S + case.waits_s
        if case.harmless or case.how == "calls":
            wanted_s = time.time() + _STARTING_S
        ended_at_s = _ended_at_s(case, mark, job, wanted_s + _PATIENCE_S)
        # The launcher may end a moment before the last rank.
        while (alive := _alive(mark)) and time.time() < wanted_s:
            time.sleep(0.05)
            if case.victim in ("launcher", "mpirun"):
                ended_at_s = time.time()
        outcome.text = _text(folder, job)
        if ended_at_s is None:
            outcome.problems.append("the job did not end")
        else:
            outcome.seconds = (
                None if case.harmless or case.how == "calls" else max(0.0, ended_at_s - fault_at_s)
            )
        outcome.in_time = ended_at_s is not None and ended_at_s <= wanted_s
        if ended_at_s is not None and not outcome.in_time:
            outcome.problems.append(
                f"the job ended {ended_at_s - fault_at_s:.1f} s after the fault"
            )
        outcome.left_alive = len(alive)
        if alive:
            outcome.problems.append(
                f"processes left: {[' '.join(_command_of(process))[-80:] for process in alive]}"
            )
        if ended_at_s is not None:
            _look_at(case, folder, job.returncode, outcome)
    finally:
        for process in _alive(mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            job.wait(10)


def _ended_at_s(
    case: Case, mark: str, job: subprocess.Popen[bytes], until_s: float
) -> float | None:
    """When the job had ended, in seconds since the epoch; None for one that has not."""
    ranks_ended_at_s = None
    if case.launcher in _TORCH and not case.harmless and case.how != "calls":
        # The ranks' own ends: torchrun takes its time to tell.
        while any(map(_is_rank, _alive(mark))):
            if time.time() > until_s:
                return None
            time.sleep(0.1)
        ranks_ended_at_s = time.time()
        until_s = ranks_ended_at_s + _TORCHRUN_WAITS_S
    with suppress(subprocess.TimeoutExpired):
        job.wait(max(0.0, until_s - time.time()))
    if job.poll() is None and case.launcher == "agents":
        # An agent whose own ranks have ended well waits minutes for another host's agent.
        for agent in psutil.Process(job.pid).children():
            agent.kill()
        job.wait()
    return None if job.poll() is None else ranks_ended_at_s or time.time()


def _is_rank(process: psutil.Process) -> bool:
    command = " ".join(_command_of(process))
    return "faults_program.py" in command and "torch.distributed.run" not in command


def _command(case: Case, folder: Path) -> tuple[list[str], dict[str, str]]:
    environment = dict(os.environ) | {
        "PYTHONPATH": str(_TESTS), "OMP_NUM_THREADS": "1", "BURST_RT_POISON": "1",
        "BURST_RT_HARDWARE": "none",
        "BURST_RT_JOIN_S": f"{_JOIN_S:g}" if case.launcher in _BARE else "60",
        "TMPDIR": str(folder / "tmp"),
    }  # fmt: skip
    if case.how == "calls":
        program = [
            str(_PROGRAMS / "attention_bad_input.py"),
            str(folder),
            str(_NUM_BAD_CALLS),
            str(case.seed),
        ]
    else:
        # The launcher must be killed while a rank is in the phase: that rank stays in it.
        how, victim = (
            (case.how, case.victim) if case.victim.isdigit() else ("hold", str(case.ranks - 1))
        )
        if case.phase == "checkpoint":
            victim = "0"  # which writes it
        limits_s = (60.0, 30.0)
        if how in ("sigstop", *_BORNE):
            limits_s = _LIMITS_S if how == "sigstop" else _BORNE_S
        program = [
            str(_PROGRAMS / "faults_program.py"),
            how,
            case.phase,
            victim,
            *map(str, limits_s),
        ]
    if case.launcher == "mpirun":
        launcher = find_launcher()
        # `burst-rt run` and torchrun say where groups of torch meet.
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        environment = launcher.environment(case.ranks, 1, folder / "mpirun") | environment
        return launcher.command([sys.executable, *program], case.ranks), environment
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run"]
    if case.launcher == "torchrun":
        ranks = f"--nproc-per-node={case.ranks}"
        return [*torchrun, "--standalone", ranks, *program], environment
    if case.launcher == "agents":
        ranks = f"--nproc-per-node={case.ranks // 2}"
        meet = ["--master-addr=127.0.0.1", f"--master-port={_free_port()}", "--nnodes=2"]
        one, two = (
            shlex.join([*torchrun, ranks, *meet, f"--node-rank={node}", *program])
            for node in range(2)
        )
        script = f"{one} & a=$!; {two} & wait $!; b=$?; wait $a; a=$?; exit $((a > b ? a : b))"
        return ["sh", "-c", script], environment
    telemetry = ["--telemetry"] if case.launcher == "telemetry" else []
    return [
        sys.executable,
        "-P",
        "-m",
        "burst_rt.launch.main",
        "run",
        "-n",
        str(case.ranks),
        *telemetry,
        *program,
    ], environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fault(case: Case, folder: Path, job: subprocess.Popen[bytes], own_mark: str) -> float:
    """Blocks until the fault has come, or makes it; its time in seconds since the epoch."""
    if case.how == "calls":
        return time.time()
    mark, deadline_s = folder / "left_at", time.monotonic() + _STARTING_S
    while not mark.exists():
        if job.poll() is not None or time.monotonic() > deadline_s:
            raise AssertionError(f"the fault did not come: {_text(folder, job)}")
        time.sleep(0.02)
    if case.how == "suspend":
        _suspend(_alive(own_mark))
    if case.victim.isdigit():
        return float(mark.read_text(encoding="utf-8"))
    process = psutil.Process(job.pid)
    if case.victim == "mpirun":
        process = next(
            child for child in process.children() if "mpi" in child.name() or "prte" in child.name()
        )
    if case.launcher == "agents":
        process = max(process.children(), key=lambda child: child.pid)
    time.sleep(0.3)
    process.kill()
    return time.time()


def _suspend(processes: Sequence[psutil.Process]) -> None:
    """Stops a job's processes for longer than `stall_s`, while ranks wait for one of them."""
    time.sleep(0.3)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if number == signal.SIGSTOP:
            time.sleep(_SUSPENDED_S)


def _look_at(case: Case, folder: Path, code: int, outcome: Outcome) -> None:
    """Checks the exit code, output, last line and leftovers of a job that has ended."""
    good = case.harmless or case.how == "calls"
    if good and code:
        outcome.problems.append(f"exit code {code}, expected 0")
    if not good and not code and not case.free:
        outcome.problems.append("exit code 0, expected another")
    if case.harmless and (folder / "out").read_text().count("done") != case.ranks:
        outcome.problems.append("not every rank is done")
    if (folder / "child_was_served").exists():
        outcome.problems.append("a call of the forked child went through")
    if case.how == "calls":
        outcome.problems += _wrong_calls(case, folder)
    if case.victim != "launcher":
        # The temporary folder is this job's alone: whatever is there, the job has left.
        own = folder / "tmp" / f"burst-rt-{os.getuid()}"  # this user's, for the jobs that run
        # What is kept of a job that failed, for the post-mortem: one folder, of no other job.
        kept = folder / "tmp" / f"burst-rt-jobs-{os.getuid()}-{socket.gethostname()}"
        left = sorted(
            str(path.relative_to(folder))
            for path in (folder / "tmp").rglob("*")
            if path != own
            and not path.is_relative_to(kept)
            # torchrun's own, and torch's
            and "torchelastic_" not in str(path)
            and "torchinductor_" not in str(path)
        )
        if left:
            outcome.problems.append(f"files left: {left}")
        jobs = [*kept.iterdir()] if kept.is_dir() else []
        # The others cannot know how a rank ended that left without a word.
        if len(jobs) > (code != 0 or case.how == "os-exit-0"):
            outcome.problems.append(f"jobs kept: {jobs}")
    # Open MPI's abort leaves a NUL byte in the output.
    last = (
        (folder / "err").read_text(errors="replace").rstrip("\n").rpartition("\n")[2].lstrip("\0")
    )
    expected = _last_line(case)
    if expected and code and not re.fullmatch(expected, last):
        outcome.wrong_last_line = True
        outcome.problems.append(f"the last line is {last!r}, expected {expected!r}")
    named = rf"burst-rt: .*rank {case.victim}\b|first: fn raised"  # `first` is rank 0's
    if case.victim.isdigit() and expected and code and not re.search(named, outcome.text):
        outcome.problems.append("no line names the rank")


def _last_line(case: Case) -> str:
    """A pattern of the launcher's last line; "" where the launcher says nothing or is gone."""
    if case.victim == "mpirun":
        return r"burst-rt: mpirun itself was killed by signal 9, SIGKILL, and its ranks with it"
    if (
        case.launcher in _BARE
        or not case.victim.isdigit()
        or case.harmless
        or case.phase == "finalized"
    ):
        return ""
    rank = rf"burst-rt: rank {case.victim} "
    if case.how == "sigstop":
        doing = rf", in call \d+ \({_IN_A_CALL[case.phase]}\).*" if case.phase in _IN_A_CALL else ""
        return rank + rf"gave no report: it was killed, or it was stuck{doing}"
    doing = ""
    if case.phase in _IN_A_CALL:
        task = r", task '.+'( \(hop \d+\))?"
        if case.phase in ("sum", "waiting"):  # which may be between tasks, or wait for the others
            task = rf"({task}|, waiting for .+)?"
        doing = rf", in call \d+ \({_IN_A_CALL[case.phase]}\){task}"
    elif case.launcher == "telemetry":
        doing = r"(; .+)?"
    after = r"after \d+\.\d s"
    if case.how in _SIGNALS:
        return (
            rank + rf"was killed by signal {_SIGNALS[case.how]}, {case.how.upper()} {after}{doing}"
        )
    if case.how in _CRASHES:
        return (
            rank
            + rf"crashed in native code \(signal {_CRASHES[case.how]}, {case.how.upper()}\){doing}"
        )
    if case.phase == "checkpoint" and case.how in ("raise", "memory"):
        # `burst-rt train` ends on all ranks by what rank 0 was told to do alone.
        return r"burst-rt: InputError: first: fn raised RuntimeError: .*"
    if case.how == "raise":
        return (
            rank
            + rf"failed {after} with RuntimeError: the leaver's own error \(exit code 1\){doing}"
        )
    if case.how == "memory":
        return rank + rf"failed {after} with .*memory.* \(exit code \d+\){doing}"
    if case.phase == "trainer" and case.how == "exit-0":
        # What another rank's library says of the lost connection; the lines above name the rank.
        return rf"burst-rt: rank \d failed {after} with RuntimeError.*"
    if case.how == "exit-3":
        return rank + rf"failed {after} \(exit code 3\){doing}"
    how = rf"left with exit code 0 {after}" if case.how == "exit-0" else r"ended without a report"
    if case.phase in _BEFORE_JOINING and case.how != "os-exit-3":
        where = r"before burst_rt\.init" if case.phase == "started" else "before it had started MPI"
        # Open MPI may notice the ended rank first; then only its exit code is known.
        noticed = (
            rf"|ended without a report \(mpirun's exit code is \d+\) {after}"
            if case.how == "os-exit-0"
            else ""
        )
        return (
            rank
            + rf"({how}, {where}; rank \d waited there for rank \d, so the job was ended{noticed})"
        )
    if case.how == "exit-0":
        return rank + rf"{how} while other ranks were in a call{doing}"
    return rank + rf"{how} \(mpirun's exit code is \d+\) {after}{doing}"


def _wrong_calls(case: Case, folder: Path) -> Iterator[str]:
    """What is wrong with the outcome of bad calls, in words.

    Every rank must get the same typed error, soon, and the context must stay usable.
    """
    by_rank = [
        json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
        for rank in range(case.ranks)
    ]
    for same in zip(*by_rank, strict=True):
        about = f"{same[0]['case']} on rank {same[0]['odd']}"
        if any(
            entry["error"] != entry["expected"] or entry["words"] not in entry["message"]
            for entry in same
        ):
            yield f"{about}: {[(entry['error'], entry.get('message')) for entry in same]}"
            continue
        words = {entry["message"] for entry in same}
        if len(words) != 1 or any(
            entry["elapsed_s"] > _DEADLINE_S or not entry["usable"] for entry in same
        ):
            yield f"{about}: other words, late, or a context that is not usable: {same}"


def _alive(mark: str) -> list[psutil.Process]:
    """The running processes of a job, known by a variable that only its environment holds."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _command_of(process: psutil.Process) -> Sequence[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return ["gone meanwhile"]


def _text(folder: Path, job: subprocess.Popen[bytes]) -> str:
    out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
    return f"exit code {job.returncode}\n--- stdout\n{out}\n--- stderr\n{err}"


def _table(outcomes: Sequence[Outcome]) -> str:
    """The figures in Markdown: a row for each launcher, and one for all cases."""
    rows: list[tuple[str, ...]] = [
        (
            "launched by",
            "cases",
            "failed",
            "in time",
            "median s",
            "95 % s",
            "worst s",
            "wrong last lines",
            "processes left",
        )
    ]
    kinds = [
        kind
        for kind in (*_LAUNCHERS, "checkpoint")
        if any(outcome.case.launcher == kind for outcome in outcomes)
    ]
    for kind in (*kinds, "all"):
        of = [outcome for outcome in outcomes if kind in (outcome.case.launcher, "all")]
        # Where a deadline ends the wait, only the time after the deadline counts.
        seconds = sorted(
            outcome.seconds - outcome.case.waits_s for outcome in of if outcome.seconds is not None
        )
        times = ["", "", ""]
        if seconds:
            worst = max(0.0, seconds[-1])
            at_95 = max(0.0, seconds[min(len(seconds) - 1, round(0.95 * len(seconds)))])
            times = [f"{max(0.0, statistics.median(seconds)):.2f}", f"{at_95:.2f}", f"{worst:.2f}"]
        rows.append(
            (
                kind, str(len(of)), str(sum(bool(outcome.problems) for outcome in of)),
                str(sum(outcome.in_time for outcome in of)), *times,
                str(sum(outcome.wrong_last_line for outcome in of)),
                str(sum(outcome.left_alive for outcome in of)),
            )
        )  # fmt: skip
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in (rows[0], ("---",) + ("---:",) * 8, *rows[1:])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300, help="how many cases are drawn")
    parser.add_argument("--only", type=int, help="only the case of this number, from 0")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many, the first drawn")
    parser.add_argument("--case", action="append", help="these instead of drawn ones")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no case after so long"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    cases = (
        [parse(name) for name in options.case]
        if options.case
        else [draw(chance) for _ in range(options.count)]
    )
    numbered = [
        (number, case)
        for number, case in enumerate(cases)
        if options.only in (None, number) and number >= options.skip
    ]
    started_s = time.monotonic()

    def in_turn(case: Case) -> Outcome | None:
        return perform(case) if time.monotonic() - started_s < 60 * options.minutes else None

    done: list[tuple[int, Outcome]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for (number, case), outcome in zip(
            numbered, pool.map(in_turn, [case for _, case in numbered]), strict=True
        ):
            if outcome is None:
                continue
            done.append((number, outcome))
            took = "" if outcome.seconds is None else f" {outcome.seconds:.2f} s"
            print(f"{number:3d} {case}: {'FAILED' if outcome.problems else 'ok'}{took}", flush=True)
            if outcome.problems:
                print(
                    "".join(f"    {problem}\n" for problem in outcome.problems)
                    + f"{outcome.text}\n----",
                    flush=True,
                )
    print(f"{len(done)} cases in {(time.monotonic() - started_s) / 60:.1f} min")
    failed = [(number, outcome) for number, outcome in done if outcome.problems]
    print("\nfailed:" if failed else "\nall well")
    for number, outcome in failed:
        print(f"{number:3d} {outcome.case}: {'; '.join(outcome.problems)[:300]}")
    print(f"\n{_table([outcome for _, outcome in done])}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.path.insert(0, str(_TESTS))
    sys.exit(main())
