"""A rank's side: one thread that tells the hub what the rank does, and what its machine measures.

Whatever happens to the hub or to a sampler, the rank goes on. Queues are bounded, sending never
waits, what finds no room is dropped and counted, and when the hub is gone the thread ends.

The thread wakes five times a second, gathers, and sends everything in one go. It wakes on the beat
of the host's clock: so all ranks of a host are held up at the same moment, which a ring feels only
once, and the hub wakes once for all of them.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from burst_rt.telemetry.messages import (
    Agreed,
    Bye,
    EndedCall,
    FromRank,
    Group,
    Heartbeat,
    Hello,
    JobReport,
    LogLine,
    PhaseEnded,
    Ping,
    PlanSummary,
    Pong,
    ToRank,
)
from burst_rt.telemetry.rank.call_log import NOTHING, CallLog, Totals
from burst_rt.telemetry.rank.host import HostSampler, ProcessSampler
from burst_rt.telemetry.rank.nvml import GpuId, NvmlThread
from burst_rt.telemetry.wire import Frames, connect_to_hub, frame, until_beat_s

__all__ = ["Agent"]

_HEARTBEAT_S = 0.5
_CONNECT_DEADLINE_S = 5.0
# Seconds between two comparisons of clocks, and number of pings in each. The ping with the shortest
# round trip tells most. Clocks drift, so only the answers of the last two comparisons count.
_CLOCK_PERIOD_S = 10.0
_PINGS = 5
_PING_DEADLINE_S = 0.2
# Maximum number of messages of other threads that wait for the agent's thread.
_MAX_WAITING = 1000
# Maximum number with steps and spans among them: however many a job has, its reports have room.
_MAX_WITH_PHASES = 900
# Maximum number of bytes that wait for the socket: above the first limit spans are dropped, above
# the second everything is.
_SPANS_UP_TO_BYTES = 2 << 20
_UP_TO_BYTES = 8 << 20
# Maximum number of calls that are handled at a time: a thread that computes for long in Python
# keeps the interpreter from the rank's own thread.
_MAX_CALLS_A_TICK = 64
_RESEND_S = 0.02
# Minimum number of seconds between two samples of hosts and processes: their processor time is
# counted in hundredths of a second, so samples closer together would say little.
_HOST_PERIOD_S = 0.5
# Seconds for which a rank that ends waits until its last words are sent; and for which these wait
# for calls that a device has yet to end.
_BYE_DEADLINE_S = 0.5
_SETTLING_S = 0.3
_ASK_AGAIN_S = 0.002

_log = logging.getLogger("burst_rt.telemetry")


class Agent:
    """The agent of one rank. hello: the rank's first message. gpus: the GPUs of the ranks of this
    host, if this rank samples them; None if another rank does.
    """

    def __init__(self, address: str, hello: Hello, gpus: list[GpuId] | None) -> None:
        self.address = address
        self.secret = hello.secret
        self.hello = hello
        self.totals = Totals()
        self.num_dropped = 0
        # The step under way, -1 outside of steps, and the last one that began.
        self.step, self.last_step = -1, 0
        # The threads that began telemetry, and the last step.
        self._begun_by, self.stepping = threading.get_ident(), 0
        self.depths: dict[int, int] = {}  # by thread, the number of steps and spans that it is in
        self.alive, self._broken = True, False
        self._gpus = gpus
        self._logs: list[CallLog] = []
        self._groups: dict[str, int] = {}
        self._waiting: deque[FromRank] = deque()
        self._connection: socket.socket | None = None
        self._frames = Frames()
        self._wake = threading.Event()
        self._ending = False
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._gap = False  # whether calls were dropped since the last that was queued
        # The round-trip time of each answer, the clock's offset, and the time at which the ping was
        # sent.
        self._pings: deque[tuple[float, float, float]] = deque(maxlen=2 * _PINGS)
        self._nvml: NvmlThread | None = None
        self._thread = threading.Thread(target=self._main, name="burst_rt telemetry", daemon=True)
        self._thread.start()

    # For the rank's own threads. Only `close` waits.

    def follow(
        self,
        ranks: list[int],
        transport: str,
        reason: str,
        when_left: Callable[[int], None] | None = None,
        enter: Callable[[], None] = lambda: None,
    ) -> CallLog:
        """The log of a new context of these ranks of the job. when_left, enter: see `CallLog`."""
        name = (
            f"{ranks[0]}-{ranks[-1]}"
            if ranks == list(range(ranks[0], ranks[0] + len(ranks)))
            else ",".join(map(str, ranks))
        )
        again = self._groups[name] = self._groups.get(name, -1) + 1
        group = Group(f"{name} #{again}" if again else name, ranks, transport, reason)
        log = CallLog(group, self.totals, when_left, self._note_planning, enter)
        self._logs.append(log)
        self.put(group)
        return log

    def report(self, step: int, values: dict[str, float]) -> None:
        """A figure that the job reports about itself."""
        self.put(JobReport(time.perf_counter(), step, values))

    def note_phase(
        self, name: str, step: int, depth: int, started_s: float, ended_s: float,
        *, made_plan: bool = False,
    ) -> None:  # fmt: skip
        """A step or a span of the job has ended. See `PhaseEnded`."""
        aside = threading.get_ident() not in (self._begun_by, self.stepping)
        if len(self._waiting) < _MAX_WITH_PHASES:
            self.put(PhaseEnded(name, step, depth, started_s, ended_s, aside and not made_plan))
        else:
            self.num_dropped += 1

    def _note_planning(self, started_s: float) -> None:
        """This thread has made a plan, since then."""
        # On a GPU autograd plans a backward in a thread of its own, and the step's thread waits.
        depth = self.depths.get(threading.get_ident()) or self.depths.get(self.stepping, 0)
        self.note_phase(
            "planning", self.step, depth, started_s, time.perf_counter(), made_plan=True
        )

    def put(self, message: FromRank) -> None:
        """Queues a message, or drops it if the queue is full."""
        if self.alive and len(self._waiting) < _MAX_WAITING:
            self._waiting.append(message)
        else:
            self.num_dropped += 1

    def close(self, code: int, text: str = "") -> None:
        """The rank ends: tells the hub, and waits until it has heard, at most half a second, and
        twice that where the connection was cut.
        """
        if self._ending:
            return
        bye, self._ending = Bye(time.perf_counter(), code, text), True
        if self.alive:
            self._waiting.append(bye)
            self._wake.set()
            self._thread.join(_BYE_DEADLINE_S)
        self.alive = False
        if self._broken:
            # A switch may have cut the connection, and the hub takes this rank for lost.
            again = threading.Thread(target=self._say_bye, args=(bye,), daemon=True)
            again.start()
            again.join(_BYE_DEADLINE_S)

    def _say_bye(self, bye: Bye) -> None:
        with suppress(OSError), connect_to_hub(self.address, _BYE_DEADLINE_S) as connection:
            connection.settimeout(_BYE_DEADLINE_S)
            connection.sendall(b"".join(frame(self._encoder.encode(x)) for x in (self.hello, bye)))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    def forked(self) -> None:
        """Lets go of the connection in a child of the rank's process, which has none of its
        threads.
        """
        self.alive = False
        if self._connection is not None:
            self._connection.close()

    # The agent's thread.

    def _main(self) -> None:
        try:
            self._run()
        except OSError as error:
            self._broken = True
            _log.info("rank %d: the telemetry hub is gone: %s", self.hello.rank, error)
        except Exception:  # noqa: BLE001  (telemetry never fails a run)
            _log.warning("rank %d: telemetry ends here", self.hello.rank, exc_info=True)
        finally:
            self.alive = False
            if self._nvml is not None:
                self._nvml.stop()
            self._waiting.clear()
            for log in self._logs:
                log.stop()

    def _run(self) -> None:
        period_s = 1.0 / self.hello.sample_hz
        host_period_s = max(period_s, _HOST_PERIOD_S)
        self._connection = connect_to_hub(self.address, _CONNECT_DEADLINE_S)
        with self._connection as self._socket:
            self._socket.setblocking(False)
            self._queue(self.hello)
            # The clock goes first, and is told at once: the first call may begin now.
            self._measure_clock()
            samplers = self._open_samplers()
            beat_at_s = sample_at_s = now_s = time.perf_counter()
            clock_at_s = now_s + _CLOCK_PERIOD_S
            while not self._ending:
                now_s = time.perf_counter()
                if now_s >= clock_at_s and not self._unsent:
                    self._measure_clock()
                    clock_at_s = now_s + _CLOCK_PERIOD_S
                self._receive()
                if now_s >= beat_at_s:
                    self._queue(self._heartbeat(now_s))
                    beat_at_s = now_s + _HEARTBEAT_S
                if now_s >= sample_at_s:
                    sample_at_s = max(sample_at_s + host_period_s, now_s)
                    for sampler in samplers:
                        sampler()
                if self._nvml is not None:
                    self._nvml.look_after()
                self._gather()
                self._send()
                self._wait_until(time.perf_counter() + until_beat_s(period_s))
            self._gather()
            self._socket.settimeout(_BYE_DEADLINE_S)
            self._socket.sendall(b"".join(self._unsent))
            # The hub may be answering. A connection that closes on an answer is broken, and what
            # the hub has not read by then is lost: the hub closes first.
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(1 << 16):
                pass

    def _wait_until(self, wake_at_s: float) -> None:
        """Waits; meanwhile sends, now and then, what the socket had no room for."""
        while (left_s := wake_at_s - time.perf_counter()) > 0 and not self._ending:
            self._wake.wait(min(left_s, _RESEND_S) if self._unsent else left_s)
            self._send()

    def _open_samplers(self) -> list[Callable[[], None]]:
        process = ProcessSampler(f"rank:{self.hello.rank}")
        # Counted from here: the first sample would otherwise say what starting cost.
        self._sampled_s = time.perf_counter(), time.thread_time()

        def of_rank() -> None:
            at_s, used_s = self._sampled_s
            self._sampled_s = time.perf_counter(), time.thread_time()
            percent = 100 * (self._sampled_s[1] - used_s) / max(1e-6, self._sampled_s[0] - at_s)
            self._queue(process.sample(percent + (self._nvml.percent if self._nvml else 0.0)))

        if self._gpus is None:
            return [of_rank]
        host = HostSampler(self.hello.host)
        self._queue(host.source())
        self._nvml = NvmlThread(self.put, self._gpus, self.hello.host, self.hello.sample_hz)

        def shared() -> None:
            self._queue(host.sample())

        return [of_rank, shared]

    def _measure_clock(self) -> None:
        """Sends a few pings in a row. Waits at most `_PING_DEADLINE_S` for each answer; stops at
        the first answer that does not come.
        """
        answer = select.poll()
        answer.register(self._socket, select.POLLIN)
        for _ in range(_PINGS):
            if not self._ping(answer):
                break
        # Also without an answer: the hub then goes by when it hears of the rank.
        self._queue(self._heartbeat(time.perf_counter()))
        self._send()

    def _ping(self, answer: select.poll) -> bool:
        """Asks the hub for its time; whether it has answered before the deadline."""
        sent_s = time.perf_counter()
        self._queue(Ping(sent_s))
        self._send()
        while not (self._pings and self._pings[-1][2] == sent_s):
            left_s = sent_s + _PING_DEADLINE_S - time.perf_counter()
            if left_s <= 0 or self._ending:
                return False
            answer.poll(1e3 * left_s)
            self._receive()
        return True

    def _heartbeat(self, now_s: float) -> Heartbeat:
        rtt_s, offset_s, _ = min(self._pings, default=(-1.0, 0.0, 0.0))
        group, doing = "", NOTHING
        for log in self._logs:
            activity = log.doing()
            if activity.call >= 0:
                group, doing = log.group.name, activity
        told = doing._asdict()  # the fields of a heartbeat that it has are named so there
        return Heartbeat(sent_s=now_s, offset_s=offset_s, rtt_s=rtt_s, group=group, **told)

    def _receive(self) -> None:
        try:
            while True:
                self._handle(self._socket.recv(1 << 16))
        except BlockingIOError:
            return

    def _handle(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if not data:
            raise ConnectionResetError("it closed the connection")
        for payload in self._frames.feed(data):
            message: ToRank = msgspec.msgpack.decode(payload, type=ToRank)
            if isinstance(message, Pong):
                offset_s = message.hub_s - (message.sent_s + now_s) / 2
                self._pings.append((now_s - message.sent_s, offset_s, message.sent_s))
            elif isinstance(message, LogLine):
                _log.log(message.severity.level, "%s", message.text)

    def _gather(self) -> None:
        """Makes frames of what has happened since the last time."""
        while self._waiting:
            message = self._waiting.popleft()
            if isinstance(message, Bye):
                self._drain_all(0.0 if message.code else _SETTLING_S)
                self._count()
            self._queue(message)
        self._drain()
        self._count()

    def _count(self) -> None:
        self._queue(
            self.totals.message(self.num_dropped + sum(log.num_dropped for log in self._logs))
        )

    def _drain(self) -> None:
        for log in list(self._logs):
            taken = 0
            while taken < _MAX_CALLS_A_TICK and (messages := log.take()):
                taken += 1
                for message in messages:
                    self._queue(message)
            # After its context is closed a device may still work on its last calls.
            if log.closed and log.is_empty:
                self._logs.remove(log)
                self.num_dropped += log.num_dropped

    def _drain_all(self, within_s: float) -> None:
        """Takes all calls that end within some seconds, and gives the others up."""
        deadline_s = time.perf_counter() + within_s
        self._drain()
        while any(not log.is_empty for log in self._logs):
            if time.perf_counter() >= deadline_s:
                for log in self._logs:
                    log.give_up()
                return
            time.sleep(_ASK_AGAIN_S)
            self._drain()

    def _queue(self, message: FromRank | Ping) -> None:
        spans = isinstance(message, (EndedCall, PhaseEnded))
        limit = _SPANS_UP_TO_BYTES if spans else _UP_TO_BYTES
        if self._unsent_bytes > limit and not isinstance(message, (PlanSummary, Group, Bye)):
            self.num_dropped += 1
            self._gap |= isinstance(message, (EndedCall, Agreed))
            return
        if self._gap and isinstance(message, (EndedCall, Agreed)):
            message, self._gap = msgspec.structs.replace(message, after_gap=True), False
        data = frame(self._encoder.encode(message))
        self._unsent.append(data)
        self._unsent_bytes += len(data)

    def _send(self) -> None:
        """Sends as much as the socket takes now."""
        if not self._unsent:
            return
        data = b"".join(self._unsent)
        self._unsent.clear()
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._unsent.append(data[sent:])
        self._unsent_bytes = len(data) - sent
