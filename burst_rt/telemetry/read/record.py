"""Records: all messages of a job in a file, in the order in which the hub had them.

A record can be replayed, or made into a trace.

The file begins with a line of magic; then come frames: a `RecordHeader`, and `Recorded` entries. A
frame is the payload's length and a CRC-32, of four bytes each (little endian), and the payload. The
CRC-32 goes on from that of the frame before, over length and payload, so that no frame can be
missing unseen. An empty frame is the end mark.

The file grows as the job runs, so a record whose writer was killed lacks only its last moment and
the end mark. A failure to write (a full disk) ends the record, never the job. A record that is
damaged is read up to the damage.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from burst_rt.errors import InputError, ProtocolError
from burst_rt.telemetry.messages import VERSION, Heartbeat, Item, Recorded, RecordHeader
from burst_rt.telemetry.wire import MAX_FRAME_BYTES

__all__ = ["Clocks", "Record", "Recorder"]

_MAGIC = b"burst_rt record 2\n"
# Records from before frames had a CRC-32, and files an end mark.
_PLAIN_MAGIC = b"burst_rt record\n"
# Errors that damaged frames and messages raise.
_DAMAGE = (ProtocolError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_log = logging.getLogger("burst_rt.telemetry.read.record")
# A record leaves so much of its disk free for others, and looks now and then.
_LEFT_BYTES, _LOOKED_EVERY_BYTES = 1 << 30, 16 << 20


class _Packed(msgspec.Struct, array_like=True):
    """A `Recorded` whose message is still packed, as it came."""

    at_s: float
    rank: int
    message: msgspec.Raw


class _NoEndMark(ProtocolError):
    """The file ends behind a whole frame that is not the end mark."""


class _Seal:
    """The heads of frames, one after the other, as they are written or as they must be."""

    def __init__(self) -> None:
        self._sum = 0

    def head(self, payload: bytes) -> bytes:
        """The length and the CRC-32 of the next frame."""
        length = len(payload).to_bytes(4, "little")
        self._sum = zlib.crc32(payload, zlib.crc32(length, self._sum))
        return length + self._sum.to_bytes(4, "little")


class Recorder:
    """Writes a record. Raises OSError where the file cannot be made. A later failure is logged, and
    ends the record.

    A file that is there already is renamed first, to `kept`: FILE.1, the next one FILE.2.
    """

    def __init__(self, path: Path, began_at_s: float, package: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.kept = _keep(path)
        # The path should be a regular file: a pipe or a device could make the hub wait.
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._encoder = msgspec.msgpack.Encoder()
        self._seal = _Seal()
        self._held: list[bytes] = [_MAGIC]
        self._since_looked = 0
        self._hold(self._encoder.encode(RecordHeader(VERSION, package, began_at_s)))
        self.flush()

    def add(self, at_s: float, rank: int, payload: bytes) -> None:
        """Adds a message, packed as it came."""
        if self._file is not None:
            self._hold(self._encoder.encode(_Packed(at_s, rank, msgspec.Raw(payload))))

    def add_message(self, at_s: float, rank: int, message: Item) -> None:
        """Adds a message of the hub's own."""
        self.add(at_s, rank, self._encoder.encode(message))

    def _hold(self, payload: bytes) -> None:
        self._held += (self._seal.head(payload), payload)

    def flush(self) -> None:
        """Writes what has been added since the last time."""
        if self._file is None or not self._held:
            return
        data, self._held = b"".join(self._held), []
        self._since_looked += len(data)
        try:
            if self._since_looked > _LOOKED_EVERY_BYTES:
                self._since_looked = 0
                if shutil.disk_usage(self._path.parent).free < _LEFT_BYTES:
                    raise OSError(errno.ENOSPC, "less than 1 GiB is free there")
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            _log.warning("the record %s ends here: %s", self._path, error)
            os.close(self._file)
            self._file = None

    def close(self) -> None:
        """Writes the rest and the end mark, and ends the record."""
        if self._file is not None:
            self._hold(b"")
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _keep(path: Path) -> Path | None:
    """Renames an existing file: its new name has the next number. None if it is missing or empty. A
    job that is started again must not lose what the attempt before it did.
    """
    if not path.is_file() or not path.stat().st_size:
        return None
    stem = f"{path.name}."
    ends = [p.name[len(stem) :] for p in path.parent.iterdir() if p.name.startswith(stem)]
    last = max((int(end) for end in ends if end.isascii() and end.isdigit()), default=0)
    return path.rename(path.with_name(f"{stem}{last + 1}"))


class Record:
    """Reads a record: `header`, and, by iterating as often as one likes, its entries in order.
    Raises InputError if the file is not a record, or is damaged before its first entry. Damage
    further on ends the entries, and is logged once, with the first byte that is left out. So is a
    file without its end mark.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told = False
        self.header = self._read_header()

    def __iter__(self) -> Iterator[Recorded]:
        decoder = msgspec.msgpack.Decoder(Recorded)
        begins = num_read = 0
        try:
            for number, (ends, payload) in enumerate(self._payloads()):
                if number > 0:  # the first is the header
                    try:
                        yield decoder.decode(payload)
                        num_read += 1
                    except msgspec.ValidationError:
                        pass  # a message of a newer version: the others are still worth reading
                begins = ends
        except _NoEndMark:
            self._tell(
                f"{self.path} has no end mark after byte {begins}: it was cut there, or its writer "
                "was killed, or still writes; all of it is shown"
            )
        except _DAMAGE as error:
            damage = f"{self.path} is damaged from byte {begins} on"
            if num_read == 0:
                raise InputError(
                    f"{damage}, and nothing before that can be shown; use a copy that is whole"
                ) from error
            self._tell(f"{damage}; what comes after that is left out")

    def _tell(self, words: str) -> None:
        if not self._told:
            self._told = True
            _log.warning("%s", words)

    def _read_header(self) -> RecordHeader:
        try:
            _, payload = next(self._payloads(), (0, b""))
            header = msgspec.msgpack.decode(payload, type=RecordHeader)
        except (OSError, *_DAMAGE) as error:
            raise InputError(
                f"{self.path} is not a record of a run: {error}. Make one with `burst-rt run "
                "--record FILE`"
            ) from error
        if header.version > VERSION:
            raise InputError(
                f"{self.path} was recorded by a newer burst_rt ({header.package}): expected a "
                f"record of version {VERSION} or older, got {header.version}; use a newer burst_rt"
            )
        return header

    def _payloads(self) -> Iterator[tuple[int, bytes]]:
        """Each frame's payload, with the byte at which the frame ends. Raises ProtocolError."""
        if self.path.exists() and not self.path.is_file():  # a pipe would be waited for
            raise ProtocolError("it is no file")
        with self.path.open("rb") as file:
            magic = file.readline(len(_MAGIC))
            if magic not in (_MAGIC, _PLAIN_MAGIC):
                raise ProtocolError("the file does not begin like a record")
            seal = _Seal() if magic == _MAGIC else None
            while head := file.read(4 if seal is None else 8):
                length = int.from_bytes(head[:4], "little")
                payload = file.read(length) if length <= MAX_FRAME_BYTES else b""
                if len(payload) < length or (seal is not None and head != seal.head(payload)):
                    raise ProtocolError("it is damaged")
                if seal is not None and not payload:
                    if file.read(1):
                        raise ProtocolError("it goes on after its end mark")
                    return
                yield file.tell(), payload
            if seal is not None:
                raise _NoEndMark("it has no end mark")


class Clocks:
    """How far the hub's clock is ahead of each rank's, as far as a record has been read."""

    def __init__(self) -> None:
        self._offsets: dict[int, float] = {}

    def hear(self, entry: Recorded) -> None:
        """Reads one entry."""
        beat = entry.message
        if isinstance(beat, Heartbeat):
            measured = beat.rtt_s >= 0
            self._offsets[entry.rank] = beat.offset_s if measured else entry.at_s - beat.sent_s

    def offset_s(self, rank: int) -> float:
        """The hub's clock minus the rank's; 0 where the rank has not told."""
        return self._offsets.get(rank, 0.0)
