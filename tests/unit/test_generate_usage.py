"""`burst-rt generate`: how a token is chosen, when a text ends, and errors in one line that say
what to do. That ranks write the right text is tested in tests/mpi/test_generate_command.py.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from generating import PROMPT, SEQ_LEN, make_options, make_run, plain_text

from burst_rt import run_local
from burst_rt.errors import ConfigError, DeviceError
from burst_rt.launch.generate.loop import generate, sample
from burst_rt.launch.generate.models import ByteStreamer
from burst_rt.launch.main import cli
from burst_rt.launch.mpirun import MpiLauncher
from burst_rt.launch.serve.batch import answer_file
from burst_rt.serving.memory import KVMemory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("generate") / "run")


def _generate(num_ranks: int = 1, **options: Any) -> None:
    run_local(num_ranks, lambda ctx: generate(ctx, make_options(**options)))


def test_tokens_are_drawn_by_their_probabilities_among_the_most_likely() -> None:
    shares = torch.tensor([0.1, 0.5, 0.15, 0.25])
    generator = torch.Generator().manual_seed(0)

    def drawn(temperature: float, top_p: float) -> Counter[int]:
        return Counter(
            sample(shares.log(), temperature=temperature, top_p=top_p, generator=generator)
            for _ in range(4000)
        )

    assert drawn(0.0, 1.0) == {1: 4000}
    everything = drawn(1.0, 1.0)
    # Five standard deviations of the count of the most likely one are 158.
    assert all(abs(everything[token] - 4000 * share) < 160 for token, share in enumerate(shares))
    # 0.5 is not enough; with 0.25 more it is.
    most = drawn(1.0, 0.7)
    assert set(most) == {1, 3}
    assert abs(most[3] - 4000 / 3) < 160
    assert drawn(1.0, 0.01) == {1: 4000}
    # The logarithms' halves: shares go by square roots.
    warm = drawn(2.0, 1.0)
    assert abs(warm[1] / warm[0] - 5**0.5) < 0.4


@pytest.mark.parametrize("num", [2, 257, 5000])
def test_what_is_drawn_among_many_tokens_is_what_a_whole_sort_leaves(num: int) -> None:
    generator = torch.Generator().manual_seed(num)
    for spread in (0.0, 1.0, 4.0):
        scores = spread * torch.randn(num, generator=generator)
        shares, tokens = scores.double().softmax(0).sort(descending=True)
        for top_p in (0.05, 0.6, 0.99):
            shown = shares.cumsum(0) - shares < top_p
            drawn = torch.tensor(
                [
                    sample(scores, temperature=1.0, top_p=top_p, generator=generator)
                    for _ in range(100)
                ]
            )
            if spread:  # else all are equal, and any of them may be left out
                assert torch.isin(drawn, tokens[shown]).all()
            assert len(drawn.unique()) <= shown.sum()
            if spread == 0.0 and num == 5000 and top_p == 0.99:
                assert len(drawn.unique()) > 90


def test_scores_that_are_no_numbers_are_no_token() -> None:
    generator = torch.Generator()
    for scores in ([0.0, torch.nan], [torch.inf, 0.0]):
        for temperature in (0.0, 1.0):
            chosen = sample(
                torch.tensor(scores), temperature=temperature, top_p=0.9, generator=generator
            )
            assert chosen == -1
    # A model may rule a token out, and temperatures may be tiny.
    ruled_out = torch.tensor([-torch.inf, 80.0, 81.0])
    assert sample(ruled_out, temperature=1e-320, top_p=1.0, generator=generator) == 2


def test_characters_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    streamer, seen = ByteStreamer(), ""
    for byte, shown in zip("aä€".encode(), ("a", "", "ä", "", "", "€"), strict=True):
        streamer.put(torch.tensor([byte]))
        seen += shown
        assert capsys.readouterr().out == shown
    streamer.put(torch.tensor([0xC3]))
    streamer.end()
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}\n"


@pytest.mark.parametrize("prompt", [PROMPT, "ab"])
def test_ranks_that_are_threads_write_what_one_process_writes_without_a_cache(
    run: Path, prompt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _generate(2, checkpoint=run, prompt=prompt, max_new_tokens=12, temperature=0.0)
    shown = capsys.readouterr()
    assert shown.out == plain_text(run, prompt, 12) + "\n"
    assert "time to first byte" in shown.err


def test_rank_0_chooses_for_all(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = iter(b"xyz")
    monkeypatch.setattr("burst_rt.launch.generate.loop.sample", lambda *_, **__: next(letters))
    _generate(3, checkpoint=run, prompt="abc", max_new_tokens=3)
    assert capsys.readouterr().out == "abcxyz\n"
    assert list(letters) == []


def test_a_text_ends_where_the_model_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", ends=True)
    _generate(checkpoint=run, prompt="abc", temperature=0.0)
    shown = capsys.readouterr()
    assert shown.out == "abc\n"
    assert re.search(r"time to first byte +│ - ", shown.err)


def test_bfloat16_writes_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _generate(checkpoint=run, prompt=PROMPT, max_new_tokens=12, dtype="bfloat16")
    assert re.fullmatch(re.escape(PROMPT) + "[ -~]{12}\n", capsys.readouterr().out)


def test_a_prompt_may_be_any_bytes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the shell gives them: what is no UTF-8 is half of a surrogate."""
    _generate(checkpoint=run, prompt="ab\udcffc", max_new_tokens=5)
    assert capsys.readouterr().out.startswith("ab\ufffdc")


def test_a_byte_level_model_has_no_chats(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--chat: expected a model of transformers"):
        _generate(2, checkpoint=run, prompt="a", chat=True)
    path = tmp_path / "requests"
    path.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}')
    with pytest.raises(ConfigError, match="--requests: expected a model of transformers"):
        run_local(2, lambda ctx: answer_file(ctx, make_options(checkpoint=run, requests=path)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--prompt a", "Missing option '--checkpoint' or '--model'"),
        ("--checkpoint run", "Give one of '--prompt', '--prompt-file' and '--requests'"),
        ("--checkpoint run --prompt a --requests b", "Give one of '--prompt', '--prompt-file' and"),
        ("--model m --prompt a --rows 2", "'--rows' is for '--requests'"),
        ("--model m --requests b --chat --seed 1", "A request of '--requests' says it itself: lea"),
        ("--checkpoint run --prompt a --prompt-file b", "Give one of '--prompt', '--prompt-file"),
        ("--checkpoint run --prompt a --temperature -1", "Invalid value for '--temperature'"),
        ("--checkpoint run --prompt a --temperature nan", "Invalid value for '--temperature'"),
        ("--checkpoint run --prompt a --top-p nan", "Invalid value for '--top-p'"),
        ("--checkpoint run --prompt a --top-p 0", "Invalid value for '--top-p'"),
        ("--checkpoint run --prompt a -n 0", "Invalid value for '-n'"),
    ],
)
def test_usage_errors_are_one_line(words: str, said: str) -> None:
    done = CliRunner().invoke(cli, ["generate", *words.split()], prog_name="burst-rt")
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2
    assert line.startswith(f"burst-rt: {said}")
    assert line.endswith("see burst-rt generate --help")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--checkpoint nothing --prompt a", "nothing: expected a complete checkpoint in nothing/"),
        ("--model nothing --prompt a", "nothing is none; nothing is downloaded"),
        (
            "--model mute --prompt a",
            "expected a tokenizer (.*) in .*mute, found none; tokenizer.sa",
        ),
        ("--checkpoint run --requests nothing", "No such file .*'nothing'; make the file"),
        ("--checkpoint run --prompt-file nothing", "No such file .*'nothing'; make the file"),
        ("--checkpoint run --model mute --prompt a", "run holds a byte-level model of its own; le"),
    ],
)
def test_what_cannot_run_is_refused_before_any_rank_starts(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(run)
    (tmp_path / "mute").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "mute" / name).touch()
    done = CliRunner().invoke(cli, ["generate", "-n", "2", *words.split()])
    assert isinstance(done.exception, ConfigError)
    assert re.search(said, str(done.exception)), done.exception
    assert "\n" not in str(done.exception)


def test_what_only_ranks_can_refuse_is_refused_on_every_rank(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, said in (
        ({"prompt": ""}, "--prompt: expected at least one token, got an empty text"),
        (
            {"prompt": "a" * 800, "max_new_tokens": 101},
            f"--prompt: expected at most {SEQ_LEN} bytes, as the model was made for, with the "
            "text; got 800 and --max-new-tokens 101; shorten",
        ),
        ({"prompt": "a", "model": tmp_path}, f"--model: {run} holds a byte-level model of its own"),
        ({"prompt_file": tmp_path / "nothing"}, "nothing'; make the file or folder accessible"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            _generate(2, checkpoint=run, **options)

    def refuse(self: KVMemory, capacity: int) -> DeviceError:
        return DeviceError("KVCache: out of memory: use more ranks", rank=0)

    monkeypatch.setattr(KVMemory, "allocate", refuse)
    with pytest.raises(ConfigError, match="out of memory: use more ranks"):
        _generate(2, checkpoint=run, prompt="a")


def test_only_open_mpi_5_is_told_to_pass_on_what_is_no_line_yet() -> None:
    for family, version, expected in (
        ("Open MPI", "(Open MPI) 5.0.11", ["--output", ":raw"]),
        ("Open MPI", "(Open MPI) 4.1.4", []),
        ("MPICH", "Version: 5.0.1", []),
        ("unknown", "version unknown", []),
    ):
        assert MpiLauncher(Path("mpirun"), family, version).as_it_comes() == expected


def test_weights_that_are_no_numbers_are_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("burst_rt.launch.generate.loop.sample", lambda *_, **__: -1)
    with pytest.raises(ConfigError, match="scores are not numbers"):
        _generate(2, checkpoint=run, prompt="a")
    assert capsys.readouterr().out == "a"
