"""Checkpoints: weights and optimizer state as safetensors, everything else as JSON, in a folder
that is either complete or ignored.

For: one writer (rank 0) that may be killed at any instant. A checkpoint is written under a hidden
name, synced to the disk and only then renamed. Its `SHA256SUMS` covers its other files, as
`sha256sum -c` reads it, so damage that comes later is noticed. What its manifest says must be of
the right types besides, and the manifest's step that of the folder's name.
Not for: sharded states; every rank holds all weights, so rank 0's are the checkpoint.

torch comes in where tensors are read or written: the launching process looks at checkpoints too,
and is not to wait for it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from safetensors import SafetensorError

from burst_rt.errors import ConfigError
from burst_rt.launch.train.config import CHECKPOINT_NAME, TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Checkpoint",
    "Manifest",
    "copy_tensors",
    "find_checkpoint",
    "find_manifest",
    "has_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
]

T = TypeVar("T")

_log = logging.getLogger("burst_rt.train")

# Format 1 had no SHA256SUMS: nothing covered its manifest.
FORMAT = 2
_MANIFEST = "config.json"
_WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_SUMS = "SHA256SUMS"
# Of a path that leads to nothing. Any other error is the disk's, and says nothing about the
# checkpoint.
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself: steps done, the run's configuration, the text it was
    trained on.
    """

    step: Annotated[int, msgspec.Meta(ge=1)]
    config: TrainConfig
    corpus: str

    def resumed(self, chosen: Mapping[str, object]) -> TrainConfig:
        """The run's configuration with the options that were chosen anew. Raises ConfigError for
        another model, or with no step left.
        """
        config = self.config.resumed(chosen)
        if self.step >= config.steps:
            raise ConfigError(
                f"--resume: {self.step} of {config.steps} steps are done, nothing is left; choose "
                "more --steps."
            )
        return config

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: object) -> Manifest:
        """What `to_json` gave. Raises msgspec.ValidationError for a wrong type, or fields that are
        not those of this version.
        """
        manifest = msgspec.convert(document, cls)
        if manifest.to_json() != document:
            raise msgspec.ValidationError("its fields are not those of this version")
        return manifest


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: tensors by parameter name (`optimizer`: moment, a dot, parameter
    name).
    """

    manifest: Manifest
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save_checkpoint(run: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write `run/checkpoints/step-N` atomically, remove all but the newest `keep`, return the
    folder. Raises OSError.
    """
    from safetensors.torch import save_file

    parent = run / "checkpoints"
    final = parent / _folder_name(checkpoint.manifest.step)
    temporary = parent / f".writing-{final.name}"
    for leftover in parent.glob(".writing-*"):
        _remove(leftover)
    temporary.mkdir(parents=True)
    try:
        save_file(checkpoint.weights, temporary / _WEIGHTS)
        save_file(checkpoint.optimizer, temporary / _OPTIMIZER)
        manifest = {"format": FORMAT, **checkpoint.manifest.to_json()}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        (temporary / _SUMS).write_text("".join(_sums(temporary)))
        for name in (_WEIGHTS, _OPTIMIZER):
            # safetensors makes its files for this user alone; they are for whom the rest of the run
            # is for.
            shutil.copymode(temporary / _MANIFEST, temporary / name)
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
    except (OSError, SafetensorError) as error:
        # A disk that is full is to have room for the log.
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{final} could not be written: {error}") from error
    # Only a damaged one can be here: a run continues from the newest that is whole.
    _remove(final)
    os.replace(temporary, final)
    _sync(parent)
    _prune(parent, newest=checkpoint.manifest.step, keep=keep)
    return final


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint whole. Raises ConfigError when it is incomplete or damaged, OSError for a
    disk that does not answer.
    """
    from safetensors.torch import load_file

    manifest = _read_manifest(folder)
    try:
        return Checkpoint(manifest, load_file(folder / _WEIGHTS), load_file(folder / _OPTIMIZER))
    except SafetensorError as error:
        raise _damaged(folder, f"its tensors cannot be read ({error})") from error


def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy each tensor of `source` into the one of that name in `target`. Raises ConfigError when
    names, types or shapes differ.
    """
    expected, got = _kinds(target), _kinds(source)
    if expected != got:
        odd = sorted(
            name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name)
        )
        raise ConfigError(
            f"checkpoint: {', '.join(odd[:4])} do not fit its own configuration; it was not "
            "written by this program."
        )
    for name, tensor in target.items():
        tensor.copy_(source[name])


def find_checkpoint(path: Path) -> tuple[Path, Checkpoint]:
    """The checkpoint meant by `path`, and its folder: that one, or the newest whole one of the run;
    warns of newer ones that are not.

    Raises ConfigError when there is none, OSError where one cannot be read.
    """
    folder, checkpoint, passed_over = _newest(path, load_checkpoint)
    for reason in passed_over:
        _log.warning("burst-rt: passed over: %s", reason)
    return folder, checkpoint


def find_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint that `find_checkpoint` would find, without loading it and
    without warnings. Raises the same.
    """
    return _newest(path, _read_manifest)[1]


def _newest(path: Path, read: Callable[[Path], T]) -> tuple[Path, T, list[str]]:
    """Folder of a checkpoint, what `read` gives of it, and why newer ones were passed over."""
    if CHECKPOINT_NAME.fullmatch(path.name):
        return path, read(path), []
    passed_over: list[str] = []
    for _, folder in reversed(_steps(path / "checkpoints")):
        try:
            return folder, read(folder), passed_over
        except ConfigError as error:
            passed_over.append(str(error))
    reasons = "".join(f" {reason}" for reason in passed_over)
    raise ConfigError(
        f"{path}: expected a complete checkpoint in {path}/checkpoints/step-N, found "
        f"none.{reasons} Train with --out first."
    )


def has_checkpoints(run: Path) -> bool:
    """Whether there is any checkpoint in a run's folder, whole or not. Needs neither torch nor the
    time to read one.
    """
    return bool(_steps(run / "checkpoints"))


def _read_manifest(folder: Path) -> Manifest:
    """Read and verify; every way in which a checkpoint can be broken ends in one ConfigError. A
    disk that does not answer is none.
    """
    try:
        said, found = _text(folder / _SUMS).splitlines(keepends=True), _sums(folder)
        if said != found:
            odd = [line.split()[1] for line in found if line not in said] or [_SUMS]
            raise _damaged(folder, f"{', '.join(odd)} is not what was written")
        document = json.loads(_text(folder / _MANIFEST))
        wrote = document.pop("format")
        if wrote != FORMAT:
            raise ConfigError(
                f"checkpoint {folder}: expected format {FORMAT}, got {wrote}; use the version that "
                "wrote it."
            )
        manifest = Manifest.from_json(document)
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        raise _incomplete(folder, Path(error.filename).name) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, f"{_MANIFEST} makes no sense ({error})") from error
    if folder.name != _folder_name(manifest.step):
        raise _damaged(folder, f"{_MANIFEST} is that of step {manifest.step}")
    return manifest


def _incomplete(folder: Path, missing: str) -> ConfigError:
    if missing == _SUMS and (folder / _MANIFEST).exists():
        return ConfigError(
            f"checkpoint {folder} has no {_SUMS}: it is incomplete, or of format 1, which this "
            "version does not read. Go on with the "
            "version that wrote it, or start a new run."
        )
    return ConfigError(
        f"checkpoint {folder} is incomplete: {missing} is missing; delete it or use an older one."
    )


def _damaged(folder: Path, how: str) -> ConfigError:
    return ConfigError(f"checkpoint {folder} is damaged: {how}; delete it or use an older one.")


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.dtype, *tensor.shape) for name, tensor in tensors.items()}


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _sums(folder: Path) -> list[str]:
    """The lines of SHA256SUMS, as sha256sum writes them."""
    lines = []
    for name in (_MANIFEST, _WEIGHTS, _OPTIMIZER):
        with _open(folder / name) as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return lines


def _text(path: Path) -> str:
    with _open(path) as file:
        return file.read().decode(errors="replace")


def _open(path: Path) -> io.BufferedReader:
    """Open a file for reading. What is there but no file, which might not even answer (a pipe),
    counts as nothing there.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a file", str(path))
    return path.open("rb")


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
            _remove(folder)


def _remove(path: Path) -> None:
    """Remove what is there, if anything: where a folder is expected, damage may have left something
    else.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
