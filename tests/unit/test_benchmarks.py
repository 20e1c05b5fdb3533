"""The command `python -m benchmarks`: its list, options, refusals, and the page it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli
from benchmarks.page import page
from burst_rt.errors import ConfigError, InputError


def _commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return {name: command for name, command in commands.items() if command is not None}


def test_every_benchmark_and_each_of_its_options_has_help() -> None:
    commands = _commands()
    assert {"all", "attention", "gpu-check", "predict", "telemetry"} < set(commands)
    shown = CliRunner().invoke(cli, ["--help"]).output
    for name, command in commands.items():
        assert f"  {name} " in shown
        assert command.help
        options = [option for option in command.params if isinstance(option, click.Option)]
        assert [option.opts for option in options if not option.help] == []


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ("strategies --group 3", InputError, "--group must divide --heads, got 3 and 8"),
        ("predict", ConfigError, "run `burst-rt calibrate` first"),
        ("layer --heads 3 --kv-heads 2", InputError, "num_kv_heads must divide num_heads"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_starts(
    words: str, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "burst_rt.launch.measure.ranks.launch", lambda *_, **__: pytest.fail("ranks were started")
    )
    monkeypatch.setenv("BURST_RT_HARDWARE", "none")
    with pytest.raises(error, match=said):
        CliRunner().invoke(cli, words.split(), catch_exceptions=False)


def test_usage_errors_name_the_option() -> None:
    done = CliRunner().invoke(cli, ["strategies", "--repeats", "0"])
    assert done.exit_code == 2
    assert "Invalid value for '--repeats': 0 is not in the range x>=1" in done.output


_ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_results_give() -> None:
    """Write it again with `python -m benchmarks page`."""
    text = (_ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    assert text == page()
    assert len(text.splitlines()) <= 150
    shown = re.findall(r"\]\((benchmarks/\S+)\)", text)
    assert [name for name in shown if not (_ROOT / name).exists()] == []


def test_every_file_of_results_says_what_made_it() -> None:
    paths = sorted((_ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(paths) > 30
    for path in paths:
        results = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(results.pop("machine"), dict)
        assert results.pop("command").startswith(("burst-rt ", "python -m benchmarks ", "make "))
        results.pop("note", None)
        assert results
        for title, rows in results.items():
            assert rows, (path.name, title)
            assert len({tuple(row) for row in rows}) == 1, (path.name, title)


def test_a_table_of_an_unknown_name_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.page._results", lambda source: {"machine": {}, "command": ""})
    with pytest.raises(KeyError):
        page()
