"""Text: documents, what is held out, tokens (bytes, or a tokenizer's), sequences.

All of it is a pure function of files and numbers.

A token is a byte and byte 0 separates documents, or a tokenizer says what a token is (`Encoding`).
Every rank holds the whole text in memory and picks its sequences by arithmetic, so no rank ever
tells another what to read.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from burst_rt.errors import ConfigError
from burst_rt.launch.train.claim import LOCK_NAME
from burst_rt.launch.train.config import require_text

__all__ = [
    "BYTES", "Corpus", "Encoding", "Stream", "heldout_starts", "load_corpus", "sequences_at",
    "training_starts",
]  # fmt: skip

SEPARATOR = b"\0"
HELDOUT_PERCENT = 5
# Minimum number of documents to hold out whole ones: with fewer, that could take most of the text
# or none of it.
_FEW_DOCUMENTS = 20
# Chance decides which documents are held out, unless their share of the bytes is outside these.
_LEAST_HELDOUT, _MOST_HELDOUT = 0.02, 0.2
# Folders of the standard library that are left out: tests, which not every machine has, and tables
# of code points, which are not text.
_NOT_SOURCES = frozenset(
    {"encodings", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)

Stream = NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The conversion of documents into tokens."""

    # The word for a token.
    unit: str
    # The token between two documents.
    separator: int
    # The tokens of each of some texts in UTF-8.
    encode: Callable[[Sequence[bytes]], list[Stream]]

    def stream(self, texts: Sequence[bytes]) -> Stream:
        """All texts as one stream, with a separator between two of them."""
        pieces: list[Stream] = []
        for tokens in self.encode(texts):
            pieces += [tokens, np.array([self.separator], dtype=tokens.dtype)]
        return np.concatenate(pieces[:-1])


BYTES = Encoding(
    unit="byte",
    separator=SEPARATOR[0],
    encode=lambda texts: [np.frombuffer(text, dtype=np.uint8) for text in texts],
)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text split into a training and a held-out stream of tokens."""

    name: str
    num_documents: int
    left_out: list[str]  # files that are not UTF-8 text
    train: Stream
    heldout: Stream
    # Bytes of the text of both streams, with a byte between documents.
    train_bytes: int
    heldout_bytes: int
    # The word for a token.
    unit: str
    # Tells two different corpora apart.
    fingerprint: str

    @property
    def size_bytes(self) -> int:
        return self.train_bytes + self.heldout_bytes

    @property
    def heldout_bytes_per_token(self) -> float:
        return self.heldout_bytes / len(self.heldout)

    def check_length(self, seq_len: int) -> None:
        """Raise ConfigError when a sequence of `seq_len` tokens and the token after it do not fit
        into both streams.
        """
        for kind, stream in (("training", self.train), ("held-out", self.heldout)):
            if len(stream) <= seq_len:
                raise ConfigError(
                    f"--seq-len: a sequence needs {seq_len + 1} {self.unit}s, but the {kind} text "
                    f"has {len(stream)}; choose a smaller --seq-len or add text."
                )


def load_corpus(path: Path | None, encoding: Encoding = BYTES) -> Corpus:
    """Read a text file, a folder of them, or (None) the Python standard library's own source files.

    In a folder every regular file counts, in sorted order, except hidden ones, folders of runs, and
    those that are not UTF-8 text (`Corpus.left_out`). From 20 documents on, documents whose
    path hashes below 5 % are held out. With fewer documents, or if the held-out ones are less than
    2 % or more than 20 % of the bytes, the last 5 % of each document are held out, from the
    beginning of a character on. Raises ConfigError when there is nothing to read, OSError as the
    file system says it.
    """
    require_text(path)
    left_out: list[str] = []
    if path is None:
        name, root = "the Python standard library", Path(sysconfig.get_path("stdlib"))
        documents = list(_read(root, left_out, suffix=".py", skip=_NOT_SOURCES))
    else:
        name, documents = str(path), list(_read(path, left_out))
    train, heldout = _split(documents)
    if not any(train) or not any(heldout):
        raise ConfigError(
            f"--data: found too little UTF-8 text in {name} ({len(documents)} documents) to train "
            "and to hold some out; add text."
        )
    streams = [encoding.stream(texts) for texts in (train, heldout)]
    fingerprint = hashlib.sha256(
        b"".join(hashlib.sha256(stream.tobytes()).digest() for stream in streams)
    ).hexdigest()
    return Corpus(
        name=name,
        num_documents=len(documents),
        left_out=left_out,
        train=streams[0],
        heldout=streams[1],
        train_bytes=len(SEPARATOR.join(train)),
        heldout_bytes=len(SEPARATOR.join(heldout)),
        unit=encoding.unit,
        fingerprint=fingerprint,
    )


def _split(documents: Sequence[tuple[str, bytes]]) -> tuple[list[bytes], list[bytes]]:
    """The training and the held-out text, as `load_corpus` says."""
    train: list[bytes] = []
    heldout: list[bytes] = []
    for relative, text in documents:
        (heldout if _is_heldout(relative) else train).append(text)
    share = sum(map(len, heldout)) / max(1, sum(len(text) for _, text in documents))
    if len(documents) >= _FEW_DOCUMENTS and _LEAST_HELDOUT <= share <= _MOST_HELDOUT:
        return train, heldout
    cuts = [(text, _cut(text)) for _, text in documents]
    # A short document has no held-out end, nor a separator behind it.
    heldout = [text[cut:] for text, cut in cuts if text[cut:]]
    return [text[:cut] for text, cut in cuts if cut], heldout


def training_starts(
    stream: Stream, seq_len: int, *, seed: int, step: int, indices: Sequence[int]
) -> list[int]:
    """The starts of the sequences numbered `indices` of a step's global batch: the same whichever
    rank asks, whatever the world size.
    """
    return [_number(f"{seed}:{step}:{index}") % (len(stream) - seq_len) for index in indices]


def heldout_starts(stream: Stream, seq_len: int, limit: int) -> list[int]:
    """Starts of at most `limit` (0: all) sequences of the held-out text that do not overlap, spread
    evenly over it.
    """
    num_windows = (len(stream) - 1) // seq_len
    chosen = min(limit, num_windows) if limit else num_windows
    return [(index * num_windows // chosen) * seq_len for index in range(chosen)]


def sequences_at(stream: Stream, starts: Sequence[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, int64 [len(starts), seq_len] each, on the CPU; a label is the token
    after its token.
    """
    rows = [stream[start : start + seq_len + 1] for start in starts]
    # The shape is given for the sake of no rows at all.
    whole = torch.from_numpy(np.array(rows, dtype=np.int64).reshape(len(starts), seq_len + 1))
    return whole[:, :-1], whole[:, 1:]


def _read(
    root: Path, left_out: list[str], *, suffix: str = "", skip: frozenset[str] = frozenset()
) -> Iterator[tuple[str, bytes]]:
    """Relative path and content of each text below `root`, or of `root` itself, sorted by path.

    left_out: gets the paths of files that are no text.
    """
    paths = (
        [root]
        if root.is_file()
        else sorted(_walk(root, skip), key=lambda path: path.relative_to(root).as_posix())
    )
    for path in paths:
        if not path.name.endswith(suffix):
            continue
        text = path.read_bytes()
        if text and _is_text(text):
            yield (path.relative_to(root).as_posix() if path != root else path.name), text
        elif text:
            left_out.append(str(path))


def _walk(root: Path, skip: frozenset[str]) -> Iterator[Path]:
    """Files below a folder, and below folders that links lead to. Raises OSError where one cannot
    be read. Without folders of runs, whose metrics are no text to learn from.
    """

    def fail(error: OSError) -> NoReturn:
        raise error

    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(root, onerror=fail, followlinks=True):
        about = os.stat(folder)
        is_run = LOCK_NAME in files and "checkpoints" in folders
        if is_run or (about.st_dev, about.st_ino) in seen:  # a link may lead round in a circle
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        # In one order on all hosts: of two ways to a folder, the first counts.
        folders[:] = sorted(
            name for name in folders if name not in skip and not name.startswith(".")
        )
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _cut(text: bytes) -> int:
    """The place at which the held-out end of a document begins."""
    place = len(text) - len(text) * HELDOUT_PERCENT // 100
    while place and place < len(text) and text[place] & 0xC0 == 0x80:
        place -= 1
    return place


def _is_text(content: bytes) -> bool:
    if SEPARATOR in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_heldout(relative: str) -> bool:
    return _number(relative) % 100 < HELDOUT_PERCENT


def _number(key: str) -> int:
    """A hash that is the same on every machine and every version of every library."""
    # Names of files need not be UTF-8.
    content = key.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
