"""What `burst-rt simulate`, `plan` and `calibrate` print: tables, JSON, and titles."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burst_rt.launch.plan.compare import Answer, best_worlds
from burst_rt.launch.plan.model import ModelForecast, Phase, Question, SpreadModel
from burst_rt.launch.plan.models import Model
from burst_rt.scheduler.simulator import Hardware

__all__ = [
    "Ticker",
    "about_model",
    "answer_to_json",
    "print_forecasts",
    "print_machine",
    "print_model",
    "print_worlds",
    "question_to_json",
    "where",
]

# Number of columns of a table that is not printed on a terminal.
_WIDTH = 120
# Seconds after which an answer says what it is at, and between two lines of it.
_QUIET_S, _BETWEEN_S = 2.0, 5.0


def answer_to_json(answer: Answer) -> dict[str, object]:
    """An answer, for JSON."""
    best = answer.best
    fewest, strategy = answer.fewest
    return {
        "take": best.strategy if best else None,
        "layout": best.layout if best else None,
        "rank_seconds": answer.rank_seconds,
        "why": " ".join(answer.why),
        "run": list(answer.how_to_run),
        "fewest_ranks": fewest,
        "fewest_ranks_with": strategy,
        "tile": answer.tile,
        "strategies": [forecast.to_json() for forecast in answer.found],
        "refused": answer.refused,
    }


def print_machine(machine: Hardware) -> None:
    """Prints the rates and the link of a measured machine."""
    table = Table(
        "operation",
        "launch us",
        "GFLOP/s",
        "under a mask",
        "at its edge",
        "GB/s",
        title=escape(machine.name),
        title_justify="left",
    )
    for name, rate in machine.device.rates.items():
        flops, memory = (speed and speed / 1e9 for speed in (rate.flops_per_s, rate.bytes_per_s))
        cells = (rate.launch_s * 1e6, flops, rate.masked, rate.edge, memory)
        table.add_row(name, *("-" if cell is None else f"{cell:,.3g}" for cell in cells))
    link = machine.node.link
    Console().print(table)
    print(f"link: {link.latency_s * 1e6:.3g} us, {link.bytes_per_s / 1e9:.3g} GB/s each way")


def print_model(model: Model) -> None:
    """Prints what was read of a configuration; nothing for a model by its name or its sizes."""
    if model.about:
        active = model.num_weights - model.inactive
        of = f", {_count(active)} active per token" * bool(model.inactive)
        print(f"{model.about}; {_count(model.num_weights)} parameters{of}")


def _count(number: int) -> str:
    size, word = (1e9, "billion") if number >= 1e9 else (1e6, "million")
    return f"{number / size:,.4g} {word}"


def question_to_json(question: Question, hardware: Hardware, world: int) -> dict[str, object]:
    """What was asked, for JSON."""
    model = question.model
    about = {"about": model.about} if model.about else {}
    training = question.phase == "train"
    return {
        "model": model.name,
        **about,
        "parameters": model.num_weights,
        "active_parameters": model.num_weights - model.inactive,
        "world": world,
        "seq": question.seq_len,
        "batch": question.batch,
        "hardware": hardware.name,
        "ranks_per_node": min(world, hardware.node.ranks),
        "shard": question.shard if training else None,
        "optimizer": question.optimizer if training else None,
        "micro_batches": question.micro_batches,
        **question.mesh(world)._asdict(),
    }


def about_model(question: Question, layout: str) -> str:
    """The start of a title. If each strategy has its own layout, the layouts are in a column."""
    of = "" if layout == "auto" else f", {layout} layout"
    training = question.phase == "train"
    sharded = f" with {question.shard}" * (training and question.shard != "none")
    other = f" by {question.optimizer}" * (training and question.optimizer != "adamw")
    parts = f", {question.micro_batches} micro-batches" * (question.micro_batches > 1)
    asked = f"{question.phase}{sharded}{other}, {question.seq_len:,} tokens{parts}, {question.mask}"
    return f"{question.model.name}, {asked}{of}"


def where(world: int, hardware: Hardware, question: Question | None = None) -> str:
    """The end of a title: the ranks, their mesh where it has several axes, and their nodes."""
    nodes = -(-world // hardware.node.ranks)
    mesh = question.mesh(world)._asdict() if question is not None else {}
    axes = [f"{name} {size}" for name, size in mesh.items() if size > 1]
    of = f" as {' x '.join(axes)}" * (len(axes) > 1 or mesh.get("context") == 1 < world)
    return f"{world} ranks{of} on {nodes} node{'s' * (nodes > 1)} of {hardware.name}"


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


def print_forecasts(
    forecasts: list[ModelForecast], title: str, layout: str, phase: Phase, hardware: Hardware
) -> None:
    """Prints a table of forecasts, one a line."""
    by_strategy = layout == "auto"  # each strategy has its own layout
    words, numbers = (
        ["strategy", *["layout"] * by_strategy],
        ["time s", "idle s", "sent GB", "memory GB"],
    )
    table = _table(title, words, numbers)
    for f in forecasts:
        table.add_row(f.strategy, *[f.layout] * by_strategy, *_cells(f))
    _show(table, phase, hardware)


def _cells(f: ModelForecast) -> tuple[str, ...]:
    sent, memory = (f"{size / 1e9:,.1f}" for size in (f.sent_bytes, f.memory_bytes))
    held = f"{memory} (too much)" if f.out_of_memory else memory
    least = "" if f.simulated else "> "
    times = (f"{least}{_seconds(time_s)}" for time_s in (f.time_s, f.idle_s))
    return *times, sent, held, f.activations or ""


def print_worlds(answers: list[Answer], title: str, layout: str) -> None:
    """The best of each number of ranks; where none fits, the one that lacks least memory."""
    by_strategy = layout == "auto"
    words = ["ranks", "take", *["layout"] * by_strategy]
    table = _table(title, words, ["time s", "ranks x s", "idle s", "sent GB", "memory GB"])
    for answer in answers:
        best, first = answer.best, next(iter(answer.found), None)
        total = "" if answer.rank_seconds is None else f"{answer.rank_seconds:,.1f}"
        taken = (best.strategy, best.layout) if best else ("none", "")
        time, *rest = _cells(first) if first else ("not possible",)
        table.add_row(str(answer.world_size), *taken[: 1 + by_strategy], time, total, *rest)
    _show(table, answers[0].question.phase, answers[0].hardware)
    for line in best_worlds(answers):
        print(line)


def _seconds(value: float) -> str:
    return f"{value:,.3f}" if value >= 1 or not value else f"{value:.3g}"


class Ticker:
    """What an answer is at, on stderr, if it takes longer than two seconds: a bar on a terminal,
    elsewhere a line now and then.
    """

    def __init__(self) -> None:
        from rich.progress import Progress as Bars  # here: 8 ms that `--help` does not wait for

        self._bars = Bars(console=Console(stderr=True), transient=True, auto_refresh=True)
        self._task = self._bars.add_task("", total=None)
        self._doing = ""
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._tell, name="burst-rt progress", daemon=True)

    def __enter__(self) -> Self:
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._clock.join()

    def doing(self, what: str) -> None:
        """Says what comes next."""
        self._doing = what
        self._bars.update(self._task, description=what)

    def through(self, what: str, candidates: Sequence[SpreadModel]) -> Iterator[SpreadModel]:
        """What goes through candidates, one after another."""
        self._bars.update(self._task, total=len(candidates), completed=0)
        for number, candidate in enumerate(candidates, 1):
            self.doing(f"{what}, {candidate.strategy}, {number} of {len(candidates)}")
            yield candidate
            self._bars.update(self._task, completed=number)

    def _tell(self) -> None:
        if self._ended.wait(_QUIET_S):
            return
        if sys.stderr.isatty():
            with self._bars:
                self._ended.wait()
            return
        while True:
            print(f"burst-rt: {self._doing}", file=sys.stderr, flush=True)
            if self._ended.wait(_BETWEEN_S):
                return
