"""The examples of sparse attention on the ranks of an MPI job: each rank's largest errors, as JSON,
in the folder `args[0]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from example_checks import CHECKS

import burst_rt

torch.set_num_threads(1)
with burst_rt.init(timeout_s=60) as ctx:
    errors = {name: check(ctx) for name, check in CHECKS.items()}
    (Path(sys.argv[1]) / f"{ctx.rank}.json").write_text(json.dumps(errors), encoding="utf-8")
