"""`burst-rt bench`: the project's benchmarks.

Each benchmark prints tables and, with --out, writes JSON with a description of the machine.
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
    help="Width of a head; may be repeated.",
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
    type=click.Choice(["kernels", "masks", "ring", "staged"]),
    help="Only this part; may be repeated. [default: all but staged]",
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
    help="Leave out sequences of more tokens.",
)
@_OUT
def gpu(parts: tuple[str, ...], repeats: int, max_tokens: int, out: Path | None) -> None:
    """On one NVIDIA GPU: tile kernels against cuDNN and FlashAttention, whole calls under masks,
    four ranks against one kernel.

    `--part staged` is for ranks of a job: burst-rt run -n 2 -m burst_rt.launch.main bench gpu
    --part staged
    """
    from burst_rt.launch.bench.gpu import main

    main(parts or ("kernels", "masks", "ring"), repeats, max_tokens, out)


@command.command()
@_HEAD_DIMS
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Type of the inputs.",
)
@click.option(
    "--repeats",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each configuration; medians are compared.",
)
@click.option(
    "--limit-s",
    default=600.0,
    show_default=True,
    help="Start no measurement after so many seconds.",
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
    help="Only this part; may be repeated. [default: both]",
)
@click.option(
    "--repeats",
    default=100,
    show_default=True,
    type=click.IntRange(1),
    help="Turns with telemetry and turns without, two steps each.",
)
@click.option(
    "--tokens",
    default=4096,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of a step, all ranks together.",
)
@click.option(
    "--minutes",
    default=60,
    show_default=True,
    type=click.IntRange(1),
    help="How long the hub watches 64 ranks while its memory is measured.",
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
    """What telemetry costs: the time of a step with and without telemetry, and the hub's memory
    when it watches 64 ranks for an hour.
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
    help="Tokens of the whole sequence; may be repeated.",
)
_WORLDS = click.option(
    "-n",
    "--num-ranks",
    "worlds",
    multiple=True,
    type=click.IntRange(1),
    help="Number of ranks; may be repeated.",
)
_REPEATS = click.option(
    "--repeats",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each side; medians are reported.",
)


@command.command()
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["measured", "tables", "simulated"]),
    help="Only this part; may be repeated. [default: all]",
)
@_REPEATS
@_OUT
@click.pass_context
def masks(ctx: click.Context, parts: tuple[str, ...], repeats: int, out: Path | None) -> None:
    """Masks: measured on 2 ranks of this machine, against causal and against torch with a dense
    mask; what planning takes for masks never seen before; and simulated on 8 to 64 H100, packed
    documents in several layouts and ways.
    """
    from burst_rt.launch.bench import masks, tables

    if "measured" in (parts or ("measured",)):
        ctx.invoke(attention, parts=("masks",), repeats=repeats, out=out)
    if "tables" in (parts or ("tables",)):
        tables.main(repeats, out)
    if "simulated" in (parts or ("simulated",)):
        masks.main(out)


@command.command()
@_WORLDS
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["first-token", "chunks", "token", "question", "simulated"]),
    help="Only this part; may be repeated. [default: all]",
)
@click.option(
    "--pairs",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each side, in turn; medians are reported. A token has 20 times as many.",
)
@click.option(
    "--max-tokens",
    default=131072,
    show_default=True,
    type=click.IntRange(64),
    help="Leave out longer prompts and caches.",
)
@click.option(
    "--chunk",
    default=2048,
    show_default=True,
    type=click.IntRange(17),
    help="Tokens of a prompt's chunk.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Threads of torch's process. The ranks share as many, at least one each. "
    "[default: the number of ranks]",
)
@_OUT
def serve(
    worlds: tuple[int, ...],
    parts: tuple[str, ...],
    pairs: int,
    max_tokens: int,
    chunk: int,
    threads: int | None,
    out: Path | None,
) -> None:
    """Serving over MPI ranks: time to first token against torch in one process, prompts in chunks,
    time of a token by what is cached, a question after a document; and, from simulation, first
    tokens of large models next to published figures.

    Default: 2 ranks.
    """
    from burst_rt.launch.plan import prefill
    from burst_rt.launch.run import launch

    measured = [part for part in parts if part != "simulated"]
    if measured or not parts:
        argv = ["-m", "burst_rt.launch.bench.serve", "--pairs", str(pairs)]
        argv += ["--max-tokens", str(max_tokens), "--chunk", str(chunk)]
        argv += [word for part in measured for word in ("--part", part)]
        argv += ["--out", str(out.absolute())] if out else []
        for num_ranks in worlds or (2,):
            alone = threads or num_ranks
            of_torch = [*argv, "--threads", str(alone)]
            if code := launch(of_torch, num_ranks=num_ranks, threads=max(1, alone // num_ranks)):
                sys.exit(code)
    if not parts or "simulated" in parts:
        prefill.main(out)


@command.command()
@_WORLDS
@_TOKENS
@_REPEATS
@_OUT
def transports(
    worlds: tuple[int, ...], tokens: tuple[int, ...], repeats: int, out: Path | None
) -> None:
    """MPI, a group of torch.distributed and threads, side by side: calls, messages, agreements.

    Default: 2 ranks, 2K to 16K tokens.
    """
    from burst_rt.launch.run import launch

    lengths = [str(each) for each in tokens or (2048, 4096, 8192, 16384)]
    argv = ["-m", "burst_rt.launch.bench.transports", "--repeats", str(repeats)]
    argv += ["--tokens", *lengths, *(["--out", str(out.absolute())] if out else [])]
    for num_ranks in worlds or (2,):
        code = launch(argv, num_ranks=num_ranks, threads=1)
        if code:
            sys.exit(code)


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
    """Forecasts against measurements: forward and backward of every strategy. The forecasts use
    the machine file that `burst-rt calibrate` wrote.

    Default: 2 ranks, 4K to 32K tokens. With more ranks than cores (say -n 4), the forecast also
    counts that ranks share cores.
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
    help="Query heads per key/value head; may be repeated. [default: 1, 4]",
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
    """All strategies against each other, full and causal, and how close the planner's choice comes
    to the fastest.

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
    help="Tokens of the sequence. In the weak series, half as many for each rank.",
)
@click.option("--heads", default=4, show_default=True, type=click.IntRange(1), help="Query heads.")
@machine_options
@_REPEATS
@_OUT
def scaling(
    worlds: tuple[int, ...], tokens: int, heads: int, repeats: int, out: Path | None
) -> None:
    """One sequence over more and more ranks (strong scaling), and a sequence that grows with the
    number of ranks (weak scaling); forward + backward, full and causal.

    Work grows with the square of the sequence. So in the weak series the work of a rank grows with
    the number of ranks, and the efficiency allows for that.
    """
    from burst_rt.launch.bench.scaling import main

    main(worlds or (1, 2, 4), tokens, heads, repeats, out)


@command.command()
@_OUT
def paper(out: Path | None) -> None:
    """The BurstAttention paper's figures (arXiv 2403.09347) next to the simulator's forecasts.
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
    from burst_rt.runtime.facts import resolve_device

    device = resolve_device(os.environ.get(DEVICE_VARIABLE, "auto")).type
    if find_hardware(device) is None:
        # Raised here, because the ranks would raise only after they have measured.
        raise ConfigError(
            f"no machine file: {calibrated_path(device)} does not exist, or {HARDWARE_VARIABLE} is "
            f"none; run `burst-rt calibrate` first, or set {HARDWARE_VARIABLE} to a machine file"
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
    """Run all benchmarks that need no GPU, with their defaults (an hour or two)."""
    for each in (engine, attention, layer, strategies, predict, scaling, serve, paper, aot):
        ctx.invoke(each, out=out)
    ctx.invoke(masks, parts=("tables", "simulated"), out=out)


@command.command()
@click.option(
    "--arch",
    "arches",
    multiple=True,
    type=click.Choice(["80", "86", "90", "100"]),
    help="Compute capability of the chip, without the dot; may be repeated. [default: 80, 90, 100]",
)
@_HEAD_DIMS
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Type of the inputs.",
)
@click.option(
    "--loads",
    type=click.Choice(["pointers", "descriptors"]),
    help="How kernels load blocks; descriptors need Hopper or newer. [default: as in calls]",
)
@click.option(
    "--v-head-dim",
    type=click.IntRange(16, 256),
    help="Head size of v, where it has its own.",
)
@click.option(
    "--scores",
    type=click.Choice(["softcap", "alibi_slopes", "sinks"]),
    multiple=True,
    help="Options of the scores apart from scaling; may be given several times.",
)
@click.option(
    "--spans",
    type=click.Choice(["1", "2", "4", "many"]),
    help="For masks with so many spans of keys a query, and lines of work with several runs of "
    "blocks. [default: 1 span, and one run of a kind]",
)
@_OUT
def aot(
    arches: tuple[str, ...],
    head_dims: tuple[int, ...],
    dtype: str,
    loads: Loads | None,
    v_head_dim: int | None,
    scores: tuple[str, ...],
    spans: str | None,
    out: Path | None,
) -> None:
    """Compile the Triton kernels for chips that this machine need not have: registers, spills,
    shared memory, tensor-core instructions.
    """
    from burst_rt.kernels.triton.configs import COMPRESSED
    from burst_rt.launch.bench.aot import main

    main(
        [int(arch) for arch in arches] or [80, 90, 100],
        head_dims,
        dtype,
        loads,
        out,
        v_head_dim=v_head_dim or 0,
        scores=scores,
        width=COMPRESSED if spans == "many" else int(spans or 1),
        single=spans is None,
    )


@command.command()
@click.option(
    "-n",
    "--num-ranks",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="Ranks, one thread each. The other side is one process with as many threads.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(
        ["speed", "bf16", "masks", "exposed", "overhead", "memory", "outside", "error"]
    ),
    help="Only this part; may be repeated. [default: all]",
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
    help="Leave out sequences of more tokens.",
)
@_OUT
def attention(
    num_ranks: int, parts: tuple[str, ...], repeats: int, max_tokens: int, out: Path | None
) -> None:
    """Attention over MPI ranks against torch's fused attention in one process: speed, masks,
    exposed communication, overhead, memory, accuracy.
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
    help="Tokens of the whole sequence; may be repeated.",
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
