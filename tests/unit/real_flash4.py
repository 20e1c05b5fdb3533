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


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 40), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", _MASKS)
def test_calls_compile(name: str, dims: tuple[int, int], heads: tuple[int, int]) -> None:
    kernel, mask = _kernel(), _MASKS[name]
    dtype = torch.float16 if dims[0] == 128 else torch.bfloat16
    places = (_ALL, _ALL)
    work = Work(
        torch.device("cuda"), dtype, dims[0], mask, v_head_dim=dims[1], places=places,
        tiles=(mask.pieces(*_ALL, *_ALL),), grouped=heads[0] > heads[1],
    )  # fmt: skip
    (call,) = kernel.calls(work.tiles[0], mask, places)
    tile = Tile(work.tiles[0], *places, mask, 0.1, lambda: None, True, True)
    with FakeTensorMode(allow_non_fake_inputs=True):

        def make(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(2, _TOKENS, heads, dim, dtype=dtype, device="cuda")

        qkv = QKV(make(heads[0], dims[0]), make(heads[1], dims[0]), make(heads[1], dims[1]))
        out = make(heads[0], dims[1])
        lse = torch.empty(2, heads[0], _TOKENS, device="cuda")
        assert kernel.refuses(work) is None
        found, of_rows = kernel._call_forward(qkv, call, tile, State(out, lse, lse, out, lse))
        assert found is out
        assert of_rows is lse
        if kernel.refuses(work._replace(forward=False)) is None:
            grads = Gradients(*(torch.empty_like(x) for x in qkv))
            upstream = Upstream(make(heads[0], dims[1]), lse, lse)
            written = kernel._call_backward(qkv, upstream, call, tile, grads)
            assert all(x is y for x, y in zip(written, grads, strict=True))
        else:
            refused = (10, (256, 256)), (9, (72, 40)), (9, (192, 128))
            assert (_GENERATION, dims) in refused
    assert _compiled()


def test_it_takes_the_head_dims_that_the_package_takes() -> None:
    from flash_attn.cute.interface import _validate_head_dims

    kernel = _kernel()
    work: Any = Work(torch.device("cuda"), torch.bfloat16, 8, Full(), partials="16bit")
    for dim in range(8, 272, 8):
        for of_v in range(8, 272, 8):
            try:
                _validate_head_dims(dim, of_v, _GENERATION, 8)
                takes = True
            except AssertionError:
                takes = False
            reason = kernel.refuses(work._replace(head_dim=dim, v_head_dim=of_v))
            assert (reason is None) == takes, (dim, of_v, reason)
