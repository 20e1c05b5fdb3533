"""The first call of a vector function, which MKL gets wrong now and then where several threads make
it at once (burst_rt/context.py).
"""

from __future__ import annotations

from forked import Forked

_PROGRAM = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

called = set()

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        called.update((func.overloadpacket.__name__, x.dtype) for x in args if torch.is_tensor(x))
        return func(*args, **kwargs or {})

with Seen():
    import burst_rt.local
for name in ("exp", "exp2", "log", "log1p", "log2", "sqrt", "tanh", "sin", "cos"):
    for dtype in (torch.float32, torch.float64):
        assert (name, dtype) in called, (name, dtype)
print("each was called")
"""


def test_one_thread_makes_it_before_ranks_are_threads() -> None:
    python = Forked("import torch")
    done = python.run(_PROGRAM)
    python.close()
    assert done.stdout == "each was called\n", done.stderr
