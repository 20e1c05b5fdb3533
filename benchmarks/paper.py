"""The BurstAttention paper's figures (arXiv 2403.09347) beside forecasts.

The machine file a100-pcie is fitted to three rows of the paper: first-token latency at 32K, 64K and
128K tokens. Everything else here is forecast.
"""

from __future__ import annotations

from pathlib import Path

import click

from burst_rt.launch.measure.options import OUT
from burst_rt.launch.measure.report import Cell, publish
from burst_rt.launch.plan.model import Question, forecast_model, published_mask
from burst_rt.launch.plan.models import MODELS
from burst_rt.planning.machines import load_hardware

__all__ = ["FIRST_TOKEN_S", "FITTED", "OUT_OF_MEMORY", "STRATEGIES", "command"]

STRATEGIES = ("tensor-parallel", "tensor-parallel+sequence", "burst")
# First-token latency in seconds, LLaMA-7B on 8 GPUs, by tokens: one column a strategy.
FIRST_TOKEN_S = {
    4096: (0.67, 0.73, 0.44),
    8192: (1.29, 1.36, 0.84),
    16384: (2.58, 2.68, 1.68),
    32768: (5.27, 5.67, 3.27),
    65536: (11.63, 12.25, 6.49),
    131072: (27.54, 28.73, 16.01),
    262144: (71.52, 75.52, 49.32),
}
FITTED = (32768, 65536, 131072)
# Number of tokens from which on two strategies run out of memory: the paper's RingAttention, and
# BurstAttention without its local optimisation.
OUT_OF_MEMORY = {"ring-naive": 65536, "burst-untiled": 131072}
# Short names, because columns of tables are narrow.
_SHORT = {
    "tensor-parallel": "V1",
    "tensor-parallel+sequence": "V3",
    "burst": "burst",
    "ring-naive": "naive",
    "burst-untiled": "untiled",
}
# The paper's claim for training is against the better of the tensor-parallel strategies, with 128K
# tokens on 32 GPUs.
_TRAINING = (131072, 32)
# (strategy, mask): the paper's strategies, then this project's own on the same machine.
_TRAINED = (
    ("tensor-parallel", "causal"), ("tensor-parallel+sequence", "causal"), ("ring-kv", "full"),
    ("burst", "full"),
    ("burst", "causal"), ("bidirectional", "causal"), ("two-level", "causal"), ("all-to-all",
    "causal"), ("hybrid", "causal"),
)  # fmt: skip


@click.command()
@OUT
def command(out: Path | None) -> None:
    """The BurstAttention paper's figures (arXiv 2403.09347) next to the simulator's forecasts.
    Measures nothing.
    """
    _first_token(out)
    _training(out)


def _first_token(out: Path | None) -> None:
    hardware, model = load_hardware("a100-pcie"), MODELS["llama-7b"]
    rows: list[dict[str, Cell]] = []
    for tokens, published in FIRST_TOKEN_S.items():
        row: dict[str, Cell] = {
            "tokens": tokens,
            "row": "fitted" if tokens in FITTED else "forecast",
        }
        for strategy, seconds in zip(STRATEGIES, published, strict=True):
            question = Question(model, tokens, "first-token", mask=published_mask(strategy))
            found = forecast_model(question, strategy, 8, hardware)
            assert found.time_s is not None
            label = _SHORT[strategy]
            row |= {
                f"{label} s": found.time_s,
                f"{label} paper": seconds,
                f"{label} error %": 100 * (found.time_s / seconds - 1),
            }
        for strategy in OUT_OF_MEMORY:
            question = Question(model, tokens, "first-token", mask="full")
            fits = not forecast_model(question, strategy, 8, hardware).out_of_memory
            row[f"{_SHORT[strategy]} fits"] = "yes" if fits else "no"
        rows.append(row)
    publish(
        "first-token latency in seconds, LLaMA-7B on 8 A100-PCIe, against arXiv 2403.09347",
        rows,
        out,
        "simulated on a100-pcie; V1: tensor-parallel, V3: tensor-parallel+sequence, naive: "
        "ring-naive, untiled: burst-untiled",
    )


def _training(out: Path | None) -> None:
    hardware, model = load_hardware("a100-pcie"), MODELS["llama-7b"]
    tokens, world = _TRAINING
    trained = [
        forecast_model(Question(model, tokens, "train", mask=mask), name, world, hardware)
        for name, mask in _TRAINED
    ]
    base = next(f for f in trained if f.strategy == STRATEGIES[1])
    rows: list[dict[str, Cell]] = [
        {
            "strategy": f.strategy, "mask": f.mask, "step s": f.time_s,
            "times as fast as V3": (base.time_s or 0) / f.time_s,
            "sent GB": f.sent_bytes / 1e9,
            "less sent %": 100 * (1 - f.sent_bytes / base.sent_bytes),
            "memory GB": f.memory_bytes / 1e9,
            "activations": f.activations,
        }
        for f in trained
        if f.time_s is not None
    ]  # fmt: skip
    publish(
        "a training step, LLaMA-7B, 128K tokens on 32 A100-PCIe in 4 nodes",
        rows,
        out,
        "simulated; V3: tensor-parallel+sequence. The paper: 1.37 times, 40 % less",
    )
