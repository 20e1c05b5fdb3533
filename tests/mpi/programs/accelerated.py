"""Rank program: examples/accelerated.py with FSDP2, for which accelerate wants to see GPUs."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

if __name__ == "__main__":
    # All that is not as it would be on GPUs: what follows is accelerate's own, on CPUs and gloo.
    PartialState(cpu=not torch.cuda.is_available()).distributed_type = DistributedType.MULTI_GPU
    example = Path(__file__).parents[3] / "examples" / "accelerated.py"
    runpy.run_path(str(example), run_name="__main__")
