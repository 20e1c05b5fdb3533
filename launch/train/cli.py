"""`burst-rt train`, `eval` and `export`: their options and help, and where each begins."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from burst_rt.errors import ConfigError
from burst_rt.launch.command import (
    SHOWN,
    before_ranks,
    checkpoint_option,
    chosen_options,
    num_ranks_option,
    relaunch,
)
from burst_rt.launch.restarts import ONCE, Restarts
from burst_rt.launch.train.checkpoint import checkpoints_of, find_manifest, resolve
from burst_rt.launch.train.claim import look
from burst_rt.launch.train.config import (
    DTYPES,
    LAYOUTS,
    MACHINE_FILE,
    ProgressMode,
    RunOptions,
    TrainConfig,
    option_name,
    require_transformers,
)
from burst_rt.launch.where import machine_options, restart_options, telemetry_options
from burst_rt.runtime.calibrated import plan_with

__all__ = ["eval_command", "export_command", "train_command"]

_TRAIN_EPILOG = """\b
Examples:
  burst-rt train -n 2                           the default job on 2 ranks
  burst-rt train -n 4 --context-parallel 2 --batch 2
                                                two groups of two ranks, a sequence each
  burst-rt train -n 2 --data book.txt --seq-len 16384 --out runs/book
  burst-rt train -n 2 --out runs/book --resume  continue from its last checkpoint
  burst-rt train -n 2 --model llama --data book.txt --seq-len 16384 --checkpoint-activations
                                                fine-tune a transformers model in a local folder
  mpirun -n 4 burst-rt train --out runs/four    with your own MPI launcher, or with srun

All ranks must see the same files; they compare them. Rank 0 writes DIR/metrics.jsonl (a line per
step), DIR/loss.png and DIR/checkpoints/step-N/ (safetensors and JSON); with --model also DIR/model/
at the end, for transformers. Measure a checkpoint with `burst-rt eval --checkpoint DIR`."""

_EVAL_EPILOG = """\b
Examples:
  burst-rt eval --checkpoint runs/book                  the run's newest checkpoint, on one rank
  burst-rt eval --checkpoint runs/book -n 4 --eval-sequences 0
                                                        on all held-out text, on four ranks
  burst-rt eval --checkpoint runs/book/checkpoints/step-00000060 --seq-len 65536 -n 2
  burst-rt eval --model llama --data c4.txt -n 4 --eval-sequences 0
                                                        a transformers model in a local folder
  mpirun -n 4 burst-rt eval --checkpoint runs/book      with your own MPI launcher, or with srun

--model alone measures that model. With --checkpoint, it is the checkpoint's base model, in case
its folder has moved."""

_EXPORT_EPILOG = """\b
Examples:
  burst-rt export runs/book book-model                  the run's newest checkpoint
  burst-rt eval --model book-model --data book.txt      measures the exported model"""

_F = TypeVar("_F", bound=Callable[..., Any])

# The module that is one rank; its __main__.py says which words it takes.
_RANK = "burst_rt.launch.train"
_PATH = click.Path(path_type=str, resolve_path=True)


def _config_options(command: _F) -> _F:
    """Adds an option for every field of TrainConfig."""
    types = {"data": _PATH, "model": _PATH, "context_parallel": int}
    for entry in reversed(fields(TrainConfig)):
        name = option_name(entry.name)
        add = click.option(
            f"{name}/--no-{name[2:]}" if isinstance(entry.default, bool) else name,
            type=types.get(entry.name, type(entry.default)),
            default=entry.default,
            metavar="NAME" if isinstance(entry.default, str) else None,
            help=entry.metadata["help"],
        )
        command = add(command)
    return command


@click.command("train", epilog=_TRAIN_EPILOG, context_settings=SHOWN)
@num_ranks_option
@_config_options
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder of the run. [default: runs/train-TIME]",
    show_default=False,
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the run in --out from its last checkpoint, which also gives omitted options.",
)
@click.option(
    "--elastic",
    is_flag=True,
    help="Resume the run in --out if it has a checkpoint, else begin it; on fewer ranks with "
    "another --context-parallel. For jobs that are started again (Slurm, torchrun).",
)
@machine_options
@telemetry_options
@restart_options
@click.option(
    "--progress",
    type=click.Choice(["auto", "bar", "lines", "none"]),
    default="auto",
    help="How progress is shown.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only the summary, as one JSON object.")
@click.pass_context
def train_command(
    context: click.Context,
    /,
    num_ranks: int | None,
    out: Path | None,
    resume: bool,
    progress: ProgressMode,
    as_json: bool,
    **values: Any,
) -> None:
    """Train a language model with its sequences split over MPI ranks.

    The model is a small byte-level, Llama-style decoder, or with --model a transformers model.
    Every rank holds a part of each sequence. The losses are those of one process with whole
    sequences. With --restarts a run that fails goes on from its last checkpoint.
    """
    restarts, window_s = values.pop("restarts"), values.pop("restart_window")
    elastic = values.pop("elastic")
    if restarts and (num_ranks is None or out is None):
        raise ConfigError("--restarts needs -n N and --out DIR: the launcher restarts that run.")
    options = RunOptions(
        out=out, resume=resume, elastic=elastic, progress="none" if as_json else progress
    )
    options.validate()
    config = TrainConfig(**values)  # the options above are its fields
    chosen = {name: value for name, value in chosen_options(context).items() if name in values}
    if num_ranks is not None:
        with before_ranks():
            resumed = None
            if out is not None:
                look(out, resume=resume, elastic=elastic)
                if resume or (elastic and checkpoints_of(out)):
                    resumed = find_manifest(out)
            resolve(config, chosen, resumed, num_ranks, elastic=elastic)
        shown = "bar" if sys.stdout.isatty() else "lines"
        extra = ["--progress", shown] if progress == "auto" else []
        if restarts and not elastic:
            extra.append("--elastic")
        again = ONCE if out is None else _restarts(out, restarts, window_s)
        sys.exit(relaunch(context, [_RANK], num_ranks, extra, restarts=again))
    from burst_rt.launch.train.loop import train
    from burst_rt.launch.world import job_world

    if (resume or elastic) and out is not None:
        plan_with(out / MACHINE_FILE)
    with job_world() as world:
        summary = train(world, config, options, chosen)
    if summary is not None and as_json:
        print(json.dumps(summary.figures), flush=True)


def _restarts(out: Path, times: int, window_s: float | None) -> Restarts:
    """Restarts of a run: a newer checkpoint is progress."""

    def progress() -> object:
        return [path.name for path in checkpoints_of(out)[-1:]]

    return Restarts(times=times, window_s=window_s, progress=progress)


@click.command("eval", epilog=_EVAL_EPILOG, context_settings=SHOWN)
@checkpoint_option
@click.option(
    "--model",
    type=_PATH,
    help="Folder of a transformers model (config.json, safetensors, tokenizer).",
)
@num_ranks_option
@click.option(
    "--data",
    type=_PATH,
    help="Text file or folder, split as in training. [default: the checkpoint's, or Python's "
    "own library]",
)
@click.option(
    "--seq-len", type=int, help="Length of a sequence. [default: as in training, or 2048]"
)
@click.option(
    "--eval-sequences",
    type=int,
    help="Held-out sequences to measure on; 0: all whole ones. [default: as in training, or 8]",
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
def eval_command(
    context: click.Context,
    /,
    checkpoint: Path | None,
    num_ranks: int | None,
    as_json: bool,
    **values: object,
) -> None:
    """Measure the perplexity of a checkpoint or a transformers model on held-out text.

    Any number of ranks gives the same perplexity, up to rounding.
    """
    if checkpoint is None and values["model"] is None:
        raise click.UsageError("Missing option '--checkpoint' or '--model'", context)
    chosen = {name: value for name, value in chosen_options(context).items() if name in values}
    if num_ranks is not None:
        with before_ranks():
            trained = TrainConfig(model=str(values["model"]))
            if checkpoint is not None:
                trained = find_manifest(checkpoint).config
            trained.evaluated(chosen, num_ranks)
        sys.exit(relaunch(context, [_RANK, "eval"], num_ranks))
    from burst_rt.launch.train.loop import evaluate
    from burst_rt.launch.world import job_world

    with job_world() as world:
        summary = evaluate(world, checkpoint, chosen)
    if summary is not None and as_json:
        print(json.dumps(summary.figures), flush=True)
    elif summary is not None:
        summary.show()


@click.command("export", epilog=_EXPORT_EPILOG, context_settings=SHOWN)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def export_command(run: Path, folder: Path) -> None:
    """Write the model of RUN as FOLDER, which transformers loads.

    RUN is the folder of a run of `burst-rt train` (its newest checkpoint) or of one checkpoint. The
    byte-level model becomes a Llama whose tokens are bytes. FOLDER must not exist yet.
    """
    with before_ranks():
        find_manifest(run)
        require_transformers("burst-rt export")
        from burst_rt.launch.train.export import export

        export(run, folder)
    click.echo(f"{folder}: AutoModelForCausalLM and AutoTokenizer of transformers load it")
