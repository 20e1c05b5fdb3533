"""Checkpoints: what is written comes back bit for bit, and what is not whole is never used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import burst_rt
from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.launch.train import checkpoint as module
from burst_rt.launch.train.agreement import on_first, same_everywhere, share_bytes, together
from burst_rt.launch.train.checkpoint import (
    Checkpoint,
    Manifest,
    copy_tensors,
    find_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from burst_rt.launch.train.config import TrainConfig
from burst_rt.launch.train.metrics import MetricsFile, StepRecord
from burst_rt.launch.train.restore import read_shared

_FILES = ("config.json", "model.safetensors", "optimizer.safetensors")


def _checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    weights = {"head.weight": torch.randn(5, 3, generator=generator), "norm.weight": torch.tensor([0.0, -0.0, 1e-45])}
    moments = {f"exp_avg.{name}": tensor / 3 for name, tensor in weights.items()}
    return Checkpoint(Manifest(step, TrainConfig(steps=99).to_json(), "fingerprint"), weights, moments)


def _names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def _step_of(run: Path) -> int:
    return load_checkpoint(find_checkpoint(run)).manifest.step


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = _checkpoint(7)
    folder = save_checkpoint(tmp_path, saved, keep=2)
    loaded = load_checkpoint(folder)
    assert folder == tmp_path / "checkpoints" / "step-00000007"
    assert sorted(path.name for path in folder.iterdir()) == list(_FILES)
    assert loaded.manifest == saved.manifest
    for mine, theirs in ((loaded.weights, saved.weights), (loaded.optimizer, saved.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name].view(torch.int32), theirs[name].view(torch.int32)) for name in mine)
    assert TrainConfig.resumed(loaded.manifest.config, {}) == TrainConfig(steps=99)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100000000):
        save_checkpoint(tmp_path, _checkpoint(step), keep=2)
    assert _names(tmp_path) == ["step-00000015", "step-100000000"]
    assert _step_of(tmp_path) == 100000000


def test_a_run_that_went_back_forgets_the_future_it_gave_up(tmp_path: Path) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path, _checkpoint(step), keep=3)
    (tmp_path / "checkpoints" / "step-00000010" / "config.json").unlink()
    save_checkpoint(tmp_path, _checkpoint(6), keep=3)
    assert _names(tmp_path) == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize("call", ["save_file", "_describe", "_sync", "replace"])
@pytest.mark.parametrize("survived", [0, 1])
def test_a_writer_that_dies_leaves_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, survived: int) -> None:
    save_checkpoint(tmp_path, _checkpoint(5), keep=2)
    place = os if call == "replace" else module
    original: Callable[..., object] = getattr(place, call)
    calls_left = survived if call != "replace" else 0

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
    assert _names(tmp_path) == ["step-00000005", "step-00000010"], "what the dead writer left is gone"
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


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in _FILES for damage in (_cut, _empty, Path.unlink)),
        *((name, _flip) for name in _FILES[1:]),
        ("config.json", _become_a_list),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path, _checkpoint(step), keep=2)
    damaged = tmp_path / "checkpoints" / "step-00000010"
    if name == "config.json" and damage is _cut:
        # The last byte is a line's end; the one before closes the object.
        damage(damaged / name)
    damage(damaged / name)

    with pytest.raises(ConfigError, match="step-00000010"):
        load_checkpoint(damaged)
    with pytest.raises(ConfigError, match="step-00000010"):
        find_checkpoint(damaged)
    folder, passed_over = newest_checkpoint(tmp_path)
    assert folder == tmp_path / "checkpoints" / "step-00000005"
    assert len(passed_over) == 1
    assert find_checkpoint(tmp_path) == folder
    assert "passed over: checkpoint" in caplog.text
    assert "step-00000010" in caplog.text


def test_a_disk_that_does_not_answer_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_finds_no_room_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, _checkpoint(5), keep=2)

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"some")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(OSError, match=r"step-00000010 could not be written: I/O error: No space left"):
        save_checkpoint(tmp_path, _checkpoint(10), keep=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, _checkpoint(5), keep=2)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "format": 99}))
    with pytest.raises(ConfigError, match="expected format 1, got 99"):
        load_checkpoint(folder)


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) == (None, [])
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "step-00000001"):
        with pytest.raises(ConfigError, match=path.name):
            find_checkpoint(path)


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    source = _checkpoint(1).weights
    copy_tensors(source, {name: torch.empty_like(tensor) for name, tensor in source.items()})
    for target in ({"head.weight": torch.empty(5, 3)}, {**source, "more": torch.empty(1)}, {**source, "norm.weight": torch.empty(4)}):
        with pytest.raises(ConfigError, match=r"norm\.weight|more"):
            copy_tensors(source, target)


@pytest.mark.parametrize("changes", [{"layers": 5}, {"dim": 64}, {"heads": 2, "kv_heads": 2}])
def test_a_resumed_run_must_have_the_same_model(changes: dict[str, object]) -> None:
    stored = TrainConfig(steps=99).to_json()
    with pytest.raises(ConfigError, match="the checkpoint holds another model"):
        TrainConfig.resumed(stored, changes)
    assert TrainConfig.resumed(stored, {"steps": 120}) == TrainConfig(steps=120)
    with pytest.raises(ConfigError, match="not of this version"):
        TrainConfig.resumed({**stored, "dropout": 0.1}, {})


def _record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=1 / step, lr=0.1, grad_norm=1.0, step_s=0.1, tokens_per_s=1.0, wait_fraction=0.0, bytes_sent=1)


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


def test_a_file_that_holds_no_metrics_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("not json\n")
    with pytest.raises(ConfigError, match="not the record of a run"):
        MetricsFile(tmp_path / "metrics.jsonl", after_step=1)


def _outcomes(world_size: int, action: Callable[[Context], object]) -> list[object]:
    """What `action` gives or raises on each rank, after which every rank still works with the others."""

    def run(context: Context) -> object:
        try:
            outcome = action(context)
        except ConfigError as error:
            outcome = error
        assert context.all_reduce(torch.ones(1)).item() == world_size
        return outcome

    return burst_rt.run_local(world_size, run, timeout_s=20)


@pytest.mark.parametrize("failing", [{0}, {1}, {2}, {1, 2}, {0, 1, 2}])
@pytest.mark.parametrize("kind", [ConfigError, OSError])
def test_a_failure_on_one_rank_is_the_same_error_on_all(failing: set[int], kind: type[Exception]) -> None:
    def act(context: Context) -> object:
        def fail() -> int:
            if context.rank in failing:
                raise kind(f"no disk on rank {context.rank}")
            return context.rank

        return together(context, fail)

    outcomes = _outcomes(3, act)
    assert all(isinstance(outcome, ConfigError) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert f"no disk on rank {min(failing)}" in str(outcomes[0])


def test_what_succeeds_everywhere_gives_each_rank_its_own_result() -> None:
    assert _outcomes(3, lambda context: together(context, lambda: context.rank)) == [0, 1, 2]
    assert _outcomes(3, lambda context: on_first(context, lambda: "read")) == ["read", None, None]


@pytest.mark.parametrize("content", [b"", b"\x00\xff", bytes(range(256)) * 9])
@pytest.mark.parametrize("source", [0, 2])
def test_bytes_of_one_rank_reach_all(content: bytes, source: int) -> None:
    shared = _outcomes(3, lambda context: share_bytes(context, content if context.rank == source else None, source=source))
    assert shared == [content] * 3


def test_values_that_differ_are_refused_on_every_rank() -> None:
    outcomes = _outcomes(3, lambda context: same_everywhere(context, "the text", "new" if context.rank == 2 else "old"))
    assert [str(outcome) for outcome in outcomes] == [str(outcomes[0])] * 3
    assert "the text differs between ranks: rank 0 has old, rank 2 has new" in str(outcomes[0])
    assert _outcomes(3, lambda context: same_everywhere(context, "the text", "old")) == [None] * 3


def test_a_checkpoint_that_only_rank_0_can_read_reaches_every_rank(tmp_path: Path) -> None:
    saved = _checkpoint(7)
    save_checkpoint(tmp_path, saved, keep=2)

    def restore(context: Context) -> object:
        # Another rank's path leads nowhere, as on a node without the file system.
        shared = read_shared(context, tmp_path if context.rank == 0 else tmp_path / "not mounted")
        weights = {name: torch.full_like(tensor, torch.nan) for name, tensor in saved.weights.items()}
        shared.fill(context, weights)
        return shared.manifest.step, all(torch.equal(weights[name], tensor) for name, tensor in saved.weights.items())

    assert _outcomes(3, restore) == [(7, True)] * 3

    shutil.rmtree(tmp_path / "checkpoints")
    assert all(isinstance(outcome, ConfigError) for outcome in _outcomes(3, restore))
