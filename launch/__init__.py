"""The command `burst-rt`: jobs under MPI, training and evaluation, benchmarks, the doctor.

This file imports nothing: every rank passes through this package before its program starts.
"""

from __future__ import annotations

__all__: list[str] = []
