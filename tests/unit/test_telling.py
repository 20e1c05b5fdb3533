"""How an error that ends a rank is printed: burst_rt/job/telling.py; the launcher's last line."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import burst_rt
from burst_rt.errors import BurstError, DeviceError, InputError, PeerLost
from burst_rt.job.ending import error_line
from burst_rt.job.reports import RankReport, primary_failure
from burst_rt.job.telling import in_one_line, named_once, shorten_text
from burst_rt.launch.verdict import _headline


def _printed(error: BaseException) -> str:
    with shorten_text(error):
        return "".join(traceback.format_exception(error))


def _raised(by_mask: bool = False) -> InputError:
    def fails(*_: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("the user's own")

    def attend(ctx: burst_rt.Context) -> None:
        layout = ctx.layout(16)
        x = torch.zeros(1, 16 if by_mask else 15, 2, 16)
        mask = burst_rt.Mask.from_function(fails) if by_mask else None
        burst_rt.burst_attention(x, x, x, layout=layout, mask=mask)

    with burst_rt.init(device="cpu") as ctx, pytest.raises(InputError) as raised:
        attend(ctx)
    return raised.value


def test_frames_end_at_the_public_call() -> None:
    error = _raised()
    before = error.__traceback__, error.__cause__, error.__suppress_context__
    text = _printed(error)
    files = [line.split('"')[1] for line in text.splitlines() if line.startswith('  File "')]
    names = [Path(name).name for name in files]
    assert names[-2:] == [Path(__file__).name, "api.py"]
    assert names.count("api.py") == 1
    # Who catches the error finds it as it was.
    assert (error.__traceback__, error.__cause__, error.__suppress_context__) == before


def test_a_cause_in_the_users_own_code_is_shown_and_one_of_ours_is_not() -> None:
    error = _raised(by_mask=True)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "ZeroDivisionError: the user's own" in _printed(error)
    ours = InputError("ours")
    ours.__cause__ = RuntimeError("without a frame of the user's")
    assert "RuntimeError" not in _printed(ours)
    assert isinstance(ours.__cause__, RuntimeError)


@pytest.mark.parametrize("kind", [DeviceError, burst_rt.errors.InternalError, ValueError])
def test_what_is_worth_a_report_keeps_its_frames(kind: type[BaseException]) -> None:
    # As a module of burst_rt would.
    names: dict[str, Any] = {"__name__": "burst_rt.made", "kind": kind}
    source = "def inner(): raise kind('x')\ndef outer(): inner()"
    exec(compile(source, "ours.py", "exec"), names)
    with pytest.raises(kind) as raised:
        names["outer"]()
    assert _printed(raised.value).count("ours.py") == 2


def test_all_frames_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_RT_TRACEBACK", "full")
    assert _printed(_raised()).count("burst_rt") > 3


@pytest.mark.parametrize(
    ("rank", "message", "expected"),
    [
        (1, "rank 1: q is wrong", "InputError: q is wrong"),
        (0, "rank 1: q is wrong", "rank 1's InputError: q is wrong"),
        (11, "rank 1: q is wrong", "rank 1's InputError: q is wrong"),
        (None, "rank 1: q is wrong", "InputError: rank 1: q is wrong"),
        (1, "q is wrong: rank 1: 3", "InputError: q is wrong: rank 1: 3"),
    ],
)
def test_one_sentence_names_one_rank(rank: int | None, message: str, expected: str) -> None:
    assert named_once("InputError", message, rank) == expected
    assert error_line(InputError(message, rank=rank)) == expected


def test_only_a_rank_of_a_job_prints_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = PeerLost("rank 0: rank 1 was lost", rank=0, peer=1)
    errors: list[BurstError] = [InputError("rank 1: no", rank=0, peer=1), lost]
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert [in_one_line(error) for error in errors] == ["", ""]
    monkeypatch.setenv("PMI_RANK", "0")
    assert in_one_line(errors[0]) == "burst-rt: rank 0: rank 1's burst_rt.errors.InputError: no"
    assert in_one_line(InputError("rank 0: no", rank=0, peer=0)) == ""
    assert in_one_line(lost) == "burst-rt: rank 0: burst_rt.errors.PeerLost: rank 1 was lost"
    assert in_one_line(DeviceError("x", rank=0, peer=1)) == ""
    assert in_one_line(ValueError("x")) == ""


def test_the_rank_that_made_the_error_is_the_cause() -> None:
    reports = [
        RankReport(0, 1.0, 64, "InputError", 1, "InputError: rank 1: no\n"),
        RankReport(1, 2.0, 64, "InputError", 1, "InputError: rank 1: no\n"),
        RankReport(2, 0.5, 69, "PeerLost", 0, "PeerLost: gone\n"),
    ]
    assert primary_failure(reports) == reports[1]
    assert primary_failure(reports[::2]) == reports[0]


@pytest.mark.parametrize("kind", ["DeviceError", "InternalError"])
def test_an_error_of_a_ranks_own_is_the_cause_of_what_came_after_it(kind: str) -> None:
    """Though it names a peer: the others do not raise it, but what follows from it."""
    reports = [
        RankReport(0, 1.0, 70, kind, 1, f"{kind}: no\n"),
        RankReport(1, 9.0, 1, "RuntimeError", None, "RuntimeError: Connection closed by peer\n"),
    ]
    assert primary_failure(reports) == reports[0]


def test_a_headline_keeps_its_end() -> None:
    for length in (10, 500, 900, 5000):
        text = f"InputError: rank 1: {'x ' * length}; do this"
        told = _headline(RankReport(1, 0.0, 64, "InputError", 1, text))
        assert told.startswith("InputError: x x")
        assert told.endswith("; do this")
        assert len(told) < 620
