"""The first call of a vector function, which MKL gets wrong now and then where several threads make
it at once (burst_rt/context.py).
"""

from __future__ import annotations

from forked import Forked

_PROGRAM = """
import threading
import torch

called, makers = [], set()
for name in ("exp", "exp2", "log", "log1p", "log2", "sqrt", "tanh", "sin", "cos"):
    def seen(x, name=name, function=getattr(torch, name)):
        called.append((name, x.dtype))
        makers.add(threading.current_thread().name)
        return function(x)
    setattr(torch, name, seen)

import burst_rt.local
assert not called, "an import has called MKL, which reads its settings then"
burst_rt.run_local(4, lambda ctx: ctx.rank)
assert len(called) == len(set(called)) == 18, called
assert len(makers) == 1, makers
print("each was called once")
"""


def test_one_thread_makes_it_before_ranks_are_threads() -> None:
    python = Forked("import torch")
    done = python.run(_PROGRAM)
    python.close()
    assert done.stdout == "each was called once\n", done.stderr
