"""Rank `args[2]` faults (`args[0]`: how) in a phase (`args[1]`) of a short job; see
`tests/faults.py`.

Notes the time of the fault in ./left_at; all that comes out well prints "done". `args[3]` and
`args[4]` are timeout_s and stall_s.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

how, phase, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])
timeout_s, stall_s = float(sys.argv[4]), float(sys.argv[5])
under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ


def told(*names: str) -> int:
    """What the launcher says in the first of these variables that it has set."""
    return next((int(os.environ[name]) for name in names if name in os.environ), 1)


own_rank = told("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
# How long the others take to do what the fault is to be before, or after.
_AWHILE_S = 0.7
# Longer than the launcher waits for a job to end in which a rank has failed.
_FORKED_S = 4.0
# Long after the launcher of the job was killed.
_HELD_S = 100.0
_SLOW_S = 1.5
# Longer than stall_s of a job in which nothing is wrong (`tests/faults.py`).
_BEYOND_S = 4.0
_TIMES_SLOWER = 100


def _signalled(number: int) -> Callable[[], None]:
    def act() -> None:
        os.kill(os.getpid(), number)
        time.sleep(_HELD_S)

    return act


def _stop_for_a_while() -> None:
    """Stopped, and sent on by a child after `_SLOW_S`."""
    wake = f"sleep {_SLOW_S}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", wake]):
        os.kill(os.getpid(), signal.SIGSTOP)


def _hold_the_lock() -> None:
    """No other thread of the process runs Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(_BEYOND_S * 1e6))


def _run_out_of_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))
    torch.zeros(2**28)


def _become_slow() -> None:
    """From here on every tile takes a hundred times as long."""
    global slower
    slower = _TIMES_SLOWER


def _fail() -> None:
    raise RuntimeError("the leaver's own error")


def _crash() -> None:
    ctypes.memset(0, 0, 1)


WAYS: dict[str, Callable[[], None]] = {
    "raise": _fail,
    "exit-0": lambda: sys.exit(0),
    "exit-3": lambda: sys.exit(3),
    "os-exit-0": lambda: os._exit(0),
    "os-exit-3": lambda: os._exit(3),
    "sigkill": _signalled(signal.SIGKILL),
    "sigterm": _signalled(signal.SIGTERM),
    "sigabrt": _signalled(signal.SIGABRT),
    "sigsegv": _crash,
    "sigstop": _signalled(signal.SIGSTOP),
    "hold": lambda: time.sleep(_HELD_S),
    "slow": lambda: time.sleep(_SLOW_S),
    "slower": _become_slow,
    "late": lambda: time.sleep(_BEYOND_S),
    "lock": _hold_the_lock,
    "sigcont": _stop_for_a_while,
    "suspend": lambda: time.sleep(_SLOW_S),  # `tests/faults.py` stops all ranks meanwhile
    "memory": _run_out_of_memory,
}

at_fault = own_rank == victim
faulted = False
slower = 1


def reach(here: str) -> None:
    """The fault, where this is its rank and phase; once."""
    global faulted
    if not at_fault or here != phase or faulted:
        return
    faulted = True
    note = Path("left_at.partial")
    note.write_text(str(time.time()), encoding="utf-8")
    note.rename("left_at")
    WAYS[how]()


def wait_for(*names: str) -> None:
    while not all(Path(name).exists() for name in names):
        time.sleep(0.02)


# Registered first, and so run last: after MPI_Finalize.
atexit.register(reach, "finalized")

import torch  # noqa: E402

import burst_rt.context  # noqa: E402  (starts no MPI)
from burst_rt.kernels import KERNELS  # noqa: E402
from burst_rt.scheduler import Graph, GraphBuilder, Op  # noqa: E402

# Imports take long on a busy machine; what follows is to happen at the same time on all ranks.
num_ranks = told("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
Path(f"imported-{own_rank}").touch()
wait_for(*(f"imported-{rank}" for rank in range(num_ranks)))

reach("start")
if phase == "start" and how != "hold":
    # Of a rank that leaves while others start MPI, Open MPI itself takes notice.
    wait_for("left_at")
    time.sleep(_AWHILE_S)
if phase == "starting" and at_fault:
    time.sleep(_AWHILE_S)
    reach("starting")
if phase == "started":
    if not under_torchrun:
        from mpi4py import MPI

        assert MPI.COMM_WORLD.size == num_ranks
    reach("started")


def write_checkpoints() -> None:
    """Two steps of `burst-rt train`, a checkpoint after each."""
    from burst_rt.launch.train import checkpoint
    from burst_rt.launch.train.cli import train_command

    sync: Any = checkpoint._sync

    def watched(path: Path) -> None:
        reach("checkpoint")
        sync(path)

    checkpoint._sync = watched
    Path("text").write_text("Around the ring, and on. " * 2000, encoding="utf-8")
    words = ["--data=text", "--out=run", "--steps=2", "--seq-len=256", "--checkpoint-every=1"]
    train_command(words, prog_name="burst-rt train")


if phase == "checkpoint":
    write_checkpoints()

ctx = burst_rt.init(timeout_s=timeout_s, stall_s=stall_s)
reach("joined")
layout = ctx.layout(64 * ctx.world_size)
num_tiles = 0
generating = False


def kernel_class() -> Any:
    """Of the kernel that does the tiles."""
    return type(KERNELS["cpu" if ctx.device.type == "cpu" else "triton"])


def watch_tiles() -> None:
    """From here on every tile is a place to fault in."""
    kernel = kernel_class()
    forward, backward = kernel.forward, kernel.backward

    def watched_forward(*args: Any) -> Any:
        global num_tiles
        num_tiles += 1
        reach("tile")
        if num_tiles > 1:
            reach("later-tile")
        began_s = time.perf_counter()
        found = forward(*args)
        time.sleep((slower - 1) * (time.perf_counter() - began_s))
        return found

    def watched_backward(*args: Any) -> Any:
        reach("backward")
        return backward(*args)

    kernel.forward, kernel.backward = watched_forward, watched_backward


def watch_sums() -> None:
    """The same of every sum over the ranks, which they have agreed on by then."""
    control: Any = ctx.runtime.control
    allreduce_sum = control.allreduce_sum

    def watched(*args: Any) -> Any:
        reach("sum")
        return allreduce_sum(*args)

    control.allreduce_sum = watched


def watch_decodes() -> None:
    """The same of every decode."""
    kernel = kernel_class()
    decode = kernel.decode

    def watched(*args: Any) -> Any:
        reach("generate" if generating else "decode")
        return decode(*args)

    kernel.decode = watched


def serve() -> None:
    """A prompt and a few tokens, in two layers."""
    cache = burst_rt.KVCache(
        ctx, num_layers=2, batch=1, num_kv_heads=2, head_dim=16, capacity=100, block=4,
        dtype=torch.float32,
    )  # fmt: skip
    for tokens in (40, 1, 1):
        step = cache.step(tokens)
        for layer in range(2):
            x = torch.randn(1, step.num_tokens, 2, 16, device=ctx.device)
            step.attend(layer, x, x, x)
            if tokens == 1:
                reach("layer")
        step.commit()


def pipeline() -> None:
    """A graph of the program's own: one operation between two transfers."""

    def build(rank: int) -> Graph:
        g = GraphBuilder(rank, ctx.world_size, ctx.lanes)
        x, y, z = (g.buffer(name, size_bytes=64, initialised=name == "x") for name in "xyz")
        after, before = (rank + 1) % ctx.world_size, (rank - 1) % ctx.world_size
        g.exchange("there", sends=[(x, after)], recvs=[(y, before)], tag=0)
        g.compute("look", Op("look", (y,)), reads=[y], accumulates=[y])
        g.exchange("back", sends=[(y, before)], recvs=[(z, after)], tag=1)
        return g.build()

    ctx.pipeline(build).run(
        buffers={name: torch.ones(16, device=ctx.device) for name in "xyz"},
        ops={"look": lambda y: reach("pipeline")},
    )


def generate() -> None:
    """A few tokens of a small model of transformers."""
    import burst_rt.hf

    global generating
    generating = True
    model = make_llama().eval().to(ctx.device)
    model.set_attn_implementation("burst_rt")
    ids = torch.arange(40, device=ctx.device)[None] % 60 + 1
    tokens = model.generate(
        ids, past_key_values=burst_rt.hf.Cache(model, ctx, capacity=64, batch=1, block=4),
        max_new_tokens=3, do_sample=False,
    )  # fmt: skip
    assert tokens.shape == (1, 43)


def train() -> None:
    """Two steps of transformers' Trainer."""
    import transformers

    import burst_rt.hf

    class Trainer(burst_rt.hf.Trainer, transformers.Trainer):  # type: ignore[misc]  # Any
        def training_step(self, *args: Any, **others: Any) -> Any:
            loss = super().training_step(*args, **others)
            reach("trainer")
            return loss

    rows = [{"input_ids": [1 + i % 60 for i in range(40)], "labels": [3] * 40}] * 4
    options = transformers.TrainingArguments(
        output_dir="trainer", use_cpu=ctx.device.type == "cpu", report_to="none", max_steps=2,
        save_strategy="no", disable_tqdm=True, per_device_train_batch_size=1,
    )  # fmt: skip
    Trainer(model=make_llama(), args=options, train_dataset=rows, context=ctx).train()


def make_llama() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def call() -> None:
    shape = 1, layout.shard_len, 2, 16
    q = torch.randn(shape, device=ctx.device, requires_grad=True)
    out = burst_rt.burst_attention(q, q, q, causal=True, layout=layout)
    reach("between")
    out.sum().backward()


def fork() -> None:
    """A child that calls, and then ends as the name says: neither is of any consequence."""
    reach("forked")
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        time.sleep(_FORKED_S)
        return
    for use in (
        call,
        lambda: ctx.all_reduce(torch.zeros(1)),
        lambda: layout.unshard(torch.zeros(1, layout.shard_len)),
    ):
        try:
            use()
        except (burst_rt.errors.ConfigError, burst_rt.errors.InputError) as error:
            if "forked" in str(error):
                continue
        Path("child_was_served").touch()
    ctx.close()
    WAYS[how.removeprefix("fork-")]()


call()
if how.startswith("fork-"):
    WAYS[how] = lambda: None
    if at_fault:
        fork()
if at_fault and phase == "awaited":
    time.sleep(_AWHILE_S)
if not at_fault and phase == "before":
    time.sleep(_AWHILE_S)
if phase == "waiting":
    if at_fault:
        signal.signal(signal.SIGALRM, lambda number, frame: reach("waiting"))
        signal.setitimer(signal.ITIMER_REAL, _AWHILE_S)
    else:
        time.sleep(3 * _AWHILE_S)
reach("before")
reach("awaited")
watch_tiles()
call()
watch_sums()
total = ctx.all_reduce(torch.ones(1))
assert total.item() == ctx.world_size
pipeline()
watch_decodes()
serve()
if phase == "generate":
    generate()
if phase == "trainer":
    train()
if not at_fault and phase == "exit":
    time.sleep(_AWHILE_S)
print("done", flush=True)
reach("exit")
