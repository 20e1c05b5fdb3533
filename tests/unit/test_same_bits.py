"""With all-to-all a rank computes whole heads as one rank alone does, to the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from covering import drawn
from drawn_masks import drawn_mask
from hypothesis import strategies
from worlds import Case, Inputs, attend

import burst_rt
from burst_rt import BlockSparse, Causal, Documents

_FLOATS = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """With more, the products of a lone head are spread over threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _assert_same_bits(case: Case, world_size: int, inputs: Inputs | None = None) -> None:
    given = inputs or case.inputs()
    alone, spread = (
        burst_rt.run_local(ranks, partial(attend, case=case.but(strategy=strategy), inputs=given))[
            0
        ]
        for ranks, strategy in ((1, "auto"), (world_size, "all-to-all"))
    )
    names = ("out", "lse", "dq", "dk", "dv")  # the gradient of sinks is a sum over ranks
    for name, x, y in zip(names, alone, spread, strict=False):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y), (name, world_size, case)


@drawn(15, 300, seed=strategies.integers(0, 2**32))
def test_drawn_calls_have_the_same_bits(seed: int) -> None:
    """Any mask, type, layout and option, with one kv head a rank and with more."""
    chance = random.Random(seed)
    q_len = chance.choice([1, 2, 30, 64, 97, 300])
    kv_len = q_len if chance.random() < 0.7 else chance.choice([1, 20, 70, 700])
    world_size, batch = chance.choice([2, 3, 4]), chance.choice([1, 2])
    kv_heads = world_size * chance.choice([1, 1, 2, 3])
    case = Case(
        q_len,
        kv_len,
        batch=batch,
        heads=kv_heads * chance.choice([1, 2]) if kv_heads < 10 else kv_heads,
        kv_heads=kv_heads,
        head_dim=chance.choice([8, 24, 64]),
        v_head_dim=chance.choice([None, 16]),
        mask=drawn_mask(chance, q_len, kv_len, batch).mask,
        kind=chance.choice(["zigzag", "contiguous", "striped"]),
        dtype=chance.choice(_FLOATS),
        softcap=chance.choice([None, None, 5.0]),
        alibi=chance.choice(["", "", "heads"]),
        sinks=chance.random() < 0.3,
        seed=seed % 1000,
    )
    _assert_same_bits(case, world_size)


@pytest.mark.parametrize("dtype", _FLOATS)
def test_a_lone_head_and_a_document_of_one_token(dtype: torch.dtype) -> None:
    """What torch computes as a matrix and a vector for one head, and otherwise for several."""
    mask = Causal() & Documents([1, 999])
    case = Case(1000, heads=4, head_dim=32, mask=mask, dtype=dtype)
    _assert_same_bits(case, 4)
    _assert_same_bits(case.but(softcap=5.0), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_keys_and_a_gradient_of_lse_alone(dtype: torch.dtype) -> None:
    """What is computed with a channel more: products of few keys, and rows whose dout is 0."""
    seen = torch.rand(25, 25, generator=torch.Generator().manual_seed(0)) < 0.3
    mask = BlockSparse(seen, 4) & Documents([31, 3, 33, 9, 18, 3])
    _assert_same_bits(Case(97, heads=12, head_dim=24, dtype=dtype, mask=mask), 4)
    case = Case(97, heads=12, head_dim=24, dtype=dtype, mask=Causal())
    inputs = case.inputs()
    _assert_same_bits(case, 4, inputs._replace(dout=torch.zeros_like(inputs.dout)))
