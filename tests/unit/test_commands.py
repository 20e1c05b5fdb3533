"""The command line: help for every option, usage errors in one line before any rank starts; what
`draw` draws covers nothing.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox
from telemetry_feed import record_calls

from burst_rt.errors import DeviceError, InputError
from burst_rt.launch import draw, run
from burst_rt.launch.main import cli
from burst_rt.scheduler import Graph, GraphBuilder


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for sub in command.list_commands(context):
            found = command.get_command(context, sub)
            assert found is not None
            yield from _commands(f"{name} {sub}", found)
    else:
        yield name, command


def test_every_option_has_help() -> None:
    bare = [
        (name, option.opts)
        for name, command in _commands("burst-rt", cli)
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "burst-rt: No such command 'trian'. Did you mean train?; see burst-rt --help"),
        (
            "draw -n 2 --tokens 0",
            "burst-rt: Invalid value for '--tokens': 0 is not in the range x>=1; see burst-rt draw "
            "--help",
        ),
        (
            "bench attention -n 0",
            "burst-rt: Invalid value for '-n' / '--num-ranks': 0 is not in the range x>=1; see "
            "burst-rt bench attention",
        ),
        (
            "bench hub",
            "burst-rt: hub: it is not in the installed package; in the source tree, run `python -m "
            "benchmarks hub`; see burst-rt bench --help",
        ),
        (
            "bench attention --part memory",
            "burst-rt: Invalid value for '--part': memory: it is not in the installed package; in "
            "the source tree, run `python -m benchmarks attention --part memory`; see",
        ),
        ("plan --world 8", "burst-rt: Missing option '--hardware'; see burst-rt plan --help"),
        (
            "eval -n 2",
            "burst-rt: Missing option '--checkpoint' or '--model'; see burst-rt eval --help",
        ),
    ],
)
def test_usage_errors_are_one_line(words: str, said: str) -> None:
    done = CliRunner().invoke(cli, words.split(), prog_name="burst-rt")
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(said)


def test_too_little_memory_is_one_line() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)); "
        "from burst_rt.launch.main import main; main()"
    )
    words = ["plan", "--hardware", "h100", "--world", "8", "--seq", "999999M"]
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == DeviceError.exit_code
    (line,) = done.stderr.splitlines()
    assert line.startswith("burst-rt: this machine has too little memory: ")


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ("draw -n 2 --strategy nope", InputError, "strategy must be one of"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_starts(
    words: str, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "burst_rt.launch.run.launch", lambda *_, **__: pytest.fail("ranks were started")
    )
    monkeypatch.setenv("BURST_RT_HARDWARE", "none")
    with pytest.raises(error, match=said):
        CliRunner().invoke(cli, words.split(), catch_exceptions=False)


def _graph(rank: int, world: int) -> Graph:
    g = GraphBuilder(rank, world)
    out, into = (
        g.buffer(name, size_bytes=1 << 20, initialised=name == "out") for name in ("out", "in")
    )
    g.exchange(
        "hop 0", sends=[(out, (rank + 1) % world)], recvs=[(into, (rank - 1) % world)], tag=0
    )
    return g.build()


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_arrows_of_the_ring_reach_their_ranks_and_words_cover_nothing(world: int) -> None:
    figure = draw._ring(
        [_graph(rank, world) for rank in range(world)], "a ring", ["0 - 1,023"] * world
    )
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]  # matplotlib's
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    notes = [note for note in figure.axes[0].texts if isinstance(note, Annotation)]
    boxes = [
        patch.get_window_extent(renderer) for note in notes if (patch := note.get_bbox_patch())
    ]
    words = [
        note.get_window_extent(renderer)
        for note in notes
        if note.get_text() and not note.get_bbox_patch()
    ]
    arrows = [note.arrow_patch for note in notes if isinstance(note.arrow_patch, FancyArrowPatch)]
    assert (len(boxes), len(words), len(arrows)) == (world, world, world)
    for one, other in itertools.combinations([*boxes, *words], 2):
        assert not one.overlaps(other)
    for arrow in arrows:
        lines = arrow.get_path().to_polygons(arrow.get_transform(), closed_only=False)
        points = [(float(x), float(y)) for line in lines for x, y in np.asarray(line)]
        # Within some pixels of the rank that sends and of the one that receives.
        assert sum(min(_gap(box, x, y) for x, y in points) < 8 for box in boxes) == 2
        assert [point for point in points for word in words if word.contains(*point)] == []


def _gap(box: Bbox, x: float, y: float) -> float:
    return float(max(box.x0 - x, x - box.x1, box.y0 - y, y - box.y1, 0.0))


@pytest.mark.parametrize("words", [["--version"], ["plan", "--help"]])
def test_what_cannot_be_written_is_told(words: list[str]) -> None:
    command = [sys.executable, "-m", "burst_rt.launch.main", *words]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 74
    assert done.stderr == (
        "burst-rt: no room is left for what is written: [Errno 28] No space left on device\n"
    )
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 64
    assert done.stderr.startswith("burst-rt: InputError: standard output is closed")


def test_a_reader_that_wants_no_more_is_no_error() -> None:
    words = ["plan", "--hardware", "h100", "--world", "2", "--seq", "1K", "--phase", "first-token"]
    command = [sys.executable, "-m", "burst_rt.launch.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_file_that_is_no_json_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "results.csv"
    for text in ("a,b", "[1]"):
        out.write_text(text)
        done = CliRunner().invoke(cli, ["bench", "attention", "--out", str(out)])
        assert done.exit_code == 2
        assert "expected a file of results in JSON" in done.output
    assert out.read_text() == "[1]"


def test_a_terminal_of_ascii_gets_question_marks(tmp_path: Path) -> None:
    record_calls(tmp_path / "job.record", 2, [])
    words = ["top", "--replay", str(tmp_path / "job.record")]
    done = subprocess.run(
        [sys.executable, "-m", "burst_rt.launch.main", *words],
        env=dict(os.environ) | {"PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "? live" in done.stdout


def test_a_dashboard_that_is_asked_for_overrules_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for was, is_ in (("off", "1"), ("0", "0"), ("0.0.0.0:9000", "0.0.0.0:9000")):
        monkeypatch.setenv("BURST_RT_DASHBOARD", was)
        monkeypatch.setenv("BURST_RT_TELEMETRY", "0")
        with pytest.raises(SystemExit):
            run.command(["--dashboard", "-n", "0", "nothing.py"])
        assert os.environ["BURST_RT_DASHBOARD"] == is_
