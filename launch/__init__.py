"""The command `burst-rt`: starting jobs under MPI, the training and evaluation jobs, benchmarks and
the doctor.

Nothing is imported here: every rank passes through this package before its program starts.
"""

from __future__ import annotations

__all__: list[str] = []
