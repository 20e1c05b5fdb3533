"""`burst_rt.init`: options, and what it makes of the process's environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import burst_rt
from burst_rt.errors import ConfigError, InputError


def test_outside_a_job_it_is_a_world_of_one() -> None:
    with burst_rt.init() as ctx:
        assert (ctx.rank, ctx.world_size, ctx.device.type) == (0, 1, "cpu")


@pytest.mark.parametrize("option", ["timeout_s", "stall_s"])
@pytest.mark.parametrize("value", [0, -1.0, True, "5", float("nan")])
def test_a_deadline_must_be_a_positive_number(option: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{option} must be a positive number"):
        burst_rt.init(**{option: value})  # type: ignore[arg-type]


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="device must be"):
        burst_rt.init(device="tpu")


def test_a_launcher_of_another_mpi_is_noticed() -> None:
    program = "import burst_rt\ntry:\n    burst_rt.init()\nexcept burst_rt.errors.ConfigError as error:\n    print(error)"
    foreign = {**os.environ, "PMI_SIZE": "3", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=foreign, capture_output=True, text=True, timeout=60, check=True)
    assert "started 3 ranks" in done.stdout
    assert "world of one" in done.stdout


def test_a_closed_context_is_not_used() -> None:
    ctx = burst_rt.init()
    ctx.close()
    with pytest.raises(ConfigError, match="closed"):
        ctx.agree({"call": "anything"})
