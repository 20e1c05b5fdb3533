"""The ranks of a command: how their errors and stops end the process. On one rank."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator

import pytest

from burst_rt.context import Context
from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.world import StoppedBySignal, job_world


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def _ends(action: Callable[[Context], object]) -> object:
    """The exit code of a command whose ranks do this."""
    with pytest.raises(SystemExit) as left, job_world() as world:
        action(world)
    return left.value.code


def _misconfigured() -> None:
    raise ConfigError("--steps must be positive, got 0.") from ValueError("0")


def test_a_users_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert _ends(lambda world: world.together(_misconfigured)) == ConfigError.exit_code
    line = "burst-rt: ConfigError: --steps must be positive, got 0.\n"
    assert capsys.readouterr().err == line


def _mistaken() -> None:
    raise InputError("hf.prepare: Odd cannot be spread over ranks") from ValueError("a model's")


def test_a_users_mistake_that_an_exception_told_is_one_line_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _ends(lambda world: world.together(_mistaken)) == InputError.exit_code
    line = "burst-rt: InputError: hf.prepare: Odd cannot be spread over ranks\n"
    assert capsys.readouterr().err == line


def test_a_defect_is_shown_with_its_frames(capsys: pytest.CaptureFixture[str]) -> None:
    _ends(lambda world: world.together(lambda: [][1]))
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "IndexError: list index out of range" in err
    assert err.splitlines()[-1].startswith("burst-rt: InputError: together: fn raised IndexError")


def test_a_stop_ends_with_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    def stop(world: Context) -> None:
        raise StoppedBySignal(signal.SIGTERM, "after step 3; resume with: burst-rt train --resume")

    assert _ends(stop) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == (
        "burst-rt: stopped by SIGTERM after step 3; resume with: burst-rt train --resume\n"
    )
