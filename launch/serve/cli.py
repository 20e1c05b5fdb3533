"""`burst-rt serve`: its options, and how it starts itself on ranks, as `burst-rt generate` does."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from burst_rt.launch.command import SHOWN, before_ranks, num_ranks_option, relaunch
from burst_rt.launch.serve.options import ServeOptions
from burst_rt.launch.train.config import DTYPES
from burst_rt.launch.where import machine_options, telemetry_options

__all__ = ["command"]

_EPILOG = """\b
Examples:
  burst-rt serve --model llama -n 4            four ranks, for clients at http://127.0.0.1:8000/v1
  burst-rt serve --model llama -n 2 --capacity 1000000 --rows 2 --api-key-file keys.txt
                                               two requests at a time, of up to a million tokens
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "hello"}]}'

GET /health and /metrics (Prometheus) say how it goes. Ctrl-C ends the server and all requests."""


@click.command("serve", epilog=_EPILOG, context_settings=SHOWN)
@click.option(
    "--model",
    type=click.Path(path_type=Path, resolve_path=True),
    required=True,
    help="Folder of a transformers model (config.json, safetensors, tokenizer).",
)
@click.option("--served-name", metavar="NAME", help="The model's name for clients. [its folder's]")
@num_ranks_option
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port; 0: any free one.")
@click.option("--rows", type=click.IntRange(min=1), default=8, help="Requests written at a time.")
@click.option(
    "--capacity",
    type=click.IntRange(min=2),
    default=8192,
    help="Most tokens of a request, prompt and answer; the cache has room for rows + 1 of them.",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    default=2048,
    help="Tokens of a prompt that are read between two tokens of the other requests.",
)
@click.option("--queue", type=click.IntRange(min=0), default=64, help="Most requests that wait.")
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=3600.0,
    metavar="S",
    help="Seconds after which a request is given up.",
)
@click.option(
    "--connections", type=click.IntRange(min=1), default=256, help="Most connections at a time."
)
@click.option("--body-mib", type=click.IntRange(min=1), default=64, help="Largest request, in MiB.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, resolve_path=True),
    help="File with a key on each line; a client needs one of them. Without it none is asked.",
)
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="float32", help="Type of weights and cache."
)
@machine_options
@telemetry_options
@click.pass_context
def command(context: click.Context, /, num_ranks: int | None, **values: object) -> None:
    """Serve a model over ranks to clients of OpenAI's chat and completions protocol.

    Ranks share each prompt and the cache. Requests are written together, and prompts are read in
    chunks between their tokens. A prompt that begins like one before is read from there on.
    """
    options = ServeOptions(**values)  # type: ignore[arg-type]  # the options above are its fields
    if num_ranks is not None:
        with before_ranks():
            options.check()
        sys.exit(relaunch(context, ["burst_rt.launch.serve"], num_ranks, as_it_comes=True))
    from burst_rt.launch.serve.server import serve
    from burst_rt.launch.world import job_world

    with job_world() as world:
        world.together(options.check)
        serve(world, options)
