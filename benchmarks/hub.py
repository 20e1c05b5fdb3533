"""What the hub's model takes when it is fed what 64 ranks send in an hour, without any ranks.

The process has imported what a hub imports, and little more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import numpy as np
import psutil

import burst_rt.telemetry.hub.hub  # noqa: F401  (what a hub imports counts as idle)
from burst_rt.launch.measure.options import OUT
from burst_rt.launch.measure.report import Cell, publish
from burst_rt.telemetry.messages import (
    VERSION,
    Counters,
    EndedCall,
    FromRank,
    Group,
    Heartbeat,
    Hello,
    LaneCounters,
    PlanSummary,
    SourceInfo,
    SourceSample,
    TaskInfo,
)
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.model.timeline import SPAN

__all__ = ["command"]

_RANKS = 64
_RATE_HZ = 5
# A ring of 64 has as many tasks in one direction. The layers of a large model make five calls a
# second.
_TASKS = 190
_CALL_S = 0.2
_GPU_METRICS = 21


@click.command()
@click.option(
    "--minutes",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="How long the hub watches 64 ranks.",
)
@OUT
def command(minutes: float, out: Path | None) -> None:
    """Memory of the hub's model, beyond idle, when it watches 64 ranks for an hour."""
    seconds = round(60 * minutes)
    process = psutil.Process()
    decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
    encoder = msgspec.msgpack.Encoder()
    model = JobModel(time.time())
    idle = process.memory_info().rss
    rows: list[dict[str, Cell]] = []
    started_s, num_messages = time.perf_counter(), 0
    marks = {seconds // 6, seconds // 2, seconds}
    for second in range(seconds + 1):
        for rank in range(_RANKS):
            for at_s, message in _second(rank, second):
                # Messages from a socket have been encoded and decoded.
                model.apply(at_s, rank, decoder.decode(encoder.encode(message)))
                num_messages += 1
        model.advance(float(second))
        if second in marks:
            view = model.snapshot()
            timeline = model.timeline(-10.0)
            took_s = time.perf_counter() - started_s
            rows.append(
                {
                    "minutes": second / 60, "messages": num_messages,
                    "us a message": took_s / num_messages * 1e6,
                    "hub MB beyond idle": (process.memory_info().rss - idle) / 1e6,
                    "spans shown": timeline.num_spans,
                    "ranks shown": len(view.ranks),
                }
            )  # fmt: skip
    publish(
        f"telemetry: the hub's model with {_RANKS} ranks",
        rows,
        out,
        f"idle: {idle / 1e6:.0f} MB; 5 samples/s of a GPU and a rank each",
    )


def _second(rank: int, second: int) -> Iterator[tuple[float, FromRank]]:
    """The messages of one rank in one second, each with its time in seconds."""
    name = f"0-{_RANKS - 1}"
    if second == 0:
        yield (
            0.0,
            Hello(
                version=VERSION,
                secret="",
                rank=rank,
                world_size=_RANKS,
                local_rank=rank % 8,
                host=f"host{rank // 8}",
                pid=rank,
                device="cuda:0",
                gpu=f"gpu:{rank}",
                command="train",
                package="0.1",
                sample_hz=_RATE_HZ,
            ),
        )
        yield 0.0, Group(name, list(range(_RANKS)), "nccl", "a GPU each")
        yield (
            0.0,
            SourceInfo(
                name=f"gpu:{rank}",
                kind="gpu",
                host=f"host{rank // 8}",
                metrics=[],
                about={"name": "a GPU"},
            ),
        )
        for number in range(2):
            yield (
                0.0,
                PlanSummary(
                    number=number,
                    group=name,
                    kind="forward",
                    tasks=[_task(rank, i) for i in range(_TASKS)],
                    explain="ring-kv, zigzag",
                    predicted_s=None,
                ),
            )
    for half in range(2):
        at_s = second + half / 2
        yield (
            at_s,
            Heartbeat(
                sent_s=at_s,
                offset_s=0.0,
                rtt_s=1e-4,
                group=name,
                call=second,
                doing=f"hop {second % 60}",
                since_s=at_s,
            ),
        )
    values = {f"metric_{i}": float(second + i) for i in range(_GPU_METRICS)}
    for i in range(_RATE_HZ):
        at_s = second + i / _RATE_HZ
        calls = second * _RATE_HZ + i
        yield at_s, SourceSample(f"gpu:{rank}", at_s, values)
        yield (
            at_s,
            SourceSample(
                f"rank:{rank}",
                at_s,
                {"process_percent": 99.0, "rss_bytes": 1e9, "telemetry_percent": 0.3},
            ),
        )
        lanes = {
            lane: LaneCounters(95 * calls, calls << 20, calls << 30)
            for lane in ("compute", "network")
        }
        yield (
            at_s,
            Counters(
                at_s=at_s,
                calls=calls,
                traced_calls=calls,
                compute_s=0.9 * calls,
                wait_s=0.1 * calls,
                total_s=calls,
                transfer_s=0.5 * calls,
                overlap_s=0.4 * calls,
                lanes=lanes,
                dropped=0,
            ),
        )
        yield (
            at_s,
            EndedCall(
                group=name,
                number=calls,
                plan=calls % 2,
                started_s=at_s,
                ended_s=at_s + _CALL_S,
                compute_s=0.1,
                wait_s=0.01,
                spans=_SPANS,
            ),
        )


def _task(rank: int, number: int) -> TaskInfo:
    hop = number // 3
    if number % 3:
        return TaskInfo(
            name=f"hop {hop} q{rank} kv{(rank - hop) % _RANKS}.{number % 3 - 1}",
            lane="compute",
            op="forward",
            hop=hop,
            size_bytes=1 << 20,
            flops=1 << 30,
            ordered=True,
            sends=[],
            recvs=[],
        )
    sends, recvs = ([((rank + way) % _RANKS, hop * 3, 1 << 20)] * 4 for way in (1, -1))
    return TaskInfo(
        name=f"hop {hop}",
        lane="network",
        op="exchange",
        hop=hop,
        size_bytes=4 << 20,
        flops=0,
        ordered=True,
        sends=sends,
        recvs=recvs,
    )


_SPANS = np.array([(i, i / 1e3, i / 1e3, (i + 1) / 1e3) for i in range(_TASKS)], SPAN).tobytes()
