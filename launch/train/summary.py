"""How a run or a measurement ended: its figures, which `--json` prints, and their table.

Losses are in nats a token, of the byte-level model a byte.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burst_rt.launch.train.report import StepRecord

__all__ = ["Summary", "perplexity", "summarise_measurement", "summarise_run", "table"]

# Number of steps at the end of a run over which its training loss is averaged.
_LAST_STEPS = 10


@dataclass(frozen=True)
class Summary:
    """The figures by name, as numbers and texts of any type, and the table's rows by name."""

    title: str
    figures: Mapping[str, Any]
    rows: Mapping[str, str]

    def show(self) -> None:
        """Print the table."""
        # Under mpirun stdout looks like a terminal even where it is a file, so no colours.
        Console(color_system=None, highlight=False).print(table(self.title, self.rows))


def table(title: str, rows: Mapping[str, str]) -> Table:
    """A table of names and texts about them."""
    made = Table(title=title, title_justify="left", show_header=False)
    for name, text in rows.items():
        made.add_row(name, escape(text))
    return made


def summarise_run(history: list[StepRecord], done: int, about: Mapping[str, Any]) -> Summary:
    """The summary of a run with these records of all its steps.

    done: the step after which it was continued, 0 where it was not. Speed, communication and time
    count since then. about: the figures that are in no record.
    """
    last = history[-1]
    # A run that is resumed after its last step takes no step.
    recent = [record for record in history if record.step > done] or [last]
    step_s = sum(record.step_s for record in recent)
    figures = {
        **about,
        "steps": last.step,
        "resumed_after": done,
        "loss_first": history[0].loss,
        "loss_last": statistics.fmean(record.loss for record in history[-_LAST_STEPS:]),
        "heldout_loss": last.heldout_loss,
        "heldout_perplexity": last.heldout_perplexity,
        "tokens_per_s": statistics.median(record.tokens_per_s for record in recent),
        "wait_fraction": sum(record.wait_fraction * record.step_s for record in recent) / step_s,
        "bytes_sent": sum(record.bytes_sent for record in recent),
    }
    since = f" since step {done}" if done else ""
    now = f", {last.step - done} of them now" if done else ""
    model = ", model/" if figures["unit"] == "token" else ""
    rows = {
        "ranks": "{world_size} ({data_parallel} data x {context_parallel} context)",
        "steps": f"{{steps}}{now}",
        "training loss": (
            f"{{loss_first:.4f}} at the first step, {{loss_last:.4f}} over the last {_LAST_STEPS}"
        ),
        "held-out": (
            "loss {heldout_loss:.4f} nats per {unit}, perplexity {heldout_perplexity:.3f}"
            if last.heldout_loss is not None
            else "not measured after the last step"
        ),
        f"speed{since}": "{tokens_per_s:,.0f} tokens/s",
        f"communication{since}": (
            "{megabytes_sent:,.1f} MB sent by attention; compute waited {wait_fraction:.2%} of the "
            "time"
        ),
        f"time{since}": "{elapsed_s:.1f} s",
        "written": f"{{out}}/ (metrics.jsonl, loss.png, checkpoints/{model})",
    }
    shown = {**figures, "megabytes_sent": figures["bytes_sent"] / 1e6}
    return Summary(
        "training finished", figures, {name: text.format(**shown) for name, text in rows.items()}
    )


def summarise_measurement(loss: float, bytes_per_token: float, about: Mapping[str, Any]) -> Summary:
    """The summary of a measurement on held-out text. bytes_per_token: the mean over that text.
    about: the other figures.
    """
    figures = {
        **about,
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": loss / math.log(2) / bytes_per_token,
    }
    # None without a checkpoint.
    other_text = figures["same_text"] is False
    note = "; not the text that the model was trained on" if other_text else ""
    rows = {
        **(
            {"checkpoint": "{checkpoint} (step {step})"}
            if figures["checkpoint"]
            else {"model": "{model}"}
        ),
        "text": f"{{data}}{note}",
        "measured": ("{num_tokens:,} {unit}s in sequences of {seq_len:,}, on {world_size} ranks"),
        "loss": "{loss:.6f} nats per {unit}, {bits_per_byte:.4f} bits per byte",
        "perplexity": "{perplexity:.5f} per {unit}",
        "time": "{elapsed_s:.1f} s",
    }
    return Summary(
        "held-out text", figures, {name: text.format(**figures) for name, text in rows.items()}
    )


def perplexity(loss: float) -> float:
    """The perplexity of a token, infinite where it is no number of a computer's."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
