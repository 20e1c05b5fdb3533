"""Checkpoints: what is written comes back bit for bit, and what is not whole is never used."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import random
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

import burst_rt
from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.launch.train import checkpoint as module
from burst_rt.launch.train.checkpoint import (
    Checkpoint,
    Manifest,
    copy_tensors,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from burst_rt.launch.train.claim import claim, look
from burst_rt.launch.train.config import RunOptions, TrainConfig
from burst_rt.launch.train.loop import train
from burst_rt.launch.train.report import MetricsFile, StepRecord
from burst_rt.launch.train.shared import read_shared
from burst_rt.launch.world import same_everywhere

_FILES = ("SHA256SUMS", "config.json", "model.safetensors", "optimizer.safetensors")


def _checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    weights = {
        "head.weight": torch.randn(5, 3, generator=generator),
        "norm.weight": torch.tensor([0.0, -0.0, 1e-45]),
    }
    moments = {f"exp_avg.{name}": tensor / 3 for name, tensor in weights.items()}
    return Checkpoint(Manifest(step, TrainConfig(steps=99), "fingerprint"), weights, moments)


def _names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def _step_of(run: Path) -> int:
    return find_checkpoint(run)[1].manifest.step


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = _checkpoint(7)
    folder = save_checkpoint(tmp_path, saved, keep=2)
    loaded = load_checkpoint(folder)
    assert folder == tmp_path / "checkpoints" / "step-00000007"
    assert sorted(path.name for path in folder.iterdir()) == list(_FILES)
    assert loaded.manifest == saved.manifest
    for mine, theirs in ((loaded.weights, saved.weights), (loaded.optimizer, saved.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(
            torch.equal(mine[name].view(torch.int32), theirs[name].view(torch.int32))
            for name in mine
        )
    assert loaded.manifest.config == TrainConfig(steps=99)
    # Whoever has only a shell can check it.
    subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=folder,
        check=True,
        capture_output=True,
    )


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_all_files_are_for_whom_the_umask_says(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = save_checkpoint(tmp_path, _checkpoint(7), keep=2)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == dict.fromkeys(
        _FILES, 0o666 & ~umask
    )


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100000000):
        save_checkpoint(tmp_path, _checkpoint(step), keep=2)
    assert _names(tmp_path) == ["step-00000015", "step-100000000"]
    assert _step_of(tmp_path) == 100000000


def test_file_systems_that_take_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS keeps what is mapped, OpenAFS synchronises no folders, some have modes of their own, and
    locks are unknown to Cray's DVS by a number that has no name."""
    sync, remove = os.fsync, shutil.rmtree

    def no_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    def refuse(number: int) -> Callable[..., None]:
        def refused(*args: object, **others: object) -> None:
            raise OSError(number, os.strerror(number))

        return refused

    monkeypatch.setattr(os, "fsync", no_folders)
    monkeypatch.setattr(shutil, "copymode", refuse(errno.EPERM))
    monkeypatch.setattr(shutil, "rmtree", refuse(errno.ENOTEMPTY))
    with caplog.at_level(logging.WARNING, "burst_rt"):
        for step in (1, 2):
            save_checkpoint(tmp_path, _checkpoint(step), keep=1)
        assert "step-00000001 could not be removed: Directory not empty" in caplog.text
        monkeypatch.setattr(fcntl, "flock", refuse(524))
        claim(tmp_path, resume=True).release()
        assert "cannot be locked" in caplog.text
    monkeypatch.setattr(shutil, "rmtree", remove)
    save_checkpoint(tmp_path, _checkpoint(3), keep=1)
    assert _names(tmp_path) == ["step-00000003"]
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="could not be written"):
        save_checkpoint(tmp_path, _checkpoint(4), keep=1)


def test_a_run_that_went_back_forgets_the_future_it_gave_up(tmp_path: Path) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path, _checkpoint(step), keep=3)
    (tmp_path / "checkpoints" / "step-00000010" / "config.json").unlink()
    save_checkpoint(tmp_path, _checkpoint(6), keep=3)
    assert _names(tmp_path) == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize("call", ["save_file", "_sums", "_sync", "replace"])
@pytest.mark.parametrize("survived", [0, 1])
def test_a_writer_that_dies_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, survived: int
) -> None:
    save_checkpoint(tmp_path, _checkpoint(5), keep=2)
    place = {"replace": os, "save_file": safetensors.torch}.get(call, module)
    original: Callable[..., object] = getattr(place, call)
    calls_left = survived if call not in ("replace", "_sums") else 0

    def die(*args: object) -> object:
        nonlocal calls_left
        if calls_left == 0:
            raise KeyboardInterrupt
        calls_left -= 1
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(place, call, die)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, _checkpoint(10), keep=2)
    assert _step_of(tmp_path) == 5

    save_checkpoint(tmp_path, _checkpoint(10), keep=2)
    assert _names(tmp_path) == ["step-00000005", "step-00000010"], (
        "what the dead writer left is gone"
    )
    assert _step_of(tmp_path) == 10


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _become_a_list(path: Path) -> None:
    path.write_bytes(b"[]")


def _change(folder: Path, fields: Mapping[str, object], *, cover: bool) -> None:
    """Set entries of a checkpoint's manifest ("config.lr": of its configuration); `cover`: its
    checksums are made anew.
    """
    document = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        place, _, entry = name.rpartition(".")
        (document[place] if place else document)[entry] = value
    _write_manifest(folder, json.dumps(document), cover=cover)


def _write_manifest(folder: Path, text: str, *, cover: bool) -> None:
    (folder / "config.json").write_text(text)
    if cover:
        names = ("config.json", "model.safetensors", "optimizer.safetensors")
        lines = [
            f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
            for name in names
        ]
        (folder / "SHA256SUMS").write_text("".join(lines))


_NESTED = "[" * 100_000 + "]" * 100_000
_WRONG_TYPES: list[object] = [True, [], [[]], {}, {"a": 1}]


def _cut_anywhere(chance: random.Random, run: Path, folder: Path) -> None:
    path = folder / chance.choice(_FILES)
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def _flip_bits(chance: random.Random, run: Path, folder: Path) -> None:
    path = folder / chance.choice(_FILES)
    content = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 3)):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _replace_bytes(chance: random.Random, run: Path, folder: Path) -> None:
    path = folder / chance.choice(_FILES)
    content = path.read_bytes()
    start = chance.randrange(len(content))
    path.write_bytes(
        content[:start]
        + chance.randbytes(chance.randint(0, 9))
        + content[start + chance.randint(0, 9) :]
    )


def _wrong_value(chance: random.Random, run: Path, folder: Path) -> None:
    names = [
        "format",
        "step",
        "config",
        "corpus",
        # For some of them True is no wrong value.
        *(f"config.{field.name}" for field in fields(TrainConfig) if field.default is not False),
    ]
    wrong = {chance.choice(names): chance.choice(_WRONG_TYPES)}
    if chance.random() < 0.3:
        wrong = {"step": chance.choice(["10", "", 5, 11, 0, -5, -10, 10.5, 10**400, None])}
    _change(folder, wrong, cover=chance.random() < 0.7)


def _other_fields(chance: random.Random, run: Path, folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    target = chance.choice([document, document["config"]])
    if chance.random() < 0.5:
        del target[chance.choice(list(target))]
    else:
        target["dropout"] = 0.1
    _write_manifest(folder, json.dumps(document), cover=chance.random() < 0.7)


def _nest_deeply(chance: random.Random, run: Path, folder: Path) -> None:
    text = (folder / "config.json").read_text()
    changed = chance.choice(
        [
            _NESTED,
            text.replace('"fingerprint"', _NESTED),
            text.replace("{", '{"a": ' + _NESTED + ",", 1),
        ]
    )
    _write_manifest(folder, changed, cover=chance.random() < 0.7)


def _no_manifest(chance: random.Random, run: Path, folder: Path) -> None:
    _write_manifest(
        folder,
        chance.choice(["", "null", "[]", "{}", "5", '"a"', "\x00", "{'a': 1}", "NaN"]),
        cover=chance.random() < 0.7,
    )


def _lose_a_file(chance: random.Random, run: Path, folder: Path) -> None:
    (folder / chance.choice(_FILES)).unlink()


def _empty_a_file(chance: random.Random, run: Path, folder: Path) -> None:
    (folder / chance.choice(_FILES)).write_bytes(b"")


def _add_a_file(chance: random.Random, run: Path, folder: Path) -> None:
    (
        chance.choice([folder, folder.parent])
        / chance.choice(["notes.txt", "step-1", ".writing-x"])
    ).write_bytes(chance.randbytes(9))


def _swap_between_checkpoints(chance: random.Random, run: Path, folder: Path) -> None:
    for name in chance.sample(_FILES, chance.randint(1, len(_FILES))):
        mine, theirs = (
            run / "checkpoints" / "step-00000005" / name,
            run / "checkpoints" / "step-00000010" / name,
        )
        shutil.move(mine, run / "aside")
        shutil.move(theirs, mine)
        shutil.move(run / "aside", theirs)


def _something_else_in_place(chance: random.Random, run: Path, folder: Path) -> None:
    path = folder / chance.choice(_FILES) if chance.random() < 0.8 else folder
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    instead: list[Callable[[Path], None]] = [
        Path.mkdir,
        os.mkfifo,
        lambda p: p.symlink_to("nowhere"),
        lambda p: p.symlink_to(p.name),
    ]
    chance.choice(instead)(path)


def _rename(chance: random.Random, run: Path, folder: Path) -> None:
    folder.rename(
        folder.with_name(
            chance.choice(["step-00000099", "step-000000010", "step-00000000", "gone"])
        )
    )


_DAMAGES = [
    _cut_anywhere, _flip_bits, _replace_bytes, _wrong_value, _other_fields, _nest_deeply,
    _no_manifest, _lose_a_file, _empty_a_file,
    _add_a_file, _swap_between_checkpoints, _something_else_in_place, _rename,
]  # fmt: skip


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    pairs = ((one.weights, other.weights), (one.optimizer, other.optimizer))
    equal = all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )
    return equal and one.manifest == other.manifest


def whole_run(run: Path) -> dict[int, Checkpoint]:
    """Makes a run with checkpoints of steps 5 and 10."""
    saved = {step: _checkpoint(step) for step in (5, 10)}
    for checkpoint in saved.values():
        save_checkpoint(run, checkpoint, keep=2)
    return saved


def outcome_of_damage(seed: int, run: Path, saved: Mapping[int, Checkpoint]) -> str:
    """What comes of a damage drawn from the seed: "no effect", "passed over" (told, and an older
    checkpoint taken) or "refused".

    run: a copy of what `whole_run` makes. Raises where it is anything else: AssertionError, or what
    a reader raises.
    """
    chance = random.Random(seed)
    folder = run / "checkpoints" / chance.choice(["step-00000010"] * 3 + ["step-00000005"])
    damage = chance.choice(_DAMAGES)
    damage(chance, run, folder)
    about = f"seed {seed}: {damage.__name__} of {folder.name}"
    told = _Told()
    logger = logging.getLogger("burst_rt")
    logger.addHandler(told)
    try:
        _, loaded = find_checkpoint(run)
    except ConfigError:
        return "refused"
    finally:
        logger.removeHandler(told)
    step = loaded.manifest.step
    assert _same(loaded, saved[step]), about
    # One whose whole folder is gone leaves nothing to tell.
    assert step == 10 or "skipped: checkpoint" in told.text or not folder.exists(), about
    save_checkpoint(run, saved[10], keep=2)
    assert _same(find_checkpoint(run)[1], saved[10]), about
    return "no effect" if step == 10 else "passed over"


class _Told(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"


def test_no_damage_is_used_or_ends_in_a_traceback(tmp_path: Path) -> None:
    """200 damages: each has no effect, or is told and an older checkpoint taken, or is refused; a
    run goes on from what was taken.
    """
    saved = whole_run(tmp_path / "whole")
    outcomes: Counter[str] = Counter()
    for seed in range(200):
        run = tmp_path / str(seed)
        shutil.copytree(tmp_path / "whole", run)
        outcomes[outcome_of_damage(seed, run, saved)] += 1
        shutil.rmtree(run)
    assert outcomes["passed over"] > 100, outcomes
    assert min(outcomes.values()) > 3, outcomes


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in _FILES for damage in (_cut, _empty, Path.unlink)),
        *((name, _flip) for name in _FILES),
        ("config.json", _become_a_list),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path, _checkpoint(step), keep=2)
    damaged = tmp_path / "checkpoints" / "step-00000010"
    damage(damaged / name)

    with pytest.raises(ConfigError, match="step-00000010"):
        load_checkpoint(damaged)
    with pytest.raises(ConfigError, match="step-00000010"):
        find_checkpoint(damaged)
    assert find_checkpoint(tmp_path)[0] == tmp_path / "checkpoints" / "step-00000005"
    assert caplog.text.count("skipped: checkpoint") == 1
    assert "step-00000010" in caplog.text


def test_a_disk_that_does_not_answer_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest may be whole, and must not give way to an older one."""
    for step in (5, 10):
        save_checkpoint(tmp_path, _checkpoint(step), keep=2)
    opened = Path.open

    def fail(path: Path, *args: Any, **options: Any) -> Any:
        if path.parent.name == "step-00000010" and path.suffix == ".safetensors":
            raise OSError(5, "Input/output error")
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match="Input/output error"):
        find_checkpoint(tmp_path)


def test_what_finds_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, _checkpoint(5), keep=2)

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"some")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(
        OSError, match=r"step-00000010 could not be written: I/O error: No space left"
    ):
        save_checkpoint(tmp_path, _checkpoint(10), keep=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, _checkpoint(5), keep=2)
    for wrote in (2, 3, 99):
        _change(folder, {"format": wrote}, cover=True)
        with pytest.raises(
            ConfigError,
            match=f"expected format 4, got {wrote}; use the version of burst_rt that wrote",
        ):
            load_checkpoint(folder)
    # As format 1 was.
    (folder / "SHA256SUMS").unlink()
    _change(folder, {"format": 1, "files": {}}, cover=False)
    with pytest.raises(
        ConfigError,
        match=(
            r"of format 1, which this version does not read\. Use the version of burst_rt that "
            r"wrote it"
        ),
    ):
        load_checkpoint(folder)


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "step-00000001"):
        with pytest.raises(ConfigError, match=path.name):
            find_checkpoint(path)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    source = _checkpoint(1).weights
    copy_tensors(source, {name: torch.empty_like(tensor) for name, tensor in source.items()})
    for target in (
        {"head.weight": torch.empty(5, 3)},
        {**source, "more": torch.empty(1)},
        {**source, "norm.weight": torch.empty(4)},
    ):
        with pytest.raises(ConfigError, match=r"norm\.weight|more"):
            copy_tensors(source, target)


@pytest.mark.parametrize("changes", [{"layers": 5}, {"dim": 64}, {"heads": 2, "kv_heads": 2}])
def test_a_resumed_run_must_have_the_same_model(changes: dict[str, object]) -> None:
    stored = TrainConfig(steps=99)
    with pytest.raises(ConfigError, match="the checkpoint holds another model"):
        stored.resumed(changes)
    assert stored.resumed({"steps": 120}) == TrainConfig(steps=120)


def _record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        loss=1 / step,
        lr=0.1,
        grad_norm=1.0,
        step_s=0.1,
        tokens_per_s=1.0,
        wait_fraction=0.0,
        bytes_sent=1,
    )


def test_metrics_are_cut_at_the_checkpoint_that_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, after_step=0)
    for step in (1, 2, 3):
        first.append(_record(step))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    second = MetricsFile(path, after_step=2)
    second.append(_record(3))
    assert second.history == [_record(1), _record(2), _record(3)]
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [1.0, 0.5, 1 / 3]


_LINES = [json.dumps(asdict(_record(step))).encode() + b"\n" for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("damaged", "kept", "said"),
    [
        (b"not json\n", [], "steps 1 to 3 have no record"),
        (b"[" * 100_000 + b"\n", [], "steps 1 to 3 have no record"),
        (b'[]\n{"step": 1}\n', [], "steps 1 to 3 have no record"),
        (_LINES[0] + _LINES[1].replace(b"2", b'"2"', 1) + _LINES[2], [1, 3], "step 2 has no"),
        (b"".join(_LINES) + b"\xff\xfe", [1, 2, 3], "no record is lost"),
        (b"".join(_LINES) + b"\xff\n", [1, 2, 3], "no record is lost"),
        (b"".join(_LINES) + _LINES[1], [1, 2, 3], "no record is lost"),
        (_LINES[2] + _LINES[1] + _LINES[0], [1, 2, 3], ""),
        (_LINES[0][:20], [], "steps 1 to 3 have no record"),
        (b"".join(_LINES)[:-20], [1, 2], "step 3 has no record"),
        (b"", [], "steps 1 to 3 have no record"),
    ],
)
def test_a_damaged_record_is_set_aside_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes, kept: list[int], said: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(damaged)
    metrics = MetricsFile(path, after_step=3)
    assert metrics.history == [_record(step) for step in kept]
    assert path.read_bytes() == b"".join(_LINES[step - 1] for step in kept)
    assert (said in caplog.text) if said else not caplog.text
    aside = tmp_path / "damaged-1-metrics.jsonl"
    assert (f"is kept as {aside.name}" in caplog.text) == aside.exists()
    # A file that merely ends too early has nothing that the new one has not.
    assert aside.exists() == (b"".join(_LINES).find(damaged) != 0 and bool(said))
    if aside.exists():
        assert aside.read_bytes() == damaged


def test_a_record_that_is_gone_is_missing_and_not_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MetricsFile(tmp_path / "metrics.jsonl", after_step=2)
    assert "metrics.jsonl is missing: steps 1 to 2 have no record" in caplog.text


def test_a_disk_that_fails_for_a_while_takes_no_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "metrics.jsonl"
    metrics = MetricsFile(path, after_step=0)
    metrics.append(_record(1))
    folder.rename(tmp_path / "away")
    for step in (2, 3):
        metrics.append(_record(step))
    assert caplog.text.count("step 2 is not in") == 1 == len(caplog.records)
    with pytest.raises(OSError, match="No such file"):
        metrics.complete()
    (tmp_path / "away").rename(folder)
    metrics.append(_record(4))
    metrics.append(_record(5))
    written = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert written == [1, 2, 3, 4, 5]


def test_a_second_damaged_record_does_not_replace_the_first(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f"damage {number}\n")
        MetricsFile(tmp_path / "metrics.jsonl", after_step=1)
        aside = tmp_path / f"damaged-{number}-metrics.jsonl"
        assert aside.read_text() == f"damage {number}\n"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "folder"])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, kind: str, resume: bool) -> None:
    """At once, and what a link leads to stays as it is."""
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    precious = tmp_path / "precious"
    if kind != "dangling link":
        precious.write_text("precious")
    if kind == "pipe":
        os.mkfifo(run / ".lock")
    elif kind == "folder":
        (run / ".lock").mkdir()
    else:
        (run / ".lock").symlink_to(precious)
    for take in (look, claim):
        with pytest.raises(ConfigError, match=r"expected .*\.lock to be a file"):
            take(run, resume=resume)
    assert not precious.exists() or precious.read_text() == "precious"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: _change(folder, {"step": 1}, cover=False),
        lambda folder: _change(folder, {"step": "2"}, cover=True),
        lambda folder: _change(folder, {"step": -2}, cover=True),
        lambda folder: _write_manifest(folder, _NESTED, cover=True),
        lambda folder: _change(
            folder, {"config.layers": 2}, cover=True
        ),  # which its tensors do not fit
    ],
)
def test_a_damaged_checkpoint_costs_a_run_nothing_else(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    (tmp_path / "text").write_text("some text " * 999)
    config = TrainConfig(
        data=str(tmp_path / "text"),
        seq_len=9,
        steps=2,
        layers=1,
        dim=8,
        heads=1,
        kv_heads=1,
        eval_sequences=1,
    )
    fresh = RunOptions(out=tmp_path / "run", progress="none")

    def run(options: RunOptions, chosen: Mapping[str, object]) -> None:
        burst_rt.run_local(1, lambda world: train(world, config, options, chosen), timeout_s=20)

    run(fresh, {})
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    damage(tmp_path / "run" / "checkpoints" / "step-00000002")
    with pytest.raises(ConfigError):
        run(replace(fresh, resume=True), {"steps": 3})
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def _outcomes(world_size: int, action: Callable[[Context], object]) -> list[object]:
    """What `action` gives or raises on each rank, after which every rank still works with the
    others.
    """

    def run(context: Context) -> object:
        try:
            outcome = action(context)
        except ConfigError as error:
            outcome = error
        assert context.all_reduce(torch.ones(1)).item() == world_size
        return outcome

    return burst_rt.run_local(world_size, run, timeout_s=20)


def test_values_that_differ_are_refused_on_every_rank() -> None:
    outcomes = _outcomes(
        3,
        lambda context: same_everywhere(context, "the text", "new" if context.rank == 2 else "old"),
    )
    assert [str(outcome) for outcome in outcomes] == [str(outcomes[0])] * 3
    assert "the text differs between ranks: rank 0 has old, rank 2 has new" in str(outcomes[0])
    assert _outcomes(3, lambda context: same_everywhere(context, "the text", "old")) == [None] * 3


def test_a_checkpoint_that_only_rank_0_can_read_reaches_every_rank(tmp_path: Path) -> None:
    saved = _checkpoint(7)
    save_checkpoint(tmp_path, saved, keep=2)

    def restore(context: Context) -> object:
        # Another rank's path leads nowhere, as on a node without the file system.
        shared = read_shared(context, tmp_path if context.rank == 0 else tmp_path / "not mounted")
        weights = {
            name: torch.full_like(tensor, torch.nan) for name, tensor in saved.weights.items()
        }
        shared.fill(context, weights)
        return shared.manifest.step, all(
            torch.equal(weights[name], tensor) for name, tensor in saved.weights.items()
        )

    assert _outcomes(3, restore) == [(7, True)] * 3

    shutil.rmtree(tmp_path / "checkpoints")
    assert all(isinstance(outcome, ConfigError) for outcome in _outcomes(3, restore))


def test_a_run_on_text_whose_name_is_no_unicode_can_be_resumed(tmp_path: Path) -> None:
    saved = _checkpoint(7)
    config = TrainConfig(steps=99, data=os.fsdecode(b"/data/te\xffxt"))
    saved = replace(saved, manifest=replace(saved.manifest, config=config))
    save_checkpoint(tmp_path, saved, keep=2)

    def read(context: Context) -> object:
        return read_shared(context, tmp_path).manifest

    assert _outcomes(2, read) == [saved.manifest] * 2


def test_a_whole_checkpoint_of_another_version_is_not_passed_over(tmp_path: Path) -> None:
    """It would be deleted in time, as one of a future that was given up."""
    save_checkpoint(tmp_path, _checkpoint(3), keep=2)
    newest = save_checkpoint(tmp_path, _checkpoint(6), keep=2)
    document = json.loads((newest / "config.json").read_text())
    _change(newest, {"config": document["config"] | {"new_option": 1}}, cover=True)
    with pytest.raises(ConfigError, match="step-00000006 is whole, and another version of burst"):
        find_checkpoint(tmp_path)
    assert newest.exists()
