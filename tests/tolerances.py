"""All tolerances, with their reasons.

Errors are relative, in the Frobenius norm, against the float64 spec on the same (rounded) inputs.
"""

from __future__ import annotations

import torch

__all__ = [
    "BALANCE",
    "ERROR",
    "LOSSES",
    "LOSSES_16BIT",
    "LOSSES_OF_TRAINERS",
    "PRODUCTS",
    "RATIO",
    "ROUNDING",
    "SINKS",
]

# The unit roundoff of a type is half the distance from 1 to the next number.
ROUNDING = {
    torch.float64: 1.2e-16,
    torch.float32: 6.0e-8,
    torch.float16: 4.9e-4,
    torch.bfloat16: 3.9e-3,
}

# The largest errors of out, lse, dq, dk, dv, in worlds of any size.
ERROR = {
    # Measured 5e-16; 2e-15 with gradients of rows that see a single key, which are differences of
    # equal numbers.
    torch.float64: 5e-15,
    # Measured 2e-7 to 5e-7; 2e-6 on 1 to 3 tokens, where there are only rows that
    # see a single key.
    torch.float32: 4e-6,
    # Sums are float32. Only out (and with it delta) and the gradients are rounded, once each:
    # measured 0.5 to 1 roundoff.
    torch.float16: 1.5 * ROUNDING[torch.float16],
    torch.bfloat16: 1.5 * ROUNDING[torch.bfloat16],
}

# The largest errors of the gradient of sinks. With 16-bit inputs it is made from delta, and so from
# an out that was rounded; it is a sum of both signs, in which roundings count for more where there
# are few rows: measured 0.1 to 1.7 roundoffs.
SINKS = ERROR | {dtype: 3 * ROUNDING[dtype] for dtype in (torch.float16, torch.bfloat16)}

# The largest errors of a GPU kernel's float32 sums of 16-bit inputs. Tensor cores multiply 16-bit
# numbers, so probabilities and their gradients are rounded to the inputs' type first: one rounding
# in every product. An emulation in float64, with head sizes 16 to 128, 70 to 1,000 tokens and
# grouped heads, has 0.40 to 0.56 roundoffs in dq, dk, dv. Where the sum is rounded too, as at the
# end of a call and in vendors' kernels, there are 0.59 to 0.79, and 0.56 to 0.60 in out, which is
# inside ERROR.
PRODUCTS = {dtype: ROUNDING[dtype] for dtype in (torch.float16, torch.bfloat16)}

# The project promises that its error in float32 is at most this many times the error of torch's own
# attention in one process on the same inputs. Measured 0.7 to 1.2: the order of adding up differs.
RATIO = 1.5

# The project promises for causal zigzag, from 1,000 tokens a rank on, that the busiest rank
# computes at most this many times the score cells of the idlest rank.
BALANCE = 1.02

# The project promises that the losses of 20 steps in float32, with the model spread in any way, are
# those of one process within this, relative. Measured 2.0e-7.
LOSSES = 1e-4
# And what transformers' Trainer and TRL's log in 20 steps of float32: losses, gradient norms, token
# accuracy. Measured 2.4e-7 for losses and 2.0e-6 for gradient norms.
LOSSES_OF_TRAINERS = 1e-5
# The same in 6 steps under bfloat16 autocast, where results of tiles are rounded before they are
# added up. Over ranks the gradients of logits are rounded before they are divided by the number of
# labels, on one process after. Measured 7.7e-5 for losses and 4.3e-3 for gradient norms; to round
# them at 7 times their size does as much on one process, 5.9e-5 and 5.0e-3. A roundoff is 2**-8.
LOSSES_16BIT = 2.0**-7
