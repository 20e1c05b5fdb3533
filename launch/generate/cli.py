"""`burst-rt generate`: its options, and how it starts itself on ranks.

As `train` and `eval` do: with `-n` what can be seen without ranks is checked first, and only ranks
need torch.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import click

from burst_rt.launch.command import (
    SHOWN,
    before_ranks,
    checkpoint_option,
    chosen_options,
    num_ranks_option,
    relaunch,
)
from burst_rt.launch.generate.options import GenerateOptions
from burst_rt.launch.train.checkpoint import find_manifest
from burst_rt.launch.train.config import DTYPES
from burst_rt.launch.where import machine_options, telemetry_options

__all__ = ["command"]

_EPILOG = """\b
Examples:
  burst-rt generate --checkpoint runs/book --prompt "def main(" -n 2
                                               the run's newest checkpoint, on two ranks
  burst-rt generate --model llama --prompt-file question.txt -n 4 --max-new-tokens 50
                                               a transformers model in a local folder
  burst-rt generate --checkpoint runs/book --prompt "import " --temperature 0
                                               the most likely text, on one rank
  burst-rt generate --model llama --prompt "Who was Noether?" --chat -n 2
                                               the answer of a model that was trained for chats
  burst-rt generate --model llama --requests requests.jsonl -n 2 > answers.jsonl
                                               many requests, with OpenAI's lines for batches
  mpirun -n 4 --output :raw burst-rt generate --checkpoint runs/book --prompt "def "
                                               with your own MPI launcher, or with srun (:raw is for
                                               Open MPI 5, which else holds back part lines)

Prompt and text go to standard output as they come, figures to standard error. --dashboard shows
them in a browser. With --checkpoint, --model is the base model of the checkpoint, in case its
folder has moved."""


class _Finite(click.FloatRange):
    """A range that has no place for nan, which is neither below nor above a number."""

    def convert(
        self, value: float | str, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)  # type: ignore[arg-type]  # also text
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


@click.command("generate", epilog=_EPILOG, context_settings=SHOWN)
@checkpoint_option
@click.option(
    "--model",
    type=click.Path(path_type=Path, resolve_path=True),
    help="Folder of a transformers model (config.json, safetensors, tokenizer).",
)
@click.option("--prompt", metavar="TEXT", help="Beginning of the text.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="The same, from a file.")
@click.option(
    "--chat",
    is_flag=True,
    help="The prompt is a user's message, written as the model's chat template says.",
)
@click.option(
    "--requests",
    type=click.Path(path_type=Path),
    help="JSON lines of custom_id, url and body, as OpenAI's batch files have them; answers go to "
    "standard output in the same form. A body says how it samples.",
)
@click.option("--rows", type=click.IntRange(min=1), default=8, help="Requests written at a time.")
@num_ranks_option
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=200,
    help="Most new tokens; the model may end the text earlier.",
)
@click.option(
    "--temperature",
    type=_Finite(min=0),
    default=0.8,
    help="Sampling temperature; 0: always the most likely token.",
)
@click.option(
    "--top-p",
    type=_Finite(min=0, max=1, min_open=True),
    default=0.95,
    help="Draw among the most likely tokens that together have this probability.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Seed of the sampling.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="float32", help="Type of weights and cache."
)
@machine_options
@telemetry_options
@click.pass_context
def command(context: click.Context, /, num_ranks: int | None, **values: object) -> None:
    """Generate text with a trained model, with the KV cache over MPI ranks.

    Each rank runs a part of the prompt through the model and keeps a part of the cache. The same
    seed gives the same text on any number of ranks, up to rounding.
    """
    options = GenerateOptions(**values)  # type: ignore[arg-type]  # the options above are its fields
    if options.checkpoint is None and options.model is None:
        raise click.UsageError("Missing option '--checkpoint' or '--model'", context)
    sources = (options.prompt, options.prompt_file, options.requests)
    if sum(source is not None for source in sources) != 1:
        raise click.UsageError("Give one of '--prompt', '--prompt-file' and '--requests'", context)
    unread = {"chat", "temperature", "top_p", "seed"} & chosen_options(context).keys()
    if options.requests is not None and unread:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(unread))
        raise click.UsageError(
            f"A request of '--requests' says it itself: leave out {names}", context
        )
    if options.requests is None and "rows" in chosen_options(context):
        raise click.UsageError("'--rows' is for '--requests'; leave it out", context)
    if num_ranks is not None:
        with before_ranks():
            run = options.checkpoint
            options.source(find_manifest(run).config if run is not None else None)
            for path in (options.prompt_file, options.requests):
                if path is not None:
                    path.open("rb").close()
        rank = ["burst_rt.launch.generate"]
        sys.exit(relaunch(context, rank, num_ranks, as_it_comes=True))
    from burst_rt.launch.world import job_world

    with job_world() as world:
        if options.requests is not None:
            from burst_rt.launch.serve.batch import answer_file

            answer_file(world, options)
        else:
            from burst_rt.launch.generate.loop import generate

            generate(world, options)
