"""`burst-rt eval`: the held-out perplexity of a checkpoint, the same for a world of any size.

With `-n` the command launches itself on that many ranks; without it, it is one rank of whatever
started it (mpirun, srun, nothing).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burst_rt.launch.train.checkpoint import find_manifest
from burst_rt.launch.train.config import DTYPES, LAYOUTS, require_text
from burst_rt.launch.train.relaunch import before_ranks, chosen_options, relaunch
from burst_rt.launch.where import machine_options

if TYPE_CHECKING:
    from burst_rt.launch.train.heldout import Evaluation

__all__ = ["command"]

_EPILOG = """\b
Examples:
  burst-rt eval --checkpoint runs/book                  the run's newest checkpoint, on one rank
  burst-rt eval --checkpoint runs/book -n 4 --eval-sequences 0
                                                        on all of its held-out text, on four ranks
  burst-rt eval --checkpoint runs/book/checkpoints/step-00000060 --seq-len 65536 -n 2
  mpirun -n 4 burst-rt eval --checkpoint runs/book      under an MPI launcher, srun likewise"""


@click.command(
    "eval", epilog=_EPILOG, context_settings={"show_default": True, "max_content_width": 120}
)
@click.option(
    "--checkpoint",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of a run (its newest checkpoint) or of one checkpoint.",
)
@click.option(
    "-n",
    "num_ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Launch on N ranks here. Without it: be one rank.",
)
@click.option(
    "--data",
    type=click.Path(path_type=str, resolve_path=True),
    help="Text file or folder, split as for training. [default: that of training]",
)
@click.option("--seq-len", type=int, help="Bytes of a sequence. [default: as in training]")
@click.option(
    "--eval-sequences",
    type=int,
    help="Held-out sequences to measure on; 0: all. [default: as in training]",
)
@click.option(
    "--context-parallel",
    type=int,
    help="Ranks that share a sequence; must divide the ranks. [default: all]",
)
@click.option("--layout", metavar="NAME", help=f"{', '.join(LAYOUTS)}. [default: as in training]")
@click.option("--dtype", metavar="NAME", help=f"{', '.join(DTYPES)}. [default: as in training]")
@machine_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.pass_context
def command(
    context: click.Context,
    /,
    checkpoint: Path,
    num_ranks: int | None,
    as_json: bool,
    **values: object,
) -> None:
    """Measure the perplexity of a checkpoint on held-out text.

    A checkpoint of any world is measured on any other: the number is the same up to rounding.
    """
    chosen = {name: value for name, value in chosen_options(context).items() if name in values}
    if num_ranks is not None:
        with before_ranks():
            config = find_manifest(checkpoint).config.evaluated(chosen, num_ranks)
            require_text(config.data_path)
        sys.exit(relaunch(context, "burst_rt.launch.train.evaluate", num_ranks))
    # Only ranks need torch; help and the launching process do without.
    from burst_rt.launch.train.heldout import evaluate
    from burst_rt.launch.train.session import job_world

    with job_world() as world:
        evaluation = evaluate(world, checkpoint, chosen)
    if evaluation is None:
        return
    if as_json:
        print(json.dumps(asdict(evaluation)), flush=True)
    else:
        _show(evaluation)


def _show(evaluation: Evaluation) -> None:
    # Under mpirun stdout looks like a terminal even where it is a file, so no colours.
    table = Table(title="held-out text", title_justify="left", show_header=False)
    table.add_row("checkpoint", escape(f"{evaluation.checkpoint} (step {evaluation.step})"))
    note = "" if evaluation.same_text else "; not the text it was trained on"
    table.add_row("text", escape(f"{evaluation.data}{note}"))
    table.add_row(
        "measured",
        f"{evaluation.num_tokens:,} bytes in sequences of {evaluation.seq_len:,}, on "
        f"{evaluation.world_size} ranks",
    )
    table.add_row(
        "loss", f"{evaluation.loss:.6f} nats per byte ({evaluation.bits_per_byte:.4f} bits)"
    )
    table.add_row("perplexity", f"{evaluation.perplexity:.5f}")
    table.add_row("time", f"{evaluation.elapsed_s:.1f} s")
    Console(color_system=None, highlight=False).print(table)


if __name__ == "__main__":
    command(prog_name="burst-rt eval")
