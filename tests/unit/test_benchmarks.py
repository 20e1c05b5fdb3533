"""The command `python -m benchmarks`: its list, options, refusals, and the page it writes."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli
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
