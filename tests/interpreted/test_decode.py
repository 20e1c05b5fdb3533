"""The decode kernels against the spec: splits of keys, spans, softcap, sizes, types.

Interpreted on a CPU, or compiled on a GPU.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from decodes import CASES, decode, spans_of
from spec import relative_error
from tolerances import ERROR

import burst_rt
from burst_rt.kernels import KERNELS, QKV
from burst_rt.kernels.decode import Partial, SeenColumns, decode_plainly, lowest
from burst_rt.kernels.triton.tables import table_of_decode

_DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
# Worlds and types; the cases take turns.
_MIXES = ((1, torch.float32), (2, torch.bfloat16), (3, torch.float16), (2, torch.float32))


@pytest.mark.skipif(_DEVICE.type == "cuda", reason="ranks that share a GPU need another transport")
@pytest.mark.parametrize("name", CASES)
def test_over_ranks(name: str) -> None:
    world, dtype = _MIXES[[*CASES].index(name) % len(_MIXES)]
    case = replace(CASES[name], dtype=dtype)
    outs = burst_rt.run_local(world, partial(decode, case=case), kernel="triton")
    assert relative_error(outs[0], case.truth()) < ERROR[dtype]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(
    ("length", "head_dim"), [(1, 16), (15, 40), (16, 16), (17, 128), (100, 40), (333, 16)]
)
def test_parts_are_those_of_plain_products(length: int, head_dim: int) -> None:
    """out and lse themselves."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(2, 3, 12, head_dim, generator=generator)
    k, v = (torch.randn(2, length, 2, head_dim, generator=generator) for _ in range(2))
    cells = torch.rand(2, 3, length, generator=generator) > 0.3
    cells[1, 2] = False  # a row that sees nothing
    seen, softcap = SeenColumns(spans_of(cells), length), 1.5 if length % 2 else None
    parts = []
    for kernel in (KERNELS["triton"], None):
        rows = (2, 12, 3)
        sizes = (*rows, head_dim), rows
        dtype = torch.float64 if kernel is None else torch.float32
        into = Partial(
            *(torch.full(size, torch.nan, dtype=dtype, device=_DEVICE) for size in sizes)
        )
        some = QKV(*(x.to(_DEVICE) for x in (q, k, v)))
        if kernel is None:
            wide = QKV(*(x.double() for x in some))
            decode_plainly(wide, seen, 0.3, softcap, into)
        else:
            kernel.decode(some, seen, 0.3, softcap, into)
        parts.append(into)
    got, truth = parts
    assert relative_error(got.out, truth.out) < ERROR[torch.float32]
    assert got.lse[1, :, 2].eq(lowest(got.lse)).all()  # has seen no key
    got.lse[1, :, 2] = truth.lse[1, :, 2] = 0.0
    assert relative_error(got.lse, truth.lse) < ERROR[torch.float32]


def test_the_layers_of_a_step_share_a_table() -> None:
    cells = torch.ones(2, 1, 9, dtype=torch.bool)
    cells[1, 0, :4] = False
    seen = SeenColumns(spans_of(cells), 9)
    table = table_of_decode(seen, _DEVICE)
    assert table_of_decode(seen, _DEVICE).seen is table.seen
    assert table.seen.tolist() == [0, 9, 4, 9, 0, 9, 4, 9]
    assert (table.width, table.longest, table.by_row) == (1, 9, 1)
