"""The flash-4 kernel's calls, given to FlashAttention-4 itself by `make test-flash-4`.

The package compiles its kernels for tensors that have a shape and no memory, so no GPU is needed.
What the kernels compute, tests/gpu shows. The environment names the GPU: FLASH_ATTENTION_ARCH and
CUTE_DSL_ARCH.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from burst_rt import Causal, Documents, Full, Mask, SlidingWindow
from burst_rt.kernels import KERNELS, QKV, Gradients, State, Tile, Upstream, Work, flash4
from burst_rt.kernels.flash4 import Flash4Kernel
from burst_rt.kernels.vendor import PartOfTile

_GENERATION = {"sm_90": 9, "sm_100": 10}[os.environ["FLASH_ATTENTION_ARCH"]]
_TOKENS = 1024
_ALL = (range(_TOKENS),)
_MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": SlidingWindow(127, 0),
    "window to both sides": SlidingWindow(127, 30),
    "documents": Documents([[1000, 24], [1024]]) & Causal(),
    "documents under a window": Documents([1000, 24]) & SlidingWindow(127, 0),
}


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The little that is asked of a GPU while kernels are compiled."""
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (_GENERATION, 0))
    monkeypatch.setattr("torch.Tensor.pin_memory", lambda self: self)
    chip = SimpleNamespace(
        get_max_active_clusters=lambda _: 66, get_device_multiprocessor_count=lambda: 132
    )
    monkeypatch.setattr("cutlass.utils.HardwareInfo", lambda *_: chip)


def _kernel() -> Flash4Kernel:
    kernel = KERNELS["flash-4"]
    assert isinstance(kernel, Flash4Kernel)
    return kernel


def test_it_is_the_package_itself() -> None:
    found = flash4._interface()
    assert not isinstance(found, str), found
    assert all(function.__module__ == "flash_attn.cute.interface" for function in found)


def _compiled() -> int:
    """How many kernels the package has compiled."""
    from flash_attn.cute import interface

    functions = ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess")
    return sum(len(getattr(interface, name).compile_cache.cache) for name in functions)


_HEADS = [(2, 2), (4, 1)]


@pytest.mark.parametrize("heads", _HEADS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", _MASKS)
def test_calls_compile(name: str, dims: tuple[int, int], heads: tuple[int, int]) -> None:
    mask = _MASKS[name]
    (call,) = _kernel().calls(mask.pieces(*_ALL, *_ALL), mask, (_ALL, _ALL))
    _compile(call, mask, dims, heads)


@pytest.mark.parametrize("heads", _HEADS)
@pytest.mark.parametrize("name", _MASKS)
def test_sums_in_any_order_compile(name: str, heads: tuple[int, int]) -> None:
    mask = _MASKS[name]
    (call,) = _kernel().calls(mask.pieces(*_ALL, *_ALL), mask, (_ALL, _ALL))
    _compile(call, mask, (128, 128), heads, in_order=False)


@pytest.mark.parametrize("heads", _HEADS)
@pytest.mark.parametrize("dim", [8, 40, 96, 104, 136, 200, 248])
def test_other_head_dims_compile(dim: int, heads: tuple[int, int]) -> None:
    if _GENERATION == 9 or dim <= 128:
        for name in ("causal", "window to both sides"):
            mask = _MASKS[name]
            (call,) = _kernel().calls(mask.pieces(*_ALL, *_ALL), mask, (_ALL, _ALL))
            _compile(call, mask, (dim, dim), heads)


@pytest.mark.parametrize("heads", _HEADS)
@pytest.mark.parametrize(
    "call",
    [
        PartOfTile(slice(0, 100), slice(0, 100), left=0),
        PartOfTile(slice(0, 100), slice(0, 300), left=200, right=0),
        PartOfTile(slice(10, 11), slice(3, _TOKENS)),
    ],
    ids=["upper triangle", "band", "row"],
)
def test_pieces_compile(call: PartOfTile, heads: tuple[int, int]) -> None:
    _compile(call, Full(), (128, 128), heads)


def _compile(
    call: PartOfTile, mask: Mask, dims: tuple[int, int], heads: tuple[int, int],
    *, in_order: bool = True,
) -> None:  # fmt: skip
    """Has the package compile a call in both directions, if the kernel takes both."""
    kernel, places = _kernel(), (_ALL, _ALL)
    dtype = torch.float16 if dims[0] == 128 else torch.bfloat16
    work = Work(
        torch.device("cuda"), dtype, dims[0], mask, v_head_dim=dims[1], places=places,
        tiles=(mask.pieces(*_ALL, *_ALL),), grouped=heads[0] > heads[1],
    )  # fmt: skip
    tile = Tile(work.tiles[0], *places, mask, 0.1, lambda: None, True, True, in_order=in_order)
    rows = call.rows.stop - call.rows.start
    columns = call.columns.stop - call.columns.start
    with FakeTensorMode(allow_non_fake_inputs=True):

        def make(tokens: int, heads: int, dim: int) -> torch.Tensor:
            return torch.empty(2, tokens, heads, dim, dtype=dtype, device="cuda")

        k, v = (make(columns, heads[1], dim) for dim in dims)
        qkv, out = QKV(make(rows, heads[0], dims[0]), k, v), make(rows, heads[0], dims[1])
        lse = torch.empty(2, heads[0], rows, device="cuda")
        assert kernel.refuses(work) is None
        found, of_rows = kernel._call_forward(qkv, call, tile, State(out, lse, lse, out, lse))
        assert found is out
        assert of_rows is lse
        if kernel.refuses(work._replace(forward=False)) is None:
            grads = Gradients(*(torch.empty_like(x) for x in qkv))
            upstream = Upstream(torch.empty_like(out), lse, lse)
            written = kernel._call_backward(qkv, upstream, call, tile, grads)
            assert all(x is y for x, y in zip(written, grads, strict=True))
        else:
            assert (_GENERATION, dims) in ((10, (256, 256)), (9, (192, 128)))
    assert _compiled()


def test_the_package_takes_all_head_dims_that_are_taken() -> None:
    from flash_attn.cute.interface import _validate_head_dims

    kernel, taken = _kernel(), 0
    work: Any = Work(torch.device("cuda"), torch.bfloat16, 8, Full(), partials="16bit")
    for dim in range(8, 272, 8):
        for of_v in range(8, 272, 8):
            if kernel.refuses(work._replace(head_dim=dim, v_head_dim=of_v)) is None:
                _validate_head_dims(dim, of_v, _GENERATION, 8)
                taken += 1
    assert taken == {9: 33, 10: 18}[_GENERATION]
