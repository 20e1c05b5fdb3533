"""`burst-rt serve`: rank 0 listens, and all ranks compute."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import uvicorn

from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.job.telling import tell
from burst_rt.launch.generate.models import longest_text
from burst_rt.launch.serve.app import LOOPBACK, Admission, make_routes
from burst_rt.launch.serve.desk import Desk
from burst_rt.launch.serve.loop import RowCaches, take_turns
from burst_rt.launch.serve.options import ServeOptions
from burst_rt.launch.serve.turns import Requests
from burst_rt.launch.serve.vocabulary import Vocabulary
from burst_rt.launch.train.config import TrainConfig
from burst_rt.launch.train.shared import open_same_folder

__all__ = ["serve"]

# Seconds that answers have to leave, once the server ends.
_LEAVING_S = 2.0


def serve(world: Context, options: ServeOptions) -> None:
    """Serve until a signal ends it. Collective; blocks.

    Raises StoppedBySignal; ConfigError or InputError, the same on every rank, for what cannot run.
    """
    folder = open_same_folder(world, TrainConfig(model=str(options.model), seq_len=1), None)
    assert folder is not None
    model = world.together(folder.load)
    longest = longest_text(folder)
    if longest is not None and options.capacity > longest:
        if world.rank == 0:
            said = f"--capacity {options.capacity:,}: the model was made for {longest:,} tokens"
            tell(f"burst-rt: {said}, so requests may have as many")
        options = replace(options, capacity=longest)
    rows = RowCaches(world, model, options.dtype, num_rows=options.rows, capacity=options.capacity)
    requests = Requests(
        options.rows, capacity=options.capacity, chunk=options.chunk,
        most_waiting=options.queue, within_s=options.request_timeout,
        keep_states=rows.keep_states,
    )  # fmt: skip
    server: _Server | None = None
    if world.rank == 0:
        vocabulary = Vocabulary(folder, model)
        desk = Desk(model=options.name, vocabulary=vocabulary, requests=requests)
        server = _Server(desk, options)
    # Rank 0 says why where the port is taken.
    world.first(lambda: server.listen() if server else None)
    take_turns(world, rows, requests, server)


class _Server:
    """Rank 0's server, in a thread of its own."""

    def __init__(self, desk: Desk, options: ServeOptions) -> None:
        self._desk, self._options = desk, options
        self._socket: socket.socket | None = None
        self._where = ""
        admission = Admission(
            most_bytes=options.body_mib << 20, keys=options.keys(),
            hosts=LOOPBACK if options.host in LOOPBACK else None,
        )  # fmt: skip
        # At a lower level uvicorn would write a line for each malformed request.
        self._server = _Uvicorn(
            uvicorn.Config(
                make_routes(desk, admission),
                log_level="critical", access_log=False, lifespan="off",
                limit_concurrency=options.connections, timeout_graceful_shutdown=int(_LEAVING_S),
                server_header=False, proxy_headers=False,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="burst_rt server", daemon=True)

    def listen(self) -> None:
        """Binds the port. Raises ConfigError."""
        host, port = self._options.host, self._options.port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            bound = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port}: {error}; choose another.") from error
        self._socket = bound
        host = f"[{host}]" if ":" in host else host
        self._where = f"http://{host}:{bound.getsockname()[1]}/v1"

    def start(self) -> None:
        """Answers from now on, and says where."""
        self._thread.start()
        keys = "" if self._options.api_key_file else ", without a key"
        said = f"serving {self._options.name} at {self._where}{keys}"
        tell(said)

    def end(self, why: str) -> None:
        """Ends open requests, and the server; blocks until answers have left, at most 3 s."""
        self._desk.ready = False
        self._desk.requests.close()
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
