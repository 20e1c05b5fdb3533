"""Running a plan on tensors: two classes for each kind of program, one for each direction.

`RUNS` says which classes run which kind of program. `ring.py` has the base of all runs (`SlotRun`,
`Binding`).
"""

from functools import cache

from burst_rt.attention.execute import hybrid, ring, ring_naive
from burst_rt.attention.execute.ring import BackwardRun, Binding, ForwardRun, RunTypes
from burst_rt.errors import InternalError
from burst_rt.planning.strategies import Hybrid, Program, Ring, RingNaive

__all__ = ["RUNS", "BackwardRun", "Binding", "ForwardRun", "RunTypes", "run_types"]

# The run classes of each kind of program that a strategy makes.
RUNS: dict[type[Program], RunTypes] = {
    Ring: ring.RUNS,
    Hybrid: hybrid.RUNS,
    RingNaive: ring_naive.RUNS,
}


@cache  # a warm call asks nothing here
def run_types(program: type[Program]) -> RunTypes:
    """The classes that run a kind of program. Raises InternalError where there are none."""
    if program not in RUNS:
        raise InternalError(
            f"no class runs {program.__name__} of {program.__module__}: expected a key of RUNS in "
            f"{__name__}, got {sorted(kind.__name__ for kind in RUNS)}; add its run classes"
        )
    return RUNS[program]
