"""What ranks do together outside a step: begin, end, fail together, share rank 0's files.

They begin and end a command (`job_world`), form a mesh (`open_mesh`), fail together (`together`,
`on_first`, `same_everywhere`), and share the files that rank 0 alone reads and writes
(`read_shared`, `RunFolder`). One rank's failure becomes every rank's failure instead of a hang.
Everything here rests on `Context.all_reduce`, so every rank must make the same calls in the same
order.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor

import burst_rt
from burst_rt.context import Context
from burst_rt.errors import BurstError, ConfigError, InputError
from burst_rt.job import launched
from burst_rt.job.reports import say_resume
from burst_rt.launch.stopping import LastWord, leave_word
from burst_rt.launch.train.checkpoint import (
    Checkpoint,
    Manifest,
    claim,
    copy_tensors,
    find_checkpoint,
    save_checkpoint,
    save_folder,
)
from burst_rt.launch.train.config import mesh_shape
from burst_rt.launch.train.report import MetricsFile, StepRecord, plot_loss

__all__ = [
    "Mesh", "RunFolder", "SharedCheckpoint", "Stopped", "job_world", "on_first", "open_mesh",
    "read_shared", "same_everywhere", "share_bytes", "together",
]  # fmt: skip

T = TypeVar("T")

# Errors with which an action may fail; index + 1 is sent. Any other error is a defect and ends the
# job as one.
_CLASSES: tuple[type[BurstError], ...] = (ConfigError, InputError)
# Seconds that other ranks wait before they exit if `init` failed: rank 0 prints the error first.
_SPEAKING_S = 1.0


def together(world: Context, action: Callable[[], T]) -> T:
    """Run `action` on this rank and return its result, or raise on every rank if it failed on any.

    A ConfigError or InputError keeps its class, and an OSError becomes a ConfigError. The message
    comes from the lowest failing rank. Blocks until every rank arrives, at most the context's
    `timeout_s`.
    """
    result: T | None = None
    error: BurstError | None = None
    try:
        result = action()
    except _CLASSES as raised:
        error = raised
    except OSError as raised:
        error = ConfigError(f"{raised}; make the file or folder accessible, then run again.")
    codes = torch.zeros(world.world_size, dtype=torch.int64, device=world.device)
    if error is not None:
        codes[world.rank] = 1 + [isinstance(error, cls) for cls in _CLASSES].index(True)
    world.all_reduce(codes)
    if not codes.any():
        # Only an action that returned leaves its code at zero, so this is its result, even if None.
        return result  # type: ignore[return-value]
    failing = int(codes.nonzero()[0].item())
    message = share_bytes(world, os.fsencode(str(error)), source=failing)
    raise _CLASSES[int(codes[failing].item()) - 1](os.fsdecode(message), rank=failing) from error


def on_first(world: Context, action: Callable[[], T]) -> T | None:
    """Run `action` on rank 0 only, return its result there and None elsewhere, or raise on every
    rank if it failed.
    """
    return together(world, lambda: action() if world.rank == 0 else None)


def share_bytes(world: Context, content: bytes | None, *, source: int = 0) -> bytes:
    """Give every rank the `content` of rank `source`; what other ranks pass counts for nothing.
    Blocks until every rank arrives.
    """
    content = (content or b"") if world.rank == source else b""
    size = torch.tensor([len(content)], dtype=torch.int64, device=world.device)
    world.all_reduce(size)
    # Sums of one rank's values and zeros: the values themselves.
    values = torch.zeros(int(size.item()), dtype=torch.int64, device=world.device)
    if content:
        values.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    if values.numel():
        world.all_reduce(values)
    return bytes(values.tolist())


def same_everywhere(world: Context, what: str, value: str) -> None:
    """Raise ConfigError on every rank unless all ranks have rank 0's `value`. Blocks until every
    rank arrives.
    """
    reference = share_bytes(world, value.encode()).decode()

    def compare() -> None:
        if value != reference:
            raise ConfigError(
                f"{what} differs between ranks: rank 0 has {reference}, rank {world.rank} has "
                f"{value}."
            )

    together(world, compare)


@dataclass(frozen=True)
class Mesh:
    """The world as data x context: the ranks of one context group share a sequence, and different
    groups take different sequences.
    """

    # Reduces gradients.
    world: Context
    # Runs attention.
    context: Context
    # The number of this rank's group, of `data_size` groups.
    data_index: int
    data_size: int

    def share_of(self, count: int) -> range:
        """The sequences, among `count`, that this rank's group takes: every `data_size`-th."""
        return range(self.data_index, count, self.data_size)


@contextmanager
def open_mesh(world: Context, context_parallel: int | None) -> Iterator[Mesh]:
    """Split `world` into context groups of neighbouring ranks, for as long as the block runs.
    Collective: blocks until all arrive.
    """
    data_size, context_size = mesh_shape(world.world_size, context_parallel)
    if data_size == 1:
        yield Mesh(world, world, data_index=0, data_size=1)
        return
    data_index = world.rank // context_size
    with (
        _neighbours(data_size, context_size, world.rank) as chosen,
        burst_rt.init(**chosen) as context,
    ):
        yield Mesh(world, context, data_index=data_index, data_size=data_size)


@contextmanager
def _neighbours(data_size: int, context_size: int, rank: int) -> Iterator[dict[str, Any]]:
    """This rank's group of neighbours, as `burst_rt.init` takes it, until the end of the block.

    Collective over the job, whose ranks are processes of MPI or of torchrun.
    """
    # Only a job of several ranks gets here, and only such a job needs an MPI library, or a group.
    if launched.mpi_ranks() == 1 and launched.torchrun_ranks() > 1:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group("gloo")
        try:
            shape, names = (data_size, context_size), ("data", "context")
            yield {"group": init_device_mesh("cpu", shape, mesh_dim_names=names)["context"]}
        finally:
            dist.destroy_process_group()
        return
    from mpi4py import MPI

    group = MPI.COMM_WORLD.Split(color=rank // context_size, key=rank)
    try:
        yield {"comm": group}
    finally:
        group.Free()


@dataclass(frozen=True)
class SharedCheckpoint:
    """A checkpoint that rank 0 has read, so that only one node need see its files."""

    folder: Path
    manifest: Manifest
    # The tensors, on rank 0 alone, until `fill` hands them out.
    local: Checkpoint | None

    def fill(
        self,
        world: Context,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Overwrite `weights`, and `optimizer` where given, on every rank. Collective; raises
        ConfigError on every rank when they do not fit.
        """

        def copy() -> None:
            assert self.local is not None
            copy_tensors(self.local.weights, weights)
            if optimizer is not None:
                copy_tensors(self.local.optimizer, optimizer)

        on_first(world, copy)
        for tensor in (*weights.values(), *(optimizer or {}).values()):
            if world.rank != 0:
                tensor.zero_()
            world.all_reduce(tensor)


def read_shared(world: Context, path: Path) -> SharedCheckpoint:
    """Read the checkpoint that `path` means: itself, or the newest of the run it names.

    Collective. Raises ConfigError on every rank when there is none, or rank 0 cannot read it.
    """
    found = on_first(world, lambda: find_checkpoint(path))
    described = json.dumps([str(found[0]), asdict(found[1].manifest)]).encode() if found else None
    folder, manifest = json.loads(share_bytes(world, described))
    return SharedCheckpoint(Path(folder), Manifest.from_json(manifest), found[1] if found else None)


class RunFolder:
    """A run's folder: `metrics.jsonl`, `loss.png`, `checkpoints/`, `model/`. A context manager:
    until its end no other run gets the folder.

    Every method but `append` is collective. Only rank 0 touches the disk; its failure is a
    ConfigError on every rank.
    """

    def __init__(self, world: Context, out: Path | None, *, resume: bool) -> None:
        """Take the folder as `claim` says."""
        self._world = world
        self._claim = on_first(world, lambda: claim(out, resume=resume))
        name = os.fsencode(self._claim.path) if self._claim else None
        self.path = Path(os.fsdecode(share_bytes(world, name)))
        self._metrics: MetricsFile | None = None

    def open_metrics(self, *, after_step: int) -> None:
        """Keep the metrics up to `after_step`, and append to them from now on."""
        self._metrics = on_first(
            self._world, lambda: MetricsFile(self.path / "metrics.jsonl", after_step=after_step)
        )

    def append(self, record: StepRecord) -> None:
        """Add a line to the metrics. Not collective, as it happens at every step; raises OSError on
        rank 0.
        """
        if self._metrics is not None:
            self._metrics.append(record)

    def save(self, checkpoint: Checkpoint, *, keep: int) -> None:
        """Write a checkpoint; from then on a launcher whose job fails says how to go on."""

        def save() -> None:
            save_checkpoint(self.path, checkpoint, keep=keep)
            say_resume(_resume_command(self._world.world_size, self.path))

        on_first(self._world, save)

    def save_model(self, save: Callable[[Path], object]) -> None:
        """Let `save` write the folder of the trained model."""
        on_first(self._world, lambda: save_folder(self.path / "model", save))

    def plot(self, title: str, unit: str) -> None:
        """Draw the loss curve, in nats a `unit`."""
        on_first(
            self._world,
            lambda: plot_loss(self.history, self.path / "loss.png", title=title, unit=unit),
        )

    @property
    def history(self) -> list[StepRecord]:
        """The run's records so far; empty on ranks other than 0."""
        return self._metrics.history if self._metrics is not None else []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._claim is not None:
            self._claim.release()


class Stopped(Exception):
    """A run was asked to stop and has stopped, on every rank, with a checkpoint after `step`."""

    def __init__(self, number: signal.Signals, step: int, folder: Path) -> None:
        super().__init__(f"stopped by {number.name} after step {step}")
        self.number = number
        self.folder = folder


@contextmanager
def job_world() -> Iterator[Context]:
    """The context of all ranks.

    The block's Stopped, ConfigError or InputError, which all ranks raise, is printed once and ends
    the job. A ConfigError of `init` does the same.
    """
    # The objects that torch has loaded are never garbage. A collection would walk over all of it,
    # on one rank while the others wait for it, and again and again at the end of the process.
    gc.freeze()
    try:
        world = burst_rt.init()
    except ConfigError as error:
        # Without a world the ranks cannot agree on who prints. All of them raise the same error; a
        # rank that knows that it is not rank 0 leaves the printing to rank 0.
        if error.rank in (None, 0):
            sys.exit(_say(_complaint(error)))
        time.sleep(_SPEAKING_S)
        sys.exit(error.exit_code)
    with world:
        try:
            yield world
        except (ConfigError, InputError) as error:
            _leave(world, _complaint(error))
        except Stopped as stopped:
            resume = _resume_command(world.world_size, stopped.folder)
            text = f"burst-rt: {stopped}; resume with: {resume}"
            _leave(world, LastWord(text, 128 + stopped.number))


def _leave(world: Context, word: LastWord) -> NoReturn:
    code = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.rank == 0:
        code += _say(word)
    # The launcher ends the job when the first rank leaves, so no rank leaves before rank 0 has
    # spoken.
    world.all_reduce(code)
    sys.exit(int(code.item()))


def _say(word: LastWord) -> int:
    """Tell the launcher, or else whoever reads stderr; return the exit code that is left for the
    rank to give.
    """
    # To mpirun a rank's exit code means that the rank failed, which mpirun says at length.
    # Therefore the launcher gives the code instead.
    if leave_word(word):
        return 0
    print(word.text, file=sys.stderr, flush=True)
    return word.exit_code


def _complaint(error: ConfigError | InputError) -> LastWord:
    return LastWord(f"burst-rt: {type(error).__name__}: {error}", error.exit_code)


def _resume_command(num_ranks: int, folder: Path) -> str:
    """The command that goes on with the run in `folder`."""
    ranks = f" -n {num_ranks}" if num_ranks > 1 else ""
    return f"burst-rt train{ranks} --resume --out {shlex.quote(str(folder))}"
