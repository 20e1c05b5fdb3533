"""The server's ranks: rank 0 listens and decides, in turns that all ranks take.

A turn is told by `Context.first`, in which the other ranks wait. Where no request comes rank 0
tells an empty turn each second, so no deadline of theirs ends the job.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import uvicorn
from torch import Tensor

from burst_rt.context import Context
from burst_rt.errors import BurstError, ConfigError, DeviceError
from burst_rt.launch.generate.models import folder_ends
from burst_rt.launch.serve.app import LOOPBACK, Desk, make_routes
from burst_rt.launch.serve.options import ServeOptions
from burst_rt.launch.serve.turns import Requests, Turn
from burst_rt.launch.stopping import SIGNALS, StopRequests
from burst_rt.launch.train.config import TrainConfig
from burst_rt.launch.train.pretrained import ModelFolder
from burst_rt.launch.train.shared import open_same_folder
from burst_rt.launch.world import StoppedBySignal

__all__ = ["serve"]

_IDLE_S = 1.0
# Seconds that answers have to leave, once the server ends.
_LEAVING_S = 2.0


def serve(world: Context, options: ServeOptions) -> None:
    """Serve until a signal ends it. Collective; blocks.

    Raises StoppedBySignal; ConfigError or InputError, the same on every rank, for what cannot run.
    """
    folder = open_same_folder(world, TrainConfig(model=str(options.model), seq_len=1), None)
    assert folder is not None
    model = world.together(folder.load)
    try:
        rows = _Rows(world, model.to(world.device, getattr(torch, options.dtype)), options)
    except DeviceError as error:
        raise ConfigError(error.message) from error
    requests = Requests(
        options.rows, capacity=options.capacity, chunk=options.chunk,
        most_waiting=options.queue, within_s=options.request_timeout,
    )  # fmt: skip
    ending = "a rank has failed"
    with StopRequests(offer=world.rank == 0) as asked, torch.inference_mode():
        server: Any = None
        if world.rank == 0:
            server = _Server(_desk(folder, model, requests, options), options)
        # Rank 0 says why where the port is taken.
        where = world.first(lambda: server.listen())
        try:
            if world.rank == 0:
                server.start()
                keys = "" if options.api_key_file else ", without a key"
                print(f"serving {options.name} at {where}{keys}", file=sys.stderr, flush=True)
            while True:
                turn = Turn(**world.first(lambda: vars(_next(requests, asked))))
                if turn.stop:
                    ending = "the server was stopped"
                    stop = next(number for number in SIGNALS if number.name == turn.stop)
                    raise StoppedBySignal(stop, "and open requests were ended")
                of_rows, of_chunk = rows.take(turn)
                if world.rank == 0:
                    requests.took(turn, of_rows, of_chunk)
        except BurstError as error:
            ending = f"a rank has failed: {error}"
            raise
        finally:
            if world.rank == 0:
                server.end(ending)


def _next(requests: Requests, asked: StopRequests) -> Turn:
    stop = asked.heard(asked.votes())
    return Turn(stop=stop.name) if stop else requests.next_turn(_IDLE_S)


class _Rows:
    """The model's caches on a rank: a row for each request, and one sequence for a new prompt."""

    def __init__(self, world: Context, model: Any, options: ServeOptions) -> None:
        import burst_rt.hf
        from burst_rt.hf.release import cache_name

        config = model.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False  # for a loss
        self._model, self._device = model, world.device
        self._written, self._read = (
            burst_rt.hf.Cache(model, world, capacity=options.capacity, batch=batch)
            for batch in (options.rows, 1)
        )
        self._given = {cache_name(model): self._read}

    def take(self, turn: Turn) -> tuple[Tensor | None, Tensor | None]:
        """Takes a turn: the scores of rows [rows, vocabulary], and of the chunk [vocabulary].

        Collective.
        """
        of_rows = of_chunk = None
        if any(turn.rows):
            of_rows = self._written.extend(turn.rows)
        if turn.begin:
            self._read.reset()
            row, tokens = turn.begin
            self._read.copy(0, self._written, row, tokens)
        if turn.chunk:
            chunk = torch.tensor([turn.chunk], device=self._device)
            of_chunk = self._model(input_ids=chunk, **self._given).logits[0, -1]
        if turn.place >= 0:
            self._written.copy(turn.place, self._read)
        return of_rows, of_chunk


def _desk(folder: ModelFolder, model: Any, requests: Requests, options: ServeOptions) -> Desk:
    tokenizer = folder.tokenizer

    def encode(text: str, begins: bool) -> list[int]:
        tokens: list[int] = tokenizer(text, verbose=False, add_special_tokens=begins)["input_ids"]
        return tokens

    def decode(tokens: list[int]) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def render(messages: list[dict[str, Any]]) -> str:
        if tokenizer.chat_template is None:
            raise ValueError("the model's folder has no chat template; use /v1/completions")
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    return Desk(
        model=options.name, requests=requests, encode=encode, decode=decode, render=render,
        ends=folder_ends(folder, model), num_words=model.config.get_text_config().vocab_size,
        most_bytes=options.body_mib << 20, keys=options.keys(),
        hosts=LOOPBACK if options.host in LOOPBACK else None,
    )  # fmt: skip


class _Server:
    """Rank 0's server, in a thread of its own."""

    def __init__(self, desk: Desk, options: ServeOptions) -> None:
        self._desk, self._options = desk, options
        self._socket: socket.socket | None = None
        # At a lower level uvicorn would write a line for each malformed request.
        self._server = _Uvicorn(
            uvicorn.Config(
                make_routes(desk), log_level="critical", access_log=False, lifespan="off",
                limit_concurrency=options.connections, timeout_graceful_shutdown=int(_LEAVING_S),
                server_header=False, proxy_headers=False,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="burst_rt server", daemon=True)

    def listen(self) -> str:
        """Binds the port: the address. Raises ConfigError."""
        host, port = self._options.host, self._options.port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            bound = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port}: {error}; choose another.") from error
        self._socket = bound
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{bound.getsockname()[1]}/v1"

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()

    def end(self, why: str) -> None:
        """Ends open requests, and the server; blocks until answers have left, at most 3 s."""
        self._desk.ready = False
        self._desk.requests.fail(why)
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_LEAVING_S + 1)

    def _run(self) -> None:
        assert self._socket is not None
        asyncio.run(self._server.serve([self._socket]))


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the main thread."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
