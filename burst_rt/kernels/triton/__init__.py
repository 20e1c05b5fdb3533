"""The project's own tile kernels, in Triton, for NVIDIA GPUs.

Under Triton's interpreter they also run, slowly, on CPU tensors. Importing this package does not
import triton: the first tile does.
"""

from burst_rt.kernels.triton.kernel import TritonKernel

__all__ = ["TritonKernel"]
