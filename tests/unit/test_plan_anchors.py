"""Published figures beside the planner's forecasts: the errors are what they are said to be."""

from __future__ import annotations

import pytest

from benchmarks.anchors import Anchor, anchors
from benchmarks.paper import FITTED

# Points of a percent by which an error may differ from the one that is told.
_BAND = 0.5


@pytest.mark.parametrize("anchor", list(anchors()), ids=lambda anchor: anchor.what)
def test_errors_are_those_that_are_told(anchor: Anchor) -> None:
    error = 100 * (anchor.forecast() / anchor.published - 1)
    assert error == pytest.approx(anchor.error_percent, abs=_BAND)


def test_each_figure_has_a_source_and_none_is_fitted() -> None:
    table = list(anchors())
    assert len({anchor.what for anchor in table}) == len(table) > 20
    assert all(anchor.source and anchor.published > 0 for anchor in table)
    fitted = [f"{tokens:,} tokens" for tokens in FITTED]
    assert not any("LLaMA-7B" in each.what and each.what.split(", ")[2] in fitted for each in table)


def test_all_are_forecast_within_a_tenth() -> None:
    assert max(abs(anchor.error_percent) for anchor in anchors()) < 10
