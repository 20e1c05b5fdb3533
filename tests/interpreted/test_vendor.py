"""What the vendors' kernels take from the project's own: delta, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from spec import relative_error
from tolerances import ERROR

from burst_rt.kernels import KERNELS, Kernel, Results
from burst_rt.kernels.triton import TritonKernel


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("name", ["cudnn", "flash", "flash-4"])
def test_delta_is_one_kernel(name: str, dlse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    delta = TritonKernel.delta

    def spied(self: TritonKernel, *args: object) -> None:
        calls.append(self)
        delta(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TritonKernel, "delta", spied)
    generator = torch.Generator().manual_seed(1)
    out, dout = (
        torch.randn(2, 37, 4, 24, generator=generator).to(torch.bfloat16) for _ in range(2)
    )
    lse, of_lse = (torch.randn(2, 4, 37, generator=generator) for _ in range(2))
    lse[:, :, 3] = -torch.inf  # it saw no key
    out[:, 3] = 0.0
    results = Results(out, lse, dout, of_lse if dlse else None)
    rows, plain = torch.full((2, 2, 2, 4, 37), torch.nan)
    KERNELS[name].delta(results, rows)
    assert len(calls) == 1
    Kernel.delta(KERNELS[name], results, plain)
    assert torch.equal(rows[0], plain[0])
    assert relative_error(rows[1], plain[1].double()) < ERROR[torch.float32]
