"""`burst-rt simulate`, `plan` and `calibrate`: their options and what they print."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.plan.asked import MOST_RANKS, PlanOptions, SimulateOptions, questions
from burst_rt.launch.plan.compare import COMPARED, compare
from burst_rt.launch.plan.layers import TENSOR_PARALLEL
from burst_rt.launch.plan.model import (
    ATTENTION,
    forecast_model,
    parse_strategy,
    published_mask,
)
from burst_rt.launch.plan.printed import (
    Ticker,
    about_model,
    answer_to_json,
    print_forecasts,
    print_machine,
    print_model,
    print_worlds,
    question_to_json,
    where,
)
from burst_rt.launch.where import machine_options
from burst_rt.planning.machines import load_hardware
from burst_rt.runtime.calibrated import calibrated_path

__all__ = ["calibrate", "plan", "simulate"]


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
@questions(one=True)
@click.option(
    "--strategy",
    required=True,
    help=f"{', '.join((*COMPARED, *ATTENTION[-3:]))}; hybrid:N, two-level:N (N ranks in a group), "
    "sliced:N (N slices).",
)
def simulate(**options: Any) -> None:  # see `SimulateOptions`
    """Simulate a model on a machine that you need not have: time, communication and memory under
    one strategy.

    The task graphs of one layer run on all ranks under a virtual clock. The time of the model is
    the time of the layer multiplied by the number of layers. Example:

    burst-rt simulate --hardware a100-pcie --model llama-7b --strategy tensor-parallel+sequence
    --world 8 --seq 128K --json
    """
    asked = SimulateOptions(**options)
    machine = asked.machine(asked.world)
    strategy = parse_strategy(asked.strategy)
    chosen = click.get_current_context().get_parameter_source("layout")
    if chosen is ParameterSource.COMMANDLINE:
        _check_layout(strategy, asked.layout)
    mask = published_mask(strategy) if asked.mask == "published" else asked.mask
    question = asked.question(mask)
    with _not_collecting(), Ticker() as progress:
        progress.doing(f"{asked.world} ranks, {strategy}")
        forecast = forecast_model(question, strategy, asked.world, machine)
    if asked.as_json:
        print(json.dumps(question_to_json(question, machine, asked.world) | forecast.to_json()))
    else:
        print_model(question.model)
        about = about_model(question, forecast.layout)
        title = f"{about}, {where(asked.world, machine, question)}"
        print_forecasts([forecast], title, forecast.layout, asked.phase, machine)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@questions(one=False)
def plan(**options: Any) -> None:  # see `PlanOptions`
    """Compare all strategies for a model on a machine. Say which one to take, and how many ranks
    the model needs. With several numbers of ranks: say which costs least.

    Example: burst-rt plan --world 8,16,32 --hardware h100 --model llama-7b --seq 512K
    """
    asked = PlanOptions(**options)
    question = asked.question(asked.mask)
    machines = {world: asked.machine(world) for world in asked.worlds}
    with _not_collecting(), Ticker() as progress:
        answers = []
        for world, machine in machines.items():
            progress.doing(f"{world} ranks, memory and bounds")
            going_through = partial(progress.through, f"{world} ranks")
            answers.append(compare(question, machine, world, going_through))
            if asked.as_json or len(machines) == 1:
                progress.doing("the fewest ranks that are enough")
                _ = answers[-1].why  # takes a while, and is kept
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
        title = f"{about}, {where(answer.world_size, answer.hardware, question)}"
        print_forecasts(answer.found, title, question.layout, question.phase, answer.hardware)
        for strategy, reason in answer.refused.items():
            print(f"{strategy}: not possible here: {reason}")
        print(*answer.why, *answer.how_to_run, sep="\n")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-n",
    "--num-ranks",
    default=2,
    show_default=True,
    type=click.IntRange(2, MOST_RANKS),
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

    Takes at most two minutes. Run nothing else meanwhile: on a busy machine no file is
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
