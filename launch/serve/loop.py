"""What the ranks of a server do: turns that rank 0 decides and all take.

A turn is told by `Context.first`, in which the other ranks wait. Where no request comes rank 0
tells an empty turn each second, so no deadline of theirs ends the job.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from burst_rt.context import Context
from burst_rt.errors import BurstError, ConfigError, DeviceError
from burst_rt.launch.generate.models import cast_model, require_same_frequencies
from burst_rt.launch.serve.turns import Requests, Turn
from burst_rt.launch.stopping import SIGNALS, StopRequests
from burst_rt.launch.world import StoppedBySignal

__all__ = ["Front", "RowCaches", "take_turns"]

_IDLE_S = 1.0


class Front(Protocol):
    """Who puts requests, on rank 0: in a thread of its own, from `start` on."""

    def start(self) -> None: ...

    def end(self, why: str) -> None:
        """Ends open requests, and the thread; blocks for a few seconds at most."""


class RowCaches:
    """The model's caches on a rank: a row for each request, and one sequence for a new prompt.

    Collective. Raises ConfigError or InputError, the same on every rank, for a model that cannot
    be served or has no room.
    """

    def __init__(
        self, world: Context, model: Any, dtype: str, *, num_rows: int, capacity: int
    ) -> None:
        import burst_rt.hf
        from burst_rt.hf.release import cache_name

        config = model.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False  # for a loss
        require_same_frequencies(model, capacity, f"--capacity {capacity:,}")
        try:
            self._model = cast_model(model, world.device, getattr(torch, dtype))
            self._written, self._read = (
                burst_rt.hf.Cache(model, world, capacity=capacity, batch=batch)
                for batch in (num_rows, 1)
            )
        except DeviceError as error:
            raise ConfigError(error.message) from error
        self._device, self.keep_states = world.device, self._read.keeps_states
        self._given = {cache_name(model): self._read}

    def take(self, turn: Turn) -> tuple[Tensor | None, Tensor | None]:
        """Takes a turn: the scores of rows [rows, vocabulary], and of the chunk [vocabulary].

        Collective.
        """
        of_rows = of_chunk = None
        if turn.begin:
            self._read.reset()
            row, tokens = turn.begin
            if tokens:
                self._read.copy(0, self._written, row, None if self.keep_states else tokens)
        if any(turn.rows):
            of_rows = self._written.extend(turn.rows)
        if turn.chunk:
            chunk = torch.tensor([turn.chunk], device=self._device)
            of_chunk = self._model(input_ids=chunk, **self._given).logits[0, -1]
        if turn.place >= 0:
            self._written.copy(turn.place, self._read)
        return of_rows, of_chunk


def take_turns(world: Context, rows: RowCaches, requests: Requests, front: Front | None) -> None:
    """Takes turns until all is over. front: on rank 0. Collective; blocks.

    Raises StoppedBySignal where a signal ends it.
    """
    ending = "a rank has failed"
    with StopRequests(offer=world.rank == 0) as asked, torch.inference_mode():
        try:
            if front is not None:
                front.start()
            while True:
                turn = Turn(**world.first(lambda: vars(_next(requests, asked))))
                if turn.stop:
                    ending = "the server was stopped"
                    stop = next(number for number in SIGNALS if number.name == turn.stop)
                    raise StoppedBySignal(stop, "and open requests were ended")
                if turn.over:
                    return
                of_rows, of_chunk = rows.take(turn)
                if world.rank == 0:
                    requests.took(turn, of_rows, of_chunk)
        except BurstError as error:
            ending = f"a rank has failed: {error}"
            raise
        finally:
            if front is not None:
                front.end(ending)


def _next(requests: Requests, asked: StopRequests) -> Turn:
    stop = asked.heard(asked.votes())
    return Turn(stop=stop.name) if stop else requests.next_turn(_IDLE_S)
