"""`burst-rt bench`: the project's benchmarks. Each prints tables and, with --out, writes JSON with
the machine's description.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click

from burst_rt.errors import ConfigError, InputError
from burst_rt.kernels.triton.configs import Loads
from burst_rt.launch.where import machine_options

__all__ = ["command"]

_HEAD_DIMS = click.option(
    "--head-dim",
    "head_dims",
    multiple=True,
    type=click.IntRange(16, 256),
    default=(64, 128),
    show_default=True,
    help="Widths of a head; may be repeated.",
)
_OUT = click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add the results to this JSON file.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Benchmarks of this machine: interleaved comparisons, medians, ratios within one run.
    BENCHMARKS.md holds results.
    """


@command.command()
@_OUT
def engine(out: Path | None) -> None:
    """Cost of the scheduler: building, verifying and running graphs."""
    from burst_rt.launch.bench.engine import main

    main(out)


@command.command()
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["kernels", "ring", "staged"]),
    help="Only these; default: the first two.",
)
@click.option(
    "--repeats",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each side; medians are reported.",
)
@click.option(
    "--max-tokens",
    default=65536,
    show_default=True,
    type=click.IntRange(1),
    help="Leave out longer sequences.",
)
@_OUT
def gpu(parts: tuple[str, ...], repeats: int, max_tokens: int, out: Path | None) -> None:
    """On one NVIDIA GPU: tile kernels against cuDNN and FlashAttention, four ranks against one
    kernel.

    `--part staged` is for ranks of a job: burst-rt run -n 2 -m burst_rt.launch.main bench gpu
    --part staged
    """
    from burst_rt.launch.bench.gpu import main

    main(parts or ("kernels", "ring"), repeats, max_tokens, out)


@command.command()
@_HEAD_DIMS
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Of the inputs.",
)
@click.option(
    "--repeats",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each configuration; medians are compared.",
)
@click.option(
    "--limit-s", default=600.0, show_default=True, help="Begin nothing new after so many seconds."
)
@_OUT
def tune(
    head_dims: tuple[int, ...], dtype: str, repeats: int, limit_s: float, out: Path | None
) -> None:
    """Find the Triton kernels' fastest block sizes on this GPU; later jobs on this machine use
    them.
    """
    from burst_rt.launch.bench.tune import main

    main(head_dims, dtype, repeats, limit_s, out)


@command.command()
@click.option(
    "-n",
    "--num-ranks",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="Ranks of the job.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["step", "memory"]),
    help="Only these parts; may be repeated. Default: both.",
)
@click.option(
    "--repeats",
    default=100,
    show_default=True,
    type=click.IntRange(1),
    help="Turns of each side, of two steps.",
)
@click.option(
    "--tokens",
    default=4096,
    show_default=True,
    type=click.IntRange(1),
    help="Of a step, over all ranks.",
)
@click.option(
    "--minutes",
    default=60,
    show_default=True,
    type=click.IntRange(1),
    help="How long 64 ranks are watched, for the hub's memory.",
)
@_OUT
def telemetry(
    num_ranks: int,
    parts: tuple[str, ...],
    repeats: int,
    tokens: int,
    minutes: int,
    out: Path | None,
) -> None:
    """What telemetry costs: a step with and without it, and the hub's memory for 64 ranks over an
    hour.
    """
    from burst_rt.launch.run import launch

    code = 0
    if "step" in (parts or ("step",)):
        argv = [
            "-m",
            "burst_rt.launch.bench.telemetry",
            "--repeats",
            str(repeats),
            "--tokens",
            str(tokens),
        ]
        code = launch(
            [*argv, *(["--out", str(out.absolute())] if out else [])],
            num_ranks=num_ranks,
            threads=1,
        )
    if "memory" in (parts or ("memory",)):
        command = [
            sys.executable,
            "-P",
            "-m",
            "burst_rt.launch.bench.hub",
            "--seconds",
            str(60 * minutes),
        ]
        code = (
            code
            or subprocess.run(
                [*command, *(["--out", str(out.absolute())] if out else [])], check=False
            ).returncode
        )
    sys.exit(code)


_TOKENS = click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(64),
    help="Lengths of the whole sequence; may be repeated.",
)
_WORLDS = click.option(
    "-n",
    "--num-ranks",
    "worlds",
    multiple=True,
    type=click.IntRange(1),
    help="Ranks; may be repeated.",
)
_REPEATS = click.option(
    "--repeats",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each side; medians are reported.",
)


@command.command()
@_WORLDS
@_TOKENS
@click.option("--heads", default=2, show_default=True, type=click.IntRange(1), help="Query heads.")
@machine_options
@_REPEATS
@_OUT
def predict(
    worlds: tuple[int, ...], tokens: tuple[int, ...], heads: int, repeats: int, out: Path | None
) -> None:
    """Forecast against measured: forward and backward of every strategy, by the file of `burst-rt
    calibrate`.

    Default: 2 ranks, 4K to 32K tokens. With more ranks than cores (-n 4), what shares a core is
    forecast too.
    """
    for num_ranks in worlds or (2,):
        _strategies(
            "predict",
            num_ranks,
            tokens or (4096, 8192, 16384, 32768),
            ["--heads", str(heads)],
            repeats,
            out,
        )


@command.command()
@_WORLDS
@_TOKENS
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1), help="Query heads.")
@click.option(
    "--group",
    "groups",
    multiple=True,
    type=click.IntRange(1),
    help="Query heads a key/value head. [default: 1, 4]",
)
@machine_options
@_REPEATS
@_OUT
def strategies(
    worlds: tuple[int, ...],
    tokens: tuple[int, ...],
    heads: int,
    groups: tuple[int, ...],
    repeats: int,
    out: Path | None,
) -> None:
    """All strategies against each other, full and causal, and how the planner's choice stands among
    them.

    Default: 2 and 4 ranks, 2K to 8K tokens.
    """
    for group in groups:
        if heads % group:
            raise InputError(
                f"bench strategies: --group must divide --heads, got {group} and {heads}"
            )
    shape = ["--heads", str(heads), "--groups", *(str(group) for group in groups or (1, 4))]
    for num_ranks in worlds or (2, 4):
        _strategies("compare", num_ranks, tokens or (2048, 4096, 8192), shape, repeats, out)


@command.command()
@_WORLDS
@click.option(
    "--tokens",
    default=8192,
    show_default=True,
    type=click.IntRange(64),
    help="Of the sequence; weak: half a rank.",
)
@click.option("--heads", default=4, show_default=True, type=click.IntRange(1), help="Query heads.")
@machine_options
@_REPEATS
@_OUT
def scaling(
    worlds: tuple[int, ...], tokens: int, heads: int, repeats: int, out: Path | None
) -> None:
    """One sequence over more and more ranks (strong), and sequences that grow with them (weak);
    forward + backward, full and causal.

    Work grows with the square of the sequence: in the weak series a rank's work grows with the
    ranks, and the efficiency allows for it.
    """
    from burst_rt.launch.bench.scaling import main

    main(worlds or (1, 2, 4), tokens, heads, repeats, out)


@command.command()
@_OUT
def paper(out: Path | None) -> None:
    """The BurstAttention paper's figures, and what the simulator makes of them (arXiv 2403.09347).
    Measures nothing.
    """
    from burst_rt.launch.plan.paper import main

    main(out)


def _strategies(
    part: str,
    num_ranks: int,
    tokens: tuple[int, ...],
    shape: list[str],
    repeats: int,
    out: Path | None,
) -> None:
    from burst_rt.launch.run import launch

    options = [*shape, "--repeats", str(repeats)] + (["--out", str(out.absolute())] if out else [])
    lengths = ["--tokens", *(str(n) for n in tokens)]
    from burst_rt.job.launched import DEVICE_VARIABLE
    from burst_rt.runtime.calibrated import HARDWARE_VARIABLE, calibrated_path, find_hardware
    from burst_rt.runtime.joining import resolve_device

    device = resolve_device(os.environ.get(DEVICE_VARIABLE, "auto")).type
    if find_hardware(device) is None:
        # Here rather than on the ranks, once they have measured.
        raise ConfigError(
            f"no machine file: {calibrated_path(device)} is not there, or {HARDWARE_VARIABLE} says "
            "none; run `burst-rt calibrate` first, "
            f"or set {HARDWARE_VARIABLE} to a file"
        )
    code = launch(
        ["-m", "burst_rt.launch.bench.strategies", part, *lengths, *options], num_ranks=num_ranks
    )
    if code:
        sys.exit(code)


@command.command("all")
@click.pass_context
@_OUT
def every(ctx: click.Context, out: Path | None) -> None:
    """All of them that need no GPU, with their defaults (an hour or two)."""
    for each in (engine, attention, layer, strategies, predict, scaling, paper, aot):
        ctx.invoke(each, out=out)


@command.command()
@click.option(
    "--arch",
    "arches",
    multiple=True,
    type=click.Choice(["80", "86", "90", "100"]),
    help="Only these chips; may be repeated.",
)
@_HEAD_DIMS
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Of the inputs.",
)
@click.option(
    "--loads",
    type=click.Choice(["pointers", "descriptors"]),
    default="pointers",
    show_default=True,
    help="How; the latter from Hopper on.",
)
@_OUT
def aot(
    arches: tuple[str, ...], head_dims: tuple[int, ...], dtype: str, loads: Loads, out: Path | None
) -> None:
    """The Triton kernels compiled for chips that need not be there: registers, spills, shared
    memory, tensor-core instructions.
    """
    from burst_rt.launch.bench.aot import main

    main([int(arch) for arch in arches] or [80, 90, 100], head_dims, dtype, loads, out)


@command.command()
@click.option(
    "-n",
    "--num-ranks",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="Ranks, one thread each; compared with one process of as many threads.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["speed", "bf16", "exposed", "overhead", "memory", "outside", "error"]),
    help="Only these parts; may be repeated. Default: all.",
)
@machine_options
@click.option(
    "--repeats",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each side; medians are reported.",
)
@click.option(
    "--max-tokens",
    default=65536,
    show_default=True,
    type=click.IntRange(1),
    help="Leave out longer sequences.",
)
@_OUT
def attention(
    num_ranks: int, parts: tuple[str, ...], repeats: int, max_tokens: int, out: Path | None
) -> None:
    """Attention over MPI ranks against torch's fused attention in one process: speed, exposed
    communication, overhead, memory, accuracy.
    """
    from burst_rt.launch.run import launch

    options = ["--repeats", str(repeats), "--max-tokens", str(max_tokens)] + (
        ["--out", str(out.absolute())] if out else []
    )
    argv = [
        "-m",
        "burst_rt.launch.bench.attention",
        *options,
        *(word for part in parts for word in ("--part", part)),
    ]
    if code := launch(argv, num_ranks=num_ranks, threads=1):
        sys.exit(code)


@command.command()
@click.option(
    "-n",
    "--num-ranks",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="Ranks, one thread each.",
)
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1024, 2048, 4096),
    show_default=True,
    help="May be repeated.",
)
@click.option(
    "--dim",
    default=512,
    show_default=True,
    type=click.IntRange(1),
    help="Width of the residual stream.",
)
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1), help="Query heads.")
@click.option(
    "--kv-heads", default=8, show_default=True, type=click.IntRange(1), help="Key and value heads."
)
@click.option(
    "--head-dim", default=64, show_default=True, type=click.IntRange(1), help="Width of a head."
)
@click.option(
    "--ffn-dim",
    default=1408,
    show_default=True,
    type=click.IntRange(1),
    help="Width of the feed-forward.",
)
@machine_options
@click.option(
    "--repeats",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each strategy; medians are reported.",
)
@_OUT
def layer(
    num_ranks: int, tokens: tuple[int, ...], repeats: int, out: Path | None, **sizes: int
) -> None:
    """One transformer layer over MPI ranks: a ring, all-to-all, and tensor parallelism without and
    with a split sequence.
    """
    from burst_rt.baselines.layers import LayerShape
    from burst_rt.launch.run import launch

    names = {"heads": "num_heads", "kv_heads": "num_kv_heads"}
    shape = LayerShape(**{names.get(name, name): size for name, size in sizes.items()})
    options = [
        "--shape",
        json.dumps(vars(shape)),
        "--repeats",
        str(repeats),
        "--tokens",
        *(str(length) for length in tokens),
    ]
    options += ["--out", str(out.absolute())] if out else []
    if code := launch(
        ["-m", "burst_rt.launch.bench.layer", *options], num_ranks=num_ranks, threads=1
    ):
        sys.exit(code)
