"""Every mask with every strategy, layout, world and length, forward and backward.

`make test-masks`: on the CPU, or with TRITON_INTERPRET=1 by the Triton kernels under the
interpreter. A test is all worlds and lengths of one mask, strategy and kind of layout. Both runs
take hours; `-k "documents and hybrid"` is a part of them.
"""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
from mask_cases import FACTORS, Row, assert_row
from mask_truths import truth_of

_MASKS, _STRATEGIES, _KINDS, _WORLDS, _LENGTHS, _, _ = FACTORS
_KERNEL = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "cpu"


@pytest.mark.parametrize("kinds", _KINDS, ids="-".join)
@pytest.mark.parametrize("strategy", _STRATEGIES)
@pytest.mark.parametrize("mask", _MASKS)
def test_every_combination(mask: str, strategy: str, kinds: tuple[str, str]) -> None:
    if strategy == "burst-untiled" and _KERNEL == "triton":
        pytest.skip("burst-untiled brings a kernel of its own")
    for world, lengths in product(_WORLDS, _LENGTHS):
        row = Row(mask, strategy, kinds, world, lengths, torch.float32, _KERNEL)
        if truth_of(mask, row.sizes._replace(batch=1)) is None:
            continue
        try:
            assert_row(row)
        except AssertionError as error:
            raise AssertionError(f"{row}: {error}") from error
