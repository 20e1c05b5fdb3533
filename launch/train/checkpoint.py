"""Checkpoints of a run on disk.

A checkpoint is a folder: weights and optimizer state as safetensors, everything else as JSON. One
writer (rank 0) may be killed at any instant, so a checkpoint is written under a hidden name, synced
to the disk and only then renamed: it is complete or ignored. Its `SHA256SUMS` covers its other
files, as `sha256sum -c` reads it, so later damage is noticed. Its manifest must also have the right
types, and the step of the folder's name. Every rank holds all weights, so rank 0's are the
checkpoint.

torch is imported only where tensors are read or written: the launching process looks at folders
too, and must not wait for torch.
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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from safetensors import SafetensorError

from burst_rt.errors import ConfigError
from burst_rt.launch.train.config import CHECKPOINT_NAME, TrainConfig

if TYPE_CHECKING:
    from torch import Size, Tensor, dtype

__all__ = [
    "Checkpoint", "Manifest", "checkpoints_of", "copy_tensors", "find_checkpoint", "find_manifest",
    "load_checkpoint", "resolve", "save_checkpoint", "save_folder",
]  # fmt: skip

T = TypeVar("T")

_log = logging.getLogger("burst_rt.train")

# Format 1 had no SHA256SUMS: nothing covered its manifest. Only this format is read.
FORMAT = 4
_MANIFEST = "config.json"
_WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_SUMS = "SHA256SUMS"
# Errors of a path that leads to nothing. Any other error is the disk's, and says nothing about the
# checkpoint.
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description of itself."""

    # Steps done.
    step: Annotated[int, msgspec.Meta(ge=1)]
    config: TrainConfig
    # Fingerprint of the text it was trained on.
    corpus: str
    # Fingerprint of the configuration of the folder that --model names; "" for the byte-level
    # model.
    source: str = ""

    @classmethod
    def from_json(cls, document: object) -> Manifest:
        """The manifest whose `asdict` is `document`. Raises msgspec.ValidationError for a wrong
        type, or fields that this version does not have.
        """
        manifest = msgspec.convert(document, cls)
        if asdict(manifest) != document:
            raise msgspec.ValidationError("its fields are not those of this version")
        return manifest


def resolve(
    config: TrainConfig,
    chosen: Mapping[str, object],
    resumed: Manifest | None,
    world_size: int,
    *,
    elastic: bool = False,
) -> tuple[TrainConfig, TrainConfig]:
    """The configuration of a run: `config`, or that of the run that is resumed, with the options
    that were `chosen`; and the one that runs on `world_size` ranks, which differs only in an
    `elastic` run. Raises ConfigError for what cannot run there.
    """
    if resumed is None:
        asked = config.begun(chosen)
    else:
        asked = resumed.config.resumed(chosen)
        # What starts a job again need not know that it had just ended well.
        if resumed.step >= asked.steps and not elastic:
            raise ConfigError(
                f"--resume: {resumed.step} of {asked.steps} steps are done, no step is left; "
                "choose more --steps."
            )
    return asked, asked.on_ranks(world_size, elastic=elastic)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory."""

    manifest: Manifest
    # Keyed by parameter name.
    weights: dict[str, Tensor]
    # Keyed by moment, a dot, and parameter name.
    optimizer: dict[str, Tensor]


def save_checkpoint(run: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write `run/checkpoints/step-N` atomically, remove all but the newest `keep`, return the
    folder. Raises OSError.
    """
    from safetensors.torch import save_file

    def save(folder: Path) -> None:
        folder.mkdir()
        save_file(checkpoint.weights, folder / _WEIGHTS)
        save_file(checkpoint.optimizer, folder / _OPTIMIZER)
        manifest = {"format": FORMAT, **asdict(checkpoint.manifest)}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        (folder / _SUMS).write_text("".join(_sums(folder)))
        for name in (_WEIGHTS, _OPTIMIZER):
            # safetensors makes its files readable by this user alone; whoever may read the rest of
            # the run may read them too.
            with suppress(OSError):  # some file systems have modes of their own
                shutil.copymode(folder / _MANIFEST, folder / name)

    parent = run / "checkpoints"
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(".writing-*"):
        _remove(leftover)
    final = parent / _folder_name(checkpoint.manifest.step)
    # Only a damaged checkpoint can have this name: a run continues from the newest whole one.
    save_folder(final, save)
    _prune(run, newest=checkpoint.manifest.step, keep=keep)
    return final


def save_folder(final: Path, save: Callable[[Path], object]) -> None:
    """Let `save` write a folder, which is complete if it exists; one of that name is replaced.
    Raises OSError.
    """
    temporary = final.parent / f".writing-{final.name}"
    _remove(temporary)
    try:
        save(temporary)
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
    except (OSError, SafetensorError) as error:
        # A full disk needs room for the log.
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{final} could not be written: {error}") from error
    _remove(final)
    os.replace(temporary, final)
    _sync(final.parent)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a whole checkpoint. Raises ConfigError when it is incomplete or damaged, OSError when
    the disk does not answer.
    """
    from safetensors.torch import load_file

    manifest = _read_manifest(folder)
    try:
        return Checkpoint(manifest, load_file(folder / _WEIGHTS), load_file(folder / _OPTIMIZER))
    except SafetensorError as error:
        raise _damaged(folder, f"its tensors cannot be read ({error})") from error


def _forms(tensors: Mapping[str, Tensor]) -> set[tuple[str, dtype, Size]]:
    """Names, types and shapes."""
    return {(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy each tensor of `source` into the tensor of that name in `target`. Raises ConfigError
    when names, types or shapes differ.
    """
    differing = _forms(target) ^ _forms(source)
    if differing:
        odd = sorted({name for name, *_ in differing})
        raise ConfigError(
            f"checkpoint: the tensors {', '.join(odd[:4])} do not fit the checkpoint's own "
            "configuration; this program did not write the checkpoint."
        )
    for name, tensor in target.items():
        tensor.copy_(source[name])


def find_checkpoint(path: Path) -> tuple[Path, Checkpoint]:
    """The checkpoint that `path` denotes, and its folder: `path` itself, or the newest whole
    checkpoint of the run. Warns of newer ones that are damaged.

    Raises ConfigError when there is none, OSError when the disk does not answer.
    """
    folder, checkpoint, passed_over = _newest(path, load_checkpoint)
    for reason in passed_over:
        _log.warning("burst-rt: skipped: %s", reason)
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
    for folder in reversed(checkpoints_of(path)):
        try:
            return folder, read(folder), passed_over
        except _OtherVersionError:
            raise  # it is whole, and must not be passed over, and deleted in time
        except ConfigError as error:
            passed_over.append(str(error))
    reasons = "".join(f" {reason}" for reason in passed_over)
    raise ConfigError(
        f"{path}: expected a complete checkpoint in {path}/checkpoints/step-N, found "
        f"none.{reasons} Train with --out first."
    )


def _read_manifest(folder: Path) -> Manifest:
    """Read and verify. Every kind of corruption ends in one ConfigError. I/O errors are not
    corruption, and propagate as OSError.
    """
    try:
        written, sums = _text(folder / _SUMS).splitlines(keepends=True), _sums(folder)
        if written != sums:
            odd = [line.split()[1] for line in sums if line not in written] or [_SUMS]
            raise _damaged(folder, f"{', '.join(odd)} has changed since it was written")
        document = json.loads(_text(folder / _MANIFEST))
        wrote = document.pop("format")
        if wrote != FORMAT:
            raise _OtherVersionError(
                f"checkpoint {folder}: expected format {FORMAT}, got {wrote}; use the version of "
                "burst_rt that wrote the checkpoint."
            )
        try:
            manifest = Manifest.from_json(document)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _OtherVersionError(
                f"checkpoint {folder} is whole, and another version of burst_rt has written it "
                f"({error}); use that version, or start a new run."
            ) from error
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        raise _incomplete(folder, Path(error.filename).name) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, f"{_MANIFEST} cannot be understood ({error})") from error
    if folder.name != _folder_name(manifest.step):
        raise _damaged(folder, f"{_MANIFEST} belongs to step {manifest.step}")
    return manifest


class _OtherVersionError(ConfigError):
    """A checkpoint that is whole, and that this version cannot read."""


def _incomplete(folder: Path, missing: str) -> ConfigError:
    if missing == _SUMS and (folder / _MANIFEST).exists():
        return ConfigError(
            f"checkpoint {folder} has no {_SUMS}: it is incomplete, or of format 1, which this "
            "version does not read. Use the version of burst_rt that wrote it, or start a new run."
        )
    return ConfigError(
        f"checkpoint {folder} is incomplete: {missing} is missing; delete it or use an older one."
    )


def _damaged(folder: Path, how: str) -> ConfigError:
    return ConfigError(f"checkpoint {folder} is damaged: {how}; delete it or use an older one.")


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
    """Open a file for reading. Something else in its place, which might not even answer (a pipe),
    counts as nothing there.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a file", str(path))
    return path.open("rb")


def checkpoints_of(run: Path) -> list[Path]:
    """The folders of the run's checkpoints, whole or not, in the order of their steps."""
    parent = run / "checkpoints"
    folders = parent.iterdir() if parent.is_dir() else ()
    return sorted((path for path in folders if CHECKPOINT_NAME.fullmatch(path.name)), key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _prune(run: Path, *, newest: int, keep: int) -> None:
    """Keep the last `keep` checkpoints up to `newest`. Later ones belong to a future that was given
    up.
    """
    folders = checkpoints_of(run)
    kept = [folder for folder in folders if _step_of(folder) <= newest][-keep:]
    for folder in folders:
        if folder not in kept:
            try:
                _remove(folder)
            except OSError as error:
                # NFS keeps what some process still reads. The next turn tries again.
                _log.warning("burst-rt: %s could not be removed: %s", folder, error.strerror)


def _remove(path: Path) -> None:
    """Remove what is there, if anything. Damage may have left something else than a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems synchronise no folders (OpenAFS).
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
            raise
    finally:
        os.close(descriptor)
