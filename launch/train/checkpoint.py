"""Checkpoints: weights and optimizer state as safetensors, everything else as JSON, in a folder that is either complete or ignored.

For: one writer (rank 0) that may be killed at any instant. A checkpoint is written under a hidden name, synced to the disk and only
then renamed; its `config.json` holds size and SHA-256 of its other files, so damage that comes later is noticed too.
Not for: sharded states; every rank holds all weights, so rank 0's are the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from burst_rt.errors import ConfigError
from burst_rt.launch.train.config import CHECKPOINT_NAME

__all__ = [
    "Checkpoint", "Manifest", "copy_tensors", "find_checkpoint", "load_checkpoint", "newest_checkpoint",
    "save_checkpoint",
]  # fmt: skip

_log = logging.getLogger("burst_rt.train")

FORMAT = 1
_MANIFEST = "config.json"
_WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself: steps done, the run's configuration, the text it was trained on."""

    step: int
    config: dict[str, object]
    corpus: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: tensors by parameter name (`optimizer`: moment, a dot, parameter name)."""

    manifest: Manifest
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save_checkpoint(run: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write `run/checkpoints/step-N` atomically, remove all but the newest `keep`, return the folder. Raises OSError."""
    parent = run / "checkpoints"
    final = parent / f"step-{checkpoint.manifest.step:08d}"
    temporary = parent / f".writing-{final.name}"
    _remove_leftovers(parent)
    temporary.mkdir(parents=True)
    try:
        save_file(checkpoint.weights, temporary / _WEIGHTS)
        save_file(checkpoint.optimizer, temporary / _OPTIMIZER)
        files = {name: _describe(temporary / name) for name in (_WEIGHTS, _OPTIMIZER)}
        manifest = {"format": FORMAT, **asdict(checkpoint.manifest), "files": files}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
    except (OSError, SafetensorError) as error:
        # A disk that is full is to have room for the log.
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{final} could not be written: {error}") from error
    if final.exists():
        # Only a damaged one can be here: a run continues from the newest that is whole.
        shutil.rmtree(final)
    os.replace(temporary, final)
    _sync(parent)
    _prune(parent, newest=checkpoint.manifest.step, keep=keep)
    return final


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint whole. Raises ConfigError when it is incomplete or damaged."""
    manifest = _read_manifest(folder)
    return Checkpoint(manifest, load_file(folder / _WEIGHTS), load_file(folder / _OPTIMIZER))


def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy each tensor of `source` into the one of that name in `target`. Raises ConfigError when names or shapes differ."""
    expected, got = _shapes(target), _shapes(source)
    if expected != got:
        odd = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
        raise ConfigError(f"checkpoint: {', '.join(odd[:4])} do not fit its own configuration; it was not written by this program.")
    for name, tensor in target.items():
        tensor.copy_(source[name])


def newest_checkpoint(run: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run (None: there is none), and why newer ones were passed over."""
    passed_over: list[str] = []
    for _, folder in reversed(_steps(run / "checkpoints")):
        try:
            _read_manifest(folder)
        except ConfigError as error:
            passed_over.append(str(error))
        else:
            return folder, passed_over
    return None, passed_over


def find_checkpoint(path: Path) -> Path:
    """The checkpoint meant by `path`: itself, or the newest whole one of the run it names; warns of newer ones that are not.

    Raises ConfigError when there is none, OSError where one cannot be read.
    """
    if CHECKPOINT_NAME.fullmatch(path.name):
        _read_manifest(path)
        return path
    folder, passed_over = newest_checkpoint(path)
    if folder is None:
        reasons = "".join(f" {reason}" for reason in passed_over)
        raise ConfigError(
            f"{path}: expected a complete checkpoint in {path}/checkpoints/step-N, found none.{reasons} Train with --out first."
        )
    for reason in passed_over:
        _log.warning("burst-rt: passed over: %s", reason)
    return folder


def _read_manifest(folder: Path) -> Manifest:
    """Read and verify; every way in which a checkpoint can be broken ends in one ConfigError. A disk that does not answer is none."""
    try:
        document = json.loads((folder / _MANIFEST).read_text())
        if document["format"] != FORMAT:
            raise ConfigError(f"checkpoint {folder}: expected format {FORMAT}, got {document['format']}; use the version that wrote it.")
        damaged = [name for name in (_WEIGHTS, _OPTIMIZER) if _describe(folder / name) != document["files"][name]]
        manifest = Manifest(document["step"], document["config"], document["corpus"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"checkpoint {folder} is incomplete: {error!r}; delete it or use an older one.") from error
    if damaged:
        raise ConfigError(f"checkpoint {folder} is damaged: {', '.join(damaged)} is not what was written; delete it or use an older one.")
    return manifest


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _describe(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size_bytes": path.stat().st_size, "sha256": digest}


def _steps(parent: Path) -> list[tuple[int, Path]]:
    if not parent.is_dir():
        return []
    matches = ((CHECKPOINT_NAME.fullmatch(path.name), path) for path in parent.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _prune(parent: Path, *, newest: int, keep: int) -> None:
    """Keep the last `keep` up to `newest`; later ones belong to a future that was given up."""
    steps = _steps(parent)
    kept = [folder for step, folder in steps if step <= newest][-keep:]
    for _, folder in steps:
        if folder not in kept:
            shutil.rmtree(folder)


def _remove_leftovers(parent: Path) -> None:
    for leftover in parent.glob(".writing-*"):
        shutil.rmtree(leftover)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
