"""Which kernel "auto" takes where several can do the work: by measured speed, remembered, the same
for all ranks of a host.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

import burst_rt
from burst_rt import Causal, Documents, Full, SlidingWindow
from burst_rt.errors import InputError
from burst_rt.kernels import (
    KERNELS,
    QKV,
    Gradients,
    Kernel,
    State,
    Tile,
    Upstream,
    Work,
    flash4,
    pick,
    speed,
)
from burst_rt.kernels.cpu import CpuKernel
from burst_rt.kernels.speed import KIND, TileProblem, error_in_words, fastest_kernel
from burst_rt.planning.masks import Both
from burst_rt.remembered import alone, forget, recall, remember

_WORK = Work(torch.device("cuda"), torch.bfloat16, 128, Causal())
_Measure = Callable[[Work, Sequence[Kernel]], dict[str, float | str]]


class Clock:
    """Measures by a table, and counts how often it is asked."""

    def __init__(self, **seconds: float | str) -> None:
        self.seconds = seconds
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, work: Work, candidates: Sequence[Kernel]) -> dict[str, float | str]:
        self.asked.append(tuple(kernel.name for kernel in candidates))
        return {kernel.name: self.seconds[kernel.name] for kernel in candidates}


@pytest.fixture(autouse=True)
def a_chip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that is not there, nothing measured yet, a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a chip")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(speed, "_known", {})
    for kernel in ("CudnnKernel", "FlashKernel"):
        monkeypatch.setattr(f"burst_rt.kernels.aten.{kernel}._missing", lambda self, device: None)
    monkeypatch.setattr(flash4, "_interface", lambda: "is not here")


def _square(world_size: int = 1, *, forward: bool = True, partials: str = "exact") -> Work:
    pieces = Causal().pieces(range(64), range(64))
    return _WORK._replace(
        tiles=(pieces,) * world_size, ring_size=world_size, forward=forward, partials=partials
    )


def _measure_by(monkeypatch: pytest.MonkeyPatch, clock: _Measure) -> None:
    monkeypatch.setattr(speed, "seconds_of", clock)


def test_the_fastest_is_taken_and_the_figures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(triton=2e-3, cudnn=1e-3, flash=3e-3)
    _measure_by(monkeypatch, clock)
    picked = pick(_square())
    assert picked.kernel.name == "cudnn"
    assert picked.reason == (
        "the fastest of cudnn 1.000 ms, triton 2.000 ms, flash 3.000 ms for a tile of 4,096 x "
        "4,096 (measured now); the flash-4 kernel is not here"
    )
    assert pick(_square()).kernel is picked.kernel
    assert clock.asked == [("triton", "cudnn", "flash")]


def test_the_answer_is_remembered_from_job_to_job(monkeypatch: pytest.MonkeyPatch) -> None:
    _measure_by(monkeypatch, Clock(triton=2e-3, cudnn=1e-3, flash=3e-3))
    assert pick(_square()).kernel.name == "cudnn"
    # Another job, in which the clock says something else.
    speed._known.clear()
    later = Clock(triton=1e-3, cudnn=2e-3, flash=3e-3)
    _measure_by(monkeypatch, later)
    picked = pick(_square())
    assert picked.kernel.name == "cudnn"
    assert "remembered for this chip" in picked.reason
    assert later.asked == []
    # Any other class of work, chip or version is measured for itself.
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "another chip")
    assert pick(_square()).kernel.name == "triton"
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert pick(_square()).kernel.name == "triton"
    forget(KIND)
    speed._known.clear()
    assert pick(_square()).kernel.name == "triton"
    for work in (
        _square()._replace(head_dim=64),
        _square()._replace(dtype=torch.float16),
        _square(2, partials="16bit"),
    ):
        assert pick(work).kernel.name == "triton"
    assert len(later.asked) == 6


def test_another_flash_attention_is_measured_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch puts it behind the same operators, when a program asks for it."""
    _measure_by(monkeypatch, Clock(triton=2e-3, cudnn=3e-3, flash=4e-3))
    assert pick(_square()).kernel.name == "triton"
    _measure_by(monkeypatch, Clock(triton=2e-3, cudnn=3e-3, flash=1e-3))
    register_flash_attention_impl(
        "double", register_fn=lambda: SimpleNamespace(remove=lambda: None)
    )
    activate_flash_attention_impl("double")
    try:
        assert pick(_square()).kernel.name == "flash"
    finally:
        restore_flash_attention_impl()
    assert pick(_square()).kernel.name == "triton"


def test_only_kernels_that_can_and_repeat_themselves_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(triton=2e-3, cudnn=1e-3, flash=1.5e-3)
    _measure_by(monkeypatch, clock)
    several = pick(_square(2))
    assert several.kernel.name == "triton"
    assert several.reason.startswith(
        "the only kernel here that can compute this call; the cudnn kernel rounds each partial "
        "result"
    )
    backward = pick(_square(forward=False))
    assert backward.kernel.name == "triton"
    assert (
        "the cudnn kernel's sums differ in the last bits from run to run; "
        "init(deterministic=False) or kernel='cudnn' allows that" in backward.reason
    )
    assert clock.asked == []
    torch.use_deterministic_algorithms(True)
    try:
        assert pick(_square(forward=False)).kernel.name == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
    assert clock.asked == [("triton", "flash")]
    rounded = pick(_square(2, partials="16bit"))
    assert rounded.kernel.name == "cudnn"
    assert rounded.reason.endswith(
        "partials are 16-bit: each partial result is rounded to bfloat16"
    )


def test_bits_that_need_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(triton=2e-3, cudnn=1e-3, flash=3e-3)
    _measure_by(monkeypatch, clock)
    picked = pick(_square(forward=False)._replace(deterministic=False))
    assert picked.kernel.name == "cudnn"
    assert picked.reason.endswith("; its sums differ in the last bits from run to run")
    assert clock.asked == [("triton", "cudnn", "flash")]
    # FlashAttention has another backward where torch is told to repeat itself.
    torch.use_deterministic_algorithms(True)
    try:
        assert pick(_square(forward=False)).kernel.name == "triton"
    finally:
        torch.use_deterministic_algorithms(False)
    assert clock.asked[1:] == [("triton", "flash")]


def test_flash_attention_4_is_taken_where_it_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward, too: it repeats its bits. Windows and documents are single calls of it."""
    monkeypatch.setattr(flash4, "_interface", lambda: flash4._Interface(None, None))
    _measure_by(
        monkeypatch, Clock(**{"triton": 2e-3, "cudnn": 3e-3, "flash": 4e-3, "flash-4": 1e-3})
    )
    for forward in (True, False):
        assert pick(_square(forward=forward)).kernel.name == "flash-4"
        for mask in (SlidingWindow(9, 0), Documents([3, 61]) & Causal()):
            work = _square(forward=forward)._replace(
                mask=mask,
                tiles=(mask.pieces(range(64), range(64)),),
                places=((range(64),), (range(64),)),
            )
            assert pick(work).kernel.name == "flash-4"


class _Wrong(CpuKernel):
    """A kernel that is fast, and off."""

    name = "wrong"

    def __init__(self, by: float) -> None:
        self._by = by

    def forward(self, qkv: QKV, tile: Tile, state: State) -> None:
        super().forward(qkv, tile, state)
        state.out.mul_(self._by)

    def backward(self, qkv: QKV, upstream: Upstream, tile: Tile, grads: Gradients) -> None:
        super().backward(qkv, upstream, tile, grads)
        assert grads.dk is not None
        grads.dk.mul_(self._by)


@pytest.mark.parametrize("by", [1.01, 1.5, math.nan])
@pytest.mark.parametrize("forward", [True, False])
def test_a_kernel_that_is_wrong_is_not_taken(
    forward: bool, by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_TOKENS", {"cpu": 32})
    work = Work(torch.device("cpu"), torch.bfloat16, 64, Causal(), forward)
    figures = speed.seconds_of(work, [KERNELS["cpu"], _Wrong(by)])
    assert isinstance(figures["cpu"], float)
    if by == 1.01:  # as much as 16-bit sums may be off
        assert isinstance(figures["wrong"], float)
    else:
        much = "0.5" if by == 1.5 else "nan"
        assert figures["wrong"] == f"its results are off from cpu's by {much} under Causal()"


class _WrongElsewhere(CpuKernel):
    """A kernel that is right on the standard tile only."""

    name = "elsewhere"

    def __init__(self, mask: type, error: Exception | None = None) -> None:
        self._mask, self._error = mask, error

    def forward(self, qkv: QKV, tile: Tile, state: State) -> None:
        super().forward(qkv, tile, state)
        if isinstance(tile.mask, self._mask):
            if self._error is not None:
                raise self._error
            state.out.add_(1.0)


def test_kernels_are_compared_under_windows_and_for_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed, "_TOKENS", {"cpu": 40})
    work = Work(torch.device("cpu"), torch.bfloat16, 64, Full())
    for mask, words in ((SlidingWindow, "SlidingWindow(left=4, right=0)"), (Both, "Documents(")):
        figures = speed.seconds_of(work, [KERNELS["cpu"], _WrongElsewhere(mask)])
        assert words in str(figures["elsewhere"])
    # What it refuses is not asked of it.
    picky = _WrongElsewhere(SlidingWindow)
    monkeypatch.setattr(picky, "refuses", lambda work: str(work.mask), raising=False)
    assert isinstance(speed.seconds_of(work, [KERNELS["cpu"], picky])["elsewhere"], float)
    # A kernel that finds no memory may find some another time.
    full = _WrongElsewhere(SlidingWindow, torch.OutOfMemoryError("CUDA out of memory"))
    figures = speed.seconds_of(work, [KERNELS["cpu"], full])
    assert figures["elsewhere"] == "OutOfMemoryError: CUDA out of memory"
    assert isinstance(figures["cpu"], float)


@pytest.mark.parametrize("forward", [True, False])
def test_the_standard_tile_has_the_head_dims_and_the_groups_of_the_work(
    forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(torch.device("cpu"), torch.float32, 16, Causal(), forward)
    shapes = []
    for of_v, grouped in ((0, False), (8, False), (24, True)):
        problem = TileProblem(work._replace(v_head_dim=of_v, grouped=grouped), tokens=20, heads=4)
        cpu, spec = (problem.results(KERNELS[name]) for name in ("cpu", "naive"))
        for x, y in zip(cpu, spec, strict=True):
            assert torch.allclose(x, y, atol=1e-4)
        shapes.append(tuple(tuple(x.shape[2:]) for x in cpu))
    heads = 4 * torch.get_num_threads()
    if forward:
        assert [shape[0] for shape in shapes] == [(heads, 16), (heads, 8), (heads, 24)]
    else:
        assert shapes[1] == ((heads, 16), (heads, 16), (heads, 8))
        assert shapes[2] == ((heads, 16), (heads // 2, 16), (heads // 2, 24))
    keys = [
        speed.speed_key(work._replace(v_head_dim=of_v, grouped=grouped))
        for of_v, grouped in ((0, False), (8, False), (8, True))
    ]
    assert keys[0] != keys[1] != keys[2]
    versions = {"flash-attn-4": "1"}
    monkeypatch.setattr(speed, "_version", lambda name: versions.get(name, ""))
    before = speed.speed_key(work)
    versions["flash-attn-4"] = "2"
    assert speed.speed_key(work) != before


class _Unfit(CpuKernel):
    """A kernel behind which something stands that torch does not know."""

    name = "unfit"

    def forward(self, qkv: QKV, tile: Tile, state: State) -> None:
        raise ValueError("too many values to unpack (expected 2)")


def test_a_kernel_that_cannot_be_run_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_TOKENS", {"cpu": 32})
    work = Work(torch.device("cpu"), torch.bfloat16, 64, Causal())
    figures = speed.seconds_of(work, [_Unfit(), KERNELS["cpu"]])
    assert isinstance(figures["cpu"], float)
    assert figures["unfit"] == "ValueError: too many values to unpack (expected 2)"


def test_a_kernel_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _measure_by(
        monkeypatch,
        Clock(
            triton=2e-3,
            cudnn=error_in_words(RuntimeError("no execution plan\nat line 3")),
            flash=3e-3,
        ),
    )
    picked = pick(_square())
    assert picked.kernel.name == "triton"
    assert "(measured now; cudnn failed: RuntimeError: no execution plan)" in picked.reason
    # What failed for want of memory may do another time, and is not written down.
    speed._known.clear()
    forget(KIND)
    full = error_in_words(torch.OutOfMemoryError("CUDA out of memory"))
    clock = Clock(triton=full, cudnn=full, flash=full)
    _measure_by(monkeypatch, clock)
    picked = pick(_square())
    assert picked.kernel.name == "triton"
    assert picked.reason.startswith(
        "no kernel could be measured (triton failed: OutOfMemoryError: CUDA out of memory, "
    )
    speed._known.clear()
    pick(_square())
    assert len(clock.asked) == 2


def test_ranks_of_a_host_measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes; here threads, each with a memory of its own, that share only the cache
    folder.
    """
    clock = Clock(triton=2e-3, cudnn=1e-3, flash=3e-3)

    def slow(work: Work, candidates: Sequence[Kernel]) -> dict[str, float | str]:
        time.sleep(0.3)
        return clock(work, candidates)

    class Nothing(dict[tuple[str, ...], dict[str, float | str]]):
        def get(self, *_: object) -> None:  # type: ignore[override]
            return None

    monkeypatch.setattr(speed, "_known", Nothing())

    class Open:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(speed, "_lock", Open())
    names: list[str] = []
    candidates = [KERNELS[name] for name in ("triton", "cudnn", "flash")]
    threads = [
        threading.Thread(
            target=lambda: names.append(fastest_kernel(_square(), candidates, slow).kernel.name)
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert names == ["cudnn"] * 4
    assert len(clock.asked) == 1


def _any(answer: object) -> bool:
    return True


def test_what_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = {"chip": "a", "dtype": "b"}
    assert recall("kind", key, _any) is None
    assert remember("kind", key, {"x": 1.5})
    assert recall("kind", key, _any) == {"x": 1.5}
    assert recall("kind", key | {"chip": "c"}, _any) is None
    assert recall("other", key, _any) is None
    (path,) = (tmp_path / "burst_rt").glob("kind-*.json")
    forget("kind")
    assert not path.exists()
    # A folder that cannot be: nothing is kept, nothing fails.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not remember("kind", key, 1)
    with alone("kind", key, 1.0):
        assert recall("kind", key, _any) is None


@pytest.mark.parametrize(
    "broken", ["", "{", "[]", '{"key": {}}', "[" * 100_000, b"\xff", "pipe", "folder", "link"]
)
def test_a_damaged_memory_is_set_aside_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | bytes
) -> None:
    key = {"chip": "a"}
    assert remember("kind", key, 1)
    (path,) = (tmp_path / "burst_rt").glob("kind-*.json")
    path.unlink()
    if broken == "pipe":
        os.mkfifo(path)
    elif broken == "folder":
        path.mkdir()
    elif broken == "link":
        path.symlink_to(tmp_path)
    else:
        path.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    assert recall("kind", key, _any) is None
    assert "is damaged: it is now " in caplog.text
    assert not path.exists()
    assert remember("kind", key, 2)
    assert recall("kind", key, _any) == 2


def test_a_file_that_cannot_be_opened_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = {"chip": "a"}
    assert remember("kind", key, 1)

    def too_many(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("burst_rt.remembered.open_regular", too_many)
        assert recall("kind", key, _any) is None
    assert not caplog.text
    assert recall("kind", key, _any) == 1


def test_no_flipped_bit_is_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = {"chip": "a"}
    assert remember("kind", key, {"triton": 1.25e-3, "cudnn": "no memory"})
    (path,) = (tmp_path / "burst_rt").glob("kind-*.json")
    whole = path.read_bytes()
    answer = recall("kind", key, _any)
    for at in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            assert recall("kind", key, _any) in (None, answer), (at, bit)
    for edited in ({"triton": 1e300}, {"triton": 1e-300}):
        path.write_text(json.dumps(json.loads(whole) | {"answer": edited}))
        caplog.clear()
        assert recall("kind", key, _any) is None
        assert "is damaged: it is now " in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        "x",
        [],
        3,
        {"triton": 1e-3},
        {"triton": 1e-3, "cudnn": math.nan, "flash": 1e-3},
        {"triton": 1e-3, "cudnn": -1.0, "flash": 1e-3},
        {"triton": 1e-3, "cudnn": 0.0, "flash": 1e-3},
        {"triton": 1e-3, "cudnn": math.inf, "flash": 1e-3},
        {"triton": 1e-3, "cudnn": None, "flash": 1e-3},
    ],
)
def test_figures_that_are_none_are_measured_anew(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    answer: object,
) -> None:
    _measure_by(monkeypatch, Clock(triton=2e-3, cudnn=1e-3, flash=3e-3))
    assert pick(_square()).kernel.name == "cudnn"
    (path,) = (tmp_path / "burst_rt").glob(f"{KIND}-*.json")
    key = json.loads(path.read_text())["key"]
    assert remember(KIND, key, answer)  # with its checksum
    speed._known.clear()
    _measure_by(monkeypatch, Clock(triton=1e-3, cudnn=2e-3, flash=3e-3))
    picked = pick(_square())
    assert (picked.kernel.name, "measured now" in picked.reason) == ("triton", True)
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_lock_that_is_no_file_is_done_without(tmp_path: Path, kind: str) -> None:
    with alone("kind", {"a": "b"}, 0.1):
        pass
    (path,) = (tmp_path / "burst_rt").glob("kind-*.lock")
    path.unlink()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(precious)
    with alone("kind", {"a": "b"}, 5.0):
        assert precious.read_text() == "precious"


def test_waiting_for_another_rank_ends() -> None:
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with alone("kind", {"a": "b"}, 5.0):
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(5)
    started_s = time.monotonic()
    with alone("kind", {"a": "b"}, 0.2):
        assert 0.2 <= time.monotonic() - started_s < 5
    done.set()
    thread.join(5)


@pytest.mark.parametrize("forward", [True, False])
def test_the_standard_tile_is_one_a_kernel_can_do(forward: bool) -> None:
    for mask in (Full(), Causal()):
        for dtype in (torch.float32, torch.bfloat16):
            problem = TileProblem(Work(torch.device("cpu"), dtype, 512, mask, forward), tokens=48)
            problem.run(KERNELS["cpu"])
            results = (problem._state.out,) if forward else problem._written
            assert all(x.isfinite().all() and x.any() for x in results)


def test_on_a_cpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    _measure_by(monkeypatch, clock)
    with burst_rt.init(device="cpu") as ctx:
        x = torch.zeros(1, 8, 2, 16)
        assert "kernel cpu: the only kernel here that can compute this call\n" in str(
            burst_rt.explain(x, x, x, layout=ctx.layout(8))
        )
    with pytest.raises(
        InputError,
        match=r"no tile kernel for torch\.float64 on cuda: .*triton.*; .*cudnn.*; .*flash",
    ):
        pick(_WORK._replace(dtype=torch.float64))
    assert clock.asked == []
