"""Compares anybody's context parallelism with one process in float64.

    python -m burst_rt.conformance ADAPTER ...

An adapter is a module with a function for attention, one for models, or both (docs/conformance.md).
What is here needs no torch and nothing of burst_rt's runtime: only the adapter of burst_rt does.
"""

from __future__ import annotations

from burst_rt.conformance.cases import AttentionCase, ModelCase, NotOffered, all_cases

__all__ = ["AttentionCase", "ModelCase", "NotOffered", "all_cases"]
