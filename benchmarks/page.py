"""BENCHMARKS.md and its plots, from the results in benchmarks/results: `python -m benchmarks page`.

A file of results is what a benchmark writes with --out: one machine block, and tables by their
titles. In addition it has the command, and a note where something must be said about it. The page
shows figures with the digits that the files have. `page.toml` has the page's words.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import click

from burst_rt.launch.measure.plots import COLOURS

__all__ = ["command", "page"]

_Cell: TypeAlias = str | int | Decimal | None
_Rows: TypeAlias = Sequence[Mapping[str, _Cell]]

_HERE = Path(__file__).resolve().parent
_PAGE = _HERE.parent / "BENCHMARKS.md"


@cache
def _results(source: str) -> dict[str, Any]:
    """A file of results; its values are of several types."""
    text = (_HERE / "results" / f"{source}.json").read_text(encoding="utf-8")
    results: dict[str, Any] = json.loads(text, parse_float=Decimal)  # keeps the digits
    return results


def _only(rows: _Rows, wanted: Mapping[str, _Cell | list[_Cell]]) -> _Rows:
    """The rows whose cells are the ones that are wanted, or among them."""
    cells = {name: cell if isinstance(cell, list) else [cell] for name, cell in wanted.items()}
    return [row for row in rows if all(row[name] in cells[name] for name in cells)]


def _side_by_side(rows: _Rows) -> _Rows:
    """A row for each kernel, with its lengths side by side."""
    names = ("head_dim", "mask", "direction")
    kernels: dict[tuple[_Cell, ...], dict[str, _Cell]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        kernel = kernels.setdefault(key, dict(zip(names, key, strict=True)))
        speeds = f"{row['triton TFLOP/s']} ({row['triton / cudnn']}, {row['triton / flash']})"
        kernel[str(row["tokens"])] = speeds
    return list(kernels.values())


def _measured(source: str) -> str:
    """Command, date, machine and versions; what was not recorded is left out."""
    results = _results(source)
    machine: dict[str, str] = dict(results["machine"])
    parts = [machine.pop(name, None) for name in ("date", "cpu", "gpu")]
    cores = machine.pop("cores", None)
    parts += [cores and f"{cores} cores", *(f"{name} {text}" for name, text in machine.items())]
    parts.append(results.get("note"))
    return f"`{results['command']}`: {'; '.join(filter(None, parts))}."


def _text(cell: _Cell) -> str:
    """A figure with no more digits than it has; long ones as `publish` prints them."""
    if isinstance(cell, Decimal):
        digits = 3 if abs(cell) < 10 else 1
        exponent = cell.as_tuple().exponent
        assert isinstance(exponent, int)  # JSON has neither infinities nor NaN
        return f"{cell:,.{digits}f}" if -exponent > digits else f"{cell:,}"
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell


def _lines(section: Mapping[str, Any]) -> list[str]:
    """One section; the values of its table in page.toml are of several types."""
    rows: _Rows = _only(_results(section["source"])[section["table"]], section.get("only", {}))
    if section.get("side_by_side"):
        rows = _side_by_side(rows)
    names = [column.partition(" > ")[0] for column in section["columns"]]
    heads = [column.rpartition(" > ")[2] for column in section["columns"]]
    words = {name for name in names if any(isinstance(row[name], str) for row in rows)}
    return [
        "",
        f"## {section['heading']}",
        section["text"].strip().replace("\n", " "),
        _measured(section["source"]),
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "|".join("---" if name in words else "---:" for name in names) + "|",
        *("| " + " | ".join(_text(row[name]) for name in names) + " |" for row in rows),
    ]


def page() -> str:
    """The page in Markdown."""
    words = tomllib.loads((_HERE / "page.toml").read_text(encoding="utf-8"))
    lines = ["# Benchmarks", "", words["head"].strip()]
    for section in words["section"]:
        lines += _lines(section)
    return "\n".join(lines) + "\n"


def _draw_attention() -> None:
    """The speed of ranks against torch by length, on three CPUs."""
    from matplotlib.figure import Figure

    shared = "against torch's fused attention in one process, 2 ranks x 1 thread"
    float32 = f"forward + backward, float32, {shared}"
    amx = _results("attention-xeon-amx")[f"forward + backward {shared}"]
    machines = {
        "Zen 5": _results("attention-zen5")[float32],
        "EPYC, AVX2": _results("attention-epyc")[float32],
        "Xeon, AMX": _only(amx, {"dtype, partials": "float32"}),
    }
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, mask in zip(figure.subplots(1, 2, sharey=True), ("full", "causal"), strict=True):
        for colour, (name, rows) in zip(COLOURS, machines.items(), strict=False):
            rows = _only(rows, {"mask": mask})
            speeds = [float(row["speed against torch"] or 0) for row in rows]
            axes.plot([row["tokens"] for row in rows], speeds, "o-", color=colour, label=name)
        axes.axhline(1, color="grey", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set(title=f"{mask}, float32, forward + backward", xlabel="tokens", ylim=(0.75, 1.15))
        axes.set_xticks([2048 << i for i in range(5)], [f"{2 << i}K" for i in range(5)])
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].set_ylabel("speed of 2 ranks, of torch's")
    figure.axes[0].legend(fontsize=8, loc="lower right")
    figure.savefig(_HERE / "attention.svg", metadata={"Date": None})


def _draw_kernels() -> None:
    """The kernels' speeds on an H100. The others' follow from the ratios, measured in turn."""
    from matplotlib.figure import Figure

    rows = _only(_results("gpu-kernels-h100")["tile kernels, bfloat16, TFLOP/s"], {"tokens": 16384})
    sides = {"burst_rt": "", "cuDNN": "triton / cudnn", "FlashAttention-2": "triton / flash"}
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, ratio) in enumerate(sides.items()):
        speeds = [float(row["triton TFLOP/s"] or 0) / float(row.get(ratio) or 1) for row in rows]
        places = [i + 0.27 * number for i in range(len(rows))]
        axes.bar(places, speeds, 0.27, color=COLOURS[number], label=name)
    labels = [f"{row['head_dim']} {row['mask']}\n{row['direction']}" for row in rows]
    axes.set_xticks([i + 0.27 for i in range(len(rows))], labels, fontsize=8)
    axes.set(ylabel="TFLOP/s", title="one H100, 16,384 tokens, bfloat16; head_dim, mask, direction")
    axes.legend(fontsize=8, ncols=3)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.15)
    figure.savefig(_HERE / "kernels.svg", metadata={"Date": None})


@click.command()
def command() -> None:
    """Write BENCHMARKS.md and its plots from benchmarks/results."""
    import matplotlib as mpl

    # The same results give the same file.
    mpl.rcParams.update({"svg.hashsalt": "burst_rt", "svg.fonttype": "none"})
    text = page()
    _PAGE.write_text(text, encoding="utf-8")
    _draw_attention()
    _draw_kernels()
    click.echo(f"{_PAGE.name}: {len(text.splitlines())} lines, and two plots in benchmarks/")
