"""`burst-rt simulate`, `plan` and `calibrate`: their options and what they print."""

from __future__ import annotations

import gc
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.plan.compare import COMPARED, compare
from burst_rt.launch.plan.layers import TENSOR_PARALLEL
from burst_rt.launch.plan.model import (
    ACTIVATIONS,
    ATTENTION,
    MODELS,
    Activations,
    Model,
    Phase,
    Question,
    forecast_model,
    parse_model,
    parse_strategy,
    published_mask,
)
from burst_rt.launch.plan.printed import (
    about_model,
    answer_to_json,
    print_forecasts,
    print_machine,
    print_model,
    print_worlds,
    question_to_json,
    strategy_progress,
    where,
)
from burst_rt.launch.plan.words import MASK_HELP, fitting_mask, parse_tokens
from burst_rt.launch.train.config import require_transformers
from burst_rt.launch.where import machine_options
from burst_rt.planning.choose import LAYOUTS
from burst_rt.planning.machines import load_hardware
from burst_rt.runtime.calibrated import calibrated_path
from burst_rt.scheduler.simulator import Hardware

__all__ = ["calibrate", "plan", "simulate"]

_F = TypeVar("_F", bound=Callable[..., Any])
# Maximum number of ranks. Every rank has a graph of its own: for more ranks, planning would take
# hours.
_MOST_RANKS = 1024


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
            help="a100-pcie, a100-sxm, h100-sxm, h200-sxm, or the path of a machine file.",
        ),
        click.option(
            "--model",
            "model_text",
            default="llama-7b",
            show_default=True,
            help="llama-7b, llama-13b, a config.json of transformers or a folder that has one, or "
            "sizes: layers=32,dim=4096,heads=32,kv_heads=8,head_dim=128,ffn=14336,vocab=128256. "
            "kv_heads defaults to heads, head_dim to dim / heads, vocab to 32000.",
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
            help="Nodes, with equal numbers of ranks. [default: as few as possible]",
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
            help="first-token: one forward. train: one training step.",
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
            help="Which rank holds which tokens. balanced: equal work under the mask. auto: for "
            "each strategy, the layout with the best forecast; planning takes four times as long. "
            "Tensor parallelism has contiguous shards or none.",
        ),
        click.option(
            "--activations",
            "kept",
            type=click.Choice(["auto", *(name.replace(" ", "-") for name in ACTIVATIONS)]),
            default="auto",
            show_default=True,
            help="What training keeps for the backward. kept: everything. attention-kept: each "
            "layer's input and attention's outputs, as burst_rt.checkpoint does. computed-again: "
            "each layer's input only. auto: for each strategy, the first of these that fits.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ]

    def add(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The options of `_about`, as click gives them."""

    hardware: str
    model_text: str
    nodes: int | None
    seq_text: str
    batch: int
    phase: Phase
    mask: str
    layout: str
    kept: str
    as_json: bool

    def question(self, mask: str) -> Question:
        """What is to be computed, under a mask. Raises InputError for words that do not fit."""
        model, seq_len = _model(self.model_text), parse_tokens(self.seq_text)
        fitting_mask(mask, seq_len, self.batch)
        activations = _activations(self.kept, self.phase)
        return Question(model, seq_len, self.phase, mask, self.batch, self.layout, activations)

    def machine(self, world: int) -> Hardware:
        """The machine, with as many ranks a node as --nodes says."""
        return _spread(load_hardware(self.hardware), world, self.nodes)


@dataclass(frozen=True, kw_only=True)
class _Simulated(_Asked):
    world: int
    strategy: str


@dataclass(frozen=True, kw_only=True)
class _Planned(_Asked):
    worlds: tuple[int, ...]


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
def simulate(**options: Any) -> None:  # see `_Simulated`
    """Simulate a model on a machine that you need not have: time, communication and memory under
    one strategy.

    The task graphs of one layer run on all ranks under a virtual clock. The time of the model is
    the time of the layer multiplied by the number of layers. Example:

    burst-rt simulate --hardware a100-pcie --model llama-7b --strategy tensor-parallel+sequence
    --world 8 --seq 128K --json
    """
    asked = _Simulated(**options)
    machine = asked.machine(asked.world)
    strategy = parse_strategy(asked.strategy)
    chosen = click.get_current_context().get_parameter_source("layout")
    if chosen is ParameterSource.COMMANDLINE:
        _check_layout(strategy, asked.layout)
    mask = published_mask(strategy) if asked.mask == "published" else asked.mask
    question = asked.question(mask)
    with _not_collecting():
        forecast = forecast_model(question, strategy, asked.world, machine)
    if asked.as_json:
        print(json.dumps(question_to_json(question, machine, asked.world) | forecast.to_json()))
    else:
        print_model(question.model)
        title = f"{about_model(question, forecast.layout)}, {where(asked.world, machine)}"
        print_forecasts([forecast], title, forecast.layout, asked.phase, machine)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_about(one=False)
def plan(**options: Any) -> None:  # see `_Planned`
    """Compare all strategies for a model on a machine. Say which one to take, and how many ranks
    the model needs. With several numbers of ranks: say which costs least.

    Example: burst-rt plan --world 8,16,32 --hardware h100 --model llama-7b --seq 512K
    """
    asked = _Planned(**options)
    question = asked.question(asked.mask)
    machines = {world: asked.machine(world) for world in asked.worlds}
    with _not_collecting(), strategy_progress(len(COMPARED) * len(machines)) as strategies_of:
        answers = [
            compare(question, machine, world, strategies_of(f"{world} ranks", COMPARED))
            for world, machine in machines.items()
        ]
    if asked.as_json:
        said = [
            question_to_json(question, answer.hardware, answer.world_size)
            | {"phase": question.phase, "mask": question.mask}
            | answer_to_json(answer)
            for answer in answers
        ]
        print(json.dumps(said[0] if len(said) == 1 else said))
        return
    print_model(question.model)
    about = about_model(question, question.layout)
    if len(answers) > 1:
        print_worlds(answers, f"{about}, {load_hardware(asked.hardware).name}", question.layout)
    else:
        (answer,) = answers
        title = f"{about}, {where(answer.world_size, answer.hardware)}"
        print_forecasts(answer.found, title, question.layout, question.phase, answer.hardware)
        for strategy, reason in answer.refused.items():
            print(f"{strategy}: not possible here: {reason}")
        print(*answer.why, sep="\n")


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
    help="Heads in the measured calls.",
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
    help="Tokens per rank in the largest measured call.",
)
@machine_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write. [default: the file that jobs plan with]",
)
@click.option("--force", is_flag=True, help="Write the file even if the machine was busy.")
def calibrate(num_ranks: int, out: Path | None, force: bool, **options: object) -> None:
    """Measure this machine, for `simulate` and `plan`, and for strategy="auto" of later jobs.

    Takes about four minutes on a CPU. Run nothing else meanwhile: on a busy machine no file is
    written. Jobs find the file by themselves. BURST_RT_HARDWARE=none makes them ignore it,
    BURST_RT_HARDWARE=FILE makes them use another.
    """

    from burst_rt.job.launched import DEVICE_VARIABLE
    from burst_rt.launch.measure.ranks import run_on_ranks
    from burst_rt.launch.plan.calibrate import measure_machine
    from burst_rt.runtime.facts import resolve_device

    path = out or calibrated_path(resolve_device(os.environ.get(DEVICE_VARIABLE, "auto")).type)
    try:  # now, and not when all has been measured
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"--out: cannot write to {path.parent}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(prefix="burst-rt-") as folder:
        made, doubts = Path(folder, "machine.toml"), Path(folder, "doubts")
        run_on_ranks(measure_machine, num_ranks, {**options, "made": made, "doubts": doubts})
        measured, doubtful = load_hardware(made), doubts.read_text(encoding="utf-8").splitlines()
        text = made.read_text(encoding="utf-8")
    print_machine(measured)
    if doubtful and not force:
        raise ConfigError(
            f"calibrate: the machine was busy: {'; '.join(doubtful)}. Nothing was written to "
            f"{path}; try again when nothing else runs, or use --force"
        )
    path.write_text(
        "".join(f"# Doubtful: {doubt}.\n" for doubt in doubtful) + text, encoding="utf-8"
    )
    print(f"wrote {path}")


def _model(text: str) -> Model:
    """A model by its name, by the path of its configuration, or by its sizes."""
    if text in MODELS or not os.path.exists(text):
        return parse_model(text)
    require_transformers("--model with a config.json")
    from burst_rt.launch.plan.configuration import read_config

    return read_config(Path(text), text)


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
