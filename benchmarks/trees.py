"""Answers to one question as a tree, packed, and one by one: `python -m benchmarks trees`.

Decoder layers of transformers with their embedding and head, forward and backward, over the ranks
of one job; the three ways run in turn. All compute the same loss and the same gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    LlamaConfig,
    Mamba2Config,
    PreTrainedConfig,
)

import burst_rt
import burst_rt.hf
from benchmarks.options import size_option
from burst_rt.launch.measure.options import OUT, RANKS, REPEATS
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.launch.measure.timing import progress_bar, slowest_s

__all__ = ["command", "run_rank"]

_WORDS, _WIDTH, _HEADS = 1024, 512, 8
_MIB = 2**20
_Batches = list[dict[str, Any]]


def _ways(prompt: int, answer: int, answers: int) -> dict[str, _Batches]:
    """The batches of a step, by its name."""
    draw = torch.Generator().manual_seed(0)
    question = torch.randint(_WORDS, (prompt,), generator=draw).tolist()
    sequences = [
        question + torch.randint(_WORDS, (answer,), generator=draw).tolist() for _ in range(answers)
    ]
    labels = [[-100] * prompt + each[prompt:] for each in sequences]
    alone = [
        {"input_ids": torch.tensor([ids]), "labels": torch.tensor([each])}
        for ids, each in zip(sequences, labels, strict=True)
    ]
    packed = {name: torch.cat([batch[name] for batch in alone], 1) for name in alone[0]}
    packed["position_ids"] = torch.arange(prompt + answer).repeat(answers)[None]
    tree = burst_rt.tree_row(sequences, labels).batch()
    return {"a tree": [tree], "packed": [packed], "one by one": alone}


_WIDTHS: dict[str, Any] = {"vocab_size": _WORDS, "hidden_size": _WIDTH}
_ATTENTION = {
    "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "intermediate_size": 1408,
    "attn_implementation": "burst_rt",
}  # fmt: skip
# A layer of attention, a layer with a state, and one of each.
_MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {**_ATTENTION, "num_hidden_layers": 1}),
    "mamba2": (Mamba2Config, {
        "num_hidden_layers": 1, "num_heads": 16, "head_dim": 64, "state_size": 128, "n_groups": 1,
    }),
    "bamba": (BambaConfig, {
        **_ATTENTION, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 16,
        "mamba_d_head": 64, "mamba_d_state": 128,
    }),
}  # fmt: skip


def _model(name: str) -> Any:
    torch.manual_seed(0)
    config, options = _MODELS[name]
    return AutoModelForCausalLM.from_config(config(**_WIDTHS, **options))


class _Side:
    """One way: its times, its bytes, and its gradients."""

    def __init__(self, ctx: burst_rt.Context, model: Any, batches: _Batches, labels: int) -> None:
        self._ctx, self._batches, self._labels = ctx, batches, labels
        self._model = model.to(ctx.device)
        burst_rt.hf.prepare(self._model, ctx)
        self.times: list[float] = []
        self.sent = self.tokens = 0

    def run(self) -> None:
        """Times a step. Blocks for the other ranks."""
        self._model.zero_grad()
        before = self._ctx.runtime.transport.bytes_sent
        self.times.append(slowest_s(self._ctx, self._step))
        self.sent = self._ctx.runtime.transport.bytes_sent - before
        self.tokens = sum(batch["input_ids"].shape[1] for batch in self._batches)

    def _step(self) -> None:
        for batch in self._batches:
            given = {**batch, "num_items_in_batch": self._labels}
            self._model(**burst_rt.hf.shard(given, self._ctx)).loss.backward()

    def gradient(self) -> torch.Tensor:
        """All parameters' gradients, averaged over the ranks. Collective."""
        burst_rt.average_gradients(self._model.parameters(), group=self._ctx)
        return torch.cat([x.grad.flatten() for x in self._model.parameters()])


def run_rank(
    model: str, prompt: int, answer: int, answers: int, repeats: int, out: str | None
) -> None:
    """Measures on all ranks; rank 0 prints and writes. Blocks for the other ranks."""
    ways = _ways(prompt, answer, answers)
    with burst_rt.init(device="cpu", timeout_s=1200, stall_s=300) as ctx:
        sides = {
            name: _Side(ctx, _model(model), each, answer * answers) for name, each in ways.items()
        }
        with progress_bar(ctx.rank == 0, len(sides) * (repeats + 1)) as step:
            for _ in range(repeats + 1):
                for name, side in sides.items():
                    step(name)
                    side.run()
        gradients = {name: side.gradient() for name, side in sides.items()}
        truth = gradients["one by one"]
        tree = median(sides["a tree"].times[1:])
        rows: list[dict[str, Cell]] = [
            {
                "way": name, "tokens": side.tokens, "seconds": median(side.times[1:]),
                "times a tree's": median(side.times[1:]) / tree, "sent MiB": side.sent / _MIB,
                "gradients differ by": f"{float((each - truth).norm() / truth.norm()):.1e}",
            }
            for (name, side), each in zip(sides.items(), gradients.values(), strict=True)
        ]  # fmt: skip
        if ctx.rank == 0:
            title = (
                f"{answers} answers of {answer:,} tokens to a question of {prompt:,}: {model}, "
                f"forward + backward; {ctx.world_size} ranks"
            )
            publish(title, rows, out, f"medians of {repeats}, in turn; bytes of rank 0")


@click.command()
@RANKS
@click.option(
    "--model",
    type=click.Choice(list(_MODELS)),
    default="llama",
    show_default=True,
    help="A layer of attention, a layer with a state (mamba2), or one of each (bamba).",
)
@size_option("--prompt", 8192, "Tokens of the question")
@size_option("--answer", 512, "Tokens of an answer")
@size_option("--answers", 8, "Answers")
@REPEATS
@OUT
def command(num_ranks: int, repeats: int, out: Path | None, **options: Any) -> None:
    """Answers that share a question, as a tree, packed, and one by one."""
    run_on_ranks(run_rank, num_ranks, {**options, "repeats": repeats, "out": out}, threads=1)
