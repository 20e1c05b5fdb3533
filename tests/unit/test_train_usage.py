"""`burst-rt train` and `burst-rt eval` told what cannot be: one line that says what to change,
before any rank starts.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import Forked

from burst_rt.errors import ConfigError
from burst_rt.launch.command import before_ranks
from burst_rt.launch.main import cli
from burst_rt.launch.train.checkpoint import Checkpoint, Manifest, save_checkpoint
from burst_rt.launch.train.config import TrainConfig

# Against hanging: refusing takes less than a second.
_DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 5 steps of 9 (`run`), one that is done (`done`), a damaged one, one
    that is held, one of a model of transformers (`tuned`), a text, and folders of models: `model`,
    and some that lack a file.
    """
    place = tmp_path_factory.mktemp("place")
    tensors = {"head.weight": torch.zeros(2)}
    for name, steps in (("run", 9), ("done", 5), ("held", 9), ("damaged", 9)):
        config = TrainConfig(steps=steps, data=str(place / "text"), strategy="hybrid:2")
        save_checkpoint(
            place / name, Checkpoint(Manifest(5, config, "fingerprint"), tensors, tensors), keep=1
        )
    tuned = TrainConfig(steps=9, model=str(place / "model"))
    save_checkpoint(
        place / "tuned", Checkpoint(Manifest(5, tuned, "text", "model"), tensors, tensors), keep=1
    )
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    for name, lacking in (("model", -1), ("unknown", 0), ("empty", 1), ("mute", 2)):
        (place / name).mkdir()
        for number, file in enumerate(files):
            if number != lacking:
                (place / name / file).touch()
    (place / "empty" / "pytorch_model.bin").touch()
    (place / "damaged" / "checkpoints" / "step-00000005" / "config.json").write_text("{")
    (place / "held" / ".lock").write_text("process 123 on somewhere\n")
    (place / "text").write_text("some text " * 999)
    return place


_TRAIN: list[tuple[str, list[str]]] = [
    ("--data nowhere", ["--data", "nowhere does not exist"]),
    ("--device cuda", ["--device: cuda was asked for", "no GPUs"]),
    ("--device cuda:3", ["--device: cuda:3 was asked for"]),
    ("--device tpu", ["--device: expected auto, cpu, cuda or cuda:N, got tpu"]),
    ("--resume", ["--resume needs --out DIR"]),
    (
        "--resume --out nothing",
        [
            "--resume: expected a complete checkpoint in nothing/checkpoints",
            "Train with --out first",
        ],
    ),
    ("--resume --out text", ["--out: text is not a folder"]),
    (
        "--resume --out damaged",
        ["checkpoint damaged/checkpoints/step-00000005 is damaged: config.json"],
    ),
    ("--resume --out held", ["--out: held is in use", "process 123 on somewhere"]),
    ("--out held", ["--out: held is in use", "process 123 on somewhere"]),
    ("--resume --out done", ["5 of 5 steps are done", "choose more --steps"]),
    ("--resume --out run --steps 4", ["5 of 4 steps are done"]),
    ("--resume --out run --dim 64", ["the checkpoint holds another model"]),
    ("--resume --out run --data nowhere", ["--data", "nowhere does not exist"]),
    (
        "--resume --out run/checkpoints/step-00000005",
        ["named like a checkpoint", "name the folder of the run"],
    ),
    ("--out run", ["run already holds a run", "--resume"]),
    ("--out text", ["--out: text is not a folder"]),
    ("--out text/run", ["text is not a folder"]),
    ("--out " + 300 * "x", ["File name too long"]),
    ("--context-parallel 3", ["--context-parallel: 4 ranks cannot form groups of 3"]),
    ("--context-parallel 2", ["--batch: 1 sequences cannot be shared by 2"]),
    ("--heads 3", ["heads", "--dim or --heads"]),
    ("--seed 18446744073709551616", ["--seed"]),
    ("--seq-len 0", ["--seq-len must be positive, got 0"]),
    ("--seq-len 3", ["--seq-len: 3 cannot be split over 4 ranks"]),
    ("--lr nan", ["--lr must be positive, got nan"]),
    ("--layout diagonal", ["--layout must be one of contiguous, striped, zigzag, got diagonal"]),
    ("--dtype int8", ["--dtype must be one of"]),
    ("--strategy hybrid:3", ["--strategy", "groups of 3 and 4 ranks"]),
    ("--strategy hybrid:4", ["--strategy", "4 must divide the number of kv heads, got 2"]),
    ("--strategy two-level:3", ["--strategy", "3 ranks per node and 4 ranks"]),
    (
        "--strategy all-to-all --kv-heads 1",
        ["--strategy", "4 must divide the number of kv heads, got 1"],
    ),
    ("--strategy circle", ["--strategy", "circle"]),
    ("--model nowhere", ["--model: expected the folder", "nowhere is none", "downloaded"]),
    ("--model text", ["--model: expected the folder", "text is none"]),
    ("--model unknown", ["--model: expected a configuration (config.json) in", "unknown, found"]),
    ("--model empty", ["--model: expected safetensors (*.safetensors) in", "empty, found none"]),
    ("--model mute", ["--model: expected a tokenizer (tokenizer", "mute, found none"]),
    ("--model model --data nowhere", ["--data", "nowhere does not exist"]),
    ("--model model --seq-len 0", ["--seq-len must be positive"]),
    (
        "--model model --layers 4 --strategy burst",
        ["--layers, --strategy: of the byte-level", "strategy is auto; leave it out"],
    ),
    ("--resume --out tuned --dim 64", ["--dim: of the byte-level"]),
    ("--resume --out run --model model", ["--model: the checkpoint holds another model"]),
]
_EVAL: list[tuple[str, list[str]]] = [
    ("--checkpoint nothing", ["expected a complete checkpoint in nothing/checkpoints"]),
    ("--checkpoint damaged", ["is damaged: config.json"]),
    ("--checkpoint run/checkpoints/step-00000006", ["SHA256SUMS is missing"]),
    ("--checkpoint run --data nowhere", ["--data", "nowhere does not exist"]),
    ("--checkpoint run --device cuda", ["--device: cuda was asked for"]),
    ("--checkpoint run --context-parallel 3", ["--context-parallel: 4 ranks"]),
    ("--checkpoint run --seq-len -1", ["--seq-len must be positive, got -1"]),
    ("--checkpoint run --eval-sequences -1", ["--eval-sequences must not be negative"]),
    ("--checkpoint run --layout diagonal", ["--layout must be one of"]),
    ("--checkpoint run --dtype int8", ["--dtype must be one of"]),
    ("--checkpoint run --model model", ["--model: the checkpoint holds another model"]),
    ("--checkpoint tuned --model nowhere", ["--model: expected the folder", "nowhere is none"]),
    ("--model mute", ["--model: expected a tokenizer", "found none"]),
    ("--model model --context-parallel 3", ["--context-parallel: 4 ranks"]),
]


# Neither torch nor mpi4py is needed to refuse: one that has been imported is another line.
_COMMAND = """
import sys
from burst_rt.launch.main import main

try:
    main()
finally:
    for name in {"torch", "mpi4py"} & sys.modules.keys():
        print("imported", name, file=sys.stderr)
"""


def _environment() -> dict[str, str]:
    # No GPU, also where there is one; nor a batch job, in which other hosts might have one.
    hidden = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")
    return {name: value for name, value in os.environ.items() if name not in hidden} | {
        "CUDA_VISIBLE_DEVICES": ""
    }


@pytest.fixture(scope="module")
def commands(place: Path) -> Iterator[Forked]:
    forked = Forked("import burst_rt.launch.main, burst_rt.launch.train.cli", place)
    yield forked
    forked.close()


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [(c, *case) for c, table in (("train", _TRAIN), ("eval", _EVAL)) for case in table],
)
def test_what_cannot_run_is_refused_with_one_line(
    place: Path, commands: Forked, command: str, arguments: str, words: list[str]
) -> None:
    before = sorted(place.rglob("*"))
    with (place / "held" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = commands.run(
            _COMMAND, "burst-rt", command, "-n", "4", *arguments.split(),
            env=_environment(), timeout_s=int(_DEADLINE_S),
        )  # fmt: skip
    said = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (78, ""), said
    assert len(said) == 1, said
    assert said[0].startswith("burst-rt: ConfigError: ")
    for word in words:
        assert word in said[0]
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(("command", "case"), [("train", _TRAIN[0]), ("eval", _EVAL[0])])
def test_a_command_of_its_own_process_refuses_too(
    place: Path, command: str, case: tuple[str, list[str]]
) -> None:
    arguments, words = case
    done = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-m", "burst_rt.launch.main", command, "-n",
        "4", *arguments.split()],
        cwd=place, env=_environment(), capture_output=True, text=True, timeout=_DEADLINE_S,
        check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    said = [line for line in lines if not line.startswith("import time:")]
    assert (done.returncode, done.stdout) == (78, ""), said
    assert len(said) == 1, said
    assert said[0].startswith("burst-rt: ConfigError: ")
    assert all(word in said[0] for word in words)
    assert not any(line.split()[-1] in ("torch", "mpi4py") for line in lines), (
        "neither is needed for that"
    )


@pytest.mark.parametrize(
    ("name", "fits"),
    [("cuda", True), ("cuda:1", True), ("cuda:2", False), ("auto", True), ("cpu", True)],
)
def test_a_device_that_is_there_is_taken(
    monkeypatch: pytest.MonkeyPatch, name: str, fits: bool
) -> None:
    def count_devices(count: Any) -> int:  # ctypes.byref's own type
        count._obj.value = 2
        return 0

    for variable in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE"):
        monkeypatch.delenv(variable, raising=False)
    driver = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetCount=count_devices)
    monkeypatch.setattr("ctypes.CDLL", lambda path: driver)
    monkeypatch.setenv("BURST_RT_DEVICE", name)
    with (
        nullcontext() if fits else pytest.raises(ConfigError, match="finds 2 GPUs here"),
        before_ranks(),
    ):
        pass
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with before_ranks():
        pass  # on another host there may be more


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_missing_transformers_is_told_with_what_to_do(
    place: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = [command, "-n", "2", "--model", str(place / "model")]
    with pytest.raises(ConfigError, match=r"--model needs transformers.* pip install '\.\[hf\]'"):
        cli(words, standalone_mode=False)
