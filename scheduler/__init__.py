"""The scheduler: task graphs, the engine that runs them, policies, traces, the verifier and the
simulator. Standard library only.
"""

from burst_rt.scheduler.engine import (
    Abort,
    Engine,
    Event,
    Finish,
    Instruction,
    Issue,
    PeerLost,
    Schedule,
    State,
    TaskDone,
    TaskFailed,
)
from burst_rt.scheduler.faults import Faults, Loss, Rehearsal, Stall, rehearse, verdict
from burst_rt.scheduler.graph import (
    COMPUTE,
    CONTROL,
    DEVICE_LANES,
    HOST_LANES,
    NCCL_LANES,
    NETWORK,
    Buffer,
    Cost,
    Graph,
    GraphBuilder,
    Lane,
    Message,
    Op,
    Operation,
    Part,
    Task,
)
from burst_rt.scheduler.hardware import Hardware, load_hardware
from burst_rt.scheduler.loop import Driver, run
from burst_rt.scheduler.payload import BusyPart, EmptyPart, reference
from burst_rt.scheduler.policy import Policy, critical_path, program_order
from burst_rt.scheduler.simulate import Deadlock, RankTime, Rotated, Simulated, simulate
from burst_rt.scheduler.trace import Idle, Span, Trace, Wait, exposed, overlap, waits
from burst_rt.scheduler.verify import check_graph, check_messages, check_world, match_messages

__all__ = [
    "COMPUTE", "CONTROL", "DEVICE_LANES", "HOST_LANES", "NCCL_LANES", "NETWORK",
    "Abort", "Buffer", "BusyPart", "Cost", "Deadlock", "Driver", "EmptyPart", "Engine", "Event",
    "Faults", "Finish", "Graph",
    "GraphBuilder", "Hardware", "Idle", "Instruction", "Issue", "Lane", "Loss", "Message", "Op",
    "Operation",
    "Part", "PeerLost", "Policy", "RankTime",
    "Rehearsal", "Rotated", "Schedule", "Simulated", "Span", "Stall", "State", "Task", "TaskDone",
    "TaskFailed", "Trace", "Wait",
    "check_graph", "check_messages", "check_world", "critical_path", "exposed", "load_hardware",
    "match_messages", "overlap",
    "program_order", "reference", "rehearse", "run", "simulate", "verdict", "waits",
]  # fmt: skip
