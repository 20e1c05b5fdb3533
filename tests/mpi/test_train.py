"""The main job on real MPI jobs: the same losses on any world, exact resuming, one perplexity, one
error on every rank.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import click
import psutil
import pytest
import torch
from jobs import python_and_environment
from warm import Preloaded

import burst_rt
from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.job.reports import JOB_DIR_VARIABLE
from burst_rt.launch.mpirun import find_launcher
from burst_rt.launch.train.checkpoint import find_checkpoint
from burst_rt.launch.train.cli import eval_command, train_command
from burst_rt.launch.train.config import RunOptions, TrainConfig
from burst_rt.launch.train.loop import train
from burst_rt.telemetry.hub.starting import HUB_MODULE
from burst_rt.telemetry.messages import JobReport
from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.tape import replay

_JOB_DEADLINE_S = 90.0
_STEPS = 50
# 251 is prime: no world divides it.
_TINY = [
    "--seq-len",
    "251",
    "--batch",
    "2",
    "--layers",
    "2",
    "--dim",
    "32",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--warmup",
    "5",
]
_RUN = [
    *_TINY,
    "--steps",
    str(_STEPS),
    "--eval-every",
    "25",
    "--eval-sequences",
    "3",
    "--checkpoint-every",
    "10",
    "--keep-checkpoints",
    "9",
]


@dataclass(frozen=True)
class _Job:
    exit_code: int
    out: str
    err: str


def _start(
    command: list[str], cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=cwd,
        # The same number of threads in all runs, which are compared bit for bit.
        env=environment or python_and_environment(None)[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_signals,
    )


def _heed_signals() -> None:
    """Tests in the background of a shell were told to ignore SIGINT, those under nohup SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _finish(process: subprocess.Popen[str]) -> _Job:
    try:
        out, err = process.communicate(timeout=_JOB_DEADLINE_S)
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        pytest.fail(f"the job did not end within {_JOB_DEADLINE_S:.0f} s\n{out}\n{err}")
    return _Job(process.returncode, out, err)


def _kill(process: subprocess.Popen[str]) -> None:
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()


def _burst_rt(*arguments: str, python: str = sys.executable) -> list[str]:
    return [python, "-P", "-m", "burst_rt.launch.main", *arguments]


def _run(cwd: Path, *arguments: str, warm: Preloaded | None = "models") -> _Job:
    python, environment = python_and_environment(warm)
    return _finish(_start(_burst_rt(*arguments, python=python), cwd, environment))


def _under_mpirun(cwd: Path, num_ranks: int, *arguments: str) -> _Job:
    launcher = find_launcher()
    python, environment = python_and_environment("models")
    return _finish(
        _start(
            launcher.command(_burst_rt(*arguments, python=python), num_ranks),
            cwd,
            launcher.environment(num_ranks, 1, cwd) | environment,
        )
    )


def _read(job: _Job) -> dict[str, float]:
    assert job.exit_code == 0, job.err
    result = json.loads(job.out)
    assert isinstance(result, dict)
    return result


def _metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in _metrics(run)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of real text, small enough to load at once."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(Path(json.__file__).parent.parent.glob("a*.py")):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text: Path) -> dict[str, Path]:
    """One run on one process, on 2 and on 4 ranks, and on a mesh of 2 x 2: the same options but for
    the world.
    """
    folder = tmp_path_factory.mktemp("runs")
    worlds = {
        "1": [],
        "2": ["-n", "2"],
        "4": ["-n", "4"],
        "2x2": ["-n", "4", "--context-parallel", "2"],
    }
    for name, options in worlds.items():
        job = _run(folder, "train", *options, *_RUN, "--data", str(text), "--out", name)
        assert job.exit_code == 0, job.err
    return {name: folder / name for name in worlds}


def test_losses_do_not_depend_on_the_world(runs: dict[str, Path]) -> None:
    reference = _losses(runs["1"])
    assert len(reference) == _STEPS
    assert reference[-1] < 0.8 * reference[0], "it learns"
    for name in ("2", "4", "2x2"):
        losses = _losses(runs[name])
        assert losses == pytest.approx(reference, rel=1e-4), name
        for step in (25, _STEPS):
            measured, expected = (_metrics(runs[world])[step - 1] for world in (name, "1"))
            assert measured["heldout_loss"] == pytest.approx(expected["heldout_loss"], rel=1e-4)
            assert measured["heldout_perplexity"] == pytest.approx(
                math.exp(measured["heldout_loss"]), rel=1e-12
            )


def test_a_run_leaves_its_record(runs: dict[str, Path]) -> None:
    for name, run in runs.items():
        records = _metrics(run)
        assert [record["step"] for record in records] == list(range(1, _STEPS + 1))
        assert [record["step"] for record in records if record["heldout_loss"] is not None] == [
            25,
            50,
        ]
        assert all(
            record["bytes_sent"] == (0 if name == "1" else records[0]["bytes_sent"])
            for record in records
        )
        assert all(
            record["tokens_per_s"] > 0
            and 0 <= record["wait_fraction"] <= 1
            and record["grad_norm"] > 0
            for record in records
        )
        assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
            f"step-{step:08}" for step in range(10, 51, 10)
        ]
    # Half the ranks share a sequence, so half as much travels, and less far.
    assert _metrics(runs["2"])[0]["bytes_sent"] > 0
    assert _metrics(runs["2x2"])[0]["bytes_sent"] < _metrics(runs["4"])[0]["bytes_sent"]


def test_perplexity_does_not_depend_on_the_world(runs: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["eval", "--checkpoint", str(runs["2"]), "--json"]
    results = {
        "1": _read(_run(tmp_path, *arguments)),
        "2": _read(_run(tmp_path, *arguments, "-n", "2", "--layout", "striped")),
        "4 under mpirun": _read(_under_mpirun(tmp_path, 4, *arguments)),
    }
    expected = _metrics(runs["2"])[-1]["heldout_perplexity"]
    for name, result in results.items():
        assert result["perplexity"] == pytest.approx(expected, rel=1e-5), name
        assert (result["step"], result["num_tokens"], result["same_text"]) == (
            _STEPS,
            3 * 251,
            True,
        )


def _kill_a_rank(process: subprocess.Popen[str]) -> None:
    # mpirun's own command line names the module too.
    below = psutil.Process(process.pid).children(recursive=True)
    rank = next(
        child
        for child in below
        if child.cmdline()[0] == sys.executable and "burst_rt.launch.child" in child.cmdline()
    )
    rank.kill()


def test_a_run_that_is_restarted_has_the_losses_of_one_that_was_not(
    runs: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    """Killed twice: before its first checkpoint it begins anew, after one it goes on."""
    run = tmp_path / "run"
    command = ["train", "-n", "2", *_RUN, "--data", str(text), "--out", str(run), "--restarts", "2"]
    process = _start(_burst_rt(*command), tmp_path)
    _wait_for(run / "metrics.jsonl", process)
    _kill_a_rank(process)
    _wait_for(run / "checkpoints" / "step-00000020", process)
    _kill_a_rank(process)
    job = _finish(process)
    assert job.exit_code == 0, job.err
    assert [line for line in job.err.splitlines() if line.startswith("burst-rt: restart")] == [
        "burst-rt: restart 1 of 2", "burst-rt: restart 2 of 2",
    ]  # fmt: skip
    assert job.out.count("resuming after step") == 1
    assert _losses(run) == _losses(runs["2"]), "bit for bit"
    assert [record["step"] for record in _metrics(run)] == list(range(1, _STEPS + 1))


def test_restarts_need_ranks_and_a_folder(tmp_path: Path) -> None:
    job = _run(tmp_path, "train", "-n", "2", "--restarts", "1")
    assert job.exit_code == 78, job.err
    assert "--restarts needs -n N and --out DIR" in job.err


def test_a_killed_run_continues_with_exactly_the_same_losses(
    runs: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = _start(
        _burst_rt("train", "-n", "2", *_RUN, "--data", str(text), "--out", str(run)), tmp_path
    )
    _wait_for(run / "checkpoints" / "step-00000020", process)
    _kill_a_rank(process)
    killed = _finish(process)
    assert killed.exit_code == 128 + signal.SIGKILL, killed.err
    # The last line says which rank it was, what it did, and how to go on.
    # On a busy machine the launcher may see both gone at once.
    how = (
        r"burst-rt: (rank [01]|one of ranks [01], [01]) was killed by signal 9, SIGKILL after .* "
        r"s(, in call \d+ \(.*)?; resume with: "
    )
    assert re.fullmatch(
        how + re.escape(f"burst-rt train -n 2 --resume --out {run}"),
        killed.err.rstrip().rpartition("\n")[2],
    ), killed.err

    # What was written last may be damaged too: then it starts from the one before.
    (run / "checkpoints" / "step-00000020" / "optimizer.safetensors").write_bytes(b"half")
    # Activations that are computed again change no bit, and no ring goes round again for them.
    again = "--checkpoint-activations"
    job = _run(tmp_path, "train", "-n", "2", "--resume", "--out", str(run), again)
    assert job.exit_code == 0, job.err
    assert "resuming after step" in job.out
    assert _losses(run) == _losses(runs["2"]), "bit for bit"
    sent = [record["bytes_sent"] for record in _metrics(run)]
    assert sent == [record["bytes_sent"] for record in _metrics(runs["2"])]
    assert [record["step"] for record in _metrics(run)] == list(range(1, _STEPS + 1))
    for name in ("model.safetensors", "optimizer.safetensors"):
        last = Path("checkpoints", f"step-{_STEPS:08}", name)
        assert (run / last).read_bytes() == (runs["2"] / last).read_bytes()


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + _JOB_DEADLINE_S
    while not path.exists() or path.stat().st_size == 0:
        assert time.monotonic() < deadline_s
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def _assert_one_line(job: _Job, *words: str) -> None:
    """A usage error as it should be: one line that says it, and its exit code."""
    assert job.exit_code == 78, job.err
    assert job.err.count("\n") == 1, job.err
    assert job.err.startswith("burst-rt: ConfigError: ")
    for word in words:
        assert word in job.err


def test_a_folder_belongs_to_one_live_run(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [
        *_TINY,
        "--checkpoint-every",
        "2",
        "--data",
        str(text),
        "--out",
        str(run),
        "--eval-sequences",
        "1",
    ]
    holder = _start(_burst_rt("train", "-n", "2", "--steps", "100000", *options), tmp_path)
    try:
        _wait_for(run / "checkpoints" / "step-00000002", holder)
        held_by = (run / ".lock").read_text().strip()
        pid = int(held_by.split()[1])
        assert held_by == f"process {pid} on {socket.gethostname()}"
        assert psutil.Process(holder.pid) in psutil.Process(pid).parents(), (
            "it is a rank of this job"
        )
        before = (run / "metrics.jsonl").read_bytes()
        for job in (
            _run(tmp_path, "train", "--resume", "--out", str(run)),
            _run(tmp_path, "train", "-n", "2", "--resume", "--out", str(run)),
            _run(tmp_path, "train", *options),
        ):
            _assert_one_line(job, str(run), "is in use", held_by)
        assert (run / "metrics.jsonl").read_bytes().startswith(before)
    finally:
        _kill(holder)
        holder.communicate()
    # The lock went with its process.
    last = _metrics(run)[-1]["step"]
    job = _run(
        tmp_path,
        "train",
        "-n",
        "2",
        "--resume",
        "--out",
        str(run),
        "--steps",
        str(last + 2),
        "--progress",
        "lines",
    )
    assert job.exit_code == 0, job.err
    assert [record["step"] for record in _metrics(run)] == list(range(1, int(last) + 3))


def _ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [
        child
        for child in children
        if child.cmdline()[:1] == [sys.executable] and HUB_MODULE not in child.cmdline()
    ]
    assert len(ranks) == 2
    return ranks


def _assert_stopped(job: _Job, run: Path, signal_name: str, resume: str) -> None:
    """It kept its last step, and its last line says so and how to go on."""
    last = int(_metrics(run)[-1]["step"])
    expected = (
        f"burst-rt: stopped by {signal_name} after step {last}; resume with: burst-rt "
        f"{resume} --resume --out {run}"
    )
    assert expected in job.err.splitlines(), job.err
    assert find_checkpoint(run)[1].manifest.step == last
    assert "Traceback" not in job.err


def _wait_for_a_step(run: Path, done: int, process: subprocess.Popen[str]) -> None:
    """Blocks until the run has taken more than `done` steps."""
    _wait_for(run / "metrics.jsonl", process)
    deadline_s = time.monotonic() + _JOB_DEADLINE_S
    while (run / "metrics.jsonl").read_bytes().count(b"\n") <= done:
        assert time.monotonic() < deadline_s
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_a_process_that_is_stopped_keeps_its_last_step(
    runs: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["train", *_RUN, "--data", str(text), "--out", str(run), "--checkpoint-every", "0"]
    done = 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        process = _start(_burst_rt(*words), tmp_path)
        _wait_for_a_step(run, done, process)
        process.send_signal(number)
        # Who asks twice at once (a terminal and a launcher) asks once.
        process.send_signal(number)
        job = _finish(process)
        assert job.exit_code == 128 + number
        _assert_stopped(job, run, number.name, "train")
        assert job.err.count("\n") == 1, job.err
        done = len(_losses(run))
        words = ["train", "--resume", "--out", str(run)]
    job = _run(tmp_path, *words)
    assert job.exit_code == 0, job.err
    assert _losses(run) == _losses(runs["1"]), "bit for bit"


def test_a_job_that_is_stopped_keeps_its_last_step_and_says_how_to_go_on(
    runs: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    words = ["train", "-n", "2", *_RUN, "--data", str(text), "--out", str(run)]
    words += ["--checkpoint-every", "0"]
    done = 0
    for number in (signal.SIGINT, signal.SIGHUP):
        process = _start(_burst_rt(*words), tmp_path)
        _wait_for_a_step(run, done, process)
        process.send_signal(number)
        job = _finish(process)
        assert job.exit_code == 128 + number
        done = int(_metrics(run)[-1]["step"])
        *earlier, last_line = job.err.splitlines()
        said, _, command = last_line.partition("; resume with: ")
        assert said == f"burst-rt: stopped by {number.name} after step {done}"
        assert [line.partition(",")[0] for line in earlier] == [
            "burst-rt: stopping after this step"
        ]
        program, *words = shlex.split(command)
        assert [program, *words] == [
            "burst-rt", "train", "-n", "2", "--resume", "--out", str(run)
        ]  # fmt: skip
    job = _run(tmp_path, *words)
    assert job.exit_code == 0, job.err
    assert _losses(run) == _losses(runs["2"]), "bit for bit"
    assert (run / "checkpoints" / f"step-{_STEPS:08}" / "model.safetensors").read_bytes() == (
        runs["2"] / "checkpoints" / f"step-{_STEPS:08}" / "model.safetensors"
    ).read_bytes()


def test_a_job_that_nobody_reads_any_more_keeps_its_last_step(text: Path, tmp_path: Path) -> None:
    """As in `burst-rt train ... 2>&1 | tee log`, where Ctrl-C ends tee first."""
    run = tmp_path / "run"
    options = [*_TINY, "--steps", "100000", "--data", str(text), "--out", str(run)]
    process = _start(_burst_rt("train", "-n", "2", *options), tmp_path)
    _wait_for(run / "metrics.jsonl", process)
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(_JOB_DEADLINE_S) == 130
    assert find_checkpoint(run)[1].manifest.step == len(_losses(run))


def test_a_second_signal_ends_a_job_that_is_stopping(text: Path, tmp_path: Path) -> None:
    """Here one that would not end its step."""
    run = tmp_path / "run"
    options = [*_TINY, "--steps", "100000", "--data", str(text), "--out", str(run)]
    process = _start(_burst_rt("train", "-n", "2", *options), tmp_path)
    _wait_for(run / "metrics.jsonl", process)
    for rank in _ranks_of(process):
        rank.suspend()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    sent_at_s = time.monotonic()
    job = _finish(process)
    assert time.monotonic() - sent_at_s < 10.0
    assert job.exit_code == 130
    assert job.err.splitlines()[-1].startswith("burst-rt: stopped by SIGINT after "), job.err


def test_a_rank_that_is_told_to_stop_stops_all(text: Path, tmp_path: Path) -> None:
    """As a batch system does it; under a launcher of one's own."""
    launcher, run = find_launcher(), tmp_path / "run"
    command = _burst_rt(
        "train", *_TINY, "--steps", "100000", "--data", str(text), "--out", str(run)
    )
    environment = launcher.environment(2, 1, tmp_path)
    del environment[JOB_DIR_VARIABLE]
    process = _start(launcher.command(command, 2), tmp_path, environment)
    _wait_for(run / "metrics.jsonl", process)
    _ranks_of(process)[1].send_signal(signal.SIGTERM)
    job = _finish(process)
    assert job.exit_code == 128 + signal.SIGTERM
    _assert_stopped(job, run, "SIGTERM", "train -n 2")


def test_a_run_of_another_model_is_refused_by_every_rank(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    before = (runs["2"] / "metrics.jsonl").read_bytes()
    # Under mpirun itself, so that nothing has checked the options before the ranks meet.
    job = _under_mpirun(
        tmp_path, 2, "train", "--dim", "64", "--steps", "60", "--resume", "--out", str(runs["2"])
    )
    assert job.exit_code == 78
    complaints = [line for line in job.err.splitlines() if line.startswith("burst-rt: ")]
    assert len(complaints) == 1, job.err
    assert "ConfigError: --resume: the checkpoint holds another model" in complaints[0]
    assert "Traceback" not in job.err
    assert (runs["2"] / "metrics.jsonl").read_bytes() == before


def test_what_only_ranks_can_refuse_is_one_line_too(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_one_line(
        _run(tmp_path, "train", "-n", "2", "--seq-len", "10000000", "--data", str(text)),
        "--seq-len",
        "10000001 bytes",
    )
    # In burst_rt.init, before there is a world. Only the launching process of `burst-rt train`
    # would have looked earlier.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job = _run(
        tmp_path, "run", "-n", "2", "-m", "burst_rt.launch.train", "--device", "cuda", warm=None
    )
    assert job.exit_code == 78
    complaints = [line for line in job.err.splitlines() if line.startswith("burst-rt: ")]
    assert complaints == job.err.splitlines()[-1:], job.err
    assert "device 'cuda' was asked for" in complaints[0]
    assert "Traceback" not in job.err
    assert not list(tmp_path.iterdir())


def _outcomes(
    config: TrainConfig, options: RunOptions, chosen: dict[str, object], data: list[Path]
) -> list[str]:
    """What each of three ranks (threads of this process) raises when it trains on its `data`;
    afterwards they still work together.
    """

    def run(world: Context) -> str:
        with pytest.raises(ConfigError) as raised:
            train(world, replace(config, data=str(data[world.rank])), options, chosen)
        assert world.all_reduce(torch.ones(1)).item() == world.world_size
        return str(raised.value)

    return burst_rt.run_local(3, run, timeout_s=20)


def test_a_run_that_cannot_start_is_refused_on_every_rank(
    runs: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    run, other = runs["2"], tmp_path / "other.txt"
    other.write_text("other text " * 9999)
    config, fresh, resumed = (
        TrainConfig(seq_len=251),
        RunOptions(out=tmp_path / "new"),
        RunOptions(out=run, resume=True),
    )
    cases: list[tuple[TrainConfig, RunOptions, dict[str, object], list[Path], str]] = [
        (config, fresh, {}, [tmp_path / "nowhere"] * 3, "--data"),
        (config, fresh, {}, [text, text, other], "differs between ranks"),
        (config, fresh, {}, [text, text, tmp_path / "nowhere"], "--data"),
        (replace(config, seq_len=10**6), fresh, {}, [text] * 3, "--seq-len"),
        (replace(config, layout="diagonal"), fresh, {}, [text] * 3, "--layout"),
        (config, RunOptions(out=run), {}, [text] * 3, "already holds a run"),
        (config, RunOptions(out=other), {}, [text] * 3, str(other)),
        (
            config,
            RunOptions(out=tmp_path, resume=True),
            {},
            [text] * 3,
            "expected a complete checkpoint",
        ),
        (config, resumed, {"kv_heads": 4}, [text] * 3, "another model"),
        (config, resumed, {}, [text] * 3, "no step is left"),
        (config, resumed, {"steps": 60, "context_parallel": 2}, [text] * 3, "--context-parallel"),
        (config, resumed, {"steps": 60, "data": str(other)}, [text] * 3, "not the text"),
    ]
    before = (run / "metrics.jsonl").read_bytes()
    for changed, options, chosen, data, named in cases:
        outcomes = _outcomes(changed, options, chosen, data)
        assert len(set(outcomes)) == 1, outcomes
        assert named in outcomes[0]
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "new").exists()


def test_a_run_shows_its_steps_and_their_parts(text: Path, tmp_path: Path) -> None:
    short = ("--steps", "4", "--eval-every", "2", "--checkpoint-every", "0")
    options = ("-n", "2", "--record", "run.record", *_RUN, *short, "--data", str(text))
    job = _run(tmp_path, "train", *options, "--out", "run")
    assert job.exit_code == 0, job.err
    record = Record(tmp_path / "run.record")
    model = replay(record)
    parts = ["data", "forward", "backward", "average gradients", "optimizer", ""]
    for rank in model.snapshot().ranks:
        own = [
            p
            for p in model.timeline(0.0).phases
            if p.rank == rank.rank and p.name != "planning"  # where something is new
        ]
        steps = [(p.step, p.name) for p in own if p.step >= 0]
        assert steps == [(step, part) for step in range(1, 5) for part in parts]
        others = [p.name for p in own if p.step < 0]
        assert others == ["evaluation", "evaluation", "checkpoint"]
        assert rank.steps == 4
        assert 0 < rank.step_call_s < rank.step_s
    reports = [e.message for e in record if isinstance(e.message, JobReport)]
    told = [(r.step, r.values["learning_rate"]) for r in reports if "loss" in r.values]
    assert told == [(line["step"], line["lr"]) for line in _metrics(tmp_path / "run")]


def test_bfloat16_trains_too(runs: dict[str, Path], text: Path, tmp_path: Path) -> None:
    stored = find_checkpoint(runs["1"])[1].manifest.config
    config = replace(stored, steps=3, dtype="bfloat16", data=str(text))
    options = RunOptions(out=tmp_path, progress="none")
    summaries = burst_rt.run_local(2, lambda world: train(world, config, options, {}), timeout_s=60)
    assert summaries[0] is not None
    assert summaries[1] is None
    expected = _losses(runs["1"])[0]
    assert summaries[0].figures["loss_first"] != expected
    assert summaries[0].figures["loss_first"] == pytest.approx(expected, rel=1e-2)
    assert summaries[0].figures["heldout_loss"] < expected


@pytest.mark.parametrize("command", [train_command, eval_command])
def test_help_explains_every_option_and_gives_examples(
    tmp_path: Path, command: click.Command
) -> None:
    job = _run(tmp_path, str(command.name), "--help")
    assert job.exit_code == 0
    assert "  Examples:\n    burst-rt " in job.out
    for option in command.params:
        assert isinstance(option, click.Option)
        assert option.opts[0] in job.out
        assert option.help, option.name
