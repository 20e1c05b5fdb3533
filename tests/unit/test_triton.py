"""The Triton kernel without a GPU: what it refuses, when it is taken, positions as runs; and
tests/interpreted, in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from burst_rt import Causal, Full
from burst_rt.errors import InputError, InternalError
from burst_rt.kernels import KERNELS, Work, pick
from burst_rt.kernels.triton.configs import ARCHES, arch_of, default_config, padded
from burst_rt.kernels.triton.configs import KINDS as KERNEL_KINDS
from burst_rt.kernels.triton.runs import Runs, runs_of
from burst_rt.planning.layouts import KINDS, make_layout
from burst_rt.planning.masks import Both

_INTERPRETED = Path(__file__).resolve().parents[1] / "interpreted"
_DEADLINE_S = 600.0


@pytest.mark.parametrize("module", [path.name for path in sorted(_INTERPRETED.glob("test_*.py"))])
def test_under_the_interpreter(module: str) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(_INTERPRETED / module),
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command,
        cwd=_INTERPRETED.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout


def test_importing_the_kernels_does_not_import_triton(tmp_path: Path) -> None:
    source = (
        "import sys, burst_rt.kernels, burst_rt.kernels.triton.configs; print('triton' in "
        "sys.modules)"
    )
    command = [sys.executable, "-P", "-c", source]
    assert (
        subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
        == "False"
    )


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, cuda, kernel = torch.device("cpu"), torch.device("cuda", 1), KERNELS["triton"]
    assert kernel.refuses(Work(cuda, torch.bfloat16, 64, Causal())) is None
    for device, dtype, head_dim, mask, why in (
        (
            cpu,
            torch.bfloat16,
            64,
            Full(),
            r"takes CUDA tensors \(CPU tensors only where TRITON_INTERPRET=1 is set\), got cpu",
        ),
        (cuda, torch.float64, 64, Full(), "float32, bfloat16 and float16, got torch.float64"),
        (cuda, torch.float16, 15, Full(), "a head_dim of 16 to 256, got 15"),
        (cuda, torch.float16, 257, Full(), "a head_dim of 16 to 256, got 257"),
        (
            cuda,
            torch.float16,
            16,
            Both(Full(), Causal()),
            r"masks Full and Causal only, got Both\(first=Full\(\), second=Causal\(\)\)",
        ),
    ):
        reason = kernel.refuses(Work(device, dtype, head_dim, mask))
        assert reason is not None
        assert re.search(why, reason)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernel.refuses(Work(cpu, torch.float32, 33, Full())) is None
    reason = kernel.refuses(Work(cuda, torch.float32, 33, Full()))
    assert reason is not None
    assert "takes CPU tensors (TRITON_INTERPRET=1 is set), got cuda:1" in reason


def test_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda")
    several = Work(cuda, torch.bfloat16, 128, Causal(), ring_size=2)
    assert pick(several).kernel.name == "triton"
    assert pick(several, "triton").reason == "asked for by name"
    with pytest.raises(
        InputError, match=r"no tile kernel for torch\.float64 on cuda: the triton kernel takes"
    ):
        pick(Work(cuda, torch.float64, 128, Causal()))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert pick(Work(torch.device("cpu"), torch.bfloat16, 128, Causal())).kernel.name == "cpu"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 16, 61])
def test_every_shard_and_block_of_every_layout_is_runs(kind: str, seq_len: int) -> None:
    for world_size in (1, 2, 3, 5):
        for blocks in make_layout(kind, seq_len, world_size).blocks:
            for positions in (blocks, *((block,) for block in blocks)):
                expected = [i for block in positions for i in block]
                if not expected:
                    continue
                first, split, second, step, length = runs_of(positions, len(expected))
                assert [
                    first + i * step if i < split else second + (i - split) * step
                    for i in range(length)
                ] == expected


def test_runs_that_go_on_are_one() -> None:
    assert runs_of((range(4), range(12, 16)), 8) == Runs(0, 4, 12, 1, 8)
    assert runs_of((range(4), range(4, 8)), 8) == Runs(0, 8, 0, 1, 8)
    assert runs_of((range(1, 8, 3), range(10, 17, 3)), 6) == Runs(1, 6, 0, 3, 6)
    assert runs_of((range(-3, -2), range(0), range(0, 6, 3)), 3) == Runs(-3, 3, 0, 3, 3)
    assert runs_of((range(5, 6), range(9, 10)), 2) == Runs(5, 1, 9, 1, 2)
    with pytest.raises(InternalError, match="3 positions in one or two growing runs of one step"):
        runs_of((range(4),), 3)
    with pytest.raises(InternalError, match="0 positions"):
        runs_of((range(0),), 0)


def test_there_is_a_configuration_for_everything() -> None:
    for head_dim in range(16, 257):
        assert padded(head_dim) in (16, 32, 64, 128, 256)
        assert padded(head_dim) >= head_dim > padded(head_dim) // 2 or head_dim == 16
        for kind in KERNEL_KINDS:
            for arch in (None, *ARCHES):
                for input_bytes in (2, 4):
                    config = default_config(kind, arch, head_dim, input_bytes)
                    # The kernel addresses at most 256 rows of a block in 32 bits; blocks are powers
                    # of two.
                    assert all(0 < size <= 256 and size & (size - 1) == 0 for size in config[:2])
    assert [arch_of(c) for c in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))] == [
        80,
        86,
        86,
        90,
        100,
        100,
        86,
    ]
