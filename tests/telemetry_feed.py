"""Messages as ranks would send them, made by hand: a job whose every time is known."""

from __future__ import annotations

import math

import numpy as np

from burst_rt.telemetry.messages import (
    VERSION,
    Call,
    Counters,
    FromRank,
    Group,
    Heartbeat,
    Hello,
    LaneCounters,
    Plan,
    Report,
    Sample,
    Source,
    TaskInfo,
)
from burst_rt.telemetry.state import State
from burst_rt.telemetry.timeline import SPAN

__all__ = ["SECRET", "Load", "arrive", "beat", "call", "counters", "gpu_sample", "hello"]

SECRET = "a secret"
# A rank's clock is so far behind the hub's (its offset).
_OFFSET_S = 100.0
# Of a call of `Load`.
_HOPS = 8
_TASKS = 2 * _HOPS - 1


def offset_s(rank: int) -> float:
    return _OFFSET_S * (rank + 1)


def hello(rank: int, world_size: int, *, gpu: bool = False) -> Hello:
    source = f"gpu:{rank}" if gpu else ""
    return Hello(
        VERSION,
        SECRET,
        rank,
        world_size,
        0,
        "host",
        1000 + rank,
        "cuda:0" if gpu else "cpu",
        source,
        "train.py",
        "0.1",
        5.0,
    )


def beat(
    rank: int,
    hub_s: float,
    *,
    number: int = -1,
    doing: str = "",
    since_s: float = 0.0,
    hop: int = -1,
) -> Heartbeat:
    """since_s: by the hub's clock."""
    back_s = offset_s(rank)
    return Heartbeat(
        sent_s=hub_s - back_s,
        offset_s=back_s,
        rtt_s=1e-4,
        group="0-1",
        call=number,
        doing=doing,
        since_s=since_s - back_s if number >= 0 else 0.0,
        hop=hop,
    )


def arrive(rank: int, world_size: int = 2, *, gpu: bool = False) -> list[FromRank]:
    """What a rank says first. Its plan: 0 swaps 1,000 bytes with the next rank, 1 works meanwhile,
    2 works on what came.
    """
    following, preceding = (rank + 1) % world_size, (rank - 1) % world_size
    tasks = [
        TaskInfo(
            "hop 0",
            "network",
            "exchange",
            0,
            1000,
            0,
            False,
            [(following, 5, 1000)],
            [(preceding, 5, 1000)],
        ),
        TaskInfo("hop 0 q0 kv0", "compute", "forward", 0, 0, 10, False, [], []),
        TaskInfo("hop 1 q0 kv1", "compute", "forward", 1, 0, 10, False, [], []),
    ]
    group = f"0-{world_size - 1}"
    said: list[FromRank] = [
        hello(rank, world_size, gpu=gpu),
        beat(rank, 0.0),
        Group(group, list(range(world_size)), "mpi", "asked for"),
    ]
    said.append(Plan(0, group, "forward", tasks, "ring-kv, zigzag", None))
    if gpu:
        said.append(Source(f"gpu:{rank}", "gpu", "host", ["power_w"], {"name": "a GPU"}))
    return said


def call(
    rank: int, number: int, start_s: float, *times: tuple[float, float, float], group: str = "0-1"
) -> Call:
    """A call with (issued, started, ended) of each task, in seconds after start_s (the hub's
    clock).
    """
    spans = np.array([(task, *when) for task, when in enumerate(times)], SPAN)
    began_s = start_s - offset_s(rank)
    ended_s = began_s + max(when[2] for when in times)
    return Call(group, number, 0, began_s, ended_s, 0.0, 0.0, spans.tobytes())


def counters(rank: int, hub_s: float, calls: int) -> Counters:
    lanes = {
        "network": LaneCounters(calls, 1000 * calls, 0),
        "compute": LaneCounters(2 * calls, 0, 20 * calls),
    }
    return Counters(
        hub_s - offset_s(rank),
        calls,
        calls,
        0.5 * calls,
        0.1 * calls,
        1.0 * calls,
        0.4 * calls,
        0.3 * calls,
        lanes,
        0,
    )


def gpu_sample(rank: int, hub_s: float, power_w: float) -> Sample:
    # As many values as a new chip has.
    values = {"power_w": power_w} | {name: float(i) for i, name in enumerate(_GPU_METRICS)}
    return Sample(f"gpu:{rank}", hub_s - offset_s(rank), values)


_GPU_METRICS = (
    "sm_percent", "memory_busy_percent", "memory_used_bytes", "energy_j", "temperature_c",
    "memory_temperature_c", "sm_clock_mhz",
    "memory_clock_mhz", "throttle_bits", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s",
    "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s",
    "num_processes", "ecc_corrected", "ecc_uncorrected", "num_xid", "gpm_sm_percent",
    "gpm_occupancy_percent", "gpm_tensor_percent",
    "gpm_dram_percent",
)  # fmt: skip


class Load:
    """Ranks that each make calls of `_TASKS` tasks so that all together there are `rate` spans a
    second.
    """

    def __init__(self, num_ranks: int, rate: float) -> None:
        self.num_ranks = num_ranks
        self.period_s = num_ranks * _TASKS / rate
        self.calls = 0
        self.spans = 0

    def begin(self, state: State) -> None:
        """All ranks join."""
        everyone = list(range(self.num_ranks))
        for rank in everyone:
            following, preceding = (rank + 1) % self.num_ranks, (rank - 1) % self.num_ranks
            tiles = [
                TaskInfo(
                    f"hop {h} q{rank} kv{(rank - h) % self.num_ranks}",
                    "compute",
                    "forward",
                    h,
                    0,
                    10**9,
                    False,
                    [],
                    [],
                )
                for h in range(_HOPS)
            ]
            moves = [
                TaskInfo(
                    f"hop {h}",
                    "network",
                    "exchange",
                    h,
                    10**6,
                    0,
                    False,
                    [(following, h, 10**6)],
                    [(preceding, h, 10**6)],
                )
                for h in range(_HOPS - 1)
            ]
            hello = Hello(
                VERSION,
                "",
                rank,
                self.num_ranks,
                rank % 8,
                f"node{rank // 8}",
                1000 + rank,
                "cpu",
                "",
                "load.py",
                "0.1",
                5.0,
            )
            first: list[FromRank] = [
                hello,
                Group("all", everyone, "mpi", ""),
                Plan(0, "all", "forward", [*tiles, *moves], "made up", self.period_s * 0.8),
            ]
            for message in first:
                state.apply(0.0, rank, message)

    def advance(self, state: State, now_s: float) -> None:
        """What has happened since."""
        while (self.calls + 1) * self.period_s <= now_s:
            self._call(state, self.calls * self.period_s)
            self.calls += 1
        for rank in range(self.num_ranks):
            state.apply(
                now_s,
                rank,
                Heartbeat(
                    sent_s=now_s,
                    offset_s=0.0,
                    rtt_s=1e-4,
                    group="all",
                    call=self.calls,
                    doing=f"hop {self.calls % _HOPS}",
                    since_s=now_s,
                    hop=self.calls % _HOPS,
                ),
            )
            lanes = {
                "network": LaneCounters(self.calls * 7, self.calls * 7 * 10**6, 0),
                "compute": LaneCounters(self.calls * 8, 0, self.calls * 8 * 10**9),
            }
            worked_s = 0.85 * self.calls * self.period_s
            state.apply(
                now_s,
                rank,
                Counters(
                    now_s,
                    self.calls,
                    self.calls,
                    worked_s,
                    0.1 * worked_s,
                    worked_s,
                    worked_s,
                    0.9 * worked_s,
                    lanes,
                    0,
                ),
            )
        state.apply(
            now_s,
            0,
            Report(
                now_s, self.calls, {"loss": 1 + 5 * math.exp(-now_s / 100), "tokens_per_s": 1e6}
            ),
        )

    def _call(self, state: State, start_s: float) -> None:
        hop_s = 0.9 * self.period_s / _HOPS
        for rank in range(self.num_ranks):
            shake = 0.05 * hop_s * math.sin(rank * 7 + self.calls)
            spans = np.zeros(_TASKS, SPAN)
            spans["task"] = np.arange(_TASKS)
            begins = (
                np.concatenate([np.arange(_HOPS), np.arange(_HOPS - 1) + 0.05]) * hop_s
                + shake
                + 0.05 * hop_s
            )
            spans["issued"] = spans["started"] = begins
            spans["ended"] = begins + hop_s * 0.9
            state.apply(
                start_s + self.period_s,
                rank,
                Call(
                    "all",
                    self.calls,
                    0,
                    start_s,
                    start_s + self.period_s,
                    0.0,
                    0.0,
                    spans.tobytes(),
                ),
            )
            self.spans += _TASKS
