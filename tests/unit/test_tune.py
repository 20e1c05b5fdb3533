"""Block sizes measured on a machine: candidates, which is taken, how it is remembered and used.
tests/interpreted tries some for real.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from burst_rt import Causal, Full
from burst_rt.errors import ConfigError
from burst_rt.kernels import KERNELS, Work, pick
from burst_rt.kernels.triton import tuned as module
from burst_rt.kernels.triton.configs import (
    ARCHES,
    Config,
    block_width,
    default_config,
    takes_producer,
)
from burst_rt.kernels.triton.tuned import TUNED, candidates, config_of, keep, trial_of
from burst_rt.launch.bench.cli import command
from burst_rt.launch.bench.tune import KernelRequest, Trial, best_of, compile_beside, paste
from burst_rt.planning.needs import ROWS_TOGETHER
from burst_rt.remembered import recall, remember

_CUDA = torch.device("cuda")


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A GPU that is not there, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a chip")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    module._recalled.cache_clear()
    yield tmp_path
    module._recalled.cache_clear()


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", TUNED)
def test_candidates_are_few_and_may_fit(kind: str, arch: int) -> None:
    for head_dim in (16, 64, 80, 128, 256):
        for input_bytes in (2, 4):
            found = candidates(kind, arch, head_dim, input_bytes)
            producer = takes_producer(kind, arch, (head_dim, head_dim), input_bytes)
            assert found[0] == default_config(kind, arch, head_dim, input_bytes, producer=producer)
            assert len(found) == len(set(found)) <= 32
            assert all(arch >= 90 for config in found if config.loads != "pointers")
            for config in found[1:]:
                assert config.block_m & (config.block_m - 1) == 0
                assert 16 <= config.block_n <= 256
                assert ROWS_TOGETHER % config.block_m == ROWS_TOGETHER % config.block_n == 0
                # At least one block of each side is in shared memory.
                assert (config.block_m + config.block_n) * block_width(
                    head_dim
                ) * input_bytes <= ARCHES[arch]
    assert len(candidates(kind, 90, 128, 2)) >= 8
    assert {config.loads for config in candidates("forward", 90, 128, 2)} == {
        "pointers",
        "descriptors",
        "producer",
    }
    for others in (
        ("forward", 90, 64, 2), ("forward", 90, 96, 2), ("forward", 90, 128, 4), ("dq", 90, 128, 2)
    ):  # fmt: skip
        assert not any(config.loads == "producer" for config in candidates(*others))
    roles = [config for config in candidates("forward", 90, 128, 2) if config.loads == "producer"]
    assert len(roles) == 4
    for config in roles:
        # What the kernel is written for; with one stage its warps would wait for ever.
        assert (config.block_m, config.num_warps) == (128, 8)
        assert config.num_stages >= 2


def test_a_backward_in_one_pass_is_tried_where_calls_can_have_one(chip: Path) -> None:
    """None has it by default, nor where it was not the faster one."""
    from burst_rt.kernels.triton.chosen import one_pass_config

    two, one = candidates("backward", 90, 128, 2)
    assert (two.loads, one.loads) == ("pointers", "producer")
    for others in ((90, 64, 2), (90, 128, 4), (100, 128, 2)):
        assert candidates("backward", *others) == []
    call: Any = (_CUDA, (128, 128), torch.bfloat16)
    assert one_pass_config(*call) is None
    for found, taken in ((two, None), (one, one)):
        with trial_of("backward", found):
            assert one_pass_config(*call) == taken
        assert keep("backward", _CUDA, 128, torch.bfloat16, found)
        assert one_pass_config(*call) == taken
    assert one_pass_config(_CUDA, (128, 64), torch.bfloat16) is None


def test_a_producer_where_the_call_can_have_one(chip: Path) -> None:
    """It has one by default. What was measured, or is tried, comes first, and a configuration with
    a producer leaves other calls as they are.
    """
    from burst_rt.kernels.triton.chosen import cuts_of

    def configs(producer: bool) -> list[Config]:
        cut, *found = cuts_of("forward", _CUDA, 128, torch.bfloat16, producer)
        assert [cut.blocks, cut.several] == [config.blocks for config in found]
        return found

    table = [default_config("forward", 90, 128, 2, several=several) for several in (False, True)]
    assert configs(True) == [Config(128, 128, 8, 2, "producer"), Config(128, 64, 8, 3, "producer")]
    assert configs(False) == table
    with trial_of("forward", table[0]):
        assert configs(True) == configs(False) == table
    tuned = Config(128, 64, 8, 2, "producer")
    assert keep("forward", _CUDA, 128, torch.bfloat16, tuned)
    assert configs(True) == [tuned, Config(128, 64, 8, 3, "producer")]
    assert configs(False) == table


def test_what_cannot_be_compiled_beside_is_left_to_its_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(3))
    wanted = [KernelRequest(kind, "cuda:99", "bf16", 64, Config(64, 64, 4, 2)) for kind in TUNED]
    assert compile_beside(wanted, 60) == [1, 1]  # there is no such device
    assert compile_beside(wanted, 0.1) == [-signal.SIGKILL] * 2


def test_the_fastest_is_taken_if_it_is_worth_it() -> None:
    a, b, c = Config(128, 64, 8, 2), Config(64, 64, 4, 3), Config(64, 32, 4, 3)
    failed = Trial(b, None, "OutOfResources: shared memory")
    assert best_of([Trial(a, 1.0), Trial(b, 0.9), Trial(c, 0.8)]) == Trial(c, 0.8)
    assert best_of([Trial(a, 1.0), Trial(b, 0.99), failed]) == Trial(a, 1.0)
    assert best_of([Trial(a, None, "no"), failed, Trial(c, 2.0)]) == Trial(c, 2.0)
    assert best_of([failed]) is None
    line = paste("dq", 90, 128, [Trial(a, 2e-3), Trial(c, 1e-3)], Trial(c, 1e-3))
    assert line == f'("dq", 90), head sizes up to 128: {c!r}  # 1.000 ms; {a!r} took 2.000'


def test_what_was_measured_is_used_and_told(chip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from burst_rt.kernels.triton.chosen import config_for

    # What a launcher asks with; the tensor itself needs no device.
    class OnCuda:
        device, shape, dtype = _CUDA, (1, 8, 2, 128), torch.bfloat16

    x: torch.Tensor = OnCuda()  # type: ignore[assignment]
    work = Work(_CUDA, torch.bfloat16, 128, Causal(), ring_size=2)
    assert config_for("forward", x) == default_config("forward", 90, 128, 2)
    assert "tuned" not in pick(work, "triton").reason
    found = Config(64, 128, 4, 2, "descriptors")
    assert keep("forward", _CUDA, 128, torch.bfloat16, found)
    assert config_for("forward", x) == found
    told = (
        "asked for by name; blocks tuned on this machine: forward 64 x 128, 4 warps, 2 stages, "
        "descriptors"
    )
    assert pick(work, "triton").reason == told
    # For this kernel, head size and type alone; and for this chip.
    assert "tuned" not in pick(work._replace(forward=False), "triton").reason
    assert config_of("dq", _CUDA, 128, torch.bfloat16) is None
    assert config_of("forward", _CUDA, 64, torch.bfloat16) is None
    assert config_of("forward", _CUDA, 128, torch.float16) is None
    assert config_of("forward", torch.device("cpu"), 128, torch.bfloat16) is None
    # A trial comes before both.
    with trial_of("forward", Config(32, 32, 4, 1)):
        assert config_for("forward", x) == Config(32, 32, 4, 1)
    assert config_for("forward", x) == found
    module._recalled.cache_clear()
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "another chip")
    assert config_of("forward", _CUDA, 128, torch.bfloat16) is None


@pytest.mark.parametrize(
    "answer",
    [
        [1, 2, 3],
        [64, 64, 4, 2],
        [64, 64, 4, 0, "pointers"],
        [64, 64, 4, "2", "pointers"],
        [64, 64, 4, 2, "x"],
        {"block_m": 64},
        "x",
    ],
)
def test_what_is_no_configuration_is_not_used(answer: object, chip: Path) -> None:
    key = module._key("dq", _CUDA, 64, torch.float16)
    assert remember("triton-blocks", key, answer)
    assert recall("triton-blocks", key, lambda _: True) == answer
    assert config_of("dq", _CUDA, 64, torch.float16) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_remembered_of_a_machine_without_a_gpu() -> None:
    assert config_of("forward", _CUDA, 64, torch.bfloat16) is None
    assert KERNELS["triton"].remarks(Work(_CUDA, torch.bfloat16, 64, Full())) == ()
    result = CliRunner().invoke(command, ["tune"])
    assert isinstance(result.exception, ConfigError)
    assert "bench tune: torch sees no CUDA device" in str(result.exception)
