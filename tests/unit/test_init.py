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


_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_")


def _init_under(launcher: dict[str, str]) -> str:
    """What `init` says in a process of its own that has a launcher's variables."""
    attempt = "try:\n    print('ranks', burst_rt.init().world_size)\nexcept burst_rt.errors.ConfigError as error:\n    print(error)"
    program = f"import burst_rt\n{attempt}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean | root | launcher, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_a_launcher_of_another_mpi_is_noticed() -> None:
    said = _init_under({"PMI_SIZE": "3"})
    assert "started 3 ranks" in said
    assert "world of one" in said
    assert "the mpirun that belongs" in said


@pytest.mark.parametrize("pmi", [{}, {"PMI_SIZE": "2"}], ids=["none", "pmi2"])
def test_srun_without_the_pmi_of_the_library_is_noticed(pmi: dict[str, str]) -> None:
    said = _init_under({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **pmi})
    assert "started 2 ranks" in said
    assert "srun --mpi=pmix" in said


def test_one_rank_of_mpirun_inside_a_step_of_srun_is_a_world_of_one() -> None:
    assert _init_under({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "1"}) == "ranks 1\n"


def test_a_closed_context_is_not_used() -> None:
    ctx = burst_rt.init()
    ctx.close()
    with pytest.raises(ConfigError, match="closed"):
        ctx.agree({"call": "anything"})
