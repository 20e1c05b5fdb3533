"""Text: what is read, what is held out, and that sequences depend on numbers only."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from burst_rt.errors import ConfigError
from burst_rt.launch.train.data import (
    Stream,
    heldout_starts,
    load_corpus,
    sequences_at,
    training_starts,
)

_STREAM: Stream = np.arange(1000, dtype=np.int64).astype(np.uint8)


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_the_default_text_is_the_standard_library_and_always_the_same() -> None:
    first, again = load_corpus(None), load_corpus(None)
    assert first.fingerprint == again.fingerprint
    assert first.num_documents > 400
    assert 4e6 < first.size_bytes < 40e6
    assert 0.01 < len(first.heldout) / first.size_bytes < 0.12
    assert b"class OrderedDict(dict):" in first.train.tobytes() + first.heldout.tobytes()


def test_a_folder_is_read_in_order_without_hidden_files_and_binaries(tmp_path: Path) -> None:
    long = b"x" * 100
    files = {
        "b/two.txt": b"2" + long,
        "a.txt": b"1" + long,
        ".hidden": b"h" + long,
        ".git/config": b"g" + long,
        "image": b"\x89PNG" + long,
    }
    corpus = load_corpus(_write(tmp_path, {**files, "zeros": b"a\0b" + long, "empty": b""}))
    assert corpus.num_documents == 2
    # Of few documents the end of each is held out; byte 0 separates them.
    assert corpus.train.tobytes() == b"1" + long[:95] + b"\0" + b"2" + long[:95]
    assert corpus.heldout.tobytes() == b"xxxxx\0xxxxx"


def test_of_many_documents_some_are_held_out_whole(tmp_path: Path) -> None:
    names = [f"{number:03}.txt" for number in range(200)]
    corpus = load_corpus(_write(tmp_path, {name: f"<{name}>".encode() for name in names}))
    train, heldout = (
        set(stream.tobytes().split(b"\0")) for stream in (corpus.train, corpus.heldout)
    )
    assert not train & heldout
    assert train | heldout == {f"<{name}>".encode() for name in names}
    assert 1 <= len(heldout) <= 30


@pytest.mark.parametrize("num", [20, 30, 60])
def test_chance_does_not_decide_whether_there_is_held_out_text(tmp_path: Path, num: int) -> None:
    """By their names alone, of 20 documents none would be held out every third time."""
    for name in range(20):
        corpus = load_corpus(
            _write(tmp_path / str(name), {f"{name} {i}": b"some text " * 100 for i in range(num)})
        )
        assert 0.02 <= len(corpus.heldout) / (len(corpus.heldout) + len(corpus.train)) <= 0.2


def test_names_need_not_be_utf_8(tmp_path: Path) -> None:
    folder = _write(tmp_path / "texts", {str(i): b"some text " * 100 for i in range(25)})
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).write_bytes(b"more text")
    assert load_corpus(folder).num_documents == 26


def test_the_split_depends_on_paths_inside_the_folder_only(tmp_path: Path) -> None:
    files = {f"{number}.txt": b"text %d" % number for number in range(50)}
    here, there = (
        load_corpus(_write(tmp_path / "here", files)),
        load_corpus(_write(tmp_path / "there", files)),
    )
    assert here.fingerprint == there.fingerprint
    (tmp_path / "there" / "7.txt").write_bytes(b"other text")
    assert load_corpus(tmp_path / "there").fingerprint != here.fingerprint


def test_one_file_is_split_at_its_end(tmp_path: Path) -> None:
    corpus = load_corpus(_write(tmp_path, {"book.txt": bytes(range(32, 127)) * 20}) / "book.txt")
    assert len(corpus.train) == 1805
    assert corpus.train.tobytes() + corpus.heldout.tobytes() == bytes(range(32, 127)) * 20


def test_no_character_is_split(tmp_path: Path) -> None:
    content = ("é" * 30).encode()
    corpus = load_corpus(_write(tmp_path, {"book.txt": content}) / "book.txt")
    assert (corpus.train.tobytes(), corpus.heldout.tobytes()) == (content[:56], content[56:])


@pytest.mark.parametrize("files", [{}, {"image": b"\xff\xfe\xfd"}, {"short.txt": b"too short"}])
def test_too_little_text_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(ConfigError, match="--data"):
        load_corpus(_write(tmp_path, files))


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_corpus(tmp_path / "nowhere")


def test_a_sequence_longer_than_the_text_is_refused(tmp_path: Path) -> None:
    corpus = load_corpus(_write(tmp_path, {"book.txt": b"word " * 200}))
    corpus.check_length(49)
    with pytest.raises(ConfigError, match="held-out text has 50"):
        corpus.check_length(50)


def test_a_label_is_the_byte_after_its_token() -> None:
    tokens, labels = sequences_at(_STREAM, [0, 900], seq_len=10)
    assert tokens.shape == labels.shape == (2, 10)
    assert tokens[0].tolist() == list(range(10))
    assert labels[0].tolist() == list(range(1, 11))
    assert (labels[1] - tokens[1]).tolist() == [1] * 10
    assert sequences_at(_STREAM, [], seq_len=10)[0].shape == (0, 10)


def test_sequences_do_not_depend_on_who_asks() -> None:
    whole = training_starts(_STREAM, 99, seed=1, step=7, indices=range(8))
    halves = [
        training_starts(_STREAM, 99, seed=1, step=7, indices=range(half, 8, 2)) for half in range(2)
    ]
    assert [halves[index % 2][index // 2] for index in range(8)] == whole
    # Pinned: another number here means that old checkpoints resume on other text.
    assert whole[:3] == [62, 588, 618]


def test_seeds_steps_and_indices_choose_other_sequences_all_inside_the_text() -> None:
    starts = [
        start
        for seed in range(3)
        for step in range(20)
        for start in training_starts(_STREAM, 99, seed=seed, step=step, indices=range(5))
    ]
    assert len(set(starts)) > 200
    assert min(starts) >= 0
    assert max(starts) <= 900
    assert all(len(row) == 99 for row in sequences_at(_STREAM, starts, 99)[1])
    assert set(training_starts(_STREAM, 999, seed=0, step=0, indices=range(5))) == {0}


@pytest.mark.parametrize("seq_len", [63, 100, 333, 999])
@pytest.mark.parametrize("limit", [0, 1, 2, 5, 1000])
def test_held_out_sequences_do_not_overlap_and_are_spread(seq_len: int, limit: int) -> None:
    starts = heldout_starts(_STREAM, seq_len, limit)
    num_windows = 999 // seq_len
    assert len(starts) == (min(limit, num_windows) if limit else num_windows)
    assert all(b - a >= seq_len for a, b in itertools.pairwise(starts))
    assert starts[-1] + seq_len + 1 <= 1000
    if len(starts) > 1:
        gaps = [b - a for a, b in itertools.pairwise(starts)]
        assert max(gaps) - min(gaps) <= seq_len


def test_what_is_left_out_is_known(tmp_path: Path) -> None:
    files = {"a.txt": b"a" * 100, "latin.txt": b"caf\xe9" * 30, "apart/b.txt": b"b" * 100}
    root = _write(tmp_path / "text", files)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "c.txt").write_bytes(b"c" * 100)
    (root / "link").symlink_to(tmp_path / "linked")
    (root / "round").symlink_to(root)
    corpus = load_corpus(root)
    assert corpus.train.tobytes().split(b"\0") == [b"a" * 95, b"b" * 95, b"c" * 95]
    assert corpus.left_out == [str(root / "latin.txt")]


def test_runs_below_the_text_are_no_text(tmp_path: Path) -> None:
    """A run that is resumed has the text that it began with."""
    root = _write(tmp_path, {"a.txt": b"a" * 100})
    before = load_corpus(root).fingerprint
    metrics = {"runs/x/.lock": b"", "runs/x/metrics.jsonl": b"{}" * 50}
    _write(root, {**metrics, "runs/x/checkpoints/step-1/config.json": b"{}" * 50})
    assert load_corpus(root).fingerprint == before


def test_short_documents_leave_no_separators_in_what_is_held_out(tmp_path: Path) -> None:
    files = {f"{number}.txt": b"ok\n" for number in range(15)}
    corpus = load_corpus(_write(tmp_path, {"long.txt": b"x" * 1000, **files}))
    assert corpus.heldout.tobytes() == b"x" * 50
