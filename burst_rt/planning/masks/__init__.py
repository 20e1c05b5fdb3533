"""import burst_rt.planning.masks: which query sees which key.

`base` says what a mask is, `pairs` combines masks; `spans` holds what rows of queries see;
`positions`, `documents`, `tree`, `blocks` and `function` hold the masks.
"""

from burst_rt.planning.masks.base import (
    MASKS,
    Cells,
    Mask,
    Relation,
    Rule,
    positions_of,
    sees_few,
    spans_of,
    structured,
)
from burst_rt.planning.masks.blocks import BlockSparse, SameKeys
from burst_rt.planning.masks.columns import columns_seen, in_place_of
from burst_rt.planning.masks.documents import Documents
from burst_rt.planning.masks.function import Function
from burst_rt.planning.masks.pairs import Both, Either
from burst_rt.planning.masks.pieces import MOST_SPANS, WIDEST_BAND, Piece, Shape
from burst_rt.planning.masks.positions import Causal, Chunked, First, Full, Prefix, SlidingWindow
from burst_rt.planning.masks.spans import Positions, Spans
from burst_rt.planning.masks.tree import PrefixTree, branches_of

__all__ = [
    "MASKS",
    "MOST_SPANS",
    "WIDEST_BAND",
    "BlockSparse",
    "Both",
    "Causal",
    "Cells",
    "Chunked",
    "Documents",
    "Either",
    "First",
    "Full",
    "Function",
    "Mask",
    "Piece",
    "Positions",
    "Prefix",
    "PrefixTree",
    "Relation",
    "Rule",
    "SameKeys",
    "Shape",
    "SlidingWindow",
    "Spans",
    "branches_of",
    "columns_seen",
    "in_place_of",
    "positions_of",
    "sees_few",
    "spans_of",
    "structured",
]
