"""Contexts: a group of ranks that attend together, and what belongs to it (transport, control
group, plans, deadlines).

`init` joins the MPI job, or makes a world of one. Several contexts may live in one process (context
parallel beside data, tensor and pipeline parallel); each duplicates its communicator. One call at a
time per context. A rank that leaves says so to the others, at `close` or when its interpreter
exits, so nobody waits for it; a context that failed inside a call is broken and takes the job down
at exit (MPI_Abort), because messages under way cannot be recalled.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch

from burst_rt.attention.execute import RUNS, BackwardRun, ForwardRun
from burst_rt.attention.planner import Plan, PlanKey, Planner
from burst_rt.attention.sharding import ContextLayout
from burst_rt.contract import Agreement, CallSpec, digest_of
from burst_rt.drivers import Backoff, BaseDriver, CudaDriver, Progress, Watch, is_out_of_memory
from burst_rt.drivers.device import DeviceEvent as Event
from burst_rt.drivers.watch import SharedWatch
from burst_rt.drivers.watchdog import Watchdog
from burst_rt.errors import (
    BurstError,
    ConfigError,
    ContractMismatch,
    DeviceError,
    InputError,
    PeerLost,
    Stalled,
)
from burst_rt.job.ending import end_job, mpi_takes_threads
from burst_rt.job.flight import own_flight
from burst_rt.kernels import PARTIALS, sum_dtype
from burst_rt.planning.layouts import make_layout
from burst_rt.planning.problem import Problem
from burst_rt.runtime.joining import LocalRank, agent_key, join
from burst_rt.runtime.machine import Machine
from burst_rt.runtime.pipeline import Pipeline
from burst_rt.scheduler import Engine, Graph, Lane, Schedule, Span, Trace, check_world, run
from burst_rt.telemetry.describe import describe
from burst_rt.telemetry.joining import farewell, follow, leave
from burst_rt.transport import ControlGroup, LocalTransport, LocalWorld, Memory, Pending

if TYPE_CHECKING:
    from mpi4py import MPI

    from burst_rt.telemetry.calls import CallLog

__all__ = [
    "Context",
    "ContextLayout",
    "LocalRank",
    "Pipeline",
    "Stats",
    "current_context",
    "init",
    "run_local",
]

_log = logging.getLogger("burst_rt")

_UNCOUNTED_UP_TO = 64
_JOIN_S = 60.0
# The others have heard by then that this rank has failed by itself, and said so.
_HEARD_AFTER_S = 1.3

_T = TypeVar("_T")
_P = TypeVar("_P", bound=Pending)

# Contexts among processes until they are closed, and broken ones for good: the others count on
# them, and what was begun goes on, even where the program has let go of them.
_live: set[Context] = set()
_current = threading.local()


class Stats(NamedTuple):
    """Cumulative counts of a context's attention calls, forward and backward. Times in seconds.

    wait_s: time the compute lane idled while a transfer was under way (exposed communication and
    late peers together).
    """

    calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    total_s: float = 0.0


class Context:
    """A group of ranks. Made by `init`; use it as a context manager or call `close`.

    rank, world_size: this rank's number and how many there are. device: where tensors of calls must
    live. timeout_s: how long a peer may take to enter a call. stall_s: how long nothing may move
    inside one.
    """

    def __init__(
        self,
        machine: Machine,
        control: ControlGroup,
        *,
        timeout_s: float,
        stall_s: float,
        kernel: str,
        partials: str,
        check_finite: bool,
    ) -> None:
        self.log: CallLog | None = None  # for telemetry
        self.agent_key: object = None
        self.rank = control.rank
        self.world_size = control.size
        self.places = control.places
        self.device = machine.device
        self.machine = machine
        self.timeout_s = timeout_s
        self.stall_s = stall_s
        self.kernel = kernel
        self.partials = partials
        self.check_finite = check_finite
        self.transport = machine.ends
        self.control = control
        self.watch = Watch(control) if machine.wire is None else SharedWatch(control)
        # With a wire of the device calls return before they have ended.
        self._watchdog: Watchdog | None = None
        if machine.wire is not None:
            self._watchdog = Watchdog(
                machine.wire, self.watch, timeout_s, machine.enter_to_watch, self._give_up
            )
        self.planner = Planner(
            self.rank, machine.lanes, machine.lower, machine.ranks_per_node, machine.hardware
        )
        self.last_run: tuple[Graph, BaseDriver] | None = None
        self.pinned: set[CallSpec] = set()  # what compiled programs know by number
        self._poison = os.environ.get("BURST_RT_POISON") == "1"
        self._number = 0
        self._broken: BaseException | None = None
        self._kept: list[object] = []
        self._closed = False
        self._process = os.getpid()
        self._flight = None if isinstance(machine.ends, LocalTransport) else own_flight()
        self._busy = threading.Lock()
        self._stats = Stats()
        self._uncounted: deque[BaseDriver] = deque()  # of calls whose times are not in `_stats` yet
        # Ranks that are threads are nobody's job but this process's.
        if not isinstance(self.transport, LocalTransport):
            _live.add(self)
        _here().append(weakref.ref(self))

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(0 if error is None else _exit_code(error), _in_words(error))

    def __repr__(self) -> str:
        return f"<burst_rt.Context rank {self.rank} of {self.world_size} on {self.device}>"

    def layout(self, seq_len: int, kind: str = "zigzag") -> ContextLayout:
        """How `seq_len` tokens are spread over the ranks: "zigzag" (equal work under a causal
        mask), "contiguous" or "striped".

        Local; but a wrong argument raises InputError on every rank, on the others in the call they
        make next.
        """
        try:
            return ContextLayout(self, make_layout(kind, seq_len, self.world_size))
        except InputError as error:
            refuse("layout", error, self)

    @property
    def closed(self) -> bool:
        """Whether this rank has left the group; also in a child that was forked from it, which is
        no rank.
        """
        return self._closed or os.getpid() != self._process

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What this rank's compute and transfers run on: for the `GraphBuilder` of a custom
        pipeline.
        """
        return self.machine.lanes

    @property
    def why_transport(self) -> str:
        """The transport this context uses, and why."""
        return f"{self.machine.transport_name}: {self.machine.reason}"

    def stats(self) -> Stats:
        """What the attention calls of this context have done so far. On a GPU compute_s and wait_s
        are of calls that have ended.
        """
        while self._uncounted and self._uncounted[0].settled():
            s, driver = self._stats, self._uncounted.popleft()
            self._stats = s._replace(
                compute_s=s.compute_s + driver.compute_s, wait_s=s.wait_s + driver.wait_s
            )
        return self._stats

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums a float32, float64 or int64 tensor over the ranks, in place; the same bits on every
        rank.

        Collective, blocks at most `timeout_s`. Raises InputError on every rank alike.
        """
        where = (
            "all_reduce: expected a contiguous tensor of float32, float64 or int64 on a CPU or GPU,"
        )
        if not isinstance(x, torch.Tensor):
            self.refuse("all_reduce", InputError(f"{where} got {type(x).__name__}"))
        right_type = (
            x.dtype in (torch.float32, torch.float64, torch.int64) and x.layout == torch.strided
        )
        if (
            not right_type
            or x.device.type not in ("cpu", "cuda")
            or not x.is_contiguous()
            or x.is_neg()
        ):
            view = ", a negative view" if x.is_neg() else ""
            self.refuse(
                "all_reduce",
                InputError(
                    f"{where} got {x.dtype} of shape {tuple(x.shape)} on {x.device} "
                    f"({x.layout}{view})"
                ),
            )
        about = {"call": "all_reduce", "shape": str(tuple(x.shape)), "dtype": str(x.dtype)}
        host = x.detach().cpu()  # x itself where it is there already
        self.collective(about, lambda: self.control.allreduce_sum(host.numpy()))
        if x.device.type != "cpu":
            x.detach().copy_(host)
        else:
            # what was written through numpy autograd did not see
            torch.autograd.graph.increment_version(x)
        return x

    def pipeline(self, build: Callable[[int], Graph]) -> Pipeline:
        """Verifies a custom pipeline: `build(rank)` gives each rank's graph and must be the same
        pure function on every rank. Local.

        Raises InternalError with what does not fit. See examples/.
        """
        graphs = [build(rank) for rank in range(self.world_size)]
        check_world(graphs)
        fingerprint = format(digest_of({"tasks": repr([graph.tasks for graph in graphs])}), "x")
        return Pipeline(self, Schedule.of(graphs[self.rank]), fingerprint)

    def gather_last_run(self) -> list[tuple[Graph, list[Span]]]:
        """Every rank's graph and trace of its last attention call or pipeline, in rank order.
        Collective, blocks at most `timeout_s`.

        On one host the traces share a clock, so `scheduler.exposed` can compare them.
        """
        if self.last_run is None:
            self.refuse(
                "gather_last_run",
                InputError("gather_last_run: nothing has run on this context yet"),
            )
        graph, driver = self.last_run
        driver.settle(self.timeout_s)
        # Pickled by this package's own ranks, received from them on a communicator of their own.
        payload = pickle.dumps((graph, list(driver.trace)))
        pending = self.collective(
            {"call": "gather_last_run"}, lambda: self.control.allgather(payload)
        )
        gathered: list[tuple[Graph, list[Span]]] = [pickle.loads(raw) for raw in pending.result()]
        return gathered

    def close(self, code: int = 0, error: str = "") -> None:
        """Leaves the group: tells the others, who can then enter no further call with this rank.
        Does not wait for them. Idempotent.

        code: other than 0 where this rank failed; error: of what, in words. In a child that was
        forked from a rank it does nothing.
        """
        if self.closed:
            return
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.finish()
        self.watch.leave(code, error)
        if self._broken is None:
            # Where this rank failed, its device may have more to do than will ever end.
            (self.transport.cancel if code else self.transport.close)()
            self.machine.forget()
            self.planner.forget()
            self.pinned.clear()
            self.last_run = None
            _live.discard(self)
        if self.log is not None:
            leave(self.agent_key, self.log, code)

    # What follows is for the package itself.

    def plan(self, spec: CallSpec, q: torch.Tensor, k: torch.Tensor, *, forward: bool) -> Plan:
        """The plan of a checked call. Local."""
        problem = Problem(
            spec.layout.map, spec.kv_layout.map, spec.mask, q.shape[0], q.shape[2], k.shape[2],
            q.shape[3],
            q.dtype.itemsize, sum_dtype(q.dtype).itemsize, spec.needs_grad,
        )  # fmt: skip
        return self.planner.plan(
            PlanKey(
                forward, problem, spec.strategy, self.kernel, q.dtype, self.device, self.partials
            )
        )

    def run_forward(
        self, plan: Plan, spec: CallSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a forward plan: (out, lse). Collective."""
        progress = Progress()
        with self._enough_memory(plan):
            bound = RUNS[type(plan.choice.program)].forward(
                plan, self.machine, spec.scale, progress, self._poison, (q, k, v)
            )
        self._attend(plan, spec, bound, progress)
        return bound.out, bound.lse

    def run_backward(
        self,
        plan: Plan,
        spec: CallSpec,
        saved: tuple[torch.Tensor, ...],
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Runs a backward plan: (dq, dk, dv). `saved` is q, k, v, out, lse. Collective."""
        progress = Progress()
        q, k, v, out, lse = saved
        with self._enough_memory(plan):
            run_type = RUNS[type(plan.choice.program)].backward
            bound = run_type(
                plan,
                self.machine,
                spec.scale,
                progress,
                self._poison,
                (q, k, v, out, lse),
                dout,
                dlse,
            )
        self._attend(plan, spec, bound, progress)
        return bound.grads()

    def agree(
        self,
        description: dict[str, str],
        error: BurstError | None = None,
        within_s: float | None = None,
    ) -> None:
        """Opens a collective that is not a graph: every rank says what it is about to do. If one
        brings an error, all raise it.

        Blocks at most `within_s`, by default `timeout_s`.
        """
        with self._exclusive():
            self._agree(description, error, within_s)

    def collective(
        self, description: dict[str, str], start: Callable[[], _P], within_s: float | None = None
    ) -> _P:
        """`agree`, then the control group's collective that `start` begins, to its end. Blocks at
        most `within_s` for each.
        """
        with self._exclusive():
            self._agree(description, None, within_s)
            with self._in_call(description["call"]), self._unbroken():
                pending = start()
                self.watch.wait_for(pending, within_s or self.timeout_s, description["call"])
            return pending

    def refuse(self, call: str, error: BurstError) -> NoReturn:
        """Tells every rank that this one cannot make the call; raises the error all of them
        raise.
        """
        self.watch.look()
        if self.watch.left and self.usable:
            raise error  # no other can be waiting: their next call finds that a rank has left
        self.agree({"call": call}, error)
        raise error

    def perform(
        self,
        schedule: Schedule,
        ops: Mapping[str, Callable[..., None]],
        memory: Mapping[int, Memory],
        opening: Agreement,
        progress: Progress | None = None,
        plan: Plan | None = None,
    ) -> tuple[BaseDriver, Event | None]:
        """Runs a schedule (that of `plan`, or a custom one) on this rank's driver; also says after
        which event of the device its memory is free. Collective.
        """
        trace, log = Trace(), self.log
        takes = partial(_takes, plan) if plan else None
        driver = self.machine.driver(
            schedule, ops=ops, memory=memory, watch=self.watch, opening=opening,
            timeout_s=self.timeout_s, stall_s=self.stall_s,
            trace=trace, takes=takes, flight=self._flight,
        )  # fmt: skip
        if progress:
            progress.driver = driver
        if log is not None:
            log.began(self._number, driver)
        watched = None
        if self._watchdog is not None and isinstance(driver, CudaDriver):
            watched = self._watchdog.begin(self._number, _name_of(plan), driver)
        try:
            run(Engine(schedule), driver)
        except BaseException as error:
            if driver.refused and isinstance(error, ContractMismatch):
                self.machine.join(driver)
                if log is not None:
                    log.abandoned()
                raise  # nothing was sent
            # Messages may be under way: their memory must outlive this call, and no later call may
            # be confused by them.
            self._broken = error
            self._kept.append((memory, ops))
            self._say_broken(error)
            if self._watchdog is not None:
                # the driver has ended all messages, and this error is the one to be told
                self._watchdog.stop()
            raise
        finally:
            if watched is not None:
                watched.issuing = False
        free = self.machine.join(driver)
        driver.forget()
        if log is not None:
            log.ended(schedule, driver, partial(describe, plan, self.machine, self.rank))
        self.last_run = (schedule.graph, driver)
        return driver, free

    def run_pipeline(
        self,
        schedule: Schedule,
        ops: Mapping[str, Callable[..., None]],
        memory: Mapping[int, Memory],
        progress: Progress,
    ) -> Trace:
        """Runs a custom schedule the ranks have agreed on. Collective."""
        with self._exclusive(), self._in_call("Pipeline.run"):
            driver, _ = self.perform(
                schedule, ops, memory, Agreement(self.control, self._number, {}, 0), progress
            )
            return driver.trace

    def _attend(
        self, plan: Plan, spec: CallSpec, bound: ForwardRun | BackwardRun, progress: Progress
    ) -> None:
        with self._exclusive():
            self._enter()
            started_s = time.perf_counter()
            sent, received = self.transport.bytes_sent, self.transport.bytes_received
            description, digest = _describe(plan.key, spec.scale, spec.return_lse)
            agreement = Agreement(self.control, self._number, description, digest)
            with self._in_call(description["call"]):
                try:
                    driver, free = self.perform(
                        plan.schedule, bound.ops, bound.memory, agreement, progress, plan
                    )
                except ContractMismatch:
                    if self._broken is not None:
                        raise
                    self._settle(agreement)
            self.machine.give_back(plan, bound.slots, free)
            self._uncounted.append(driver)
            # On a device its work may not have ended, and to ask takes longer than to wait until
            # somebody wants to know.
            counts_now = self.device.type == "cpu" or len(self._uncounted) > _UNCOUNTED_UP_TO
            s = self.stats() if counts_now else self._stats
            self._stats = Stats(
                s.calls + 1,
                s.bytes_sent + self.transport.bytes_sent - sent,
                s.bytes_received + self.transport.bytes_received - received,
                s.compute_s,
                s.wait_s,
                s.total_s + time.perf_counter() - started_s,
            )

    def _agree(
        self, description: dict[str, str], error: BurstError | None, within_s: float | None = None
    ) -> None:
        self._enter()
        if self.world_size == 1:
            if error:
                raise error
            return
        agreement = Agreement(
            self.control, self._number, description, digest_of(description), error
        )
        with self._in_call(description["call"]), self._unbroken():
            agreement.start()
            self.watch.wait_for(
                agreement, within_s or self.timeout_s, description["call"], self._number
            )
        if agreement.failure():
            self._settle(agreement)

    @contextmanager
    def _in_call(self, call: str) -> Iterator[None]:
        """Writes down that this rank is in the call, for who finds it dead."""
        flight = self._flight
        if flight is None:
            yield
            return
        flight.enter(self._number, call)
        try:
            yield
        finally:
            # A call that broke the context stands there still: it is what this rank was in when it
            # failed.
            if self._broken is None:
                flight.leave()

    def waiting_here(self) -> set[int]:
        """The ranks that have said, as far as their notices are read, that they wait for this one
        to enter its next call.
        """
        return {peer for peer, number in self.watch.entered.items() if number > self._number}

    @property
    def usable(self) -> bool:
        """Whether a call may be made."""
        return not self.closed and self._broken is None

    def check_open(self) -> None:
        """Raises ConfigError where this rank has left the group, or the process is a child that was
        forked from it.
        """
        if os.getpid() != self._process:
            raise ConfigError(
                "this process was forked from a rank, and the context is that rank's: make the "
                "call there (a child may compute, "
                "load data and exit)",
                rank=self.rank,
            )
        if self._closed:
            raise ConfigError(
                "this context is closed; make another with burst_rt.init", rank=self.rank
            )

    def _enter(self) -> None:
        self.check_open()
        if self._broken is not None:
            raise PeerLost(
                f"rank {self.rank}: this context broke in an earlier call ({self._broken}); start "
                "the job again",
                rank=self.rank,
            ) from self._broken
        with self._unbroken():
            self.watch.require_all()
        self._number += 1

    def _settle(self, agreement: Agreement) -> NoReturn:
        with self._unbroken():
            error = agreement.settle(self.watch, self.timeout_s)
        raise error

    @contextmanager
    def _enough_memory(self, plan: Plan) -> Iterator[None]:
        """Binding a call takes its memory, all but the tiles' scratch, before anything is sent: if
        that fails every rank hears of it.
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.refuse(
                _name_of(plan),
                DeviceError(
                    f"out of memory on {self.device}: {_takes(plan)}",
                    rank=self.rank,
                ),
            )

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Whatever goes wrong inside leaves the control group in an unknown state."""
        try:
            yield
        except BaseException as error:
            self._broken = error
            self._say_broken(error)
            raise

    def _give_up(self, error: BurstError) -> None:
        """In the watchdog's thread: a call that was issued cannot end. Ends the job."""
        self._broken = error
        if not self._closed and mpi_takes_threads():
            self._say_broken(error)
        end_job(error, self.transport.cancel)

    def _say_broken(self, error: BaseException) -> None:
        """What began on this rank the others must hear of: they would wait for it until their
        deadlines.
        """
        if not isinstance(error, (PeerLost, Stalled)):
            # sys.exit(0) in the middle of a call is no good end
            self.watch.say_left(_exit_code(error) or 1, _in_words(error))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ConfigError(
                "one call at a time per context: another thread is in a call of this one; use a "
                "context each",
                rank=self.rank,
            )
        try:
            yield
        finally:
            self._busy.release()


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
        comm = getattr(_current, "local_rank", None)
    machine, control, wishes = join(comm, str(device), transport, within_s, telemetry, wrong)
    machine.enter()
    ctx = Context(
        machine,
        control,
        timeout_s=timeout_s,
        stall_s=stall_s,
        kernel=kernel,
        partials=partials,
        check_finite=check_finite,
    )
    try:
        ctx.agree(
            {
                "call": "init",
                "timeout_s": str(timeout_s),
                "stall_s": str(stall_s),
                "kernel": kernel,
                "partials": partials,
                "check_finite": str(check_finite),
                "device": machine.device.type,
            },
            within_s=within_s,
        )
    except BurstError:
        ctx.close()
        raise

    def gather(mine: bytes) -> list[bytes]:
        pending = ctx.collective(
            {"call": "init: telemetry"}, lambda: control.allgather(mine), within_s
        )
        return pending.result()

    ctx.agent_key = agent_key(comm)
    ctx.log = follow(
        ctx.agent_key, ctx.rank, wishes, machine.transport_name, machine.reason, gather
    )
    return ctx


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


def _here() -> list[weakref.ref[Context]]:
    """The contexts that this thread has made, the last one last."""
    made: list[weakref.ref[Context]] | None = getattr(_current, "made", None)
    if made is None:
        made = _current.made = []
    made[:] = [
        reference for reference in made if (ctx := reference()) is not None and not ctx.closed
    ]
    return made


def current_context() -> Context | None:
    """The context this thread made last, if it is still open."""
    return next((ctx for reference in reversed(_here()) if (ctx := reference()) is not None), None)


def refuse(call: str, error: BurstError, context: Context | None = None) -> NoReturn:
    """Raises the error on every rank that waits for this rank's next call, also where they wait in
    another context than this rank meant.

    context: where this rank was about to make the call; None where that is not known: then the one
    that this thread made last. Blocks until the others have come to that call, at most `timeout_s`;
    returns at once where no other rank can be waiting.
    """
    # Those of other threads are in calls of theirs.
    known = {context, *(reference() for reference in _here())}
    shared = [ctx for ctx in known if ctx is not None and ctx.usable and ctx.world_size > 1]
    meant = context if context in shared else current_context()
    if meant not in shared:
        meant = next(iter(shared), None)
    if meant is None:
        raise error
    if len(shared) == 1:
        meant.refuse(call, error)
    try:
        for ctx in shared:
            ctx.watch.say_refuses(here=ctx is meant)
        backoff = Backoff()
        while backoff.elapsed_s() < meant.timeout_s:
            _look(shared)
            where = _where_awaited(meant, shared)
            if where is not None:
                where.refuse(call, error)
            if _nobody_waits(meant):
                # The others have asked everywhere before they answered here: what they ask is
                # answered before this rank goes on.
                _look(shared)
                break
            backoff.pause()
    finally:
        for ctx in shared:
            ctx.watch.stop_refusing()
    raise error


def _look(shared: Sequence[Context]) -> None:
    """Reads the notices of all these contexts; answers those who ask whether this rank, too, cannot
    make its call.
    """
    for ctx in shared:
        ctx.watch.look()


def _nobody_waits(meant: Context) -> bool:
    """Whether no other rank can make the call either: they meant different ones, and each raises
    its own error.
    """
    return len(set(meant.watch.left).union(meant.watch.refusing or ())) == meant.world_size - 1


def _where_awaited(meant: Context, shared: Sequence[Context]) -> Context | None:
    """The context in which the others are to hear of a call that this rank cannot make; None as
    long as that is not known.

    It is the one that was meant, once somebody waits there, or nobody can make the call there. It
    is another only where all the ranks of the one that was meant wait: others may well have gone on
    to a later call there.
    """
    # Who could not make its call either and waits now, waits in the one after it.
    waiting = {ctx: ctx.waiting_here().difference(ctx.watch.refusing or ()) for ctx in shared}
    refusing, left = meant.watch.refusing or {}, set(meant.watch.left)
    if (
        waiting[meant]
        or len(left | {peer for peer, here in refusing.items() if here}) == meant.world_size - 1
    ):
        return meant
    others = {
        place for rank, place in enumerate(meant.places) if rank != meant.rank and rank not in left
    }
    return next(
        (
            ctx
            for ctx in shared
            if ctx is not meant and others <= {ctx.places[rank] for rank in waiting[ctx]}
        ),
        None,
    )


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
        _current.local_rank = LocalRank(world, rank)
        try:
            # torch runs all backwards of one GPU in one thread of its own, where ranks would wait
            # for each other for ever.
            with torch.autograd.set_multithreading_enabled(False), init(**options) as ctx:
                try:
                    results[rank] = fn(ctx)
                except BaseException as error:
                    _close_here(_exit_code(error), _in_words(error))
                    raise
                _close_here(0, "")
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


def _close_here(code: int, error: str) -> None:
    """Closes the contexts that this thread has made and not closed."""
    for reference in list(_here()):
        ctx = reference()
        if ctx is not None:
            ctx.close(code, error)


def _name_of(plan: Plan | None) -> str:
    """The call that runs a plan, or a custom schedule (None)."""
    if plan is None:
        return "Pipeline.run"
    return "burst_attention" if plan.key.forward else "backward of burst_attention"


@lru_cache(maxsize=256)
def _describe(key: PlanKey, scale: float | None, return_lse: bool) -> tuple[dict[str, str], int]:
    """What the ranks compare: everything about a call but the rank's own part; and its digest."""
    from burst_rt.version import __version__

    problem = key.problem
    description = {
        "call": "burst_attention" if key.forward else "backward of burst_attention",
        "layout": f"{problem.q_layout.kind} {problem.q_layout.seq_len}",
        "kv_layout": f"{problem.kv_layout.kind} {problem.kv_layout.seq_len}",
        "mask": repr(problem.mask),
        "batch": str(problem.batch),
        "heads": f"{problem.num_heads} and {problem.num_kv_heads} kv",
        "head_dim": str(problem.head_dim),
        "dtype": str(key.dtype),
        "needs_grad (q, k, v)": str(problem.needs_grad),
        "scale": "default" if scale is None else repr(float(scale)),
        "strategy": key.strategy,
        "return_lse": str(return_lse),
        "version": __version__,
    }
    return description, digest_of(description)


def _takes(plan: Plan) -> str:
    """What memory a call takes, by the plan's formula, and what to do if it is too much."""
    need = plan.memory()
    formula = " + ".join(f"{name} {size:,}" for name, size in need._asdict().items() if size)
    return (
        f"this call takes {need.total:,} bytes beyond its inputs and outputs ({formula}). Use more "
        "ranks, fewer tokens or heads a call, or "
        "free what else is there"
    )


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return error.exit_code if isinstance(error, BurstError) else 1


def _in_words(error: BaseException | None) -> str:
    """An error for the other ranks, in a line; nothing for a program that ended well."""
    return (
        ""
        if error is None or not _exit_code(error)
        else " ".join(f"{type(error).__name__}: {error}".split())
    )


_print_uncaught = sys.excepthook
_uncaught: list[BaseException] = []
_process = os.getpid()


def _note_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    # Others call the hook too, for errors they have handled; and at a prompt the program goes on.
    if getattr(sys, "last_value", None) is error and not hasattr(sys, "ps1"):
        _uncaught.append(error)
    _print_uncaught(kind, error, trace)


sys.excepthook = _note_uncaught


@atexit.register
def _leave() -> None:
    """Runs when the interpreter exits: says farewell for every context, and ends the job if one of
    them is broken or the program failed.

    Otherwise MPI_Finalize would wait for messages that never come, and the others, wherever they
    are, for this rank.
    """
    if os.getpid() != _process:
        return  # a child that was forked: MPI is its parent's
    contexts = list(_live)
    failure = next(
        (ctx._broken for ctx in contexts if ctx._broken), _uncaught[-1] if _uncaught else None
    )
    code = 0 if failure is None else _exit_code(failure) or 1
    mpi = sys.modules.get("mpi4py.MPI")
    # A program may have finalized MPI itself: nobody can be told anything then.
    running = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    for ctx in contexts if running else ():
        try:
            ctx.close(code, _in_words(failure))
        except Exception:  # noqa: BLE001  (whatever a library raises: the others are to hear of the end all the same)
            _log.warning("rank %d: closing a context failed", ctx.rank, exc_info=True)
    farewell(code, failure)
    if failure is not None and mpi is not None and running and mpi.COMM_WORLD.size > 1:
        if contexts and not isinstance(failure, (PeerLost, Stalled)):
            time.sleep(_HEARD_AFTER_S)
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(code)
