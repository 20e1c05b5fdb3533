"""All tolerances, with their reasons. Errors are relative, in the Frobenius norm, against the
float64 spec on the same (rounded) inputs.
"""

from __future__ import annotations

import torch

__all__ = ["BALANCE", "ERROR", "PRODUCTS", "RATIO", "ROUNDING"]

# Unit roundoff of a type: half the distance from 1 to the next number.
ROUNDING = {
    torch.float64: 1.2e-16,
    torch.float32: 6.0e-8,
    torch.float16: 4.9e-4,
    torch.bfloat16: 3.9e-3,
}

# What out, lse, dq, dk, dv may be off by, whatever the world.
ERROR = {
    # Measured 5e-16, with gradients of rows that see a single key 2e-15: they are differences of
    # equal numbers.
    torch.float64: 5e-15,
    # Measured 2e-7 to 5e-7; 2e-6 on 1 to 3 tokens, where rows that see a single key are all there
    # is.
    torch.float32: 4e-6,
    # Sums are float32, so what is left is rounding out (and with it delta) and the gradients once
    # each: measured 0.5 to 1 roundoff.
    torch.float16: 1.5 * ROUNDING[torch.float16],
    torch.bfloat16: 1.5 * ROUNDING[torch.bfloat16],
}

# What a GPU kernel's float32 sums of 16-bit inputs may be off by. Tensor cores multiply 16-bit
# numbers, so probabilities and their gradients are rounded to the inputs' type first: one rounding
# in every product. Emulated in float64, with head sizes 16 to 128, 70 to 1,000 tokens, grouped
# heads: 0.40 to 0.56 roundoffs in dq, dk, dv. (With the sum rounded too, as at the end of a call
# and in vendors' kernels, 0.59 to 0.79, and 0.56 to 0.60 in out: inside ERROR.)
PRODUCTS = {dtype: ROUNDING[dtype] for dtype in (torch.float16, torch.bfloat16)}

# In float32 the error may be this many times what torch's own attention in one process has on the
# same inputs: the project's promise. Measured 0.7 to 1.2: another order of adding up.
RATIO = 1.5

# Score cells computed by the busiest rank over those of the idlest, from 1,000 tokens a rank on:
# the project's promise for causal zigzag.
BALANCE = 1.02
