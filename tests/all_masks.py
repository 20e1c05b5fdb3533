"""Every mask with every strategy, layout, world and length, forward and backward.

`make test-masks`: on the CPU, where a test is all worlds and lengths of one mask, strategy and kind
of layout; hours, of which `-k "documents and hybrid"` is a part. With TRITON_INTERPRET=1 by the
Triton kernels under the interpreter, a thousand times slower: there every two of these meet in some
case, and a test is one case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from mask_cases import FACTORS, Row, all_pairs, assert_row

_MASKS, _STRATEGIES, _KINDS, _WORLDS, _LENGTHS, _, _ = FACTORS


def _tests() -> Iterator[tuple[str, list[Row]]]:
    """Each test's name and cases."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        # burst-untiled brings a kernel of its own.
        strategies = [name for name in _STRATEGIES if name != "burst-untiled"]
        lists = [_MASKS, strategies, _KINDS, _WORLDS, _LENGTHS, [torch.float32], ["triton"]]
        for row in all_pairs(lists):
            yield " ".join(map(str, row[:5])), [row]
        return
    for mask, strategy, kinds in product(_MASKS, _STRATEGIES, _KINDS):
        rows = [
            Row(mask, strategy, kinds, world, lengths, torch.float32, "cpu")
            for world, lengths in product(_WORLDS, _LENGTHS)
        ]
        yield f"{mask}-{strategy}-{'-'.join(kinds)}", [row for row in rows if row.possible]


_TESTS = dict(_tests())


@pytest.mark.parametrize("name", _TESTS)
def test_combinations(name: str) -> None:
    for row in _TESTS[name]:
        try:
            assert_row(row)
        except AssertionError as error:
            raise AssertionError(f"{row}: {error}") from error
