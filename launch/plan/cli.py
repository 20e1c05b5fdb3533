"""`burst-rt simulate`, `plan` and `calibrate`: their options and what they print."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from burst_rt.baselines.layers import TENSOR_PARALLEL
from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.plan.compare import COMPARED, Answer, Question, best_worlds, compare
from burst_rt.launch.plan.model import (
    ACTIVATIONS,
    ATTENTION,
    Activations,
    Model,
    ModelForecast,
    Phase,
    forecast_model,
    parse_model,
    parse_strategy,
    published_mask,
)
from burst_rt.launch.plan.words import MASK_HELP, fitting_mask, parse_tokens
from burst_rt.launch.where import machine_options
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.suited import LAYOUTS
from burst_rt.runtime.calibrated import calibrated_path
from burst_rt.scheduler.simulator import Hardware

__all__ = ["calibrate", "plan", "simulate"]

_F = TypeVar("_F", bound=Callable[..., Any])
# Maximum number of ranks. Every rank has a graph of its own: for more ranks, planning would take
# hours.
_MOST_RANKS = 1024
# Number of columns of a table that is not printed on a terminal.
_WIDTH = 120


def _worlds(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    """Numbers of ranks with commas between them."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,3}", x) and int(x) <= _MOST_RANKS for x in words):
        raise click.BadParameter(
            f"expected numbers of ranks such as 8 or 8,16,32, each at most {_MOST_RANKS:,}, got "
            f"{text[:40]!r}"
        )
    return tuple(map(int, words))


def _about(*, one: bool) -> Callable[[_F], _F]:
    """The options of `simulate` and `plan` that say what is computed where.

    Both commands have the same defaults, so that their figures can be compared. one: `simulate`,
    which has one strategy on one number of ranks, and whose --mask may be "published".
    """
    options = [
        click.option(
            "--hardware",
            required=True,
            help="A machine: a100-pcie, a100-sxm, h100-sxm, h200-sxm, or the path of a file.",
        ),
        click.option(
            "--model",
            "model_text",
            default="llama-7b",
            show_default=True,
            help="llama-7b, llama-13b, or sizes: layers=32,dim=4096,heads=32,kv_heads=8,"
            "head_dim=128,ffn=14336,vocab=128256. Without kv_heads, head_dim, vocab: heads, "
            "dim / heads, 32000.",
        ),
        click.option(
            "--world",
            type=click.IntRange(1, _MOST_RANKS),
            required=True,
            help="Ranks, one device each.",
        )
        if one
        else click.option(
            "--world",
            "worlds",
            callback=_worlds,
            metavar="N[,N...]",
            required=True,
            help="Ranks, one device each; several numbers to compare: 8,16,32.",
        ),
        click.option(
            "--nodes",
            type=click.IntRange(1),
            help="Nodes that the ranks are spread over evenly. [default: as few as possible]",
        ),
        click.option(
            "--seq", "seq_text", required=True, help="Tokens of one sequence: 131072, 128K, 1M."
        ),
        click.option(
            "--batch",
            type=click.IntRange(1),
            default=1,
            show_default=True,
            help="Sequences in a batch.",
        ),
        click.option(
            "--phase",
            type=click.Choice(["first-token", "train"]),
            default="train",
            show_default=True,
            help="first-token: the forward. train: a step of training.",
        ),
        click.option(
            "--mask",
            default="causal",
            show_default=True,
            help=MASK_HELP
            + " published: as in the BurstAttention paper, whose rings compute all scores." * one,
        ),
        click.option(
            "--layout",
            type=click.Choice([*LAYOUTS, "auto"]),
            default="zigzag",
            show_default=True,
            help="Which rank holds which tokens. balanced: even under the mask. auto: for each "
            "strategy, the one with the best forecast, which takes four times as long to plan. "
            "Tensor parallelism has none, or contiguous.",
        ),
        click.option(
            "--activations",
            "kept",
            type=click.Choice(["auto", *(name.replace(" ", "-") for name in ACTIVATIONS)]),
            default="auto",
            show_default=True,
            help="In training. kept: all of them. attention-kept: a layer's input and attention's "
            "outputs, as burst_rt.checkpoint does; the rest is computed again. computed-again: all "
            "but a layer's input. auto: for each strategy, the first that fits.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ]

    def add(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@contextmanager
def _not_collecting() -> Iterator[None]:
    """Surrounds work that makes millions of objects and no cycles: a fifth of its time was Python's
    garbage collector's.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _check_layout(strategy: str, layout: str) -> None:
    if strategy in TENSOR_PARALLEL and layout not in ("contiguous", "auto"):
        raise InputError(
            f"--layout: under {strategy} a rank has the whole sequence, or contiguous parts of it, "
            f"got {layout!r}; leave the option out"
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_about(one=True)
@click.option(
    "--strategy",
    required=True,
    help=f"{', '.join((*COMPARED, *ATTENTION[-3:]))}; hybrid:N, two-level:N (N ranks in a group).",
)
def simulate(
    hardware: str,
    model_text: str,
    world: int,
    nodes: int | None,
    seq_text: str,
    batch: int,
    phase: Phase,
    as_json: bool,
    strategy: str,
    mask: str,
    layout: str,
    kept: str,
) -> None:
    """Simulate a model on a machine that you need not have: time, communication and memory under
    one strategy.

    The task graphs of one layer run on all ranks under a virtual clock. The time of the model is
    the time of the layer multiplied by the number of layers. Example:

    burst-rt simulate --hardware a100-pcie --model llama-7b --strategy tensor-parallel+sequence
    --world 8 --seq 128K --json
    """
    model, machine = parse_model(model_text), _spread(load_hardware(hardware), world, nodes)
    strategy = parse_strategy(strategy)
    chosen = click.get_current_context().get_parameter_source("layout")
    if chosen is ParameterSource.COMMANDLINE:
        _check_layout(strategy, layout)
    taken = published_mask(strategy) if mask == "published" else mask
    fitting_mask(taken, parse_tokens(seq_text), batch)
    activations = _activations(kept, phase)
    sizes = (world, parse_tokens(seq_text), machine, phase)
    with _not_collecting():
        found = forecast_model(
            model, strategy, *sizes,
            mask=taken, batch=batch, layout=layout, activations=activations,
        )  # fmt: skip
    if as_json:
        print(json.dumps(_described(model, machine, world, seq_text, batch) | found.to_json()))
    else:
        about = _about_model(model, seq_text, phase, taken, found.layout)
        _print([found], f"{about}, {_where(world, machine)}", found.layout, phase, machine)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_about(one=False)
def plan(
    hardware: str,
    model_text: str,
    worlds: tuple[int, ...],
    nodes: int | None,
    seq_text: str,
    batch: int,
    phase: Phase,
    as_json: bool,
    mask: str,
    layout: str,
    kept: str,
) -> None:
    """Compare all strategies for a model on a machine. Say which one to take, and how many ranks
    the model needs. With several numbers of ranks: say which costs least.

    Example: burst-rt plan --world 8,16,32 --hardware h100 --model llama-7b --seq 512K
    """
    model, seq_len, shipped = (
        parse_model(model_text),
        parse_tokens(seq_text),
        load_hardware(hardware),
    )
    machines = {world: _spread(shipped, world, nodes) for world in worlds}
    fitting_mask(mask, seq_len, batch)
    activations = _activations(kept, phase)
    question = Question(model, seq_len, phase, mask, batch, layout, activations)
    with _not_collecting(), _progress(len(COMPARED) * len(machines)) as each:
        answers = [
            compare(question, machine, world, each(f"{world} ranks", COMPARED))
            for world, machine in machines.items()
        ]
    if as_json:
        said = [
            _described(model, answer.hardware, answer.world_size, seq_text, batch)
            | {"phase": phase, "mask": mask}
            | _json(answer)
            for answer in answers
        ]
        print(json.dumps(said[0] if len(said) == 1 else said))
        return
    about = _about_model(model, seq_text, phase, mask, layout)
    if len(answers) > 1:
        _print_worlds(answers, f"{about}, {shipped.name}", layout)
    else:
        (answer,) = answers
        machine = answer.hardware
        title = f"{about}, {_where(answer.world_size, machine)}"
        _print(answer.found, title, layout, phase, machine)
        for strategy, reason in answer.refused.items():
            print(f"{strategy}: not possible here: {reason}")
        print(*answer.why, sep="\n")


def _json(answer: Answer) -> dict[str, object]:
    best = answer.best
    fewest, strategy = answer.fewest
    return {
        "take": best.strategy if best else None,
        "layout": best.layout if best else None,
        "rank_seconds": answer.rank_seconds,
        "why": " ".join(answer.why),
        "fewest_ranks": fewest,
        "fewest_ranks_with": strategy,
        "tile": answer.tile,
        "strategies": [each.to_json() for each in answer.found],
        "refused": answer.refused,
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-n",
    "--num-ranks",
    default=2,
    show_default=True,
    type=click.IntRange(2, _MOST_RANKS),
    help="Ranks that measure, all at the same time.",
)
@click.option(
    "--heads",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Heads of the calls measured.",
)
@click.option(
    "--head-dim",
    default=64,
    show_default=True,
    type=click.IntRange(16, 256),
    help="Width of a head.",
)
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the inputs.",
)
@click.option(
    "--repeats",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each size; medians are taken.",
)
@click.option(
    "--max-tokens",
    default=8192,
    show_default=True,
    type=click.IntRange(256),
    help="Tokens of a rank in the largest call measured.",
)
@machine_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write. [default: the one that jobs plan with]",
)
@click.option(
    "--force", is_flag=True, help="Write the file even if the machine was busy with something else."
)
def calibrate(
    num_ranks: int,
    heads: int,
    head_dim: int,
    dtype: str,
    repeats: int,
    max_tokens: int,
    out: Path | None,
    force: bool,
) -> None:
    """Measure this machine, for `simulate` and `plan`, and for strategy="auto" of later jobs.

    Takes about four minutes on a CPU. Nothing else should run meanwhile: if the machine was busy,
    no file is written. Jobs find the file by themselves. BURST_RT_HARDWARE=none makes jobs ignore
    it, BURST_RT_HARDWARE=FILE makes them take another file.
    """

    from burst_rt.job.launched import DEVICE_VARIABLE
    from burst_rt.launch.run import launch
    from burst_rt.runtime.facts import resolve_device

    path = out or calibrated_path(resolve_device(os.environ.get(DEVICE_VARIABLE, "auto")).type)
    try:  # now, and not when all has been measured
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"--out: cannot write to {path.parent}: {error.strerror}") from error
    sizes = [
        "--heads",
        str(heads),
        "--head-dim",
        str(head_dim),
        "--dtype",
        dtype,
        "--repeats",
        str(repeats),
    ]
    with tempfile.TemporaryDirectory(prefix="burst-rt-") as folder:
        made, doubts = Path(folder, "machine.toml"), Path(folder, "doubts")
        sizes += ["--max-tokens", str(max_tokens), "--out", str(made), "--doubts", str(doubts)]
        code = launch(["-m", "burst_rt.launch.plan.calibrate", *sizes], num_ranks=num_ranks)
        if code:
            sys.exit(code)
        found, doubtful = load_hardware(made), doubts.read_text(encoding="utf-8").splitlines()
        text = made.read_text(encoding="utf-8")
    _print_machine(found)
    if doubtful and not force:
        raise ConfigError(
            f"calibrate: the machine was busy: {'; '.join(doubtful)}. Nothing was written to "
            f"{path}; try again when nothing else runs, or use --force"
        )
    path.write_text(
        "".join(f"# Doubtful: {doubt}.\n" for doubt in doubtful) + text, encoding="utf-8"
    )
    print(f"wrote {path}")


def _print_machine(found: Hardware) -> None:
    table = Table(
        "operation",
        "launch us",
        "GFLOP/s",
        "under a mask",
        "at its edge",
        "GB/s",
        title=escape(found.name),
        title_justify="left",
    )
    for name, rate in found.device.rates.items():
        flops, memory = (speed and speed / 1e9 for speed in (rate.flops_per_s, rate.bytes_per_s))
        cells = (rate.launch_s * 1e6, flops, rate.masked, rate.edge, memory)
        table.add_row(name, *("-" if cell is None else f"{cell:,.3g}" for cell in cells))
    link = found.node.link
    Console().print(table)
    print(f"link: {link.latency_s * 1e6:.3g} us, {link.bytes_per_s / 1e9:.3g} GB/s each way")


def _activations(word: str, phase: Phase) -> Activations | None:
    """The choice of --activations; None for auto."""
    if word != "auto" and phase != "train":
        raise InputError(
            f"--activations {word}: only training keeps any; leave it out, or use --phase train"
        )
    return next((name for name in ACTIVATIONS if name.replace(" ", "-") == word), None)


def _spread(hardware: Hardware, world: int, nodes: int | None) -> Hardware:
    if nodes is None:
        return hardware
    if world % nodes:
        raise InputError(f"--nodes: expected a divisor of --world {world}, got {nodes}")
    most = hardware.node.ranks
    if world > nodes * most:
        raise InputError(
            f"--nodes: a node of {hardware.name} has {most} devices, so --world {world} needs at "
            f"least {-(-world // most)} nodes, got {nodes}; for larger nodes, change `ranks` of "
            "[node] in a machine file of your own"
        )
    return replace(hardware, node=replace(hardware.node, ranks=world // nodes))


def _described(
    model: Model, hardware: Hardware, world: int, seq_text: str, batch: int
) -> dict[str, object]:
    sizes = {"model": model.name, "world": world, "seq": parse_tokens(seq_text), "batch": batch}
    return sizes | {"hardware": hardware.name, "ranks_per_node": min(world, hardware.node.ranks)}


def _about_model(model: Model, seq_text: str, phase: str, mask: str, layout: str) -> str:
    """The start of a title. If each strategy has its own layout, the layouts are in a column."""
    of = "" if layout == "auto" else f", {layout} layout"
    return f"{model.name}, {phase}, {parse_tokens(seq_text):,} tokens, {mask}{of}"


def _where(world: int, hardware: Hardware) -> str:
    nodes = -(-world // hardware.node.ranks)
    return f"{world} ranks on {nodes} node{'s' * (nodes > 1)} of {hardware.name}"


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """Columns of words, which are never cut, then columns of numbers, then activations."""
    table = Table(title=escape(title), title_justify="left")
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("activations", min_width=len("activations"))
    return table


def _show(table: Table, phase: Phase, hardware: Hardware) -> None:
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
    what = "one step of training" if phase == "train" else "one forward"
    limit = f"{hardware.device.memory_bytes / 1e9:,.1f}"
    print(f"time: {what}. idle, sent, memory: the worst rank. A device has {limit} GB.")


def _print(
    found: list[ModelForecast], title: str, layout: str, phase: Phase, hardware: Hardware
) -> None:
    own = layout == "auto"
    words, numbers = ["strategy", *["layout"] * own], ["time s", "idle s", "sent GB", "memory GB"]
    table = _table(title, words, numbers)
    for f in found:
        table.add_row(f.strategy, *[f.layout] * own, *_cells(f))
    _show(table, phase, hardware)


def _cells(f: ModelForecast) -> tuple[str, ...]:
    time = "out of memory" if f.time_s is None else _seconds(f.time_s)
    sent, memory = (f"{size / 1e9:,.1f}" for size in (f.sent_bytes, f.memory_bytes))
    return time, _seconds(f.idle_s), sent, memory, f.activations or ""


def _print_worlds(answers: list[Answer], title: str, layout: str) -> None:
    """The best of each number of ranks; where none fits, the one that lacks least memory."""
    own = layout == "auto"
    words = ["ranks", "take", *["layout"] * own]
    table = _table(title, words, ["time s", "ranks x s", "idle s", "sent GB", "memory GB"])
    for answer in answers:
        best, first = answer.best, next(iter(answer.found), None)
        total = "" if answer.rank_seconds is None else f"{answer.rank_seconds:,.1f}"
        taken = (best.strategy, best.layout) if best else ("none", "")
        time, *rest = _cells(first) if first else ("not possible",)
        table.add_row(str(answer.world_size), *taken[: 1 + own], time, total, *rest)
    _show(table, answers[0].question.phase, answers[0].hardware)
    for line in best_worlds(answers):
        print(line)


def _seconds(value: float) -> str:
    return f"{value:,.3f}" if value >= 1 or not value else f"{value:.3g}"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, Sequence[str]], Iterator[str]]]:
    """Yields what goes through strategies; shows on a terminal how far along they are."""
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("simulating", total=total)

        def each(where: str, strategies: Sequence[str]) -> Iterator[str]:
            for strategy in strategies:
                bar.update(task, description=f"{where}, {strategy}")
                yield strategy
                bar.advance(task)

        yield each
