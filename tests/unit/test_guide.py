"""The guide: its programs run on two ranks, its commands are known, its figures are of the kind
that the program prints, and the pages load nothing from elsewhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
from click.testing import CliRunner
from telemetry_feed import record_calls

import burst_rt
from burst_rt.launch.main import cli
from burst_rt.launch.plan.models import MODELS, parse_model
from burst_rt.launch.plan.words import fitting_mask
from burst_rt.scheduler.simulator import Device, Hardware, Link, Nics, Node, Rate, Switch

_ROOT = Path(__file__).parents[2]
_PAGES = [*sorted((_ROOT / "docs").glob("*.md")), _ROOT / "README.md"]
# Pages whose programs are whole: they run as they stand, one block after the other.
_PROGRAMS = (
    "index", "choosing", "masks", "recurrences", "serving", "pipelines", "watching", "errors",
    "how", "plain",
)  # fmt: skip


def _blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    # Of every language, so that the end of one block is not taken for the start of another.
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def _kind(text: str) -> list[str]:
    """Lines without their numbers."""
    return [re.sub(r"\d[\d,.]*", "0", line).rstrip() for line in text.strip().splitlines()]


def _run(page: str, world_size: int, program: str | None = None) -> list[dict[str, Any]]:
    program = program or "\n".join(_blocks(_ROOT / "docs" / f"{page}.md", "python"))

    def run(ctx: burst_rt.Context) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": page}
        exec(compile(program, f"{page}.md", "exec", dont_inherit=True), names)
        return names

    return burst_rt.run_local(world_size, run, timeout_s=60)


@pytest.mark.parametrize("page", _PROGRAMS)
def test_programs_of_a_page_run(page: str) -> None:
    program = "\n".join(_blocks(_ROOT / "docs" / f"{page}.md", "python"))
    if page == "watching":  # what is watched is to take a while there
        program = re.sub(r"\b[24]_0(96|48)\b", "256", program)
        assert "256" in program
    assert len(_run(page, 2, program)) == 2


# Functions that make tensors on the CPU unless they are told a device.
_MAKES = re.compile(r"torch\.(?:randn?|randint|zeros|ones|empty|full)\((?:[^()]|\([^()]*\))*\)")
_MODEL = re.compile(r"(?:from_pretrained|Sequential|Mine)\((?:[^()]|\([^()]*\))*\)")


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_programs_of_a_page_run_on_gpus_too(page: Path) -> None:
    """No machine of these tests has one: there `init()` takes it, and tensors have to be there."""
    program = "\n".join(_blocks(page, "python"))
    if not re.search(r"init\((?!device)", program):
        return
    made = [call for call in _MAKES.findall(program) if "device=" not in call]
    alone = [call for call in made if "**here" not in call and "generator=" not in call]
    assert not alone
    if "generator=" in program or _MODEL.search(program):
        assert ".to(ctx.device)" in program or "hf.Trainer" in program


def test_the_first_program_of_the_readme_runs() -> None:
    program, *_ = _blocks(_ROOT / "README.md", "python")
    for names in _run("README", 2, program):
        assert names["out"].shape == names["q"].shape
        assert names["q"].grad is not None
        names["ctx"].close()


def test_the_error_of_the_page() -> None:
    shown = _blocks(_ROOT / "docs" / "errors.md", "text")[0].strip()
    assert [names["said"] for names in _run("errors", 2)] == [shown] * 2


def test_the_ring_of_the_page_opens_the_module_of_rings() -> None:
    shown, *_ = _blocks(_ROOT / "docs" / "how.md", "python")
    assert len(shown.splitlines()) <= 25
    assert textwrap.indent(shown, "    ") in (
        import_module("burst_rt.planning.strategies.ring").__doc__ or ""
    )


@pytest.mark.parametrize(("page", "world_size"), [("choosing", 4), ("recurrences", 2)])
def test_the_explanation_of_the_page(page: str, world_size: int) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        _run(page, world_size)
    shown, *_ = _blocks(_ROOT / "docs" / f"{page}.md", "text")
    # What torch's operators take by the way differs between releases of torch.
    told, shown = (re.sub(r"(and results:) [\d,]+", r"\1", x) for x in (said.getvalue(), shown))
    assert told.strip() == shown.strip()


@pytest.mark.parametrize("number", [0, 1], ids=["one world", "several worlds"])
def test_the_plans_of_the_page(number: int) -> None:
    page = _ROOT / "docs" / "choosing.md"
    command = [line for line in _commands(page) if line.startswith("burst-rt plan")][number]
    done = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    shown = _blocks(page, "text")[1 + number]
    # Which strategy wins may change with the forecasts: then so does the page's text.
    assert sorted(_kind(done.stdout)) == sorted(_kind(shown))


def _words(text: str) -> list[str]:
    """Lines of a summary without numbers, kinds of calls, and names of tasks and files."""
    lines = re.sub(r"'[^']*'|[\w-]+\.record|forward|backward", "name", text).splitlines()
    return [" ".join(re.sub(r"\d[\d,.]*", "0", line).split()) for line in lines]


def test_the_summaries_of_the_page_are_in_the_words_of_the_command(tmp_path: Path) -> None:
    # Rank 1 is late at the agreement; it is in a longer tile; the wire is slow.
    entered = {
        0: (2.0, ((0.5, 0.5, 0.5), (0.0, 0.0, 0.3), (0.5, 0.5, 1.0), (0.0, 0.0, 0.5))),
        1: (2.5, ((0.0, 0.0, 0.0), (0.0, 0.0, 0.3), (0.3, 0.3, 0.5), (0.0, 0.0, 0.0))),
    }
    within = ((0.1, 0.1, 0.5), (0.0, 0.0, 0.1), (0.5, 0.5, 0.6), (0.0, 0.0, 0.0))
    longer = ((0.4, 0.4, 0.5), (0.0, 0.0, 0.4), (0.5, 0.5, 0.6), (0.0, 0.0, 0.0))
    printed: set[str] = set()
    for name, call in (
        ("agreement", entered),
        ("tile", {0: (2.0, within), 1: (2.0, longer)}),
        ("wire", {0: (2.0, within), 1: (2.0, within)}),
    ):
        path = tmp_path / f"{name}.record"
        record_calls(path, 2, [dict.fromkeys(range(2), (1.0, longer)), call], agree=True)
        done = CliRunner().invoke(cli, ["trace", "summary", str(path)])
        assert done.exit_code == 0, done.output
        printed.update(_words(done.output.replace(f"{tmp_path}/", "")))
    jobs = [_words(text) for text in _blocks(_ROOT / "docs" / "watching.md", "text")]
    assert {line for job in jobs for line in job} - printed == set()
    # Each of the three jobs has its own cause.
    whole = [" ".join(job) for job in jobs if "longest stalls:" in job]
    causes = ("was still in", "was on the wire", "comes late")
    assert [[cause in job for job in whole] for cause in causes] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]


def test_the_page_has_what_a_plan_is_asked_with(tmp_path: Path) -> None:
    """The models' sizes, a file of documents, every field of a machine file."""
    text = (_ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    for name, sizes in re.findall(r"`(llama-\d+b)` is `([^`]*)`", text):
        assert replace(parse_model(sizes), name=name) == MODELS[name]
    assert all(f"`{name}`" in text for name in MODELS)
    documents = _blocks(_ROOT / "docs" / "choosing.md", "text")[-1]
    file = tmp_path / "documents"
    file.write_text(documents, encoding="utf-8")
    fitting_mask(f"documents:{file}", 128 << 10, 1)
    machine = text[text.index("### Machine files") :]
    for kind in (Hardware, Device, Rate, Node, Link, Switch, Nics):
        for field in fields(kind):
            assert re.search(rf"[`.\[]{field.name}[`.\]]", machine), (kind, field.name)


def _commands(page: Path) -> list[str]:
    text = "".join(_blocks(page, "")).replace("\\\n", " ")
    return [
        re.sub(r"\$\w+", "", line[line.index("burst-rt ") :].partition(" #")[0]).strip()
        for line in text.splitlines()
        if re.match(r"(\.venv/bin/|srun .* )?burst-rt ", line)
    ]


# Options such as --record set variables, for the ranks of a job: not for the tests after this one.
@mock.patch.dict(os.environ)
@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_the_command_line_knows_the_commands_of_a_page(page: Path) -> None:
    for line in _commands(page):
        command: click.Command = cli
        context = click.Context(cli, info_name="burst-rt")
        words = shlex.split(line)[1:]
        while isinstance(command, click.Group):
            name, found, words = command.resolve_command(context, words)
            assert found is not None, line
            command, context = found, click.Context(found, context, info_name=name)
        try:
            with mock.patch.dict(os.environ):  # where options of telemetry leave their settings
                command.make_context(command.name, list(words), context.parent)
        except click.BadParameter as error:
            # The reader has these files.
            assert error.message.endswith("does not exist."), f"{line}: {error.message}"  # noqa: PT017


def test_commands_are_found() -> None:
    assert sum(len(_commands(page)) for page in _PAGES) > 30


def test_the_readme_counts_the_lines_to_read_first() -> None:
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    sentence = (
        text[text.index("**Small enough to read.**") :].partition("\n- ")[0].partition("\n\n")[0]
    )
    (said,) = re.findall(r"about ([\d,]+) lines", sentence)
    files = [_ROOT / link for link in re.findall(r"\]\((\S+\.py)\)", sentence)]
    assert len(files) > 8
    counted = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert abs(counted - int(said.replace(",", ""))) <= 200, f"{counted:,} lines"


def test_every_error_has_its_exit_code_on_the_page() -> None:
    page = (_ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE))
    kinds = set(burst_rt.errors.__all__) - {"BurstError"}
    assert shown == {name: str(getattr(burst_rt.errors, name).exit_code) for name in kinds}


def test_the_api_page_has_every_public_name() -> None:
    page = (_ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"burst_rt\.(\w+)$", page, re.MULTILINE))
    assert set(burst_rt.__all__) - shown == set()


def test_the_pages_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    if "BURST_RT_ALL_TESTS" not in os.environ and importlib.util.find_spec("sphinx") is None:
        pytest.skip("the guide needs the extra `docs`; `make docs` builds it")
    # `make docs` builds all pages, and looks at each. Here: what pages have in common, Markdown and
    # docstrings, and that a page that loads something is seen.
    done = _built(tmp_path / "good", ["docs/index.md", "docs/api.md", "README.md"])
    assert done.returncode == 0, done.stderr
    assert "loads" not in done.stderr, done.stderr
    assert len(list((tmp_path / "good").rglob("*.html"))) > 4
    source = tmp_path / "source"
    (source / "docs").mkdir(parents=True)
    (source / "docs" / "index.md").write_text("# A page\n\n![x](https://example.com/x.png)\n")
    done = _built(tmp_path / "bad", ["docs/index.md"], source, "--fail-on-warning")
    (said,) = done.stderr.splitlines()[:1]
    assert re.search(r'index\.html loads <img .*example\.com/x\.png"', said), done.stderr
    assert done.returncode != 0


def _built(
    folder: Path, pages: list[str], source: Path = _ROOT, *options: str
) -> subprocess.CompletedProcess[str]:
    """How Sphinx builds some pages."""
    command = [sys.executable, "-m", "sphinx", "--quiet", *options, "-c", str(_ROOT / "docs")]
    command += ["-D", f"include_patterns={','.join(pages)}", str(source), str(folder)]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=300)
