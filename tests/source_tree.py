"""Makes `benchmarks` importable, which no installed copy has.

It is found by its file: the folder above must stay off the path, where `scheduler` and others would
be importable by those names.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "benchmarks", Path(__file__).resolve().parents[1] / "benchmarks" / "__init__.py"
)
assert _spec is not None
assert _spec.loader is not None
_benchmarks = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("benchmarks", _benchmarks)
_spec.loader.exec_module(_benchmarks)
