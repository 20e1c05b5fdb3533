"""`burst-rt train`: the options of a training run. For: people and job scripts; the run itself is
loop.py.

With `-n` the command launches itself on that many ranks; without it, it is one rank of whatever
started it (mpirun, srun, nothing).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

from burst_rt.launch.train.checkpoint import find_manifest
from burst_rt.launch.train.claim import look
from burst_rt.launch.train.config import (
    DTYPES,
    LAYOUTS,
    STRATEGIES,
    ProgressMode,
    RunOptions,
    TrainConfig,
    require_text,
)
from burst_rt.launch.train.relaunch import before_ranks, chosen_options, relaunch
from burst_rt.launch.where import machine_options, telemetry_options

__all__ = ["command"]

_EPILOG = """\b
Examples:
  burst-rt train -n 2                           the default job on 2 ranks
  burst-rt train -n 4 --context-parallel 2 --batch 2
                                                two groups of two ranks, a sequence each
  burst-rt train -n 2 --data book.txt --seq-len 16384 --out runs/book
  burst-rt train -n 2 --out runs/book --resume  continue it where its last checkpoint is
  mpirun -n 4 burst-rt train --out runs/four    under an MPI launcher of your own; srun likewise

Ranks see the same files (their content is compared). Rank 0 writes DIR/metrics.jsonl (a line a
step), DIR/loss.png and DIR/checkpoints/step-N/ (safetensors and JSON). Measure a checkpoint with
`burst-rt eval --checkpoint DIR`."""

_D = TrainConfig()


@click.command(
    "train", epilog=_EPILOG, context_settings={"show_default": True, "max_content_width": 120}
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
    help="Text file or folder of them. [default: Python's own library]",
)
@click.option(
    "--seq-len",
    type=int,
    default=_D.seq_len,
    help="Bytes of a sequence, split over the ranks of a context group.",
)
@click.option("--steps", type=int, default=_D.steps, help="Optimizer steps in all.")
@click.option(
    "--batch", type=int, default=_D.batch, help="Sequences of a step, over all ranks together."
)
@click.option("--layers", type=int, default=_D.layers, help="Layers of the model.")
@click.option("--dim", type=int, default=_D.dim, help="Width of the model.")
@click.option("--heads", type=int, default=_D.heads, help="Attention heads; must divide --dim.")
@click.option(
    "--kv-heads", type=int, default=_D.kv_heads, help="Key/value heads; must divide --heads."
)
@click.option(
    "--lr", type=float, default=_D.lr, help="Peak learning rate (AdamW); ends at a tenth of it."
)
@click.option(
    "--warmup", type=int, default=_D.warmup, help="Steps of linear warm-up before the cosine."
)
@click.option(
    "--weight-decay", type=float, default=_D.weight_decay, help="Weight decay of matrices."
)
@click.option("--clip", type=float, default=_D.clip, help="Largest global norm of the gradients.")
@click.option(
    "--seed", type=int, default=_D.seed, help="Seed of weights and of the choice of sequences."
)
@click.option(
    "--context-parallel",
    type=int,
    help="Ranks that share a sequence; must divide the ranks. [default: all]",
)
@click.option(
    "--layout",
    default=_D.layout,
    metavar="NAME",
    help=f"How a sequence is split: {', '.join(LAYOUTS)}.",
)
@click.option(
    "--strategy",
    default=_D.strategy,
    metavar="NAME",
    help=(
        f"How attention is spread over ranks: {', '.join(STRATEGIES)}. hybrid:N and two-level:N: "
        "in groups of N ranks."
    ),
)
@click.option(
    "--dtype",
    default=_D.dtype,
    metavar="NAME",
    help=f"Of products and attention: {', '.join(DTYPES)}. Weights are float32.",
)
@click.option(
    "--eval-every",
    type=int,
    default=_D.eval_every,
    help="Steps between measurements on held-out text; 0: at the end only.",
)
@click.option(
    "--eval-sequences",
    type=int,
    default=_D.eval_sequences,
    help="Held-out sequences of a measurement; 0: all.",
)
@click.option(
    "--checkpoint-every",
    type=int,
    default=_D.checkpoint_every,
    help="Steps between checkpoints; 0: at the end only.",
)
@click.option(
    "--keep-checkpoints", type=int, default=_D.keep_checkpoints, help="Checkpoints to keep."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder of the run. [default: runs/train-TIME]",
    show_default=False,
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run in --out from its last checkpoint; options left out are taken from it.",
)
@machine_options
@telemetry_options
@click.option(
    "--progress",
    type=click.Choice(["auto", "bar", "lines", "none"]),
    default="auto",
    help="How progress is shown.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print nothing but the summary, as one JSON object."
)
@click.pass_context
def command(
    context: click.Context,
    /,
    num_ranks: int | None,
    out: Path | None,
    resume: bool,
    progress: ProgressMode,
    as_json: bool,
    **values: object,
) -> None:
    """Train a small byte-level language model, its sequences split over MPI ranks.

    A Llama-style decoder whose attention is burst_attention: every rank holds a part of each
    sequence, and the losses are those of one process that holds all of it.
    """
    options = RunOptions(out=out, resume=resume, progress="none" if as_json else progress)
    options.validate()
    config = TrainConfig(**values)  # type: ignore[arg-type]  # the options above are its fields
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    chosen = {name: value for name, value in chosen_options(context).items() if name in fields}
    if num_ranks is not None:
        with before_ranks():
            if out is not None:
                look(out, resume=resume)
            begun = find_manifest(out).resumed(chosen) if resume and out is not None else config
            begun.validate(num_ranks)
            require_text(begun.data_path)
        extra = (
            [] if progress != "auto" else ["--progress", "bar" if sys.stdout.isatty() else "lines"]
        )
        sys.exit(relaunch(context, "burst_rt.launch.train", num_ranks, extra))
    # Only ranks need torch; help and the launching process do without.
    from burst_rt.launch.train.loop import train
    from burst_rt.launch.train.session import job_world

    with job_world() as world:
        summary = train(world, config, options, chosen)
    if summary is not None and as_json:
        print(json.dumps(summary.to_json()), flush=True)
