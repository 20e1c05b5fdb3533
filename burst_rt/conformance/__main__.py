"""The command `python -m burst_rt.conformance`."""

from __future__ import annotations

import os

# The ranks are forks of this process, so no library may start threads in it.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
# Nor may one start CUDA when it asks for GPUs.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

from burst_rt.conformance.command import command  # noqa: E402

if __name__ == "__main__":
    command(prog_name="python -m burst_rt.conformance")
