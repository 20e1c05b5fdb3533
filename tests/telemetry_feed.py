"""Messages as ranks would send them, made by hand: a job whose every time is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from burst_rt.telemetry.messages import (
    VERSION,
    Counters,
    EndedCall,
    FromRank,
    Group,
    Heartbeat,
    Hello,
    Item,
    JobReport,
    LaneCounters,
    PlanSummary,
    SourceInfo,
    SourceSample,
    TaskInfo,
)
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.model.timeline import SPAN
from burst_rt.telemetry.read.record import Recorder

__all__ = [
    "SECRET",
    "Load",
    "Times",
    "arrive",
    "beat",
    "call",
    "counters",
    "gpu_sample",
    "hello",
    "offset_s",
    "record_calls",
    "record_load",
]

SECRET = "a secret"
# A rank's clock is (rank + 1) times this behind the hub's clock (the rank's offset).
_OFFSET_S = 100.0
# Hops and tasks of a call of `Load`.
_HOPS = 8
_TASKS = 2 * _HOPS - 1


def offset_s(rank: int) -> float:
    return _OFFSET_S * (rank + 1)


def hello(rank: int, world_size: int, *, gpu: bool = False) -> Hello:
    source = f"gpu:{rank}" if gpu else ""
    return Hello(
        version=VERSION,
        secret=SECRET,
        rank=rank,
        world_size=world_size,
        local_rank=0,
        host="host",
        pid=1000 + rank,
        device="cuda:0" if gpu else "cpu",
        gpu=source,
        command="train.py",
        package="0.1",
        sample_hz=5.0,
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


def arrive(
    rank: int, world_size: int = 2, *, gpu: bool = False, agree: bool = False
) -> list[FromRank]:
    """What a rank says first.

    Its plan has three tasks: 0 sends 1,000 bytes to the next rank and receives as many from the
    rank before, 1 works meanwhile, 2 works on what came. agree: 3 waits until all ranks are here.
    """
    following, preceding = (rank + 1) % world_size, (rank - 1) % world_size
    tasks = [
        TaskInfo(
            name="hop 0",
            lane="network",
            op="exchange",
            hop=0,
            size_bytes=1000,
            flops=0,
            ordered=False,
            sends=[(following, 5, 1000)],
            recvs=[(preceding, 5, 1000)],
        ),
        TaskInfo(
            name="hop 0 q0 kv0",
            lane="compute",
            op="forward",
            hop=0,
            size_bytes=0,
            flops=10,
            ordered=False,
            sends=[],
            recvs=[],
        ),
        TaskInfo(
            name="hop 1 q0 kv1",
            lane="compute",
            op="forward",
            hop=1,
            size_bytes=0,
            flops=10,
            ordered=False,
            sends=[],
            recvs=[],
        ),
    ]
    if agree:
        tasks.append(
            TaskInfo(
                name="agree",
                lane="control",
                op="agree",
                hop=-1,
                size_bytes=0,
                flops=0,
                ordered=False,
                sends=[],
                recvs=[],
            )
        )
    group = f"0-{world_size - 1}"
    said: list[FromRank] = [
        hello(rank, world_size, gpu=gpu),
        beat(rank, 0.0),
        Group(group, list(range(world_size)), "mpi", "asked for"),
    ]
    said.append(
        PlanSummary(
            number=0,
            group=group,
            kind="forward",
            tasks=tasks,
            explain="ring-kv, zigzag",
            predicted_s=None,
        )
    )
    if gpu:
        said.append(
            SourceInfo(
                name=f"gpu:{rank}",
                kind="gpu",
                host="host",
                metrics=["power_w"],
                about={"name": "a GPU"},
            )
        )
    return said


def call(
    rank: int, number: int, start_s: float, *times: tuple[float, float, float], group: str = "0-1"
) -> EndedCall:
    """A call that has ended.

    times: (issued, started, ended) of each task, in seconds after start_s, which is a time on the
    hub's clock.
    """
    spans = np.array([(task, *when) for task, when in enumerate(times)], SPAN)
    began_s = start_s - offset_s(rank)
    ended_s = began_s + max(when[2] for when in times)
    return EndedCall(
        group=group,
        number=number,
        plan=0,
        started_s=began_s,
        ended_s=ended_s,
        compute_s=0.0,
        wait_s=0.0,
        spans=spans.tobytes(),
    )


Times: TypeAlias = tuple[tuple[float, float, float], ...]


def record_calls(
    path: Path,
    world_size: int,
    calls: Sequence[Mapping[int, tuple[float, Times]]],
    *,
    agree: bool = False,
) -> None:
    """Writes a record of calls: when each rank enters, and (issued, started, ended) of its tasks in
    seconds after that. agree: as in `arrive`.
    """
    recorder = Recorder(path, 1e9, "0.1")
    for rank in range(world_size):
        for message in arrive(rank, world_size, agree=agree):
            recorder.add_message(0.0, rank, message)
    for number, ranks in enumerate(calls):
        for rank, (entered_s, times) in ranks.items():
            group = f"0-{world_size - 1}"
            recorder.add_message(60.0, rank, call(rank, number, entered_s, *times, group=group))
    recorder.close()


def counters(rank: int, hub_s: float, calls: int) -> Counters:
    lanes = {
        "network": LaneCounters(calls, 1000 * calls, 0),
        "compute": LaneCounters(2 * calls, 0, 20 * calls),
    }
    return Counters(
        at_s=hub_s - offset_s(rank),
        calls=calls,
        traced_calls=calls,
        compute_s=0.5 * calls,
        wait_s=0.1 * calls,
        total_s=1.0 * calls,
        transfer_s=0.4 * calls,
        overlap_s=0.3 * calls,
        lanes=lanes,
        dropped=0,
    )


def gpu_sample(rank: int, hub_s: float, power_w: float) -> SourceSample:
    # As many values as a new chip has.
    values = {"power_w": power_w} | {name: float(i) for i, name in enumerate(_GPU_METRICS)}
    return SourceSample(f"gpu:{rank}", hub_s - offset_s(rank), values)


_GPU_METRICS = (
    "sm_percent", "memory_busy_percent", "memory_used_bytes", "energy_j", "temperature_c",
    "memory_temperature_c", "sm_clock_mhz",
    "memory_clock_mhz", "throttle_bits", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s",
    "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s",
    "num_processes", "ecc_corrected", "ecc_uncorrected", "num_xid", "gpm_sm_percent",
    "gpm_occupancy_percent", "gpm_tensor_percent",
    "gpm_dram_percent", "power_cap_w", "sm_clock_max_mhz",
)  # fmt: skip


class _Recording(JobModel):
    """Takes messages as a model does, and writes them to a record."""

    def __init__(self, path: Path, late_s: float) -> None:
        super().__init__(1e9)
        self.recorder = Recorder(path, 1e9, "0.1")
        self._late_s = late_s

    def apply(self, at_s: float, rank: int, message: Item) -> None:
        self.recorder.add_message(at_s + self._late_s, rank, message)


def record_load(path: Path, load: Load, seconds: float, *, late_s: float = 0.0) -> None:
    """Writes a record of a load that is told of twice a second. late_s: by which messages come."""
    recording = _Recording(path, late_s)
    load.begin(recording)
    for i in range(1, round(2 * seconds) + 1):
        load.advance(recording, i / 2)
    recording.recorder.close()


class Load:
    """Ranks that make calls of `_TASKS` tasks each, `rate` spans a second in all, eight a host.
    gpus: each rank has one, named as `hello` names it, of which the caller says the figures.
    """

    def __init__(self, num_ranks: int, rate: float, *, gpus: bool = False) -> None:
        self.num_ranks = num_ranks
        self.gpus = gpus
        self.period_s = num_ranks * _TASKS / rate
        self.calls = 0
        self.spans = 0

    def begin(self, model: JobModel) -> None:
        """All ranks join."""
        everyone = list(range(self.num_ranks))
        for rank in everyone:
            following, preceding = (rank + 1) % self.num_ranks, (rank - 1) % self.num_ranks
            tiles = [
                TaskInfo(
                    name=f"hop {h} q{rank} kv{(rank - h) % self.num_ranks}",
                    lane="compute",
                    op="forward",
                    hop=h,
                    size_bytes=0,
                    flops=10**9,
                    ordered=False,
                    sends=[],
                    recvs=[],
                )
                for h in range(_HOPS)
            ]
            moves = [
                TaskInfo(
                    name=f"hop {h}",
                    lane="network",
                    op="exchange",
                    hop=h,
                    size_bytes=10**6,
                    flops=0,
                    ordered=False,
                    sends=[(following, h, 10**6)],
                    recvs=[(preceding, h, 10**6)],
                )
                for h in range(_HOPS - 1)
            ]
            hello = Hello(
                version=VERSION,
                secret="",
                rank=rank,
                world_size=self.num_ranks,
                local_rank=rank % 8,
                host=f"node{rank // 8}",
                pid=1000 + rank,
                device=f"cuda:{rank % 8}" if self.gpus else "cpu",
                gpu=f"gpu:{rank}" if self.gpus else "",
                command="load.py",
                package="0.1",
                sample_hz=5.0,
            )
            first: list[FromRank] = [
                hello,
                Group("all", everyone, "mpi", ""),
                PlanSummary(
                    number=0,
                    group="all",
                    kind="forward",
                    tasks=[*tiles, *moves],
                    explain="made up",
                    predicted_s=self.period_s * 0.8,
                ),
            ]
            if self.gpus:
                first.append(
                    SourceInfo(
                        name=f"gpu:{rank}",
                        kind="gpu",
                        host=f"node{rank // 8}",
                        metrics=["power_w"],
                        about={"name": "a GPU", "memory_bytes": str(80 << 30)},
                    )
                )
            for message in first:
                model.apply(0.0, rank, message)

    def advance(self, model: JobModel, now_s: float) -> None:
        """Tells the model what has happened up to now_s since the last call of this function."""
        while (self.calls + 1) * self.period_s <= now_s:
            self._call(model, self.calls * self.period_s)
            self.calls += 1
        for rank in range(self.num_ranks):
            model.apply(
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
            model.apply(
                now_s,
                rank,
                Counters(
                    at_s=now_s,
                    calls=self.calls,
                    traced_calls=self.calls,
                    compute_s=worked_s,
                    wait_s=0.1 * worked_s,
                    total_s=worked_s,
                    transfer_s=worked_s,
                    overlap_s=0.9 * worked_s,
                    lanes=lanes,
                    dropped=0,
                ),
            )
        model.apply(
            now_s,
            0,
            JobReport(
                now_s, self.calls, {"loss": 1 + 5 * math.exp(-now_s / 100), "tokens_per_s": 1e6}
            ),
        )

    def _call(self, model: JobModel, start_s: float) -> None:
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
            model.apply(
                start_s + self.period_s,
                rank,
                EndedCall(
                    group="all",
                    number=self.calls,
                    plan=0,
                    started_s=start_s,
                    ended_s=start_s + self.period_s,
                    compute_s=0.0,
                    wait_s=0.0,
                    spans=spans.tobytes(),
                ),
            )
            self.spans += _TASKS
