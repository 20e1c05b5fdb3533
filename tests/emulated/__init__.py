"""An emulated GPU: torch's device "cuda" in the host's memory, with streams that keep books.

torch believes that it has GPUs. Their tensors are the host's, their operators are the CPU's, and
all that torch's dispatcher, autograd and modules do is torch's own: tensors of two devices do not
mix, autograd runs the backward in a thread of the device, and `.to("cuda")` copies. Work is done
when it is put on a stream. What order a GPU would have is kept in books: work that no event or wait
of the host puts after what it needs raises `Race` (`books.py`), and so does work on memory that was
given back while another stream may still use it. Messages over NCCL arrive when they arrive, and
work that needs them is done then, by a thread of the devices (`nccl.py`); Gloo carries torch's
collectives (`collectives.py`). Torch's operators step in for Triton's kernels; or Triton starts its
own, and its interpreter, or a stand-in for Gluon, runs them (`triton.py`), which takes far longer.

So a program that passes here does not mix devices, does not read what is not there yet, and calls
nothing that the stand-ins lack. How long anything takes, and what CUDA and NCCL refuse, is not seen
here.

`on_start` on PYTHONPATH does all this to every Python of a job (`standin.emulated_gpus`):

EMULATED_LIBRARY  gpu.cpp, compiled
EMULATED_GPUS     how many GPUs there are
EMULATED_TRITON   if set, kernels are Triton's own
EMULATED_REFUSES  if set, and torch's operators step in, they refuse what Triton's kernels refuse
EMULATED_LAG_S    how long they do nothing now and then, so that what does not wait is too early
"""
