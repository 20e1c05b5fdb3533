"""cuDNN's attention and FlashAttention as tile kernels, on a GPU: torch's real operators and
FlashAttention-4's package, and what "auto" makes of them.

tests/unit/test_vendor.py and test_flash4.py prove what is done around them, with doubles; this,
that they are what the doubles say.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from spec import Attention, errors_of, reference, relative_error
from tolerances import ERROR
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import Causal, Context, Documents, Full, Mask, SlidingWindow
from burst_rt.kernels import (
    KERNELS,
    QKV,
    Gradients,
    Kernel,
    Results,
    State,
    Tile,
    Upstream,
    Work,
    speed,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_CUDA = torch.device("cuda", 0)
_NAMES = ("cudnn", "flash", "flash-4")


def _kernel(name: str, work: Work) -> Kernel:
    """The kernel, where this machine's torch has it: what is missing is said, never passed over in
    silence.
    """
    reason = KERNELS[name].refuses(work)
    if reason:
        pytest.skip(reason)
    return KERNELS[name]


def _run(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    mask: Mask,
    cuts: Any,
) -> Attention:  # cuts: (first key, last key) of each tile
    """Forward and backward over tiles, from NaN and from zeros; lse and delta of the kernel's own
    making.
    """
    batch, q_len, heads, head_dim = q.shape
    kv_len = k.shape[1]
    positions = range(kv_len - q_len, kv_len)
    tiles = [
        (
            slice(a, b),
            Tile(
                mask.pieces(positions, range(a, b)),
                (positions,),
                (range(a, b),),
                mask,
                head_dim**-0.5,
                lambda: None,
            ),
        )
        for a, b in cuts
    ]
    acc, out = (
        torch.full(dout.shape, torch.nan, dtype=dtype, device=_CUDA)
        for dtype in (torch.float32, q.dtype)
    )
    m, l, lse = (torch.full((batch, heads, q_len), torch.nan, device=_CUDA) for _ in range(3))  # noqa: E741
    state = State(acc, m, l, out, lse)
    for i, (at, tile) in enumerate(tiles):
        kernel.forward(
            QKV(q, k[:, at], v[:, at]), tile._replace(first=i == 0, last=i == len(tiles) - 1), state
        )
    if q.dtype == torch.float16 and kernel.name != "flash-4":
        return Attention(state.out, state.lse, None, None, None)
    rows = torch.full((2, batch, heads, q_len), torch.nan, device=_CUDA)
    kernel.delta(Results(state.out, state.lse, dout, dlse), rows)
    dq, dk, dv = (torch.zeros(x.shape, device=_CUDA) for x in (q, k, v))
    if len(tiles) == 1:
        # Then the kernel writes them.
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    for at, tile in tiles:
        kernel.backward(
            QKV(q, k[:, at], v[:, at]),
            Upstream(dout, rows[0], rows[1]),
            tile._replace(first=len(tiles) == 1, last=len(tiles) == 1),
            Gradients(dq, dk[:, at], dv[:, at]),
        )
    return Attention(state.out, state.lse, dq, dk, dv)


_TILES = {
    "full": (Full(), 300, 300, [300]),
    "causal": (Causal(), 512, 512, [512]),
    "causal, a rectangle and a triangle": (Causal(), 200, 333, [333]),
    "more queries than keys": (Causal(), 333, 200, [200]),
    "three tiles": (Causal(), 300, 300, [100, 111, 300]),
    "few": (Full(), 3, 5, [5]),
}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dlse"),
    [(2, 2, 64, False), (4, 2, 128, True), (3, 1, 72, True)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", _TILES)
@pytest.mark.parametrize("name", _NAMES)
def test_tiles_against_the_spec(
    name: str, case: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, dlse: bool
) -> None:
    mask, q_len, kv_len, ends = _TILES[case]
    kernel = _kernel(name, Work(_CUDA, dtype, head_dim, mask, partials="16bit"))
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(2, max(q_len, kv_len), heads + 2 * kv_heads, head_dim, generator=generator)
    packed = packed.to(_CUDA, dtype)
    q, (k, v) = packed[:, :q_len, :heads], packed[:, :kv_len, heads:].split(kv_heads, dim=2)
    dout = torch.randn(q.shape, generator=generator).to(_CUDA, dtype)
    weight = torch.randn(2, heads, q_len, generator=generator).to(_CUDA) if dlse else None
    found = _run(kernel, q, k, v, dout, weight, mask, list(pairwise([0, *ends])))
    truth = reference(
        q.cpu(), k.cpu(), v.cpu(), dout.cpu(), None if weight is None else weight.cpu(), mask=mask
    )
    # A row whose keys came in several calls is the mean of several rounded parts.
    several = 1 if len(ends) == 1 and (mask == Full() or q_len == kv_len) else 2
    for field, got in found._asdict().items():
        if got is not None:
            limit = ERROR[torch.float32] if field == "lse" else several * ERROR[dtype]
            assert relative_error(got.cpu(), getattr(truth, field)) < limit, field


_ONE_CALL = {
    "a window": SlidingWindow(100, 0),
    "a window to both sides": SlidingWindow(100, 30),
    "documents": Documents([1, 130, 381]),
    "causal documents of each batch row": Documents([[500, 12], [7, 3, 502]]) & Causal(),
    "documents under a window": Documents([130, 382]) & SlidingWindow(100, 0),
}


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", _ONE_CALL)
def test_what_flash_attention_4_computes_in_one_call(
    name: str, dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    """Twice, with the same bits."""
    mask, size, heads = _ONE_CALL[name], 512, 2
    places = ((range(size),), (range(size),))
    tiles = (mask.pieces(range(size), range(size)),)
    work = Work(_CUDA, dtype, dims[0], mask, False, tiles=tiles, places=places, v_head_dim=dims[1])
    kernel = _kernel("flash-4", work)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(2, size, heads, dim, generator=generator).to(_CUDA, dtype)
        for dim in (dims[0], dims[0], dims[1], dims[1])
    )
    weight = torch.randn(2, heads, size, generator=generator).to(_CUDA)
    found = _run(kernel, q, k, v, dout, weight, mask, [(0, size)])
    again = _run(kernel, q, k, v, dout, weight, mask, [(0, size)])
    truth = reference(q.cpu(), k.cpu(), v.cpu(), dout.cpu(), weight.cpu(), mask=mask)
    for field, got in found._asdict().items():
        if got is not None:
            limit = ERROR[torch.float32 if field == "lse" else dtype]
            assert relative_error(got.cpu(), getattr(truth, field)) < limit, field
            assert torch.equal(got, getattr(again, field)), field


@pytest.mark.parametrize("name", _NAMES)
def test_rows_of_dout_that_are_zero_keep_the_gradient_of_lse(name: str) -> None:
    kernel = _kernel(name, Work(_CUDA, torch.bfloat16, 64, Full(), forward=False, partials="16bit"))
    generator = torch.Generator().manual_seed(2)
    q, k, v, dout = (
        torch.randn(1, 256, 2, 64, generator=generator).to(_CUDA, torch.bfloat16) for _ in range(4)
    )
    dout[:, ::3] = 0
    dout[:, 1::3] *= 1e-4
    dlse = 100 * torch.randn(1, 2, 256, generator=generator).to(_CUDA)
    found = _run(kernel, q, k, v, dout, dlse, Full(), [(0, 256)])
    truth = reference(*(x.cpu() for x in (q, k, v, dout, dlse)))
    for got, want in zip(found[2:5], truth[2:5], strict=True):
        assert got is not None
        assert want is not None
        assert relative_error(got.cpu(), want) < ERROR[torch.bfloat16]


@pytest.mark.parametrize(("world_size", "partials"), [(1, "exact"), (2, "16bit"), (4, "16bit")])
@pytest.mark.parametrize("name", _NAMES)
def test_whole_calls(name: str, world_size: int, partials: str) -> None:
    case = Case(1000, heads=4, kv_heads=2, head_dim=128, dtype=torch.bfloat16, mask=Causal())
    _kernel(name, Work(_CUDA, case.dtype, case.head_dim, Causal(), partials="16bit"))
    found = attend_over_threads(
        world_size, case, device="cuda", kernel=name, partials=partials, timeout_s=60
    )
    for field, error in errors_of(found, reference(*case.inputs(), mask=case.mask)).items():
        limit = (
            ERROR[torch.float32]
            if field == "lse"
            else ERROR[case.dtype] * (1 if partials == "exact" else 2)
        )
        assert error < limit, (field, error)


def test_the_forward_repeats_itself() -> None:
    for name in _NAMES:
        work = Work(_CUDA, torch.bfloat16, 128, Causal(), partials="16bit")
        if KERNELS[name].refuses(work) is None:
            problem = speed.TileProblem(work, tokens=1024)
            first = problem.results(KERNELS[name])
            for _ in range(3):
                assert all(
                    torch.equal(x, y)
                    for x, y in zip(first, problem.results(KERNELS[name]), strict=True)
                )


def test_flash_repeats_its_backward_where_torch_is_told_to() -> None:
    work = Work(_CUDA, torch.bfloat16, 64, Causal(), forward=False, partials="16bit")
    kernel = _kernel("flash", work)
    problem = speed.TileProblem(work, tokens=2048)
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel.repeatable(False)
        first = problem.results(kernel)
        for _ in range(5):
            assert all(
                torch.equal(x, y) for x, y in zip(first, problem.results(kernel), strict=True)
            )
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_measures_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world of one all three may do the forward; every one of them is really timed, or its
    error told.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(speed, "_known", {})
    able = [
        n
        for n in ("triton", *_NAMES)
        if KERNELS[n].refuses(Work(_CUDA, torch.bfloat16, 128, Causal(), partials="16bit")) is None
    ]

    def explain(ctx: Context) -> str:
        x = torch.zeros(
            1, 2048, 4, 128, dtype=torch.bfloat16, device=ctx.device, requires_grad=True
        )
        return str(burst_rt.explain(x, x, x, causal=True, layout=ctx.layout(2048)))

    with burst_rt.init(device="cuda") as ctx:
        forward, backward = explain(ctx).split("backward:")
    if len(able) > 1:
        assert "(measured now)" in forward  # and none failed
        assert all(f"{name} " in forward for name in able)
    assert "kernel triton" in backward or "kernel flash-4" in backward
    speed._known.clear()
    with burst_rt.init(device="cuda") as ctx:
        again = explain(ctx).split("backward:")[0]
    if len(able) > 1:
        assert "(remembered for this chip)" in again
        assert again.replace("remembered for this chip", "measured now") == forward
