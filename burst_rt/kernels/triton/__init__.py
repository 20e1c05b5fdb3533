"""The project's own tile kernels, in Triton, for NVIDIA GPUs (and, slowly, for CPU tensors under
Triton's interpreter).

Importing this package does not import triton: that happens with the first tile.
"""

from burst_rt.kernels.triton.kernel import TritonKernel

__all__ = ["TritonKernel"]
