"""Agents and hubs as they run: real processes and sockets. Whatever happens to the hub, ranks go
on.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from forked import with_torch
from telemetry_feed import beat, hello

import burst_rt
from burst_rt.drivers import BaseDriver
from burst_rt.errors import ConfigError, InputError, ProtocolError
from burst_rt.runtime.machine import Machine
from burst_rt.telemetry.hub.starting import HUB_MODULE, RunningHub, hub_environment, start_hub
from burst_rt.telemetry.messages import (
    VERSION,
    Agreed,
    Bye,
    FromRank,
    Group,
    Note,
    Pong,
    Severity,
)
from burst_rt.telemetry.model.views import Snapshot
from burst_rt.telemetry.rank import joining
from burst_rt.telemetry.rank.agent import Agent
from burst_rt.telemetry.rank.call_log import CallLog, Totals
from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.viewer import HubViewer
from burst_rt.telemetry.wire import Frames, connect_to_hub, frame, read_settings
from burst_rt.transport import LocalWorld

_DEADLINE_S = 10.0


@pytest.fixture
def hub() -> Iterator[RunningHub]:
    running = start_hub(one_host=True, held=True)
    yield running
    running.release()


def _wait_until(viewer: HubViewer, there: Callable[[Snapshot], bool]) -> Snapshot:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not there(shown := viewer.snapshot()):
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.02)
    return shown


def _rank(
    running: RunningHub, rank: int, world_size: int = 2, secret: str | None = None
) -> socket.socket:
    """A rank's connection, by hand."""
    connection = connect_to_hub(running.address, _DEADLINE_S)
    said = msgspec.structs.replace(hello(rank, world_size), secret=secret or running.secret)
    _say(connection, said)
    return connection


def _say(connection: socket.socket, message: FromRank) -> None:
    connection.sendall(frame(msgspec.msgpack.encode(message)))


def _attend(ctx: burst_rt.Context, steps: int) -> None:
    layout = ctx.layout(64 * ctx.world_size)
    q = torch.randn(1, layout.shard_len, 2, 16, requires_grad=True)
    for step in range(steps):
        out = burst_rt.burst_attention(q, q, q, causal=True, layout=layout)
        out.sum().backward()
        if ctx.rank == 0:
            burst_rt.telemetry.report(step, loss=1.0)


def test_ranks_that_are_threads_show_calls_and_leave(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)
    entered: list[str] = []
    monkeypatch.setattr(
        Machine, "enter_to_watch", lambda _: entered.append(threading.current_thread().name)
    )
    burst_rt.run_local(3, lambda ctx: _attend(ctx, 5))
    # A thread that asks for a GPU's events has entered that GPU, once for each context.
    assert entered.count("burst_rt telemetry") == 3
    with HubViewer(hub.address, hub.secret) as viewer:
        shown = _wait_until(
            viewer, lambda s: len(s.ranks) == 3 and all(r.status == "left" for r in s.ranks)
        )
        assert [(r.rank, r.calls, r.exit_code, r.dropped) for r in shown.ranks] == [
            (rank, 10, 0, 0) for rank in range(3)
        ]
        assert {r.lanes["network"].tasks > 0 for r in shown.ranks} == {True}
        assert shown.progress.step == 4
        assert {p.kind for p in shown.plans} == {"forward", "backward"}
        assert "strategy" in shown.plans[0].explain
        assert "layout zigzag, 192 tokens" in shown.plans[0].problem
        # What `explain` says in words, as data.
        for plan in shown.plans:
            assert plan.strategy in [candidate.strategy for candidate in plan.candidates]
            assert all(f"{c.strategy} {c.size_bytes:,}" in plan.explain for c in plan.candidates)
        view = viewer.timeline(0.0, limit=100_000)
        assert (view.complete, view.left_out) == (10, 0)
        assert len(view.flows) > 0
        assert all(s.issued_s <= s.started_s <= s.ended_s for c in view.calls for s in c.spans)
        assert {"rank:0", "host:" + socket.gethostname(), "job"} <= {s.name for s in shown.sources}
        (series,) = viewer.series(["rank:0"], ["rss_bytes"])
        assert series.values["rss_bytes"][0] > 1e6  # type: ignore[operator]  # the first row has it


def _take_steps(ctx: burst_rt.Context) -> None:
    layout = ctx.layout(64 * ctx.world_size)
    q = torch.randn(1, layout.shard_len, 2, 16)
    telemetry = burst_rt.telemetry
    for number in (None, 7, None):
        with telemetry.step(number), telemetry.span("forward"), telemetry.span("attention"):
            burst_rt.burst_attention(q, q, q, causal=True, layout=layout)
    with telemetry.step(), telemetry.step():  # one in another counts once
        # As autograd's thread of a GPU does, for the thread that makes the step.
        assert ctx.runtime.observer is not None
        helper = threading.Thread(target=ctx.runtime.observer.planned, args=[time.perf_counter()])
        helper.start()
        helper.join()
    with pytest.raises(KeyError), telemetry.step(), telemetry.span("data"):
        raise KeyError
    twice = telemetry.span("twice")
    with twice, twice:  # one in itself
        pass
    with telemetry.span("evaluation"):
        burst_rt.burst_attention(q, q, q, causal=True, layout=layout)


def test_steps_and_spans_of_each_rank_are_shown_and_counted(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)
    burst_rt.run_local(2, _take_steps)
    with HubViewer(hub.address, hub.secret) as viewer:
        shown = _wait_until(
            viewer, lambda s: len(s.ranks) == 2 and all(r.status == "left" for r in s.ranks)
        )
        view = viewer.timeline(0.0)
    parts = [("attention", 2), ("forward", 1), ("", 0)]
    expected = [(step, *part) for step in (1, 7, 8) for part in parts]
    expected += [(10, "", 1), (9, "", 0), (11, "data", 1), (11, "", 0)]
    expected += [(-1, "twice", 1), (-1, "twice", 0), (-1, "evaluation", 0)]
    calls_s = [call.spans[0].issued_s for call in view.calls if call.rank == 0]
    for rank in (0, 1):
        own = [p for p in view.phases if p.rank == rank and p.name != "planning"]
        assert [(phase.step, phase.name, phase.depth) for phase in own] == expected
        for inner, outer in pairwise(own):
            if inner.depth:
                assert outer.started_s <= inner.started_s <= inner.ended_s <= outer.ended_s
        planned = [p for p in view.phases if p.rank == rank and p.name == "planning"]
        assert {(phase.step, phase.depth) for phase in planned} == {(1, 3), (10, 2)}
    own = [phase for phase in view.phases if phase.rank == 0 and phase.name != "planning"]
    for phase, called_s in zip((own[0], own[3], own[6], own[15]), sorted(calls_s), strict=True):
        assert phase.started_s <= called_s <= phase.ended_s
    for rank_view in shown.ranks:
        assert rank_view.steps == 4
        # The call after the steps is in none of them.
        assert 0 < rank_view.step_call_s < min(rank_view.step_s, rank_view.total_s)
    share = sum(r.step_call_s for r in shown.ranks) / sum(r.step_s for r in shown.ranks)
    assert shown.job.step_share == pytest.approx(share)


def test_more_spans_than_have_room_are_counted_and_leave_room_for_reports(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)
    many = 20_000

    def flood(ctx: burst_rt.Context) -> None:
        for _ in range(many):
            with burst_rt.telemetry.span("x"):
                pass
        burst_rt.telemetry.report(5, loss=1.0)

    burst_rt.run_local(1, flood)
    with HubViewer(hub.address, hub.secret) as viewer:
        shown = _wait_until(viewer, lambda s: any(r.status == "left" for r in s.ranks))
        view = viewer.timeline(0.0, limit=many)
        few = viewer.timeline(0.0, limit=10)
    assert shown.progress.step == 5
    assert len(view.phases) + shown.job.dropped == many
    assert 0 < len(view.phases) < many
    assert few.phases == view.phases[-10:]
    assert few.phases_left_out == len(view.phases) - 10


def test_a_wrong_name_of_a_span_is_refused_with_telemetry_or_without() -> None:
    telemetry = burst_rt.telemetry
    names: tuple[tuple[Any, str], ...] = (
        ("", "one character or more"),
        (7, "a str, got int"),
        (os.fsdecode(b"x\xe9"), "names in UTF-8"),
        ("x" * 257, "at most 256 bytes"),
    )
    for name, told in names:
        with pytest.raises(InputError, match=told):
            telemetry.span(name)
    for number in (-1, 0.5, "3", math.nan, 2**63):
        with pytest.raises(InputError, match="expected a"):
            telemetry.step(number)  # type: ignore[arg-type]
    with telemetry.step(0), telemetry.span("é" * 128):  # nobody listens: nothing happens
        pass


def test_telemetry_is_off_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BURST_RT_TELEMETRY", raising=False)
    assert burst_rt.run_local(2, lambda ctx: ctx.runtime.observer) == [None, None]
    assert read_settings({}) == read_settings({"BURST_RT_TELEMETRY": "0", "BURST_RT_RECORD": "x"})
    for word in ("off", "no", "false", "False"):
        assert not read_settings({"BURST_RT_TELEMETRY": word, "BURST_RT_DASHBOARD": "1"}).asked
        assert not read_settings({"BURST_RT_DASHBOARD": word}).asked
    assert read_settings({"BURST_RT_DASHBOARD": "0"}).dashboard == "0"  # any free port
    for word in ("true", "on", "Yes"):
        assert read_settings({"BURST_RT_DASHBOARD": word}).dashboard == "1"
    assert read_settings({"BURST_RT_RECORD": "x"}).asked
    settings = read_settings(
        {"BURST_RT_TELEMETRY": "unix:/tmp/x", "BURST_RT_TELEMETRY_SECRET": "s"}
    )
    assert (settings.asked, settings.address, settings.secret) == (True, "unix:/tmp/x", "s")
    burst_rt.telemetry.report(1, loss=1.0)  # nobody listens: nothing happens


def test_one_ranks_wish_is_enough_and_the_first_starts_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BURST_RT_TELEMETRY", raising=False)
    world = LocalWorld(1)
    with burst_rt.init(burst_rt.LocalRank(world, 0), telemetry=True) as ctx:
        _attend(ctx, 1)
        agent = joining._agents[id(world), 0]
        with HubViewer(agent.address, agent.secret) as viewer:
            _wait_until(viewer, lambda s: bool(s.ranks))
        (process,) = [p for p in psutil.process_iter(["cmdline"]) if _listens(p, agent.address)]
    process.wait(_DEADLINE_S)  # it ends with its last rank


def _listens(process: psutil.Process, address: str) -> bool:
    if HUB_MODULE not in (process.info["cmdline"] or []):
        return False
    return any(
        str(c.laddr) == address.removeprefix("unix:") for c in process.net_connections("unix")
    )


def test_a_wrong_report_is_the_callers_mistake(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)

    def wrong(ctx: burst_rt.Context) -> None:
        burst_rt.telemetry.report(1, loss="low")  # type: ignore[arg-type]

    with pytest.raises(InputError, match=r"expected numbers, got \{'loss': 'low'\}"):
        burst_rt.run_local(1, wrong)


@pytest.mark.parametrize(
    ("step", "values", "told"),
    [
        (1, {os.fsdecode(b"loss\xe9"): 1.0}, r"names in UTF-8 .* got 'loss\\udce9'"),
        (1, {"x" * 257: 1.0}, "at most 256 bytes, got 'xxx"),
        (2**64, {"loss": 1.0}, "a step of 64 bits, got one of 65 bits"),
        (math.inf, {"loss": 1.0}, "a step that is a finite number, got inf"),
        (math.nan, {"loss": 1.0}, "a step that is a finite number, got nan"),
        (1, {"loss": 10**5000}, "values that fit a float"),
        (1, {f"x{i}": 0.0 for i in range(300)}, "at most 256 values, got 300"),
    ],
)
def test_a_report_that_cannot_be_sent_leaves_telemetry_as_it_was(
    hub: RunningHub,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    values: dict[str, float],
    told: str,
) -> None:
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)

    def wrong(ctx: burst_rt.Context) -> None:
        with pytest.raises(InputError, match=told):
            burst_rt.telemetry.report(step, **values)
        burst_rt.telemetry.report(-(2**63), loss=math.inf)
        burst_rt.telemetry.report(2**63 - 1, **{"é" * 128: 2.0}, loss=3.0)

    burst_rt.run_local(1, wrong)
    with HubViewer(hub.address, hub.secret) as viewer:
        shown = _wait_until(viewer, lambda s: any(r.status == "left" for r in s.ranks))
        assert shown.progress.step == 2**63 - 1
        assert shown.progress.values == {"é" * 128: 2.0, "loss": 3.0}


def test_a_rank_that_ends_hears_the_hub_out(tmp_path: Path) -> None:
    """A hub that answers after the rank's last word finds the connection whole."""
    path = str(tmp_path / "hub")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        agent = Agent(f"unix:{path}", hello(0, 1), None)
        connection, _ = listening.accept()
        closing = threading.Thread(target=agent.close, args=(0,))
        with connection:
            connection.settimeout(_DEADLINE_S)
            closing.start()
            while connection.recv(1 << 16):
                pass
            for _ in range(3):
                connection.sendall(frame(msgspec.msgpack.encode(Pong(0.0, 0.0))))
                time.sleep(0.05)
        closing.join(_DEADLINE_S)


@pytest.mark.parametrize(("ends", "told"), [(True, (6, 0)), (False, (0, 6))])
def test_calls_that_a_device_has_yet_to_end_are_awaited_or_counted(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch, ends: bool, told: tuple[int, int]
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(BaseDriver, "settled", lambda _: ended.is_set())
    agent = _agent(hub)
    with burst_rt.init() as ctx:
        ctx.runtime.observer = agent.follow([0], "local", "")
        _attend(ctx, 3)
    time.sleep(0.5)  # the agent wakes, and finds the context closed
    if ends:
        threading.Timer(0.05, ended.set).start()
    agent.close(0)
    with HubViewer(hub.address, hub.secret) as viewer:
        (rank,) = _wait_until(viewer, lambda s: s.ranks[0].status == "left").ranks
        assert (agent.totals.counts.traced_calls, rank.dropped) == told


def test_a_rank_whose_device_has_failed_says_so_all_the_same(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settled(_: BaseDriver) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    agent = _agent(hub)
    with burst_rt.init() as ctx:
        ctx.runtime.observer = agent.follow([0], "local", "")
        monkeypatch.setattr(BaseDriver, "settled", settled)
        _attend(ctx, 2)
    time.sleep(0.5)  # the agent wakes, and asks
    agent.close(70, "the device failed")
    with HubViewer(hub.address, hub.secret) as viewer:
        (rank,) = _wait_until(viewer, lambda s: s.ranks[0].status not in ("live", "silent")).ranks
        assert (rank.status, rank.dropped) == ("left", 4)


def test_a_dropped_connection_is_noticed_within_100_ms(hub: RunningHub) -> None:
    with HubViewer(hub.address, hub.secret) as viewer, _rank(hub, 0) as other:
        connection = _rank(hub, 1)
        _say(connection, beat(1, 0.0, number=4, doing="hop 1 q1 kv0"))
        _wait_until(viewer, lambda s: len(s.ranks) == 2 and s.ranks[1].call == 4)
        connection.close()
        closed_s = time.monotonic()
        shown = _wait_until(viewer, lambda s: s.ranks[1].status == "lost")
        assert time.monotonic() - closed_s < 0.1
        assert "in call 4, hop 1 q1 kv0" in shown.events[-1].text
        assert shown.ranks[0].status == "live"
        other.close()


def test_the_launcher_asks_who_was_lost_first_and_what_it_did(hub: RunningHub) -> None:
    assert hub.first_lost() is None
    with (
        HubViewer(hub.address, hub.secret) as viewer,
        _rank(hub, 0) as other,
        _rank(hub, 1) as victim,
    ):
        _say(victim, beat(1, 0.0, number=932, doing="hop 1 q1 kv0", hop=1))
        _wait_until(viewer, lambda s: len(s.ranks) == 2 and s.ranks[1].call == 932)
        killed_at_s = time.time()
        victim.close()
        _wait_until(viewer, lambda s: s.ranks[1].status == "lost")
        other.close()
        _wait_until(viewer, lambda s: s.ranks[0].status == "ended")
    asked_s = time.monotonic()
    lost = hub.first_lost()
    assert time.monotonic() - asked_s < 1.0
    assert lost is not None
    assert (lost.rank, lost.call, lost.task, lost.hop, lost.exit_code) == (
        1,
        932,
        "hop 1 q1 kv0",
        1,
        None,
    )
    assert lost.at_s == pytest.approx(killed_at_s, abs=1.0)
    assert 0.0 <= lost.age_s < 10.0
    assert "in call 932, hop 1 q1 kv0" in lost.activity


def test_the_launcher_waits_until_it_is_known_how_ranks_ended(hub: RunningHub) -> None:
    """The launcher may see the end of a job before the hub does."""
    with (
        HubViewer(hub.address, hub.secret) as viewer,
        _rank(hub, 0) as good,
        _rank(hub, 1) as victim,
    ):
        _wait_until(viewer, lambda s: len(s.ranks) == 2)
        _say(good, Bye(0.0, 0, ""))
        threading.Timer(0.3, victim.close).start()
        asked_s = time.monotonic()
        lost = hub.first_lost(settling_s=20.0)
        assert time.monotonic() - asked_s < 10.0
        assert lost is not None
        assert (lost.rank, lost.exit_code) == (1, None)


def test_a_rank_that_is_never_heard_to_leave_is_lost(hub: RunningHub) -> None:
    with HubViewer(hub.address, hub.secret) as viewer, _rank(hub, 0) as good, _rank(hub, 1):
        _wait_until(viewer, lambda s: len(s.ranks) == 2)
        _say(good, Bye(0.0, 0, ""))
        lost = hub.first_lost(settling_s=0.3)
        assert lost is not None
        assert lost.rank == 1


def test_ranks_that_end_because_the_job_is_stopped_are_not_lost(
    capfd: pytest.CaptureFixture[str],
) -> None:
    running = start_hub(one_host=True, held=True)
    with HubViewer(running.address, running.secret) as viewer:
        ranks = [_rank(running, rank) for rank in range(2)]
        _wait_until(viewer, lambda s: len(s.ranks) == 2)
        asked_s = time.monotonic()
        running.stopping("SIGINT")
        assert time.monotonic() - asked_s < 1.0
        _say(ranks[0], Bye(0.0, 130, "KeyboardInterrupt: "))
        for connection in ranks:
            connection.close()
        shown = _wait_until(viewer, lambda s: all(r.status != "live" for r in s.ranks))
    assert [r.status for r in shown.ranks] == ["stopped", "stopped"]
    assert shown.events[2].line.endswith("job stopping: by SIGINT")
    assert {e.severity for e in shown.events} == {Severity.INFO}
    assert running.first_lost() is None
    running.release()
    assert "closed unexpectedly" not in capfd.readouterr().err


def test_stopping_imports_nothing_in_a_signals_handler() -> None:
    source = """
import sys
from burst_rt.telemetry.hub.starting import start_hub
hub = start_hub(one_host=True, held=True)
before = set(sys.modules)
hub.stopping("SIGINT")
print({name for name in set(sys.modules) - before if name.startswith("burst_rt")})
hub.release()
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_a_hub_that_does_not_answer_holds_the_launcher_up_for_less_than_a_second(
    hub: RunningHub,
) -> None:
    os.kill(hub._process.pid, signal.SIGSTOP)
    try:
        for ask in (hub.first_lost, lambda: hub.stopping("SIGINT")):
            asked_s = time.monotonic()
            assert ask() is None
            assert time.monotonic() - asked_s < 1.0
    finally:
        os.kill(hub._process.pid, signal.SIGCONT)
    gone = start_hub(one_host=True, held=True)
    gone.release()
    gone.stopping("SIGTERM")
    assert gone.first_lost() is None


def test_a_silent_rank_is_noticed(hub: RunningHub) -> None:
    with HubViewer(hub.address, hub.secret) as viewer, _rank(hub, 0):
        shown = _wait_until(viewer, lambda s: bool(s.ranks) and s.ranks[0].status == "silent")
        assert "nothing heard for 2 s" in shown.events[-1].text


def test_a_hub_whose_job_has_ended_waits_for_viewers_to_ask_what_they_keep() -> None:
    running = start_hub(one_host=True, held=True)
    with HubViewer(running.address, running.secret) as viewer:
        with _rank(running, 0):
            _wait_until(viewer, lambda s: bool(s.ranks))
        releasing = threading.Thread(target=running.release)
        releasing.start()
        shown = _wait_until(viewer, lambda s: s.job.ended)
        assert shown.ranks[0].status == "lost"
        assert viewer.timeline().calls == []
        assert [view.source for view in viewer.series()] == ["rank:0"]
    releasing.join(_DEADLINE_S)
    assert not releasing.is_alive()
    assert running._process.returncode == 0


def test_strangers_are_not_heard(hub: RunningHub) -> None:
    with (
        HubViewer(hub.address, "wrong") as viewer,
        pytest.raises(ConfigError, match="the secret is wrong"),
    ):
        viewer.snapshot()
    for first in (
        frame(b"\xc1"),
        b"GET / HTTP/1.1\r\n\r\n",
        frame(msgspec.msgpack.encode(beat(0, 0.0))),
    ):
        with connect_to_hub(hub.address, _DEADLINE_S) as stranger:
            stranger.sendall(first)
            assert stranger.recv(100) == b""
    for said in (
        hello(0, 1),
        msgspec.structs.replace(hello(0, 1), secret=hub.secret, version=VERSION + 1),
    ):
        with connect_to_hub(hub.address, _DEADLINE_S) as stranger:
            _say(stranger, said)
            assert stranger.recv(100) == b""
    with HubViewer(hub.address, hub.secret) as viewer:
        assert viewer.snapshot().ranks == []


def test_strangers_write_nothing_into_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    running = start_hub(one_host=True, held=True)
    for _ in range(20):
        with connect_to_hub(running.address, _DEADLINE_S) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100) == b""
    with _rank(running, 0) as rank:
        rank.sendall(frame(b"\xc1"))
        assert rank.recv(100) == b""
    running.release()
    said = capfd.readouterr().err
    assert said.count("connection of") == 1
    assert "connection of rank 0 closed: " in said


def test_over_tcp_with_the_secret() -> None:
    running = start_hub(one_host=False, held=True)
    try:
        assert running.address.startswith("tcp:")
        with HubViewer(
            f"tcp:127.0.0.1:{running.address.rpartition(':')[2]}", running.secret
        ) as viewer:
            assert viewer.snapshot().ranks == []
        with pytest.raises(InputError, match="expected an address"):
            connect_to_hub("tcp:nowhere", 1.0)
    finally:
        running.release()


def _agent(running: RunningHub) -> Agent:
    return Agent(running.address, msgspec.structs.replace(hello(0, 1), secret=running.secret), None)


def test_clocks_are_aligned(hub: RunningHub) -> None:
    agent = _agent(hub)
    with HubViewer(hub.address, hub.secret) as viewer:
        shown = _wait_until(viewer, lambda s: bool(s.ranks) and s.ranks[0].rtt_s > 0)
        (rank,) = shown.ranks
        # On one host both read the same clock: what the hub has counted since it began, this
        # process reads too.
        asked_s = time.perf_counter()
        now_s = viewer.snapshot().job.now_s
        answered_s = time.perf_counter()
        assert (
            asked_s + rank.offset_s - rank.rtt_s <= now_s <= answered_s + rank.offset_s + rank.rtt_s
        )
    agent.close(0)


def test_clocks_are_compared_again_and_again(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burst_rt.telemetry.rank.agent._CLOCK_PERIOD_S", 0.1)
    agent = _agent(hub)
    seen: dict[float, float] = {}  # when sent -> the way there and back
    deadline_s = time.perf_counter() + 20
    while len(seen) < 25:
        assert time.perf_counter() < deadline_s, seen
        seen.update((sent_s, rtt_s) for rtt_s, _, sent_s in list(agent._pings))
        time.sleep(0.01)
    # An answer is read when it comes, not when the thread happens to wake: five times a second.
    later = [rtt_s for _, rtt_s in sorted(seen.items())[5:]]
    assert statistics.median(later) < 0.05, later
    agent.close(0)


def test_a_process_is_sampled_twice_a_second(hub: RunningHub) -> None:
    agent = _agent(hub)
    with HubViewer(hub.address, hub.secret) as viewer:
        deadline_s = time.perf_counter() + 20
        times: list[float] = []
        while len(times) < 5:
            assert time.perf_counter() < deadline_s, times
            time.sleep(0.1)
            for view in viewer.series(metrics=["process_percent"]):
                if view.source == "rank:0":
                    times = [
                        at_s
                        for at_s, percent in zip(
                            view.times, view.values["process_percent"], strict=True
                        )
                        if percent is not None
                    ]
    gaps = [b - a for a, b in pairwise(times)]
    # On the beat of fifths of a second.
    assert 0.35 < min(gaps) <= statistics.median(gaps) < 1.0, gaps
    agent.close(0)


def test_a_child_of_the_rank_does_not_keep_its_connection(hub: RunningHub) -> None:
    source = """
import os, time
import burst_rt
with burst_rt.init() as ctx:
    time.sleep(0.5)
    if os.fork() == 0:
        time.sleep(60)
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), 9)
"""
    environment = dict(os.environ) | hub.environment()
    with HubViewer(hub.address, hub.secret) as viewer:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", source], env=environment, start_new_session=True
        )
        try:
            _wait_until(viewer, lambda s: bool(s.ranks) and s.ranks[0].status == "lost")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_hub_that_is_killed_ends_telemetry_and_nothing_else(hub: RunningHub) -> None:
    agent = _agent(hub)
    log = agent.follow([0], "local", "a test")
    with HubViewer(hub.address, hub.secret) as viewer:
        _wait_until(viewer, lambda s: bool(s.ranks))
    os.kill(hub._process.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + _DEADLINE_S
    while agent.alive:
        assert time.monotonic() < deadline_s
        agent.report(1, {"loss": 1.0})
        time.sleep(0.01)
    agent.report(2, {"loss": 1.0})
    log.left(0)
    started_s = time.monotonic()
    agent.close(0)
    assert time.monotonic() - started_s < 0.1


def test_a_hub_that_does_not_read_makes_nobody_wait(hub: RunningHub) -> None:
    """Messages pile up to a bound, then they are dropped and counted."""
    agent = _agent(hub)
    with HubViewer(hub.address, hub.secret) as viewer:
        _wait_until(viewer, lambda s: bool(s.ranks))
        os.kill(hub._process.pid, signal.SIGSTOP)
        try:
            slowest_s = 0.0
            for _ in range(3000):
                started_s = time.perf_counter()
                agent.put(Note(0.0, Severity.INFO, "test", "x" * 20_000))
                slowest_s = max(slowest_s, time.perf_counter() - started_s)
            time.sleep(0.5)
            assert slowest_s < 0.05
            assert agent._unsent_bytes < 9 << 20
        finally:
            os.kill(hub._process.pid, signal.SIGCONT)
        assert agent.num_dropped >= 1000
        _wait_until(viewer, lambda s: s.ranks[0].dropped >= 1000)
    agent.close(0)


def test_a_hub_that_cannot_start_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("burst_rt.telemetry.hub.starting.sys.executable", "/bin/false")
    with pytest.raises(ConfigError, match="did not start"):
        start_hub(one_host=True)
    monkeypatch.setenv("BURST_RT_TELEMETRY", "1")
    assert burst_rt.run_local(2, lambda ctx: ctx.runtime.observer) == [None, None]
    assert "no telemetry" in caplog.text


@pytest.mark.parametrize("port", ["abc", "70000", "-1", "9" * 5000])
def test_a_wrong_metrics_port_is_told_at_once(
    port: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("BURST_RT_TELEMETRY", raising=False)
    monkeypatch.setenv("BURST_RT_METRICS_PORT", port)
    began_s = time.monotonic()
    assert burst_rt.run_local(2, lambda ctx: ctx.runtime.observer) == [None, None]
    assert time.monotonic() - began_s < _DEADLINE_S
    (told,) = caplog.messages
    assert told.startswith(
        "no telemetry: BURST_RT_METRICS_PORT: expected a port from 0 to 65535, 0 for any, got "
        f"{port[:80]!r}"
    )


def test_what_a_hub_cannot_do_is_told_to_whoever_started_it() -> None:
    running = start_hub(one_host=True, held=True, record="/proc/none/x", dashboard="8.8.8.8:1")
    try:
        record, dashboard = running.lines
        assert record == "no record: cannot write /proc/none/x: No such file or directory"
        assert dashboard.startswith("no dashboard: ")
    finally:
        running.release()


def test_a_record_that_cannot_be_written_is_told_without_a_launcher() -> None:
    done = with_torch().run(
        "import burst_rt; burst_rt.init().close()",
        env=dict(os.environ) | {"BURST_RT_RECORD": "/proc/none/x"},
    )
    assert done.returncode == 0, done.stderr
    assert "burst-rt: no record: cannot write /proc/none/x: No such file" in done.stderr


def test_a_job_that_is_started_again_says_where_the_first_record_is(tmp_path: Path) -> None:
    record, said = tmp_path / "job.record", []
    for _ in range(2):
        done = with_torch().run(
            "import burst_rt; burst_rt.init().close()",
            env=dict(os.environ) | {"BURST_RT_RECORD": str(record)},
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stderr)
    kept = f"burst-rt: the record that was there is kept as {record}.1\n"
    assert [kept in text for text in said] == [False, True]
    assert Record(tmp_path / "job.record.1").header.began_at_s < Record(record).header.began_at_s


def test_a_hub_starts_without_mpi_variables() -> None:
    kept = hub_environment(
        {
            "OMPI_COMM_WORLD_RANK": "0",
            "PMIX_RANK": "0",
            "SLURM_PROCID": "1",
            "PATH": "/bin",
            "BURST_RT_RECORD": "x",
        }.items()
    )
    assert kept == {"PATH": "/bin"}


def test_frames_are_cut_whatever_the_pieces_and_bounded() -> None:
    frames = Frames()
    data = frame(b"one") + frame(b"") + frame(b"three")
    assert [p for i in range(len(data)) for p in frames.feed(data[i : i + 1])] == [
        b"one",
        b"",
        b"three",
    ]
    with pytest.raises(ProtocolError, match="the peer is not burst_rt"):
        list(Frames().feed(b"\xff\xff\xff\xff"))


def test_counts_miss_nothing_when_spans_are_dropped() -> None:
    """The agent does not come to take the calls: their spans are bounded, the counts go on."""
    totals = Totals()
    with burst_rt.init() as ctx:
        log = CallLog(Group("0-0", [0], "local", ""), totals)
        ctx.runtime.observer = log
        _attend(ctx, 200)
        counted = totals.message(log.num_dropped)
        ctx.runtime.observer = None
        spans = ctx.stats()
    assert (counted.calls, counted.dropped) == (400, 144)
    graph_tasks = 2 * 200
    assert counted.lanes["control"].tasks == graph_tasks
    assert counted.compute_s == pytest.approx(spans.compute_s)
    assert log.doing() == (-1, "", 0.0, -1)
    assert [type(message).__name__ for message in log.take()] == ["PlanSummary", "EndedCall"]
    # the first backward
    assert [type(message).__name__ for message in log.take()] == [
        "PlanSummary",
        "EndedCall",
    ]
    assert [type(message).__name__ for message in log.take()] == ["EndedCall"]


def test_a_rank_whose_connection_was_cut_is_heard_at_its_end(hub: RunningHub) -> None:
    said = msgspec.structs.replace(hello(0, 1), secret=hub.secret)
    agent = Agent(hub.address, said, None)
    with HubViewer(hub.address, hub.secret) as viewer:
        _wait_until(viewer, lambda shown: bool(shown.ranks))
        assert agent._connection is not None
        agent._connection.shutdown(socket.SHUT_RDWR)
        _wait_until(viewer, lambda shown: shown.ranks[0].status == "lost")
        assert viewer.first_lost() is not None
        agent.close(0)
        _wait_until(viewer, lambda shown: shown.ranks[0].status == "left")
        assert viewer.first_lost() is None


def test_the_call_behind_dropped_ones_says_so() -> None:
    log = CallLog(Group("0-0", [0], "local", ""), Totals())
    for number in range(260):
        log.agreed(number, 1.0 * number)
    first = log.take()
    log.agreed(260, 260.0)
    kept = [*first, *(message for _ in range(256) for message in log.take())]
    agreed = [message for message in kept if isinstance(message, Agreed)]
    assert [message.number for message in agreed] == [*range(256), 260]
    assert [message.number for message in agreed if message.after_gap] == [260]


def test_metrics_alone_bring_no_dashboard_and_a_taken_port_takes_none() -> None:
    running = start_hub(one_host=True, held=True, metrics_port="0")
    try:
        (line,) = running.lines
        assert line.startswith("metrics http://127.0.0.1:")
        taken = line.removesuffix("/metrics").rpartition(":")[2]
        beside = start_hub(one_host=True, held=True, dashboard="0", metrics_port=taken)
        lines = beside.lines
        beside.release()
    finally:
        running.release()
    assert lines[0].startswith("dashboard http://127.0.0.1:")
    assert lines[1].startswith(f"no metrics: cannot listen on 127.0.0.1 port {taken}: ")
    assert len(lines) == 2


def test_a_record_may_have_any_name(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.record")
    for lines in ([], [f"the record that was there is kept as {tmp_path}/caf?.record.1"]):
        running = start_hub(one_host=True, held=True, record=path)
        with HubViewer(running.address, running.secret) as viewer:
            assert viewer.snapshot().job.record == f"{tmp_path}/caf?.record"
        running.release()
        assert running.lines == lines
    assert os.path.exists(path)
