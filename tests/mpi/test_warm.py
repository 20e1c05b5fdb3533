"""Warm Pythons: fresh processes but for their imports, that end as they would and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from jobs import Launcher, python_and_environment, run_job
from warm import Preloaded

_TESTS = Path(__file__).parents[1]
_GONE_S = 20.0

_LOOK = """
import os, sys
before = sorted(sys.modules)
import json, threading
import psutil
found = {
    "torch": "torch" in before,
    "mpi": "mpi4py.MPI" in before,
    "threads": len(os.listdir("/proc/self/task")),
    "hash": hash("a name"),
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "kept": os.environ.get("BURST_RT_OF_THIS_JOB"),
    "main": __name__,
}
rank = next(os.environ[x] for x in ("OMPI_COMM_WORLD_RANK", "RANK") if x in os.environ)
with open(f"rank-{rank}.json", "w") as file:
    json.dump(found, file)
"""
_END = """
import os, signal, sys
how = sys.argv[1]
if how == "raises":
    raise RuntimeError("as it should")
if how == "killed":
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(7)
"""
_SLEEP = """
import os, time
open(f"{os.getpid()}.pid", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("by", ["burst-rt run", "mpirun", "torchrun"])
def test_ranks_are_fresh_but_for_their_imports(
    by: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURST_RT_OF_THIS_JOB", by)
    program = tmp_path / "look.py"
    program.write_text(_LOOK, encoding="utf-8")
    job = run_job(program, 2, ["a b", "-c"], by=by, cwd=tmp_path, warm="torch")
    assert job.exit_code == 0, job.text
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    # What depends on the order of a set of strings differs between ranks, as it would.
    assert ranks[0].pop("hash") != ranks[1].pop("hash")
    for rank in ranks:
        assert rank == {
            "torch": True, "mpi": False, "threads": 1, "arguments": ["a b", "-c"],
            "folder": str(tmp_path), "kept": by, "main": "__main__",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("how", "code"), [("raises", 1), ("exits", 7), ("killed", -signal.SIGTERM)]
)
def test_a_program_ends_as_it_would(how: str, code: int, tmp_path: Path) -> None:
    program = tmp_path / "end.py"
    program.write_text(_END, encoding="utf-8")
    outcomes = []
    for python, environment in (python_and_environment("torch"), python_and_environment(None)):
        done = subprocess.run(
            [python, str(program), how], env=environment, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        last = done.stderr.splitlines()[-1:]
        outcomes.append((done.returncode, done.stdout, last))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == code


_PRODUCT = """
import hashlib, torch
a = torch.arange(300 * 300).view(300, 300).sin()
print(hashlib.sha256((a @ a).numpy().tobytes()).hexdigest())
"""


def test_mkl_takes_the_jobs_own_setting(tmp_path: Path) -> None:
    program = tmp_path / "product.py"
    program.write_text(_PRODUCT, encoding="utf-8")
    warms: list[Preloaded | None] = [None, "torch", "models"]
    said = []
    for warm in warms:
        python, environment = python_and_environment(warm)
        done = subprocess.run(
            [python, str(program)], env=environment | {"MKL_CBWR": "COMPATIBLE"},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        said.append(done.stdout)
    assert said[0] == said[1] == said[2]


def test_another_environment_or_program_is_run_by_python_itself() -> None:
    python, environment = python_and_environment("torch")
    command = [python, "-c", "import sys; print('torch' in sys.modules)"]
    program = [python, "-P", "-m", "burst_rt.launch.main", "--version"]
    for words, changes in ((command, {}), (program, {"ATEN_CPU_CAPABILITY": "default"})):
        done = subprocess.run(
            words, env=environment | changes, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.strip() != "True"


def test_a_job_that_takes_too_long_leaves_no_rank(tmp_path: Path) -> None:
    program = tmp_path / "sleep.py"
    program.write_text(_SLEEP, encoding="utf-8")
    for by in ("burst-rt run", "torchrun"):
        with pytest.raises(TimeoutError):
            run_job(program, 2, by=by, cwd=tmp_path, warm="torch", timeout_s=10.0)
    pids = {int(path.stem) for path in tmp_path.glob("*.pid")}
    assert len(pids) == 4
    _assert_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_tests_that_are_interrupted_leave_no_process(number: int, tmp_path: Path) -> None:
    program = tmp_path / "sleep.py"
    program.write_text(_SLEEP, encoding="utf-8")
    script = (
        "from jobs import run_job; from pathlib import Path; import signal; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"run_job(Path({str(program)!r}), 2, cwd=Path({str(tmp_path)!r}), warm='torch')"
    )
    tests = subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        env=os.environ | {"PYTHONPATH": str(_TESTS)},
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 60.0
    while len(list(tmp_path.glob("*.pid"))) < 2:
        assert time.monotonic() < deadline_s
        assert tests.poll() is None
        time.sleep(0.05)
    started = psutil.Process(tests.pid).children(recursive=True)
    pids = {process.pid for process in started} | {int(x.stem) for x in tmp_path.glob("*.pid")}
    folder = next(
        Path(word).parent
        for x in started
        for word in x.cmdline()
        if "burst-rt-warm-" in word and word.endswith("/python")
    )
    assert sum("server.py" in word for x in started for word in x.cmdline()) >= 2
    tests.send_signal(number)
    tests.wait(timeout=30.0)
    _assert_gone(pids)
    assert not folder.exists()


def _assert_gone(pids: set[int]) -> None:
    deadline_s = time.monotonic() + _GONE_S
    while left := {pid for pid in pids if psutil.pid_exists(pid)}:
        assert time.monotonic() < deadline_s, [psutil.Process(pid) for pid in left]
        time.sleep(0.05)
