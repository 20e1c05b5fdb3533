"""Published figures of other systems beside the planner's forecasts, which are fitted to none.

Machines are the files of `burst_rt/planning/machines`. Where another kernel computed attention, its
speed is the one that this project measured beside its own ("Tile kernels on an H100" in
BENCHMARKS.md, causal, 64K tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.paper import FIRST_TOKEN_S, FITTED, STRATEGIES
from burst_rt.launch.measure.options import OUT
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.launch.plan.model import forecast_model, published_mask
from burst_rt.launch.plan.models import parse_model
from burst_rt.launch.plan.question import Question
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks import Causal
from burst_rt.planning.problem import Problem
from burst_rt.planning.ranking import forecast
from burst_rt.scheduler import Cost
from burst_rt.scheduler.simulator import Hardware

__all__ = ["Anchor", "anchors", "command"]

_TRL = "huggingface/trl PR 6845"
_CUDNN = "huggingface/transformers PR 48324"
# Tokens a GPU and heads of ring-flash-attention's figures, and query heads of a kv head.
_TOKENS, _HEADS, _GROUP = 8192, 32, 4
_RING = "zhuzilin/ring-flash-attention, README at 01c8baf"
# TFLOP/s forward and backward: this project's speed over its ratio to the kernel's.
_KERNELS = {"cuDNN": (498 / 0.82, 394 / 0.73), "FlashAttention-2": (498 / 1.51, 394 / 1.21)}
# Errors of the rows of `FIRST_TOKEN_S` that a100-pcie is not fitted to, in percent.
_PAPER = {
    ("burst", 4096): -8.4,
    ("burst", 8192): -4.2,
    ("burst", 16384): -3.9,
    ("tensor-parallel", 262144): 1.3,
    ("tensor-parallel+sequence", 262144): -4.6,
    ("burst", 262144): 6.6,
}
# Seconds to the first token of Llama 3 405B by tokens and nodes of 8 H100: arXiv 2411.01783, tables
# 6 and 7, sections 4.2.1 and 4.2.3.
_PREFILLS = {
    (32_768, 1): (7.658, -1.2),
    (131_072, 1): (42.01, -2.6),
    (32_768, 2): (4.015, -2.2),
    (131_072, 2): (21.042, -2.0),
    (131_072, 4): (10.95, -3.8),
    (131_072, 8): (5.85, -2.9),
    (131_072, 16): (3.8, -3.9),
    (1_048_576, 16): (77.0, -7.0),
}
# What a turn of that system's ring costs a layer beside attention and messages, from rows that are
# not compared (table 6, 8K tokens): two nodes, two turns, take 999 ms, half of one node's 1,740 ms
# is 870.
_TURN_S = (0.999 - 1.740 / 2) / (2 * 126)
_STAGES = 16  # Llama 3's pipeline has as many, and as many micro-batches
_SMALL = "layers=28,dim=1024,heads=16,kv_heads=8,head_dim=128,ffn=3072,vocab=151936"


class Anchor(NamedTuple):
    """A published figure, and what makes the planner's."""

    what: str
    source: str
    unit: str
    published: float
    forecast: Callable[[], float]
    error_percent: float  # as the forecast's is


def _with_kernel(hardware: Hardware, kernel: str) -> Hardware:
    rates = dict(hardware.device.rates)
    for name, speed in zip(("forward", "backward"), _KERNELS[kernel], strict=True):
        flops = rates[name].flops_per_s
        assert flops is not None
        rates[name] = replace(rates[name], efficiency=speed * 1e12 / flops, masked=None)
    return replace(hardware, device=replace(hardware.device, rates=rates))


def _seconds(question: Question, strategy: str, world: int, hardware: Hardware) -> float:
    return forecast_model(question, strategy, world, hardware).time_s


def _prefill(tokens: int, nodes: int) -> float:
    """Tensor parallelism in nodes, a ring of as many turns as nodes between them."""
    question = Question(parse_model("llama-3-405b"), tokens, "first-token", tensor=8)
    seconds = _seconds(question, "ring-kv", 8 * nodes, load_hardware("h100-sxm"))
    return seconds + (nodes > 1) * question.model.num_layers * nodes * _TURN_S


def _llama_step() -> float:
    """The speed of a step with 16 ranks a sequence, in percent of that of one without.

    Both have the same bubbles. By the paper, keys and values are gathered before a layer attends,
    and nothing hides that; their gradients are taken to go back in the same way. It cites what its
    operations are (arXiv 2204.02311, appendix B): 6 for each weight and token, and all scores.
    """
    model, hardware = parse_model("llama-3-405b"), load_hardware("h100-sxm")
    layer = model.layer
    assert hardware.nics is not None
    link = hardware.nics.link

    def speed(tokens: int, context: int) -> float:
        question = Question(
            model, tokens, "train", tensor=8, pipeline=_STAGES, context=context,
            micro_batches=_STAGES, activations="kept",
        )  # fmt: skip
        others = 2 * 2 * tokens * (1 - 1 / context) * layer.num_kv_heads // 8 * layer.head_dim
        exposed = 2 * others / (link.bytes_per_s * link.efficiency)
        rounds = (2 * _STAGES - 1) * model.num_layers / _STAGES
        seconds = _seconds(question, "direct", 16_384, hardware) + rounds * exposed
        scores = 12 * model.num_layers * layer.num_heads * layer.head_dim * tokens
        return (6 * model.num_weights + scores) * tokens / context / seconds

    return 100 * speed(131_072, 16) / speed(8192, 1)


def _trl(model: str, tokens: int, world: int, kernel: str = "cuDNN") -> float:
    """torch's context parallelism gathers keys; layers are computed again in the backward."""
    hardware = _with_kernel(load_hardware("h100-sxm"), kernel)
    about = Question(
        parse_model(model), tokens, "train", shard="fsdp", activations="computed again"
    )
    return _seconds(about, "direct", world, hardware)


def _adding_s(hardware: Hardware, kind: str, *, forward: bool) -> float:
    """Seconds a hop of what ring-flash-attention does between two calls of its kernel, in torch's
    operators, each of which reads and writes memory (its utils.py and *_flash_attn.py).

    Forward: the new part of out in float32, two products, their sum, and under stripes a copy back
    of all rows but the first, on the rank that does so in every hop. Backward: the kernel's 16 bits
    are added to dq, dk and dv in float32.
    """
    sizes = [6.0, 8.0, 8.0, 12.0, *[8.0] * (kind == "striped")]
    if not forward:
        sizes = [10, 10 / _GROUP, 10 / _GROUP]
    rate = hardware.device.rates["default"]
    numbers = _TOKENS * _HEADS * 128
    return sum(rate.seconds(Cost(size_bytes=int(size * numbers))) for size in sizes)


def _share(kind: str, directions: tuple[bool, ...]) -> float:
    """Percent of eight times one GPU's speed: 8K tokens a GPU, the heads of Llama 3.1 8B."""
    hardware = load_hardware("a100-sxm")

    def seconds(world: int, layout_kind: str) -> float:
        layout = make_layout(layout_kind, _TOKENS * world, world)
        problem = Problem(
            q_layout=layout, kv_layout=layout, mask=Causal(), batch=1, num_heads=_HEADS,
            num_kv_heads=_HEADS // _GROUP, head_dim=128, v_head_dim=128, input_bytes=2, sum_bytes=4,
            needs_grad=(True, True, True),
        )  # fmt: skip
        return sum(
            forecast(problem, "ring-kv", hardware, forward=way).time_s
            + (world - 1) * _adding_s(hardware, kind, forward=way)
            for way in directions
        )

    return 100 * 8 * seconds(1, "contiguous") / seconds(8, kind)


def _first_token(strategy: str, tokens: int) -> float:
    mask = published_mask(strategy)
    question = Question(parse_model("llama-7b"), tokens, "first-token", mask=mask)
    return _seconds(question, strategy, 8, load_hardware("a100-pcie"))


def anchors() -> Iterator[Anchor]:
    """All of them."""
    for (tokens, nodes), (published_s, error) in _PREFILLS.items():
        yield Anchor(
            f"Llama 3 405B, first token on {8 * nodes} H100, {tokens:,} tokens",
            "arXiv 2411.01783", "s", published_s, partial(_prefill, tokens, nodes), error,
        )  # fmt: skip
    for name, model, millions, world, published_s, error in (
        ("Qwen3-8B", "qwen3-8b", 1, 8, 364.0, 1.4),
        ("Qwen3-8B", "qwen3-8b", 2, 16, 696.0, -4.5),
        ("Qwen3-8B", "qwen3-8b", 4, 32, 1346.0, -1.4),
        ("Qwen3-32B", "qwen3-32b", 1, 8, 1295.0, 2.0),
        ("Qwen3-30B-A3B", "qwen3-30b-a3b", 1, 8, 483.0, -0.3),
        ("Qwen3-0.6B", _SMALL, 1, 8, 137.0, -7.5),
    ):
        yield Anchor(
            f"{name}, a step on {world} H100, {millions}M tokens, TRL", _TRL, "s", published_s,
            partial(_trl, model, millions << 20, world), error,
        )  # fmt: skip
    yield Anchor(
        "Qwen3-8B, a step on 8 H100, 1M tokens, FlashAttention-2", _CUDNN, "s", 606.0,
        partial(_trl, "qwen3-8b", 1 << 20, 8, "FlashAttention-2"), 3.8,
    )  # fmt: skip
    yield Anchor(
        "Llama 3 405B, a step on 16,384 H100, 131,072 tokens on 16 ranks, over 8,192 on one",
        "arXiv 2407.21783, table 4 (380 and 400 TFLOP/s)", "%", 95.0, _llama_step, 7.8,
    )  # fmt: skip
    for name, kind, forward, both, errors in (
        ("ring", "contiguous", 51.4, 52.5, (-6.2, -0.3)),
        ("zigzag ring", "zigzag", 81.7, 89.8, (-0.4, 2.2)),
        ("striped ring", "striped", 69.6, 82.6, (9.2, 9.2)),
    ):
        for words, published, ways, error in (
            ("forward", forward, (True,), errors[0]),
            ("forward and backward", both, (True, False), errors[1]),
        ):
            yield Anchor(
                f"ring-flash-attention, 8 A100, {name}, {words}", _RING, "%", published,
                partial(_share, kind, ways), error,
            )  # fmt: skip
    for tokens, row in FIRST_TOKEN_S.items():
        for strategy, published_s in zip(STRATEGIES, row, strict=True):
            if tokens not in FITTED and (strategy, tokens) in _PAPER:
                yield Anchor(
                    f"LLaMA-7B, first token on 8 A100, {tokens:,} tokens, {strategy}",
                    "arXiv 2403.09347", "s", published_s, partial(_first_token, strategy, tokens),
                    _PAPER[strategy, tokens],
                )  # fmt: skip


@click.command()
@OUT
def command(out: Path | None) -> None:
    """Published figures of other systems next to the planner's forecasts. Measures nothing."""
    rows: list[dict[str, Cell]] = []
    table = list(anchors())
    for anchor in table:
        forecast_value = anchor.forecast()
        rows.append(
            {
                "what": anchor.what, "source": anchor.source, "unit": anchor.unit,
                "published": anchor.published, "forecast": forecast_value,
                "error %": 100 * (forecast_value / anchor.published - 1),
            }
        )  # fmt: skip
    publish("published figures against the planner's forecasts", rows, out, "simulated")
    kinds: dict[str, list[float]] = {}
    for anchor, row in zip(table, rows, strict=True):
        error = row["error %"]
        assert isinstance(error, float)
        kinds.setdefault(_kind(anchor), []).append(error)
    publish(
        "published figures by kind",
        [
            {
                "what": kind, "figures": len(errors),
                "median error %": median([abs(error) for error in errors]),
                "worst %": max(errors, key=abs),
            }
            for kind, errors in kinds.items()
        ],
        out,
        "simulated",
    )  # fmt: skip


def _kind(anchor: Anchor) -> str:
    if "a step on" in anchor.what:
        return "steps of training, 128K to 4M tokens, 8 to 16,384 H100"
    if "first token" in anchor.what:
        return "first tokens, Llama 3 405B on 8 to 128 H100, LLaMA-7B on 8 A100"
    return "ring-flash-attention on 8 A100, share of one GPU's speed"
