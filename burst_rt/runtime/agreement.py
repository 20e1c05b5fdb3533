"""How the ranks agree on a call before it sends anything, and how they find out that they do not.

One small non-blocking allreduce opens every call. If a rank brings an error or a different
description, a second round tells all ranks, and every rank raises the same class. The call has sent
nothing by then, and the runtime stays usable.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from burst_rt import errors
from burst_rt.errors import BurstError, ContractMismatch
from burst_rt.transport import ControlGroup

if TYPE_CHECKING:
    from burst_rt.drivers import Watch

__all__ = ["AgreedBefore", "AgreedWhen", "Agreement", "Contract"]

_FORWARD = "the call whose backward this is"


@dataclass(frozen=True)
class Contract:
    """A call in words, which the ranks compare before they make it.

    words: by what they are about; "call" is the call's name.
    """

    words: Mapping[str, str]

    @cached_property
    def call(self) -> str:
        """The call's name, for errors and the flight record."""
        return self.words["call"]

    @cached_property
    def digest(self) -> int:
        """A digest of the words in 62 bits, the same on every rank and in every process."""
        text = repr(sorted(self.words.items())).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


class AgreedWhen(Enum):
    """When the ranks agree on a call."""

    OPENING = "as the call opens"
    BEFORE = "before the call, on this call alone"
    # A rank may come to the call late: nothing need move for `timeout_s`. Where a rank waits here
    # for one that waits in a later call, it raises ContractMismatch.
    WITH_OTHERS = "before the call, on several calls at once"


class Agreement:
    """One rank's side of the ranks' agreement on a call; the `Opening` of a driver.

    number: of the call. error: why this rank cannot make the call, or None. forward: in a backward
    the number of the call that is differentiated, else 0. If `failure` returns an error, every rank
    calls `settle`.
    """

    def __init__(
        self,
        control: ControlGroup,
        number: int,
        contract: Contract,
        error: BurstError | None = None,
        forward: int = 0,
    ) -> None:
        self._control = control
        self.number = number
        self._contract = contract
        self._error = error
        self._forward = forward
        self._verdict: list[int] | None = None
        self.deepest = 0  # once settled: the depth of the rank that is deepest

    def start(self) -> None:
        """Begins the allreduce. Never blocks."""
        # Backwards of equal calls have the same words. The numbers of their forwards tell them
        # apart: added to the digest, because the words are hashed once for all calls of a kind.
        code, digest = 1 if self._error else 0, self._contract.digest + self._forward
        self._pending = self._control.allreduce_max(
            [code, self.number, -self.number, digest, -digest]
        )

    def test(self) -> bool:
        """True once all ranks have entered the call. Never blocks."""
        if self._verdict is None and self._pending.test():
            self._verdict = self._pending.result()
        return self._verdict is not None

    def failure(self) -> BurstError | None:
        """A ContractMismatch if the ranks do not agree, or None. To be called once `test` is True.

        `settle` finds out what the ranks do not agree on.
        """
        assert self._verdict is not None
        code, high_number, low_number, high_digest, low_digest = self._verdict
        if code == 0 and high_number == -low_number and high_digest == -low_digest:
            return None
        return ContractMismatch("the ranks do not agree on this call", rank=self._control.rank)

    @property
    def cause(self) -> BaseException | None:
        """The cause of the error that this rank brought."""
        return None if self._error is None else self._error.__cause__

    def settle(
        self, watch: Watch, timeout_s: float, depth: int = 0, heard: BurstError | None = None
    ) -> BurstError:
        """The error that every rank is to raise. Collective; blocks at most `timeout_s`.

        depth: see `Runtime.depth`. heard: the error of an earlier call that all ranks raised; a
        rank that brings this very error is not where the error came from.

        To be called after `failure`, which is the same on every rank. Raises Stalled and PeerLost.
        """
        error = self._error
        words = dict(self._contract.words)
        if self._forward:
            words[_FORWARD] = f"call {self._forward}"
        source = None if error is None or error is not heard else error.peer
        mine = {
            "error": None if error is None else [type(error).__name__, error.message, source],
            "number": self.number,
            "call": words,
            "depth": depth,
        }
        pending = self._control.allgather(json.dumps(mine).encode())
        watch.wait_for(pending, timeout_s, "the comparison of their calls")
        said = [json.loads(text) for text in pending.result()]
        self.deepest = max(word["depth"] for word in said)
        return _common_error(said, self._control.rank)


class AgreedBefore:
    """The `Opening` of a call that the ranks have agreed on before; number: of the call."""

    def __init__(self, number: int) -> None:
        self.number = number

    def start(self) -> None:
        """Nothing is to be done."""

    def test(self) -> bool:
        """Always true."""
        return True

    def failure(self) -> BurstError | None:
        """None."""
        return None


def _common_error(said: list[dict[str, object]], rank: int) -> BurstError:
    """The error that all ranks raise: the first one brought, else what differs and where."""
    for peer, word in enumerate(said):
        brought = word["error"]
        if isinstance(brought, list):
            kind, message, source = brought
            if source is None:
                source, message = peer, f"rank {peer}: {message}"
            error: BurstError = getattr(errors, kind)(message, rank=rank, peer=source)
            return error
    calls = [dict(call) if isinstance(call := word["call"], dict) else {} for word in said]
    for call, word in zip(calls, said, strict=True):
        call["number of the call"] = str(word["number"])
    odd: set[int] = set()
    differences, advice = [], "pass the same arguments"
    for field in sorted({name for call in calls for name in call}):
        values = [call.get(field, "nothing") for call in calls]
        if len(set(values)) > 1:
            if field == _FORWARD:
                advice = "run the backwards in the same order"
            words, ranks = _difference(field, values)
            differences.append(words)
            odd.update(ranks)
    message = (
        f"the ranks entered one call with different arguments ({'; '.join(differences)}). "
        f"Every rank must {advice}"
    )
    return ContractMismatch(message, rank=rank, peer=min(odd, default=None))


def _difference(field: str, values: list[str]) -> tuple[str, list[int]]:
    """How a field differs, in words, and the ranks that differ from the most common value."""
    common, count = Counter(values).most_common(1)[0]
    odd = [rank for rank, value in enumerate(values) if value != common]
    # Without a majority, the message tells the value of every rank.
    has_majority = 2 * count > len(values)
    told = ", ".join(
        f"{values[rank]} on rank {rank}" for rank in (odd if has_majority else range(len(values)))
    )
    return f"{field}: {common} on most ranks, {told}" if has_majority else f"{field}: {told}", odd
