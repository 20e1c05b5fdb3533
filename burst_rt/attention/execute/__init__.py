"""Running a plan on tensors: one class for each kind of program and direction."""

from typing import NamedTuple

from burst_rt.attention.execute.hybrid import HybridBackwardRun, HybridForwardRun
from burst_rt.attention.execute.ring import BackwardRun, Binding, ForwardRun
from burst_rt.attention.execute.ring_naive import RingNaiveBackwardRun, RingNaiveForwardRun
from burst_rt.planning.strategies import Hybrid, Program, Ring, RingNaive

__all__ = ["RUNS", "BackwardRun", "Binding", "ForwardRun", "RunTypes"]


class RunTypes(NamedTuple):
    """The two classes that run one kind of program."""

    forward: type[ForwardRun]
    backward: type[BackwardRun]


RUNS: dict[type[Program], RunTypes] = {
    Ring: RunTypes(ForwardRun, BackwardRun),
    Hybrid: RunTypes(HybridForwardRun, HybridBackwardRun),
    RingNaive: RunTypes(RingNaiveForwardRun, RingNaiveBackwardRun),
}
