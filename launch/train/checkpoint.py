"""A run's folder on disk: its checkpoints, and the lock that gives it to one live run at a time.

A checkpoint is a folder: weights and optimizer state as safetensors, everything else as JSON. One
writer (rank 0) may be killed at any instant, so a checkpoint is written under a hidden name, synced
to the disk and only then renamed: it is complete or ignored. Its `SHA256SUMS` covers its other
files, as `sha256sum -c` reads it, so later damage is noticed. Its manifest must also have the right
types, and the step of the folder's name. Every rank holds all weights, so rank 0's are the
checkpoint.

The lock is `flock` on the folder's `.lock`, which the kernel takes back however the process ends.
Over NFS it keeps hosts apart if the server locks. Where the file system cannot lock (Lustre without
`-o flock`), a warning says so and the run goes on. A file system that locks within each host only
(Lustre with `-o localflock`) does not tell, so there runs of two hosts are not kept apart.

torch is imported only where tensors are read or written: the launching process looks at folders
too, and must not wait for torch.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import socket
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from safetensors import SafetensorError

from burst_rt.errors import ConfigError
from burst_rt.launch.train.config import CHECKPOINT_NAME, TrainConfig
from burst_rt.regular import NOT_REGULAR, open_regular

if TYPE_CHECKING:
    from torch import Size, Tensor, dtype

__all__ = [
    "Checkpoint", "Claim", "Manifest", "claim", "copy_tensors", "find_checkpoint", "find_manifest",
    "load_checkpoint", "look", "save_checkpoint", "save_folder",
]  # fmt: skip

T = TypeVar("T")

_log = logging.getLogger("burst_rt.train")

# Format 1 had no SHA256SUMS: nothing covered its manifest. Formats 2 and 3 are read: they had no
# model and source, format 2 no checkpoint_activations.
FORMAT = 4
_MANIFEST = "config.json"
_WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_SUMS = "SHA256SUMS"
# Errors of a path that leads to nothing. Any other error is the disk's, and says nothing about the
# checkpoint.
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})

_LOCK = ".lock"
_CANNOT_LOCK = frozenset({errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK})
# Maximum number of bytes that are read of the holder's name.
_LONGEST_NAME = 300


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

    def resumed(self, chosen: Mapping[str, object]) -> TrainConfig:
        """The run's configuration with the newly chosen options. Raises ConfigError for another
        model, or with no step left.
        """
        config = self.config.resumed(chosen)
        if self.step >= config.steps:
            raise ConfigError(
                f"--resume: {self.step} of {config.steps} steps are done, no step is left; choose "
                "more --steps."
            )
        return config

    @classmethod
    def from_json(cls, document: object) -> Manifest:
        """The manifest whose `asdict` is `document`. Raises msgspec.ValidationError for a wrong
        type, or fields that this version does not have.
        """
        manifest = msgspec.convert(document, cls)
        if asdict(manifest) != document:
            raise msgspec.ValidationError("its fields are not those of this version")
        return manifest


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

    parent = run / "checkpoints"
    final = parent / _folder_name(checkpoint.manifest.step)
    temporary = parent / f".writing-{final.name}"
    for leftover in parent.glob(".writing-*"):
        _remove(leftover)
    temporary.mkdir(parents=True)
    try:
        save_file(checkpoint.weights, temporary / _WEIGHTS)
        save_file(checkpoint.optimizer, temporary / _OPTIMIZER)
        manifest = {"format": FORMAT, **asdict(checkpoint.manifest)}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        (temporary / _SUMS).write_text("".join(_sums(temporary)))
        for name in (_WEIGHTS, _OPTIMIZER):
            # safetensors makes its files readable by this user alone; whoever may read the rest of
            # the run may read them too.
            shutil.copymode(temporary / _MANIFEST, temporary / name)
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
    except (OSError, SafetensorError) as error:
        # A full disk needs room for the log.
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{final} could not be written: {error}") from error
    # Only a damaged checkpoint can be here: a run continues from the newest whole one.
    _remove(final)
    os.replace(temporary, final)
    _sync(parent)
    _prune(parent, newest=checkpoint.manifest.step, keep=keep)
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


def _read_manifest(folder: Path) -> Manifest:
    """Read and verify. Every kind of corruption ends in one ConfigError. I/O errors are not
    corruption, and propagate as OSError.
    """
    try:
        said, found = _text(folder / _SUMS).splitlines(keepends=True), _sums(folder)
        if said != found:
            odd = [line.split()[1] for line in found if line not in said] or [_SUMS]
            raise _damaged(folder, f"{', '.join(odd)} has changed since it was written")
        document = json.loads(_text(folder / _MANIFEST))
        wrote = document.pop("format")
        if wrote == 2:
            document["config"]["checkpoint_activations"] = False
        if wrote in (2, 3):
            document["config"]["model"], document["source"] = None, ""
        elif wrote != FORMAT:
            raise ConfigError(
                f"checkpoint {folder}: expected format {FORMAT}, got {wrote}; use the version of "
                "burst_rt that wrote the checkpoint."
            )
        manifest = Manifest.from_json(document)
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        raise _incomplete(folder, Path(error.filename).name) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, f"{_MANIFEST} cannot be understood ({error})") from error
    if folder.name != _folder_name(manifest.step):
        raise _damaged(folder, f"{_MANIFEST} belongs to step {manifest.step}")
    return manifest


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


def _steps(parent: Path) -> list[tuple[int, Path]]:
    if not parent.is_dir():
        return []
    matches = ((CHECKPOINT_NAME.fullmatch(path.name), path) for path in parent.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _prune(parent: Path, *, newest: int, keep: int) -> None:
    """Keep the last `keep` checkpoints up to `newest`. Later ones belong to a future that was given
    up.
    """
    steps = _steps(parent)
    kept = [folder for step, folder in steps if step <= newest][-keep:]
    for _, folder in steps:
        if folder not in kept:
            _remove(folder)


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
    finally:
        os.close(descriptor)


@dataclass
class Claim:
    """The folder `path`, which this process holds until `release`, or until the process ends."""

    path: Path
    _descriptor: int = field(repr=False)

    def release(self) -> None:
        os.close(self._descriptor)


def claim(out: Path | None, *, resume: bool) -> Claim:
    """Take a run's folder, and make it where need be (None: a new runs/train-TIME). A folder that
    holds a run already is taken only to `resume` that run.

    Never waits. Raises ConfigError when another run has the folder, or when it does not fit
    `resume`; OSError as the file system says it.
    """
    path = (
        _new_folder(Path("runs", f"train-{datetime.now():%Y%m%d-%H%M%S}")) if out is None else out
    )
    if resume:
        _check(path, resume=True)
    path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undone:
        descriptor = _open_lock(path, os.O_RDWR | os.O_CREAT)
        undone.callback(os.close, descriptor)
        _lock(path, descriptor, fcntl.LOCK_EX)
        # Checked under the lock: until here another run could have begun in the folder, or gone on.
        _check(path, resume=resume)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        undone.pop_all()
    return Claim(path, descriptor)


def look(out: Path, *, resume: bool) -> None:
    """Raise what `claim` would raise now, and change nothing."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not place.is_dir():
        raise ConfigError(
            f"--out: {place} is not a folder; name a new folder, or the folder of a run."
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"--out: this user may not write to {place}; choose another folder.")
    if os.path.lexists(out / _LOCK):
        descriptor = _open_lock(out, os.O_RDONLY)
        try:
            # A shared lock: two processes that look do not disturb each other.
            _lock(out, descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)
    _check(out, resume=resume)


def _open_lock(path: Path, flags: int) -> int:
    try:
        return open_regular(path / _LOCK, flags)
    except OSError as error:
        if error.errno not in NOT_REGULAR:
            raise
        raise ConfigError(
            f"--out: expected {path / _LOCK} to be a file, by which a run holds its folder, and it "
            "is something else; remove it, or choose another folder."
        ) from error


def _lock(path: Path, descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = (
            os.pread(descriptor, _LONGEST_NAME, 0).decode(errors="replace").strip()
            or "another process"
        )
        raise ConfigError(
            f"--out: {path} is in use by a run that has not ended ({holder}); wait for it or stop "
            "it, or choose another folder."
        ) from error
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        if kind == fcntl.LOCK_EX:
            _log.warning(
                "burst-rt: %s cannot be locked (%s): make sure that no second run writes there",
                path,
                error.strerror,
            )


def _check(path: Path, *, resume: bool) -> None:
    """Raise ConfigError unless the folder holds checkpoints to resume, or no run where a new one is
    to begin.
    """
    if resume and not _steps(path / "checkpoints"):
        raise ConfigError(
            f"--resume: expected a complete checkpoint in {path}/checkpoints/step-N, found none. "
            "Train with --out first."
        )
    if not resume and any((path / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        raise ConfigError(
            f"--out: {path} already holds a run; add --resume to continue it, or choose another "
            "folder."
        )


def _new_folder(path: Path) -> Path:
    """Make that folder, or one named after it: another run may have begun in the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in count(2):
        try:
            path.mkdir()
        except FileExistsError:
            path = path.with_name(f"{path.name.partition('_')[0]}_{number}")
        else:
            break
    return path
