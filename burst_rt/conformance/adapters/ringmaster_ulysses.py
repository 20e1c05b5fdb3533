"""axolotl-ringmaster's adapter for Ulysses: all-to-all around transformers' sdpa."""

from __future__ import annotations

from typing import Any

import ringmaster
import torch

from burst_rt.conformance.adapters.ringmaster_ring import ringmaster_model
from burst_rt.conformance.cases import ModelCase


def model(case: ModelCase, model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`Backend.ULYSSES`; the rest is as for the ring."""
    return ringmaster_model(case, model, batch, ringmaster.Backend.ULYSSES)
