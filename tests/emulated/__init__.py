"""An emulated GPU: torch's device "cuda" in the host's memory, with streams that keep books.

torch believes that it has GPUs. Their tensors are the host's, their operators are the CPU's, and
all that torch's dispatcher, autograd and modules do is torch's own: tensors of two devices do not
mix, autograd runs the backward in a thread of the device, and `.to("cuda")` copies. Work is done
when it is put on a stream. What order a GPU would have is kept in books: work that no event or wait
of the host puts after what it needs raises `Race` (`books.py`), and so does work on memory that was
given back while another stream may still use it. Messages of CuPy's NCCL arrive when they arrive
(`nccl.py`). Triton's kernels are replaced by torch's operators.

So a program that passes here does not mix devices, does not read what is not there yet, and calls
nothing that the stand-ins lack. What kernels compute, how long anything takes, and what CUDA and
NCCL refuse is not seen here.

`on_start` on PYTHONPATH does all this to every Python of a job; `environment` gives the variables.
"""
