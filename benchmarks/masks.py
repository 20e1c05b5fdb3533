"""Masks: `python -m benchmarks masks`. Simulated: packed documents of a pretraining mix on H100s.

What the ranks compute follows the mask in all rows of the table. The rows differ in the layout, in
the rows that are sent, and in their route. This project's strategies are compared with two that
others use: a zigzag ring that sends every row to every rank, and an all-gather of keys and values
with a reduce-scatter of their gradients (TransformerEngine's and torch's context parallelism have
such a mode).
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import click

from benchmarks import tables
from benchmarks.options import parts_option
from burst_rt.launch.bench.cli import attention
from burst_rt.launch.measure.options import OUT, REPEATS
from burst_rt.launch.measure.report import Cell, publish
from burst_rt.planning.choose import choose
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks import Causal, Documents, Full, Mask
from burst_rt.planning.problem import Problem
from burst_rt.planning.strategies import AGREE, Ring
from burst_rt.runtime.collectives import all_gather, reduce_scatter
from burst_rt.scheduler import Cost, Graph, GraphBuilder, Op, Schedule
from burst_rt.scheduler.simulator import Hardware, simulate

__all__ = ["command", "document_lengths", "simulated"]

_HARDWARE = "h100"
_WORLDS, _TOKENS = (8, 16, 32, 64), (1 << 19, 1 << 20)
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
# The lengths of documents: lognormal, with this median and sigma, as long as half of the sequence.
_MEDIAN, _SIGMA = 2048, 1.6


def simulated(out: Path | None, worlds: tuple[int, ...] = _WORLDS) -> None:
    """Simulates and prints the table. Local."""
    hardware = load_hardware(_HARDWARE)
    rows: list[dict[str, Cell]] = []
    for tokens in _TOKENS:
        mask = Causal() & Documents(document_lengths(tokens))
        for world in worlds:
            rows += _rows(mask, tokens, world, hardware)
    publish(
        "packed documents on H100, simulated: forward + backward of one layer",
        rows,
        out,
        f"{_HEADS} query heads, {_KV_HEADS} kv heads x {_HEAD_DIM}, bf16; documents lognormal, "
        f"median {_MEDIAN:,} tokens, sigma {_SIGMA}, seed 0; bytes and idle of the worst rank",
    )


def document_lengths(tokens: int) -> list[int]:
    """Lengths of documents of a pretraining mix, as drawn: lognormal, the same in every run."""
    chance, lengths, left = random.Random(0), [], tokens
    while left:
        drawn = int(_MEDIAN * chance.lognormvariate(0, _SIGMA))
        lengths.append(min(left, tokens // 2, max(1, drawn)))
        left -= lengths[-1]
    return lengths


def _rows(mask: Mask, tokens: int, world: int, hardware: Hardware) -> list[dict[str, Cell]]:
    zigzag, balanced = (_problem(mask, tokens, world, kind) for kind in ("zigzag", "balanced"))
    tried = {
        "zigzag ring, every row to every rank": _graphs(zigzag, "ring-kv", unsparing=True),
        "zigzag, all-gather": _all_gather(zigzag),
        "zigzag ring": _graphs(zigzag, "ring-kv"),
        "balanced ring": _graphs(balanced, "ring-kv"),
        "balanced, direct": _graphs(balanced, "direct"),
    }
    rows: list[dict[str, Cell]] = []
    first_s = 0.0
    for name, directions in tried.items():
        runs = [simulate(list(map(Schedule.of, graphs)), hardware) for graphs in directions]
        ranks = list(zip(*(run.ranks for run in runs), strict=True))
        took_s = sum(run.end_s for run in runs)
        first_s = first_s or took_s
        busy_s = min(sum(each.busy_s for each in rank) for rank in ranks)
        rows.append(
            {
                "tokens": tokens, "ranks": world, "way": name, "ms": 1e3 * took_s,
                "speed": first_s / took_s,
                "GB sent": max(sum(each.sent_bytes for each in rank) for rank in ranks) / 1e9,
                "idle %": 100 * (1 - busy_s / took_s),
            }
        )  # fmt: skip
    return rows


def _problem(mask: Mask, tokens: int, world: int, kind: str) -> Problem:
    layout = make_layout(kind, tokens, world, mask if kind == "balanced" else None)
    return Problem(
        q_layout=layout,
        kv_layout=layout,
        mask=mask,
        batch=1,
        num_heads=_HEADS,
        num_kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        input_bytes=2,
        sum_bytes=4,
        needs_grad=(True, True, True),
    )


def _graphs(problem: Problem, strategy: str, *, unsparing: bool = False) -> list[list[Graph]]:
    """The graphs of all ranks, forward and backward. unsparing: every row goes to every rank."""
    found = []
    for forward in (True, False):
        program = choose(problem, strategy, forward=forward).program
        if unsparing and isinstance(program, Ring):
            # The needs of the full mask replace the cached property.
            other = replace(problem)
            vars(other)["needs"] = replace(problem, mask=Full()).needs
            program = replace(program, problem=other)
        found.append([program.graph(rank) for rank in range(problem.world_size)])
    return found


def _all_gather(problem: Problem) -> list[list[Graph]]:
    """All keys and values come first; then a rank's tiles are one task; then sums are scattered."""
    tokens = [problem.kv_layout.shard_len(rank) for rank in range(problem.world_size)]
    found: list[list[Graph]] = []
    for graphs in _graphs(problem, "ring-kv"):
        name = "forward" if not found else "backward"
        directions = []
        for graph in graphs:
            g = GraphBuilder(graph.rank, problem.world_size)
            agreed = g.buffer("agreed")
            g.compute("agree", AGREE, writes=[agreed], lane="control")
            sizes = [n * (problem.k_token_bytes + problem.v_token_bytes) for n in tokens]
            kv = g.buffer("kv", parts=len(tokens), size_bytes=sizes, initialised=True)
            sums = [n * (problem.k_sum_bytes + problem.v_sum_bytes) for n in tokens]
            grads = g.buffer("grads", parts=len(tokens), size_bytes=sums, initialised=True)
            tag = all_gather(g, kv, reads=[agreed])
            costs = [task.cost for task in graph.tasks if task.op and task.op.name == name]
            cost = Cost(*map(sum, zip(*costs, strict=True)))
            g.compute(name, Op(name), reads=[kv], accumulates=[grads], cost=cost)
            if found:
                reduce_scatter(g, grads, tag=tag)
            directions.append(g.build())
        found.append(directions)
    return found


@click.command()
@parts_option("measured", "tables", "simulated")
@REPEATS
@OUT
@click.pass_context
def command(ctx: click.Context, parts: tuple[str, ...], repeats: int, out: Path | None) -> None:
    """Masks: measured on 2 ranks of this machine, against causal and against torch with a dense
    mask; what planning takes for masks never seen before; and simulated on 8 to 64 H100, packed
    documents in several layouts and ways.
    """
    if "measured" in (parts or ("measured",)):
        ctx.invoke(attention, parts=("masks",), repeats=repeats, out=out)
    if "tables" in (parts or ("tables",)):
        tables.measure(repeats, out)
    if "simulated" in (parts or ("simulated",)):
        simulated(out)
