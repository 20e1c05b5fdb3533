"""`burst-rt simulate`, `plan` and `calibrate`: their options and what they print."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from burst_rt.baselines.layers import TENSOR_PARALLEL
from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.plan.model import (
    ACTIVATIONS,
    Activations,
    Model,
    ModelForecast,
    Phase,
    fewest_ranks,
    forecast_model,
    parse_model,
    published_mask,
    tile_of,
)
from burst_rt.launch.plan.words import MASK_HELP, fitting_mask, parse_tokens
from burst_rt.launch.where import machine_options
from burst_rt.planning.forecast import CANDIDATES
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.suited import LAYOUTS
from burst_rt.runtime.calibrated import calibrated_path
from burst_rt.scheduler.simulator import Hardware

__all__ = ["calibrate", "plan", "simulate"]

_F = TypeVar("_F", bound=Callable[..., Any])
_STRATEGIES = (*CANDIDATES, *TENSOR_PARALLEL)


def _about(*, published: bool = False) -> Callable[[_F], _F]:
    """The options of `simulate` and `plan` that say what is computed where.

    Both commands have the same defaults, so that their figures can be compared. published: whether
    --mask takes this word, too.
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
            help="llama-7b, llama-13b, or layers=32,dim=4096,...",
        ),
        click.option(
            "--world", type=click.IntRange(1), required=True, help="Ranks, one device each."
        ),
        click.option(
            "--nodes",
            type=click.IntRange(1),
            help="Nodes that the ranks are spread over. [default: as few as possible]",
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
            + " published: as in the BurstAttention paper, whose rings compute all scores."
            * published,
        ),
        click.option(
            "--layout",
            type=click.Choice([*LAYOUTS, "auto"]),
            default="zigzag",
            show_default=True,
            help="Which rank holds which tokens. balanced: even under the mask. auto: for each "
            "strategy, the one with the best forecast.",
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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_about(published=True)
@click.option(
    "--strategy",
    required=True,
    help=f"{', '.join(_STRATEGIES)}, ring-naive, burst-untiled; hybrid:N, two-level:N.",
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
    taken = published_mask(strategy) if mask == "published" else mask
    fitting_mask(taken, parse_tokens(seq_text), batch)
    activations = _activations(kept, phase)
    sizes = (world, parse_tokens(seq_text), machine, phase)
    found = forecast_model(
        model, strategy, *sizes,
        mask=taken, batch=batch, layout=layout, activations=activations,
    )  # fmt: skip
    if as_json:
        print(json.dumps(_described(model, machine, world, seq_text, batch) | found.to_json()))
    else:
        _print([found], _title(model, machine, world, seq_text, phase))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_about()
def plan(
    hardware: str,
    model_text: str,
    world: int,
    nodes: int | None,
    seq_text: str,
    batch: int,
    phase: Phase,
    as_json: bool,
    mask: str,
    layout: str,
    kept: str,
) -> None:
    """Compare all strategies for a model on a machine. Say which one to take, how many ranks the
    model needs, and how large the tiles are.

    Example: burst-rt plan --world 64 --nodes 8 --hardware h100 --model llama-7b --seq 1M
    """
    model, machine, seq_len = (
        parse_model(model_text),
        _spread(load_hardware(hardware), world, nodes),
        parse_tokens(seq_text),
    )
    fitting_mask(mask, seq_len, batch)
    activations = _activations(kept, phase)
    found: list[ModelForecast] = []
    refused: dict[str, str] = {}
    with _progress(_STRATEGIES) as strategies:
        for strategy in strategies:
            try:
                sizes = (world, seq_len, machine, phase)
                found.append(
                    forecast_model(
                        model, strategy, *sizes,
                        mask=mask, batch=batch, layout=layout, activations=activations,
                    )
                )  # fmt: skip
            except InputError as error:
                refused[strategy] = error.message
    found.sort(key=lambda f: (f.out_of_memory, f.time_s or 0.0, f.sent_bytes))
    best = found[0] if found and not found[0].out_of_memory else None
    taken, kind = (best.strategy, best.layout) if best else ("burst", "zigzag")
    fewest = fewest_ranks(
        model, taken, seq_len, machine, phase,
        mask=mask, batch=batch, layout=kind, activations=activations,
    )  # fmt: skip
    tile = (
        tile_of(model, taken, world, seq_len, machine, mask=mask, batch=batch, layout=kind)
        if best
        else None
    )
    why = _why(found, best, fewest, tile)
    if as_json:
        answer = _described(model, machine, world, seq_text, batch) | {"phase": phase, "mask": mask}
        answer |= {
            "take": best.strategy if best else None,
            "layout": best.layout if best else None,
            "why": why,
            "fewest_ranks": fewest,
            "tile": tile,
        }
        print(json.dumps(answer | {"strategies": [f.to_json() for f in found], "refused": refused}))
        return
    _print(found, _title(model, machine, world, seq_text, phase))
    for strategy, reason in refused.items():
        print(f"{strategy}: not possible here: {reason.removeprefix(f'{strategy}: ')}")
    print(why)


def _why(
    found: list[ModelForecast],
    best: ModelForecast | None,
    fewest: int | None,
    tile: tuple[int, int] | None,
) -> str:
    ranks = (
        "the model does not fit, even on 512 ranks"
        if fewest is None
        else f"the model needs at least {fewest} rank{'s' * (fewest > 1)}"
    )
    if best is None or best.time_s is None:
        return f"Take none: no strategy fits into a device's memory; with burst {ranks}."
    same, *others = _alike(f for f in found if not f.out_of_memory)
    names, verb = [f.strategy for f in same[1:]], "are" if len(same) > 2 else "is"
    ahead = f" (here {' and '.join(names)} {verb} the same)" if names else ""
    if others and others[0][0].time_s:
        times = f"{others[0][0].time_s / best.time_s:.2f}"
        ahead += f", {f'{times} times ' * (times != '1.00')}as fast as {others[0][0].strategy}"
    size = (
        f" Its tiles are {tile[0]:,} queries x {tile[1]:,} keys; the kernel cuts them into its own "
        "blocks."
        if tile
        else ""
    )
    on = f" with the {best.layout} layout" * (best.layout != "zigzag")
    return f"Take {best.strategy}{on}: {best.time_s:.3g} s{ahead}; {ranks}.{size}"


def _alike(found: Iterable[ModelForecast]) -> list[list[ModelForecast]]:
    """Groups of strategies whose forecasts are the same, in the order in which they come.

    Two levels on one node, for example, are a plain ring.
    """
    alike: dict[ModelForecast, list[ModelForecast]] = {}
    for f in found:
        alike.setdefault(replace(f, strategy=""), []).append(f)
    return list(alike.values())


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-n",
    "--num-ranks",
    default=2,
    show_default=True,
    type=click.IntRange(2),
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
    from burst_rt.runtime.joining import resolve_device

    path = out or calibrated_path(resolve_device(os.environ.get(DEVICE_VARIABLE, "auto")).type)
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
    path.parent.mkdir(parents=True, exist_ok=True)
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
        title=found.name,
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
    """What --activations chooses; None for auto."""
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
    return replace(hardware, node=replace(hardware.node, ranks=world // nodes))


def _described(
    model: Model, hardware: Hardware, world: int, seq_text: str, batch: int
) -> dict[str, object]:
    sizes = {"model": model.name, "world": world, "seq": parse_tokens(seq_text), "batch": batch}
    return sizes | {"hardware": hardware.name, "ranks_per_node": min(world, hardware.node.ranks)}


def _title(model: Model, hardware: Hardware, world: int, seq_text: str, phase: str) -> str:
    nodes = -(-world // hardware.node.ranks)
    return (
        f"{model.name}, {phase}, {parse_tokens(seq_text):,} tokens, {world} ranks on {nodes} "
        f"node{'s' * (nodes > 1)} of {hardware.name}"
    )


def _print(found: list[ModelForecast], title: str) -> None:
    table = Table(
        "strategy",
        "layout",
        "mask",
        "time s",
        "idle s",
        "sent GB",
        "memory GB",
        "activations",
        title=title,
        title_justify="left",
    )
    for column in table.columns[3:7]:
        column.justify = "right"
    for f in found:
        time = "out of memory" if f.time_s is None else _seconds(f.time_s)
        table.add_row(
            f.strategy,
            f.layout,
            f.mask,
            time,
            _seconds(f.exposed_s),
            f"{f.sent_bytes / 1e9:,.1f}",
            f"{f.memory_bytes / 1e9:,.1f}",
            f.activations or "",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print("time: one phase; idle, sent and memory: the worst rank")


def _seconds(value: float) -> str:
    return f"{value:,.3f}" if value >= 1 or not value else f"{value:.3g}"


@contextmanager
def _progress(strategies: tuple[str, ...]) -> Iterator[Iterator[str]]:
    """Yields the strategies; shows on a terminal how far along they are."""
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("simulating", total=len(strategies))

        def each() -> Iterator[str]:
            for strategy in strategies:
                bar.update(task, description=strategy)
                yield strategy
                bar.advance(task)

        yield each()
