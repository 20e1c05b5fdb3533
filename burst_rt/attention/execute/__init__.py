"""Running a plan on tensors: two classes for each kind of program, one for each direction.

The module that runs a program has the name of the module in `planning/strategies` that makes it,
and exports `RUNS`. `ring.py` has the base of all runs (`SlotRun`, `Binding`).
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

from burst_rt.attention.execute.ring import BackwardRun, Binding, ForwardRun, RunTypes
from burst_rt.errors import InternalError
from burst_rt.planning.strategies import Program

__all__ = ["BackwardRun", "Binding", "ForwardRun", "RunTypes", "run_types"]


@cache
def run_types(program: type[Program]) -> RunTypes:
    """The classes that run a kind of program. Raises InternalError where there are none."""
    made_in = program.__module__
    run_in = f"{__name__}.{made_in.rpartition('.')[2]}"
    if find_spec(run_in) is None:
        raise InternalError(
            f"{program.__name__} of {made_in} is run by the module of the same name in {__name__}: "
            f"expected {run_in} with RUNS, got no such module; write it"
        )
    found: RunTypes = import_module(run_in).RUNS
    return found
