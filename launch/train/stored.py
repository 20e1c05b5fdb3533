"""The types in which a folder of transformers stores its weights, read without the weights.

transformers casts whatever it finds to the type of the model. Quantisers write integers and 8-bit
floats together with scales: cast without the scales, they are different weights.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open

__all__ = ["LOSSLESS", "PLAIN", "stored_types"]

# Names of types in safetensors: types that are cast to float32 without loss, and types whose values
# have a meaning without scales.
LOSSLESS = ("BF16", "F16", "F32")
PLAIN = (*LOSSLESS, "F64")
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def stored_types(folder: Path) -> dict[str, Sequence[str]]:
    """The tensors' names by their type; none where the folder has no files that transformers would
    read. Raises OSError, ValueError, KeyError, AttributeError or SafetensorError for files that
    cannot be read.
    """
    if (folder / _WHOLE).exists():
        files = [_WHOLE]
    elif (folder / _INDEX).exists():
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    else:
        files = []
    names = defaultdict(list)
    for file in files:
        with safe_open(folder / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is not a mapping
                names[tensors.get_slice(name).get_dtype()].append(name)
    return dict(names)
