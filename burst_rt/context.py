"""Contexts: what a user has of a group of ranks that attend together.

`init` joins the MPI job, or makes a world of one. Several contexts may live in one process (context
parallel beside data, tensor and pipeline parallel); each duplicates its communicator. One call at a
time per context. A context puts together what the floors below it do: the runtime, attention's
setup, and telemetry.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from burst_rt.attention.setup import Setup
from burst_rt.attention.sharding import ContextLayout
from burst_rt.errors import BurstError, InputError, PeerLost
from burst_rt.job.ending import exit_code_of, in_words
from burst_rt.kernels import PARTIALS
from burst_rt.planning.layouts import make_layout
from burst_rt.runtime.joining import LocalRank, join
from burst_rt.runtime.pipeline import Pipeline, make_pipeline
from burst_rt.runtime.process import process
from burst_rt.runtime.reductions import all_reduce, gather_last_run
from burst_rt.runtime.refusing import refuse
from burst_rt.runtime.runtime import Runtime, Stats
from burst_rt.scheduler import Graph, Lane, Span
from burst_rt.telemetry.following import follow
from burst_rt.telemetry.joining import farewell
from burst_rt.transport import LocalWorld

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Context",
    "ContextLayout",
    "LocalRank",
    "Pipeline",
    "Stats",
    "init",
    "run_local",
]

_JOIN_S = 60.0

_T = TypeVar("_T")

# In a thread of `run_local`: the rank that it is, which `init()` joins.
_thread = threading.local()


class Context:
    """A group of ranks. Made by `init`; use it as a context manager or call `close`.

    rank, world_size: this rank's number and how many there are. device: where tensors of calls must
    live. timeout_s: how long a peer may take to enter a call. stall_s: how long nothing may move
    inside one.
    """

    def __init__(self, runtime: Runtime, setup: Setup) -> None:
        self.runtime = runtime
        self.setup = setup
        self.rank = runtime.rank
        self.world_size = runtime.world_size
        self.device = runtime.device
        self.timeout_s = runtime.timeout_s
        self.stall_s = runtime.stall_s

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(0 if error is None else exit_code_of(error), in_words(error))

    def __repr__(self) -> str:
        return f"<burst_rt.Context rank {self.rank} of {self.world_size} on {self.device}>"

    def layout(self, seq_len: int, kind: str = "zigzag") -> ContextLayout:
        """How `seq_len` tokens are spread over the ranks: "zigzag" (equal work under a causal
        mask), "contiguous" or "striped".

        Local; but a wrong argument raises InputError on every rank, on the others in the call they
        make next.
        """
        try:
            return ContextLayout(self.setup, make_layout(kind, seq_len, self.world_size))
        except InputError as error:
            refuse("layout", error, self.runtime)

    @property
    def closed(self) -> bool:
        """Whether this rank has left the group; also in a child that was forked from it, which is
        no rank.
        """
        return self.runtime.closed

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What this rank's compute and transfers run on: for the `GraphBuilder` of a custom
        pipeline.
        """
        return self.runtime.machine.lanes

    @property
    def why_transport(self) -> str:
        """The transport this context uses, and why."""
        machine = self.runtime.machine
        return f"{machine.transport_name}: {machine.reason}"

    def stats(self) -> Stats:
        """What the attention calls of this context have done so far. On a GPU compute_s and wait_s
        are of calls that have ended.
        """
        return self.runtime.stats()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums a float32, float64 or int64 tensor over the ranks, in place; the same bits on every
        rank.

        Collective, blocks at most `timeout_s`. Raises InputError on every rank alike.
        """
        return all_reduce(self.runtime, x)

    def pipeline(self, build: Callable[[int], Graph]) -> Pipeline:
        """Verifies a custom pipeline: `build(rank)` gives each rank's graph and must be the same
        pure function on every rank. Local.

        Raises InternalError with what does not fit. See examples/.
        """
        return make_pipeline(self.runtime, build)

    def gather_last_run(self) -> list[tuple[Graph, list[Span]]]:
        """Every rank's graph and trace of its last attention call or pipeline, in rank order.
        Collective, blocks at most `timeout_s`.

        On one host the traces share a clock, so `scheduler.exposed` can compare them.
        """
        return gather_last_run(self.runtime)

    def close(self, code: int = 0, error: str = "") -> None:
        """Leaves the group: tells the others, who can then enter no further call with this rank.
        Does not wait for them. Idempotent.

        code: other than 0 where this rank failed; error: of what, in words. In a child that was
        forked from a rank it does nothing.
        """
        self.runtime.close(code, error)
        if self.runtime.broken is None:
            self.setup.close()


def init(
    comm: MPI.Comm | LocalRank | None = None,
    device: str | torch.device = "auto",
    timeout_s: float = 600.0,
    stall_s: float = 30.0,
    *,
    join_s: float | None = None,
    transport: str = "auto",
    kernel: str = "auto",
    partials: str = "exact",
    check_finite: bool = False,
    telemetry: bool | None = None,
) -> Context:
    """Joins a group of ranks and returns this rank's context. Collective over `comm`; blocks at
    most `join_s` for each of a few steps.

    comm: an mpi4py intracommunicator (duplicated, yours stays yours); None: all ranks of the MPI
    job (inside `run_local`: of that), or a world of one outside a job. join_s: how long the other
    ranks may take to come here, MPI_Init included; None: what the environment says as
    BURST_RT_JOIN_S, else 60.
    device: "auto" (a GPU if torch sees one), "cpu", "cuda" (the one of this rank's number on its
    host) or "cuda:N"; a GPU becomes the calling thread's current device, so that device="cuda" is
    the same to torch. transport: "auto", "nccl", "mpi", "staged" or "local"; `ctx.why_transport`
    says what was taken and why. timeout_s: how long a peer may take to enter a call; with NCCL also
    how long no task of a call may end. stall_s: how long nothing may move inside a call. kernel:
    "auto" (the fastest measured on this machine) or a tile kernel's name.
    partials: "exact", or "16bit" to let kernels round what each tile gives to the inputs' 16 bits
    before it is added up (cuDNN's and FlashAttention do; errors then grow with the number of
    ranks). check_finite: refuse inputs with NaN or infinities (costs a pass over them).

    Raises InputError (an option), ConfigError (no MPI library in an MPI job, a device that is not
    there, ranks of torchrun), ContractMismatch (options differ between ranks), Stalled. Where ranks
    do not come to MPI_Init, the process ends with Stalled's exit code.
    """
    process.install_exit_hooks()
    process.say_at_end(farewell)
    wrong: BurstError | None = None
    try:
        for name, value in (("timeout_s", timeout_s), ("stall_s", stall_s)):
            _check_seconds(name, value)
        if partials not in PARTIALS:
            raise InputError(f"init: partials must be one of {list(PARTIALS)}, got {partials!r}")
    except InputError as error:
        wrong = error
    try:
        within_s = _join_seconds(join_s)
    except InputError as error:
        wrong, within_s = error, _JOIN_S
    if comm is None:
        comm = getattr(_thread, "rank", None)
    joined = join(comm, str(device), transport, within_s, wrong)
    machine = joined.machine
    machine.enter()
    runtime = Runtime(machine, joined.control, timeout_s=timeout_s, stall_s=stall_s)
    setup = Setup(runtime, kernel=kernel, partials=partials, check_finite=check_finite)
    terms = {
        "call": "init",
        "timeout_s": str(timeout_s),
        "stall_s": str(stall_s),
        "kernel": kernel,
        "partials": partials,
        "check_finite": str(check_finite),
        "device": machine.device.type,
    }
    try:
        runtime.agree(terms, within_s=within_s)
    except BurstError:
        runtime.close()
        raise
    follow(runtime, joined.presence, asked=telemetry, within_s=within_s)
    return Context(runtime, setup)


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InputError(f"init: {name} must be a positive number of seconds, got {value!r}")


def _join_seconds(asked: float | None) -> float:
    if asked is None:
        text = os.environ.get("BURST_RT_JOIN_S", str(_JOIN_S))
        try:
            asked = float(text)
        except ValueError:
            raise InputError(
                f"init: BURST_RT_JOIN_S must be a positive number of seconds, got {text!r}"
            ) from None
    _check_seconds("join_s", asked)
    return asked


def run_local(world_size: int, fn: Callable[[Context], _T], **options: Any) -> list[_T]:
    """Runs `fn(ctx)` on `world_size` ranks as threads of this process and returns their results in
    rank order. `options` go to `init`.

    For tests, notebooks and small trials. Blocks until all have ended; if ranks fail, raises the
    error of the first that failed by itself.
    """
    world = LocalWorld(world_size)
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        # What `init()` joins in this thread.
        _thread.rank = LocalRank(world, rank)
        try:
            # torch runs all backwards of one GPU in one thread of its own, where ranks would wait
            # for each other for ever.
            with torch.autograd.set_multithreading_enabled(False), init(**options) as ctx:
                try:
                    results[rank] = fn(ctx)
                except BaseException as error:
                    process.close_here(exit_code_of(error), in_words(error))
                    raise
                process.close_here(0, "")
        except BaseException as error:  # noqa: BLE001  (handed to the caller's thread)
            failures.append((rank, error))

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"burst_rt rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        first = next(
            (error for _, error in failures if not isinstance(error, PeerLost)), failures[0][1]
        )
        raise first
    return results
