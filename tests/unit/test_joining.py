"""What `init` decides: the device a name stands for, and the transport, from the facts of all
ranks.
"""

from __future__ import annotations

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import Causal, Context
from burst_rt.errors import BurstError, ConfigError, ContractMismatch, DeviceError
from burst_rt.job import launched
from burst_rt.planning.machines import load_hardware, to_toml
from burst_rt.runtime import joining
from burst_rt.runtime.calibrated import calibrated_path, find_hardware, fit_to_job
from burst_rt.runtime.choosing import AUTO, REFUSED, GroupFacts, choose_transport
from burst_rt.runtime.connections import LocalRank
from burst_rt.runtime.facts import Facts, facts_of, resolve_device
from burst_rt.runtime.machine import SlotPool, Slots
from burst_rt.scheduler.simulator.network import Network
from burst_rt.transport import KINDS, LocalWorld, staged

_CPU = Facts("a", "", 0, multi_rank=False, meeting="mpi")
_THREAD = replace(_CPU, meeting="threads")
_GROUP = replace(_CPU, meeting="store")
_GPUS = [replace(_CPU, gpu=f"GPU-{i}", nccl=22907) for i in range(3)]
_SHARED = [_GPUS[0]] * 2
_NEW = [replace(rank, nccl=23000, multi_rank=True) for rank in _SHARED]

# (ranks, asked) -> (taken, in the reason)
_CHOICES = {
    "CPU ranks": ([_CPU] * 2, "auto", "mpi", "host memory"),
    "threads": ([_THREAD] * 2, "auto", "local", "threads"),
    "a group": ([_GROUP] * 2, "auto", "torch", "host memory"),
    "a group of one": ([_GROUP], "auto", "local", "one rank"),
    "a group, staged": ([_GROUP] * 2, "staged", "staged", "asked for"),
    "one rank": ([_CPU], "auto", "local", "one rank"),
    "two ranks on a GPU, MPI takes it": (
        [replace(r, device_mpi=True) for r in _SHARED],
        "auto",
        "mpi",
        "takes device memory, and 2 ranks",
    ),
    "one's MPI does not": (
        [replace(_SHARED[0], device_mpi=x) for x in (True, False)],
        "auto",
        "staged",
        "does not take device memory",
    ),
    "a GPU each": (_GPUS, "auto", "nccl", "a GPU each"),
    "no CuPy on one": (
        [*_GPUS[:2], replace(_GPUS[2], nccl=0)],
        "auto",
        "staged",
        r"ranks \[2\] have no CuPy",
    ),
    "two ranks on a GPU": (_SHARED, "auto", "staged", "2 ranks share GPU GPU-0 of a"),
    "the same, new NCCL, not asked for": (
        [replace(r, multi_rank=False) for r in _NEW],
        "auto",
        "staged",
        "2.30",
    ),
    "the same, new NCCL": (_NEW, "auto", "nccl", "a GPU each"),
    "the same GPU number on two hosts": (
        [_GPUS[0], replace(_GPUS[0], host="b")],
        "auto",
        "nccl",
        "a GPU each",
    ),
    "NCCL for a rank alone": (
        [replace(_GPUS[0], meeting="threads")],
        "nccl",
        "nccl",
        "asked for",
    ),
    "threads with a GPU": ([replace(_GPUS[0], meeting="threads")] * 2, "auto", "local", "threads"),
    "a group's GPUs": (
        [replace(r, meeting="store", nccl=0, torch_nccl=22907) for r in _GPUS],
        "auto",
        "torch",
        "a GPU each",
    ),
    "a group's GPUs, over CuPy": (
        [replace(r, meeting="store") for r in _GPUS],
        "nccl",
        "nccl",
        "asked for",
    ),
    "a group that shares a GPU": (
        [replace(r, meeting="store", torch_nccl=22907) for r in _SHARED],
        "auto",
        "staged",
        "2 ranks share GPU GPU-0 of a",
    ),
    "a group with a torch without NCCL": (
        [replace(r, meeting="store") for r in _GPUS],
        "auto",
        "staged",
        r"ranks \[0, 1, 2\] have a torch without NCCL",
    ),
    "staged on CPUs": ([_CPU] * 2, "staged", "staged", "asked for"),
    "MPI on GPUs": (_GPUS, "mpi", "mpi", "asked for"),
}


@pytest.mark.parametrize("name", _CHOICES)
def test_the_transport_taken(name: str) -> None:
    ranks, asked, taken, reason = _CHOICES[name]
    got = choose_transport(asked, ranks)
    assert got.name == taken
    assert re.search(reason, got.reason), got.reason


_REFUSED = {
    "NCCL on CPUs": ([_CPU] * 2, "nccl", "NCCL needs GPUs"),
    "NCCL, two ranks on a GPU": (_SHARED, "nccl", "2 ranks share GPU GPU-0 of a"),
    "NCCL among threads": (
        [replace(_GPUS[0], meeting="threads")] * 2,
        "nccl",
        "a process for each rank",
    ),
    "NCCL without CuPy": (
        [replace(rank, nccl=0) for rank in _GPUS],
        "nccl",
        r"ranks \[0, 1, 2\] have no CuPy",
    ),
    "MPI among threads": ([_THREAD] * 2, "mpi", "threads of one process"),
    "torch's NCCL, two ranks on a GPU": (
        [replace(r, meeting="store", torch_nccl=22907) for r in _SHARED],
        "torch",
        "transport 'torch' was asked for, but 2 ranks share GPU GPU-0 of a",
    ),
    "MPI in a group": ([_GROUP] * 2, "mpi", "processes of a torch.distributed group; use 'torch'"),
    "a group of an MPI job": ([_CPU] * 2, "torch", "processes of an MPI job; use 'mpi'"),
    "threads of an MPI job": ([_CPU] * 2, "local", "processes of an MPI job"),
    "some ranks without a GPU": (
        [_GPUS[0], _CPU, _GPUS[1]],
        "auto",
        r"ranks \[1\] compute on the CPU",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_a_transport_that_cannot_be_had(name: str) -> None:
    ranks, asked, message = _REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        choose_transport(asked, ranks)


def test_every_row_of_the_choice_is_taken_by_a_case() -> None:
    """Row by row: the first that holds gives the name and the reason of its cases."""
    taken = set()
    for facts, asked, name, reason in _CHOICES.values():
        if asked == "auto":
            ranks = GroupFacts(facts)
            number, row = next((i, row) for i, row in enumerate(AUTO) if row.holds(ranks))
            assert row.name.format(ranks=ranks) == name
            assert re.search(reason, row.reason.format(ranks=ranks))
            taken.add(number)
    assert taken == set(range(len(AUTO)))


def test_every_row_of_the_refusals_refuses_a_case() -> None:
    refusing = set()
    for facts, asked, message in _REFUSED.values():
        if asked != "auto":
            ranks = GroupFacts(facts)
            number, row = next((i, r) for i, r in enumerate(REFUSED) if r.holds(ranks, asked))
            words = f"transport {asked!r} was asked for, but {row.why(ranks, asked)}; use "
            assert re.search(message, words + row.use.format(ranks=ranks))
            refusing.add(number)
    assert refusing == set(range(len(REFUSED)))


@pytest.mark.parametrize("asked", sorted(KINDS))
@pytest.mark.parametrize("gpus", [False, True])
def test_the_axes_follow_from_the_name(asked: str, gpus: bool) -> None:
    """One rank alone may use every transport; between CPUs the host carries the messages. A rank
    alone has no store by which torch's NCCL would meet.
    """
    rank = replace(_GPUS[0], torch_nccl=22907) if gpus else _CPU
    if asked == "nccl" and not gpus:
        return  # refused
    choice = choose_transport(asked, [rank])
    assert choice.wire == ("nccl" if asked == "nccl" else "host")
    assert choice.staged == (asked == "staged")


def test_names_of_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    for wrong in ("gpu", "cpu:0", "cuda:x", "cuda:-1", "auto:0"):
        with pytest.raises(ConfigError, match="device must be 'auto', 'cpu', 'cuda' or 'cuda:N'"):
            resolve_device(wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_that_is_not_there() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    for name in ("cuda", "cuda:1"):
        with pytest.raises(
            ConfigError,
            match=(
                rf"'{name}' was asked for, but torch .* sees no CUDA device "
                rf".*CUDA_VISIBLE_DEVICES"
            ),
        ):
            burst_rt.init(device=name)


def test_the_number_on_the_host_picks_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 1)
    assert resolve_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="cuda:0 to cuda:1"):
        resolve_device("cuda:2")
    # All ranks of a host would take one GPU where the launcher does not say which they are.
    monkeypatch.delenv("SLURM_LOCALID")
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(ConfigError, match=r"there are 2 GPUs.*set LOCAL_RANK"):
        resolve_device("auto")
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    for name in ("FLUX_TASK_LOCAL_ID", "MV2_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"):
        with monkeypatch.context() as launched_so:
            launched_so.setenv(name, "1")
            assert resolve_device("auto") == torch.device("cuda", 1)


def test_the_gpu_of_init_is_torchs_own_in_the_thread_that_calls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a program's device="cuda" would be the first GPU on every rank. Two ranks as threads, a
    GPU each, which are none."""
    current: dict[int, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"),
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a double")
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: current.setdefault(threading.get_ident(), device)
    )
    world = LocalWorld(2)

    def join(rank: int) -> bool:
        with burst_rt.init(LocalRank(world, rank), device=f"cuda:{1 - rank}", timeout_s=20) as ctx:
            return ctx.device == torch.device("cuda", 1 - rank) == current[threading.get_ident()]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, range(2))) == [True, True]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_rank_that_cannot_join_is_every_ranks_error(odd: int) -> None:
    """Its device is not there, or it asks for another transport: all hear of it at once, none
    waits.
    """
    world = LocalWorld(3)

    def join(rank: int, **options: Any) -> BaseException | None:
        try:
            burst_rt.init(LocalRank(world, rank), timeout_s=20, **(options if rank == odd else {}))
        except BurstError as error:
            return error
        return None

    wrong: list[tuple[dict[str, Any], type[BurstError], str]] = [
        ({"device": "abacus"}, ConfigError, f"rank {odd}: init: device must be .* got 'abacus'"),
        (
            {"transport": "pigeon"},
            ConfigError,
            f"rank {odd}: init: transport must be .* got 'pigeon'",
        ),
        ({"transport": "staged"}, ContractMismatch, "transport must be the same on every rank"),
    ]
    for options, kind, message in wrong:
        with ThreadPoolExecutor(3) as pool:
            for error in pool.map(lambda rank, options=options: join(rank, **options), range(3)):
                assert type(error) is kind
                assert re.search(message, str(error))


def test_the_environment_says_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_RT_TRANSPORT", "staged")
    with burst_rt.init() as ctx:
        assert ctx.why_transport == "staged: asked for"
    with burst_rt.init(transport="local") as ctx:
        assert ctx.why_transport == "local: asked for"
    monkeypatch.setenv("BURST_RT_DEVICE", "abacus")
    with pytest.raises(ConfigError, match="got 'abacus'"):
        burst_rt.init()


def test_memory_that_is_not_there_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is sent, with the plan's own formula; and the context can be used
    afterwards.
    """
    from burst_rt.attention.execute import ForwardRun

    take = ForwardRun._slots

    def greedy(run: ForwardRun) -> Slots:
        if run.rank == 1 and run.problem.q_layout.seq_len == 40:
            raise torch.OutOfMemoryError("tried to allocate a lot")
        return take(run)

    def calls(ctx: burst_rt.Context) -> str:
        message = ""
        for tokens in (40, 20):
            layout = ctx.layout(tokens)
            x = torch.ones(1, layout.shard_len, 2, 16)
            if tokens == 20:
                burst_rt.burst_attention(x, x, x, layout=layout)
                continue
            with pytest.raises(DeviceError) as caught:
                burst_rt.burst_attention(x, x, x, layout=layout)
            message = str(caught.value)
        return message

    monkeypatch.setattr(ForwardRun, "_slots", greedy)
    for message in burst_rt.run_local(3, calls):
        # K and V of 14 tokens at most, 2 heads of 16, float32, in two slots.
        assert "rank 1: out of memory on cpu: this call takes" in message
        assert "slots" in message


def test_a_device_that_fails_while_ranks_join_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts, asked = facts_of, itertools.count()

    def failing(*args: Any) -> Facts:
        if next(asked) == 1:
            raise RuntimeError("CUDA error: device is busy")
        return facts(*args)

    monkeypatch.setattr(joining, "facts_of", failing)

    world = LocalWorld(3)

    def join(rank: int) -> str:
        with pytest.raises(DeviceError) as caught:
            burst_rt.init(LocalRank(world, rank), timeout_s=20)
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        messages = list(pool.map(join, range(3)))
    assert len(set(messages)) == 1
    assert re.match(
        r"rank \d: init: cpu failed: CUDA error: device is busy; look at the device", messages[0]
    )


def test_a_device_that_fails_in_a_call_is_a_device_error() -> None:
    def call(ctx: burst_rt.Context) -> str:
        layout = ctx.layout(8)
        x = torch.ones(1, layout.shard_len, 2, 16)
        kernel = burst_rt.make_call(x, x, x, layout=layout).forward_plan.kernel

        def failing(*_: object) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(kernel), "forward", failing)
            with pytest.raises(DeviceError) as caught:
                burst_rt.burst_attention(x, x, x, layout=layout)
        with pytest.raises(BurstError, match="this context broke in an earlier call"):
            burst_rt.burst_attention(x, x, x, layout=layout)
        return str(caught.value)

    (message,) = burst_rt.run_local(1, call)
    assert message.startswith("rank 0: the device failed: CUDA error: an illegal memory access")


def test_a_machine_file_is_fitted_to_the_job() -> None:
    """What was measured with two ranks must serve eight, and what says nothing of the way between
    hosts serves none that are on several.
    """
    measured = load_hardware("h100-sxm")
    alone = replace(measured, nics=None, node=replace(measured.node, ranks=2))
    for ranks in (1, 2, 8, 16):
        found = fit_to_job(alone, ranks, ranks)
        assert found is not None
        assert found.node.ranks == ranks
        Network(found, ranks)
    assert fit_to_job(alone, 4, 8) is None
    spread = fit_to_job(measured, 4, 8)
    assert spread is not None
    assert spread.node.ranks == 4


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_gpus_are_known_by_their_name_where_nothing_else_is(
    gpu: str, machine: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BURST_RT_HARDWARE", raising=False)
    found = find_hardware("cuda", gpu)
    if machine is None:
        assert found is None
        return
    assert found is not None
    assert found == replace(load_hardware(machine), name=f"{machine}, by the name of the GPU")
    measured = replace(load_hardware("a100-pcie"), name="measured")
    calibrated_path("cuda").parent.mkdir(parents=True, exist_ok=True)
    calibrated_path("cuda").write_text(to_toml(measured), encoding="utf-8")
    assert find_hardware("cuda", gpu) == measured
    monkeypatch.setenv("BURST_RT_HARDWARE", "none")
    assert find_hardware("cuda", gpu) is None


def test_auto_plans_on_more_ranks_than_the_file_was_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = load_hardware("h100-sxm")
    (tmp_path / "two.toml").write_text(
        to_toml(replace(measured, nics=None, node=replace(measured.node, ranks=2)))
    )
    monkeypatch.setenv("BURST_RT_HARDWARE", str(tmp_path / "two.toml"))

    def attend(ctx: Context) -> None:
        layout = ctx.layout(64)
        x = torch.ones(1, layout.shard_len, 2, 16)
        assert " s (h100-sxm)" in str(burst_rt.explain(x, x, x, layout=layout))
        burst_rt.burst_attention(x, x, x, layout=layout)

    burst_rt.run_local(4, attend)


def test_a_transport_of_another_name() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"transport must be one of \['auto', 'local', 'mpi', 'nccl', 'staged', 'torch'\], got "
            r"'smoke signals'"
        ),
    ):
        burst_rt.init(transport="smoke signals")
    with burst_rt.init(transport="staged") as ctx:
        assert ctx.why_transport == "staged: asked for"


@pytest.mark.parametrize("strategy", ["burst", "ring-kv"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_staged_gives_the_same_bits(
    world_size: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged, "CHUNK_BYTES", 1001)
    case = Case(61, mask=Causal(), batch=2, strategy=strategy)
    plain = attend_over_threads(world_size, case)
    for x, y in zip(plain, attend_over_threads(world_size, case, transport="staged"), strict=True):
        assert (x is None) == (y is None)
        assert x is None or y is None or torch.equal(x, y)


def test_ranks_that_are_threads_run_their_own_backward() -> None:
    assert burst_rt.run_local(2, lambda _: torch._C._is_multithreading_enabled()) == [False, False]
    assert torch._C._is_multithreading_enabled()


def _slots(size_bytes: int = 8) -> Slots:
    slot = torch.empty(size_bytes, dtype=torch.uint8)
    return Slots({0: slot}, {0: slot})


def test_slots_go_to_the_next_call_that_waits_for_them() -> None:
    device = FakeDevice()
    happened, device.happened = device.happened, lambda event: False  # type: ignore[method-assign]
    pool = SlotPool(device, capacity=2)
    keys = [object() for _ in range(3)]
    new = _slots()
    made = [pool.take(key, _slots) for key in keys]
    device.use((), ["slots"], "compute")
    free = device.record("compute")
    for key, slots in zip(keys, made, strict=True):
        pool.give_back(key, slots, free)
    # Three are kept as long as they are in use, then two. Each is given out once.
    assert pool.take(keys[2], lambda: new) is made[2]
    device.happened = lambda event: True  # type: ignore[method-assign]
    pool.give_back(keys[2], made[2], free)
    device.happened = happened  # type: ignore[method-assign]
    assert pool.take(keys[0], lambda: new) is new
    assert pool.take(keys[1], lambda: new) is made[1]
    assert pool.take(keys[1], lambda: new) is new
    device.use((), ["slots"], "caller")  # after the event: no race


def test_slots_that_are_let_go_wait_for_their_last_use_where_they_were_allocated() -> None:
    """By a call from another stream; the allocator knows the first one only."""
    device, key = FakeDevice(), object()
    pool = SlotPool(device)

    def call() -> None:
        """Uses the slots on a lane, as a call from the current stream does."""
        caller = device.caller()
        slots = pool.take(key, lambda: replace(_slots(), home=caller))
        device.wait("compute", device.record(caller))
        device.use((), ["slots"], "compute")
        device.wait(caller, device.record("compute"))
        pool.give_back(key, slots, device.record(caller))

    call()
    device.current = "other caller"
    call()
    pool.forget()
    device.use((), ["slots"], "caller")  # the next to have this memory


def test_a_device_lets_go_of_slots_of_plans_that_do_not_come_again() -> None:
    """A new mask in each step: two new plans, which each layer takes."""
    device = FakeDevice()
    device.happened = lambda event: True  # type: ignore[method-assign]
    pool = SlotPool(device)
    idle: list[int] = []
    for _ in range(5):
        for plan in (object(), object()):
            for _ in range(20):
                slots = pool.take(plan, _slots)
                idle.append(len(pool._idle))
                pool.give_back(plan, slots, device.record("compute"))
    assert max(idle) == 1
    # Kinds of layers take turns, and each finds its own.
    kinds = [object() for _ in range(4)]
    first = [pool.take(kind, _slots) for kind in kinds]
    for _ in range(3):
        for kind, slots in zip(kinds, first, strict=True):
            pool.give_back(kind, slots, device.record("compute"))
        assert [pool.take(kind, _slots) for kind in kinds] == first


def test_a_host_keeps_small_slots_only() -> None:
    pool = SlotPool(None, capacity=2)
    small, large, new = _slots(), _slots(1 << 21), _slots()
    for slots in (small, large):
        pool.give_back(slots, slots, None)
    assert pool.take(small, lambda: new) is small
    assert pool.take(large, lambda: new) is new


@pytest.mark.parametrize("strategy", ["burst", "ring-q", "hybrid"])
def test_slots_made_in_inference_mode_serve_training(strategy: str) -> None:
    def job(ctx: burst_rt.Context) -> bool:
        layout = ctx.layout(8)
        q, k, v = (torch.ones(1, layout.shard_len, 2, 16) for _ in range(3))
        with torch.inference_mode():
            first = burst_rt.burst_attention(q, k, v, layout=layout, strategy=strategy)
        with torch.no_grad():
            second = burst_rt.burst_attention(q, k, v, layout=layout, strategy=strategy)
        return torch.equal(torch.as_tensor(first), torch.as_tensor(second))

    assert burst_rt.run_local(2, job) == [True, True]


@pytest.mark.parametrize(
    ("variables", "hydra"),
    [
        ((), False),
        (("PMI_RANK",), True),
        (("PMI_RANK", "TORCHELASTIC_RUN_ID"), False),  # a torchrun on each of mpirun's ranks
        (("PMI_RANK", "SLURM_PROCID"), False),  # srun's own PMI
        (("PMI_RANK", "SLURM_PROCID", "MPI_LOCALRANKID"), True),  # mpirun in a batch job
        (("OMPI_COMM_WORLD_RANK", "PMIX_RANK"), False),
    ],
)
def test_which_launcher_needs_mpi_to_be_aborted(
    variables: tuple[str, ...], hydra: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PMI_RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PMIX_RANK", "MPI_LOCALRANKID"):
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, "0")
    assert launched.by_hydra() == hydra
