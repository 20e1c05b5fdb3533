"""How messages travel: frames on a stream socket, addresses, settings.

A frame is a length of four bytes (little endian), and then that many bytes; the length is bounded.

An address is "unix:PATH" (one host) or "tcp:HOST:PORT". A peer that connects says the job's secret
first. `read_settings` reads what the environment asks for.

Four parties cut frames, and only one of them has an event loop: the hub (asyncio), the agent (a
thread with a socket that never blocks), the viewer (calls that block), and the reader of a record.
So one small decoder without I/O serves all of them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from burst_rt.errors import InputError, ProtocolError
from burst_rt.job.launched import (
    DASHBOARD_VARIABLE,
    METRICS_VARIABLE,
    RECORD_VARIABLE,
    SECRET_VARIABLE,
    TELEMETRY_VARIABLE,
)

__all__ = [
    "MAX_FRAME_BYTES",
    "Frames",
    "Settings",
    "connect_to_hub",
    "frame",
    "read_settings",
    "readable",
    "until_beat_s",
]

# Words of the variables that ask for telemetry (`job/launched.py`).
_OFF, _ON = ("off", "no", "false"), ("on", "yes", "true")

_LENGTH = 4
# Maximum size of a message. The largest one is a plan; a plan of thousands of tasks takes half a
# megabyte.
MAX_FRAME_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The wishes of the environment; "" means nothing."""

    asked: bool  # telemetry is wanted
    address: str = ""  # address of a hub that runs already
    secret: str = ""  # secret of that hub
    record: str = ""  # a file
    dashboard: str = ""
    metrics_port: str = ""


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads what the environment asks for."""
    word, record = environment.get(TELEMETRY_VARIABLE, ""), environment.get(RECORD_VARIABLE, "")
    dashboard, port = environment.get(DASHBOARD_VARIABLE, ""), environment.get(METRICS_VARIABLE, "")
    if dashboard.lower() in (*_OFF, *_ON):
        dashboard = "1" if dashboard.lower() in _ON else ""
    if word.lower() in ("0", *_OFF) or not (word or record or dashboard or port):
        return Settings(asked=False)
    address = word if word.startswith(("unix:", "tcp:")) else ""
    return Settings(
        asked=True,
        address=address,
        secret=environment.get(SECRET_VARIABLE, ""),
        record=record,
        dashboard=dashboard,
        metrics_port=port,
    )


def readable(text: str) -> str:
    """The text as it can be sent: question marks replace characters that UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def frame(payload: bytes) -> bytes:
    """The payload with its length before it."""
    return len(payload).to_bytes(_LENGTH, "little") + payload


class Frames:
    """Cuts a stream of bytes into payloads of at most `max_bytes` each."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._held = bytearray()
        self.max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that `data` completes. Raises ProtocolError for a frame that is too large to
        be a peer's.
        """
        self._held += data
        while len(self._held) >= _LENGTH:
            size = int.from_bytes(self._held[:_LENGTH], "little")
            if size > self.max_bytes:
                raise ProtocolError(
                    f"telemetry: expected a frame of at most {self.max_bytes:,} bytes, got "
                    f"{size:,} bytes: the peer is not burst_rt"
                )
            if len(self._held) < _LENGTH + size:
                return
            payload = bytes(self._held[_LENGTH : _LENGTH + size])
            del self._held[: _LENGTH + size]
            yield payload


def connect_to_hub(address: str, timeout_s: float) -> socket.socket:
    """A connected socket. Blocks at most `timeout_s`. Raises OSError if nobody answers, and
    InputError for a text that is not an address.
    """
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(timeout_s)
        try:
            peer.connect(rest)
        except OSError:
            peer.close()
            raise
        return peer
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdigit():
        raise InputError(
            f"telemetry: expected an address unix:PATH or tcp:HOST:PORT, got {address!r}"
        )
    peer = socket.create_connection((host, int(port)), timeout_s)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def until_beat_s(period_s: float) -> float:
    """Seconds until the host's clock next reaches a multiple of the period. All who wait for that
    moment wake at once.
    """
    left_s = period_s - time.time() % period_s
    # A thread that was woken a moment too early has had this beat already.
    return left_s if left_s > period_s / 8 else left_s + period_s
