"""`burst_rt.init`: options, and what it makes of the process's environment."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from typing import Any

import pytest
import torch
from forked import with_torch

import burst_rt
from burst_rt.errors import ConfigError, InputError, Stalled
from burst_rt.transport import LocalWorld


def test_outside_a_job_it_is_a_world_of_one() -> None:
    with burst_rt.init() as ctx:
        assert (ctx.rank, ctx.world_size, ctx.device.type) == (0, 1, "cpu")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="device must be"):
        burst_rt.init(device="tpu")


_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_", "RANK", "WORLD_SIZE", "TORCHELASTIC_")


def _init_under(launcher: dict[str, str], before: str = "") -> str:
    """What `init` says in a process of its own that has a launcher's variables."""
    attempt = (
        "try:\n    print('ranks', burst_rt.init().world_size)\nexcept "
        "burst_rt.errors.ConfigError as error:\n    print(error)"
    )
    program = f"{before}import burst_rt\n{attempt}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    done = with_torch().run(program, env=clean | root | launcher)
    assert done.returncode == 0, done.stderr
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
    assert (
        _init_under({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "1"})
        == "ranks 1\n"
    )


@pytest.mark.parametrize("program", ["", "from mpi4py import MPI\n"], ids=["alone", "with mpi4py"])
def test_processes_that_cannot_find_each_other_are_no_worlds_of_one(program: str) -> None:
    said = _init_under({"RANK": "0", "WORLD_SIZE": "2"}, program)
    assert "process 0 of 2, but the processes cannot find each other: " in said
    assert "MASTER_ADDR" in said
    assert "unset RANK and WORLD_SIZE" in said


def test_nobody_waits_for_a_store_beyond_join_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(_LAUNCHERS):
            monkeypatch.delenv(name)
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        for name, value in {
            "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(closed.getsockname()[1]),
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        since_s = time.monotonic()
        with pytest.raises(Stalled, match=r"process 1 of 2 waited 3 s in burst_rt\.init for the"):
            burst_rt.init(join_s=3)
        assert time.monotonic() - since_s < 5


@pytest.mark.parametrize(
    ("own", "size"),
    [("", "8"), ("x", "2"), ("-1", "2"), ("0", "abc"), ("0", "2.0"), ("0", "0"), ("2", "2")],
)
def test_half_set_variables_of_torchrun_are_no_world_of_one(
    own: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ:
        if name.startswith(_LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", own)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=f"RANK the smaller one; got '{own}' and '{size}'"):
        burst_rt.init()


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_one_process_of_torchrun_is_a_world_of_one(variables: dict[str, str]) -> None:
    assert _init_under(variables) == "ranks 1\n"


def test_a_group_of_another_library_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ProcessGroup:
        __module__ = "torch.distributed"

    with pytest.raises(
        ConfigError,
        match=(r"got ProcessGroup, a group of torch\.distributed; give it as group="),
    ):
        burst_rt.init(ProcessGroup())  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["timeout_s", "stall_s", "join_s"])
@pytest.mark.parametrize(
    "value", [0, -1.0, True, "5", math.nan, math.inf, 1e300, pytest.param(10**400, id="huge")]
)
def test_a_deadline_must_be_a_positive_number(option: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{option} must be a positive, finite number of seconds"):
        burst_rt.init(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", ["a minute", "", "-1", "0", "nan", "inf", "1e400", "1e300"])
def test_seconds_of_the_environment_are_checked(
    seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURST_RT_JOIN_S", seconds)
    with pytest.raises(ConfigError, match="BURST_RT_JOIN_S must be a positive, finite number"):
        burst_rt.init()


def test_init_inside_run_local_joins_that_world() -> None:
    def program(outer: burst_rt.Context) -> tuple[int, int, float]:
        inner = burst_rt.init()
        total = inner.all_reduce(torch.tensor([float(inner.rank)]))
        outer.all_reduce(torch.zeros(1))
        return inner.rank, inner.world_size, float(total)

    assert burst_rt.run_local(3, program) == [(rank, 3, 3.0) for rank in range(3)]
    # Outside of it this thread is alone again.
    with burst_rt.init() as ctx:
        assert ctx.world_size == 1


def test_a_context_made_inside_run_local_does_not_outlive_it() -> None:
    def program(outer: burst_rt.Context) -> burst_rt.Context:
        inner = burst_rt.init(timeout_s=20)
        if outer.rank == 0:
            return inner
        # Rank 0 has returned, and takes part in nothing more.
        with pytest.raises(
            burst_rt.errors.PeerLost, match="rank 0 closed its context or ended normally"
        ):
            inner.all_reduce(torch.zeros(1))
        return inner

    assert [ctx.closed for ctx in burst_rt.run_local(2, program)] == [True, True]


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": float("nan")},
        {"partials": "half"},
        {"kernel": "fast"},
        {"transport": "pigeon"},
        {"device": "tpu"},
        {"join_s": "soon"},
    ],
)
@pytest.mark.parametrize("odd", [0, 1])
def test_one_ranks_wrong_option_is_every_ranks_error(options: dict[str, Any], odd: int) -> None:
    world = LocalWorld(2)
    raised: dict[int, burst_rt.errors.BurstError] = {}

    def join(rank: int) -> None:
        try:
            burst_rt.init(burst_rt.LocalRank(world, rank), **(options if rank == odd else {}))
        except burst_rt.errors.BurstError as error:
            raised[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {type(error) for error in raised.values()} == {
        ConfigError if options.keys() & {"transport", "device"} else InputError
    }
    assert [str(raised[rank]).startswith(f"rank {odd}: init: ") for rank in range(2)] == [
        True,
        True,
    ]


def test_a_closed_context_is_not_used() -> None:
    ctx = burst_rt.init()
    ctx.close()
    with pytest.raises(ConfigError, match="closed"):
        ctx.runtime.agree({"call": "anything"})
