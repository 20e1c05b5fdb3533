"""When a failed job is started again, and when it is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.restarts import JobResult, Restarts

_LOST = JobResult(137, "rank 1 was killed by signal 9, SIGKILL after 3.2 s")


def _started(again: Restarts, results: Sequence[JobResult]) -> tuple[int, int]:
    """The exit code, and the number of starts."""
    num_starts = 0

    def start(made: int) -> JobResult:
        nonlocal num_starts
        assert made == num_starts
        num_starts += 1
        return results[min(made, len(results) - 1)]

    return again.run(start), num_starts


@pytest.mark.parametrize(
    ("times", "results", "starts"),
    [
        (0, [_LOST], 1),
        (3, [JobResult(0, "")], 1),
        (3, [_LOST, JobResult(0, "")], 2),
        (3, [_LOST], 4),  # signals do not say whether it was the same
        (3, [JobResult(9, "rank 1 ended without a report")], 4),  # by MPICH's mpirun
        (
            3,
            [JobResult(1, "ValueError: no after 3.1 s"), JobResult(1, "ValueError: no after 4 s")],
            2,
        ),
        (3, [JobResult(1, "ValueError: 1"), JobResult(1, "ValueError: 2"), JobResult(0, "")], 3),
        (3, [JobResult(InputError.exit_code, "a mistake")], 1),
        (3, [JobResult(ConfigError.exit_code, "a mistake")], 1),
        (3, [JobResult(130, "stopped by SIGINT", stopped=True)], 1),
    ],
)
def test_how_often_a_job_is_started(times: int, results: list[JobResult], starts: int) -> None:
    code, num_starts = _started(Restarts(times=times), results)
    assert num_starts == starts
    assert code == results[min(starts, len(results)) - 1].exit_code


def test_progress_makes_a_failure_another_one() -> None:
    steps = iter([1, 2, 2])
    again = Restarts(times=9, progress=lambda: next(steps))
    assert _started(again, [_LOST]) == (137, 3)


def test_a_job_that_ran_for_long_has_its_restarts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # Starts and ends of four jobs; the second ran for 20 s.
    times = iter([0.0, 1.0, 1.0, 21.0, 21.0, 22.0, 22.0, 23.0])
    monkeypatch.setattr("burst_rt.launch.restarts.time.monotonic", lambda: next(times))
    results = [JobResult(1, f"error {i}") for i in range(9)]
    assert _started(Restarts(times=1, window_s=10.0), results) == (1, 3)


def test_the_same_failure_after_a_long_run_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.0, 21.0, 21.0, 22.0])
    monkeypatch.setattr("burst_rt.launch.restarts.time.monotonic", lambda: next(times))
    results = [JobResult(1, "ValueError: no")]
    # The second ran for 20 s; the third fails at once, as the second did.
    assert _started(Restarts(times=9, window_s=10.0), results) == (1, 3)


def test_numbers_of_processes_make_no_other_failure() -> None:
    results = [JobResult(1, f"rank 1: process {pid} has been stopped for 60 s") for pid in (7, 8)]
    assert _started(Restarts(times=9), results) == (1, 2)
