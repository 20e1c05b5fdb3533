"""`burst-rt generate` on real MPI jobs: the text that one process finds without a cache, on any
world; its figures, on standard error and in telemetry.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from generating import PROMPT, make_options, make_run, plain_text
from jobs import Job, run_command

from burst_rt import run_local
from burst_rt.launch.generate.loop import generate
from burst_rt.launch.run import kill_job
from burst_rt.launch.train.export import export
from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.tape import replay

_NUM_TOKENS = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("generate") / "run")


def _generate(cwd: Path, *arguments: str) -> Job:
    job = run_command(
        ("generate", "--max-new-tokens", str(_NUM_TOKENS), *arguments),
        cwd=cwd,
        timeout_s=90.0,
        warm="torch",
    )
    assert job.exit_code == 0, job.text
    return job


def _figures(job: Job) -> dict[str, str]:
    rows = re.findall(r"^│ (.+?) +│ (.+?) +│$", job.err, flags=re.MULTILINE)
    return dict(rows)


def test_two_ranks_write_what_one_process_writes_without_a_cache(run: Path, tmp_path: Path) -> None:
    job = _generate(
        tmp_path, "--checkpoint", str(run), "-n", "2", "--prompt", PROMPT, "--temperature", "0",
        "--record", "job.record",
    )  # fmt: skip
    assert job.out == plain_text(run, PROMPT, _NUM_TOKENS) + "\n"

    length = len(PROMPT.encode())
    figures = _figures(job)
    assert figures["prompt"] == f"{length} bytes"
    # The last byte is not read again.
    cached, capacity = length + _NUM_TOKENS - 1, length + _NUM_TOKENS
    assert figures["cache"].startswith(f"{cached} of {capacity} bytes; ")
    assert re.fullmatch(r"[\d.]+ m?s", figures["time to first byte"])
    assert re.fullmatch(r"[\d.]+ m?s \(the last: [\d.]+ m?s\)", figures["time per byte"])
    assert float(figures["bytes/s"]) > 0
    assert int(figures["sent by attention"].split()[0].replace(",", "")) > 0

    progress = replay(Record(tmp_path / "job.record")).snapshot().progress
    assert progress.step == _NUM_TOKENS
    assert progress.values["cached_tokens"] == cached
    assert progress.values["cache_capacity_tokens"] == capacity
    mean_s = progress.values["mean_time_per_token_s"]
    assert f"{progress.values['output_tokens_per_s']:.1f}" == figures["bytes/s"]
    assert progress.values["output_tokens_per_s"] == pytest.approx(1 / mean_s)


def test_a_seed_gives_the_same_text_on_one_rank_and_on_three(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    job = _generate(
        tmp_path, "--checkpoint", str(run), "-n", "3", "--prompt-file", "prompt.txt",
        "--temperature", "1.5", "--seed", "5",
    )  # fmt: skip
    options = make_options(
        checkpoint=run, prompt=PROMPT, max_new_tokens=_NUM_TOKENS, temperature=1.5, seed=5
    )
    run_local(1, lambda ctx: generate(ctx, options))
    assert job.out == capsys.readouterr().out
    assert job.out.startswith(PROMPT)
    assert job.out != plain_text(run, PROMPT, _NUM_TOKENS) + "\n"


def test_the_text_comes_while_it_is_written(run: Path, tmp_path: Path) -> None:
    words = ["generate", "-n", "2", "--checkpoint", str(run), "--prompt", "abc"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "burst_rt.launch.main", *words, "--max-new-tokens", "800"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        # Tests that run in the background of a shell were told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 3) == b"abc"
        # Of a line that is passed on when it is whole, the job has reached the end here.
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=60.0)
    finally:
        kill_job(process)
    assert process.returncode == 128 + signal.SIGINT, said
    assert len(rest) < 800
    assert b"stopped by SIGINT" in said


def test_a_folder_of_transformers_writes_the_same(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "folder")
    job = _generate(
        tmp_path, "--model", "folder", "-n", "2", "--prompt", PROMPT, "--temperature", "0"
    )
    assert job.out == plain_text(run, PROMPT, _NUM_TOKENS) + "\n"
    assert _figures(job)["prompt"] == f"{len(PROMPT.encode())} tokens"
