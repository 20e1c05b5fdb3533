"""Links of a ring: their bytes a second, and which is slow, silent, or waits for one that is."""

from __future__ import annotations

import pytest
from telemetry_feed import arrive, beat, call, counters

from burst_rt.dashboard.links import LinkStates, LinkView
from burst_rt.telemetry.messages import HubReport
from burst_rt.telemetry.model.job_model import JobModel

_WORLD = 4


def _job(slow: int | None = None) -> JobModel:
    """Four ranks, six calls a second apart; the messages of rank `slow` take ten times as long."""
    model = JobModel(1e9)
    for rank in range(_WORLD):
        for message in arrive(rank, _WORLD):
            model.apply(0.0, rank, message)
        for i in range(4):
            model.apply(float(i), rank, counters(rank, float(i), i))
    for number in range(6):
        for rank in range(_WORLD):
            # Task 0 sends to the next rank and receives from the one before: it ends when its
            # slower message has come.
            took_s = 0.5 if slow == (rank - 1) % _WORLD else 0.05
            model.apply(
                3.0,
                rank,
                call(
                    rank,
                    number,
                    0.5 * number,
                    (0.0, 0.0, took_s),
                    (0.0, 0.0, 0.3),
                    (took_s, took_s, 0.6),
                    group="0-3",
                ),
            )
            model.apply(3.0, rank, beat(rank, 3.0))
    return model


def _links(model: JobModel, links: LinkStates | None = None) -> dict[tuple[int, int], LinkView]:
    links = links or LinkStates()
    links.look(model.timeline(-5.0))
    return {(view.sender, view.receiver): view for view in links.now(model.snapshot())}


def test_a_ring_has_a_link_from_each_rank_to_the_next() -> None:
    found = _links(_job())
    assert list(found) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert {view.state for view in found.values()} == {"ok"}
    assert all(view.bytes_per_s == pytest.approx(1000) for view in found.values())
    assert found[0, 1].moving_bytes_per_s == pytest.approx(1000 / 0.05, rel=1e-3)


def test_a_slow_link_is_told_from_the_others() -> None:
    found = _links(_job(slow=2))
    assert [link for link, view in found.items() if view.state == "slow"] == [(2, 3)]


def test_links_of_a_lost_rank_are_silent_and_stay() -> None:
    model, links = _job(), LinkStates()
    _links(model, links)
    model.apply(4.0, -1, HubReport(1, "lost", "its connection ended"))
    found = links.now(model.snapshot())
    assert [(view.sender, view.receiver) for view in found if view.state == "silent"] == [
        (0, 1),
        (1, 2),
    ]
    assert [view.bytes_per_s for view in found if view.state == "silent"] == [0.0, 0.0]


def test_of_a_ring_that_stands_still_only_the_link_at_fault_is_silent() -> None:
    model, links = _job(), LinkStates()
    _links(model, links)
    for rank in range(_WORLD):
        # Rank 1 computes and computes, all others wait for a message.
        doing = "hop 1 q0 kv1" if rank == 1 else "hop 0"
        model.apply(6.0, rank, beat(rank, 6.0, number=9, doing=doing, since_s=3.5))
    assert [
        (view.sender, view.receiver)
        for view in links.now(model.snapshot())
        if view.state == "silent"
    ] == [(1, 2)]
    # Where all wait, all links are silent.
    model.apply(6.1, 1, beat(1, 6.1, number=9, doing="hop 0", since_s=3.5))
    assert {view.state for view in links.now(model.snapshot())} == {"silent"}


def test_before_any_call_there_are_no_links() -> None:
    assert _links(JobModel(1e9)) == {}
