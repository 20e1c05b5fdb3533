"""The layout that is taken for packed batches, by `make test-all`: 200 seeded mixes."""

from __future__ import annotations

import pytest
from mixes import check_fastest_layout, mix


@pytest.mark.parametrize("seed", range(200))
def test_the_fastest_layout_is_no_slower_than_a_plain_one(seed: int) -> None:
    """Of up to 16 ranks; every eighth one of up to 64, which takes longer."""
    check_fastest_layout(mix(seed, longest=65536, largest=16 if seed % 8 else 64))
