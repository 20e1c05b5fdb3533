"""The command line: which adapters and cases, one table, one exit code."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burst_rt.conformance.cases import AttentionCase, ModelCase, all_cases
from burst_rt.conformance.ranks import Comparison, Outcome, inputs_of, run_case, truth_of
from burst_rt.conformance.small import read_input, smallest, write_input

__all__ = ["command"]

Case = AttentionCase | ModelCase

_ADAPTERS = (
    "burst_rt", "torch", "ring-attention-pytorch", "yunchang", "ringmaster-ring",
    "ringmaster-ulysses", "accelerate",
)  # fmt: skip
_FAILURES = ("wrong", "hung", "crashed")
_COLOURS = {"exact": "green", "refused": "yellow", **dict.fromkeys(_FAILURES, "red")}


@click.command()
@click.argument("adapters", metavar="ADAPTER...", nargs=-1, required=True)
@click.option(
    "-n", "--num-ranks", "world", default=2, show_default=True, type=click.IntRange(1, 64),
    help="Number of ranks, processes of this machine.",
)  # fmt: skip
@click.option(
    "--case", "chosen", default=("*",), show_default=True, metavar="PATTERN", multiple=True,
    help="Cases whose names match; or a .npz of --out. May be given several times.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the inputs of wrong cases, made as small as they stay wrong.",
)  # fmt: skip
@click.option(
    "--json", "lines", type=click.Path(dir_okay=False, path_type=Path),
    help="File for the outcomes, a line of JSON each.",
)  # fmt: skip
@click.option(
    "--deadline", "deadline_s", default=60.0, show_default=True, type=click.FloatRange(1),
    help="Seconds that a case may take before its ranks are killed.",
)  # fmt: skip
def command(
    adapters: tuple[str, ...],
    world: int,
    chosen: tuple[str, ...],
    out: Path | None,
    lines: Path | None,
    deadline_s: float,
) -> None:
    """Compare libraries' context parallelism with one process in float64.

    ADAPTER is burst_rt, torch, ring-attention-pytorch, yunchang, ringmaster-ring,
    ringmaster-ulysses or accelerate, or the path of a .py file with an adapter's functions.

    The exit code is 1 if a case is wrong, hung or crashed; 2 if nothing could run; otherwise 0.
    """
    torch.set_num_threads(1)  # with more, torch would start threads, and ranks are forks
    if not torch.cuda.is_available():
        # transformers takes its kernels wherever it is installed; they need a GPU.
        sys.modules["fla"] = None  # type: ignore[assignment]
    kept = dict(_read(pattern) for pattern in chosen if pattern.endswith(".npz"))
    cases = list(kept)
    for pattern in chosen:
        named = [case for case in all_cases() if fnmatch.fnmatch(case.name, pattern)]
        if not named and not pattern.endswith(".npz"):
            raise click.UsageError(f"--case: no case has a name like {pattern!r}")
        cases += [case for case in named if case not in cases]
    outcomes = []
    if lines:
        lines.write_text("", encoding="utf-8")
    for name in adapters:
        adapter = _load(name)
        for case in cases:
            if isinstance(adapter, ImportError):
                outcome = Outcome(name, case.name, "cannot run here", told=str(adapter))
            else:
                inputs = kept.get(case) or inputs_of(case)
                comparison = Comparison(adapter, name, world, deadline_s)
                outcome = run_case(comparison, case, inputs)
                if outcome.kind == "wrong" and out:
                    _keep(out, comparison, case, inputs)
            click.echo(f"{name}: {case.name}: {outcome.kind} {outcome.told}", err=True)
            outcomes.append(outcome)
            if lines:
                with open(lines, "a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(asdict(outcome))}\n")
    _print(outcomes, adapters, world)
    kinds = {outcome.kind for outcome in outcomes}
    sys.exit(1 if kinds.intersection(_FAILURES) else 2 if kinds == {"cannot run here"} else 0)


def _read(name: str) -> tuple[Case, dict[str, torch.Tensor]]:
    try:
        return read_input(Path(name))
    except (OSError, KeyError, ValueError) as error:
        raise click.UsageError(f"--case: {name} is no file of --out: {error}") from error


def _load(name: str) -> ModuleType | ImportError:
    """An adapter's module, or why it cannot be imported."""
    try:
        if name in _ADAPTERS:
            return importlib.import_module(f"{__package__}.adapters.{name.replace('-', '_')}")
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        if spec is None or spec.loader is None or not Path(name).is_file():
            known = ", ".join(_ADAPTERS)
            raise click.UsageError(f"ADAPTER: {name} is no .py file and none of {known}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        return error
    return module


def _keep(out: Path, comparison: Comparison, case: Case, inputs: dict[str, torch.Tensor]) -> None:
    """Writes a wrong case's input; an attention call is made smaller first."""
    if isinstance(case, AttentionCase):
        small = smallest(case, lambda x: run_case(comparison, x, inputs_of(x)).kind == "wrong")
        if small != case:
            case, inputs = small, inputs_of(small)
    path = out / Path(comparison.name).stem / f"{case.name.replace('/', '.')}.npz"
    # A process that has gone backward cannot be forked.
    fork = multiprocessing.get_context("fork")
    process = fork.Process(
        target=lambda: write_input(path, case, inputs, truth_of(case, inputs)), daemon=True
    )
    process.start()
    process.join()
    click.echo(f"{comparison.name}: {case.name}: its input is in {path}", err=True)


def _print(outcomes: Sequence[Outcome], adapters: Sequence[str], world: int) -> None:
    """The table, and below it each message once."""
    console = Console()
    if not console.is_terminal:
        console.width = max(100, 40 + 28 * len(adapters))
    table = Table(title=f"{date.today()}, {world} ranks: {_versions()}")
    table.add_column("case", no_wrap=True)
    for name in adapters:
        table.add_column(escape(name))
    rows: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        row = outcome.case.rpartition("/")[0]
        rows.setdefault(row, {}).setdefault(outcome.adapter, []).append(outcome)
    for row, cells in rows.items():
        table.add_row(row, *(_cell(cells[name]) for name in adapters))
    console.print(table)
    told: dict[tuple[str, str, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.told:
            key = (outcome.adapter, outcome.kind, outcome.told)
            told.setdefault(key, []).append(outcome.case)
    for (name, kind, words), cases in told.items():
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        console.print(f"{name}: {kind}: {words} ({cases[0]}{more})", markup=False)


def _cell(outcomes: Sequence[Outcome]) -> str:
    """Both ways of a case: one word where both ended alike, else `evaluated / trained`."""
    words = [
        f"[{_COLOURS.get(x.kind, 'dim')}]{x.kind}{'' if x.error is None else f' {x.error:.0e}'}[/]"
        for x in outcomes
    ]
    if len({x.kind for x in outcomes}) == 1:
        return words[max(range(len(outcomes)), key=lambda i: outcomes[i].error or 0.0)]
    return " / ".join(words)


def _versions() -> str:
    """Packages that adapters use, as far as they are installed."""
    words = []
    for name in ("torch", "transformers", "accelerate", "burst-rt", "ring-attention-pytorch",
                 "yunchang", "axolotl-ringmaster"):  # fmt: skip
        try:
            words.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(words)
