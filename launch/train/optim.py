"""How weights move: AdamW, warm-up and cosine, one flat buffer of gradients, clipping by their
global norm.

For: weights that every rank holds in full and updates alike. Not for: sharded optimizer states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["MOMENTS", "FlatGradients", "learning_rate", "make_optimizer"]

# AdamW's tensors of state, one of each a parameter.
MOMENTS = ("exp_avg", "exp_avg_sq")
# The cosine ends at this part of the peak.
_FLOOR = 0.1


def learning_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Rate of step `step` (from 0): linear to `peak` over `warmup` steps, then half a cosine down
    to a tenth of it.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: nn.Module, *, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (0.9, 0.95) whose weight decay takes matrices only; the rate is set anew for each
    step.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    # The state is made now, not at the first step, so that every rank has tensors to receive a
    # checkpoint into.
    for parameter in (*matrices, *vectors):
        moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return optimizer


class FlatGradients:
    """All gradients of a model as one fp32 tensor, `flat`, so that one reduction carries them.

    Each parameter's `.grad` is a view into it, which backward adds to in place; so never set a
    gradient to None, call `zero()`.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=torch.float32, device=parameters[0].device
        )
        offset = 0
        for parameter in parameters:
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def zero(self) -> None:
        self.flat.zero_()

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before."""
        norm: Tensor = torch.linalg.vector_norm(self.flat)
        self.flat.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
