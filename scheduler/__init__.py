"""The scheduler: task graphs, the engine that runs them, policies, traces and the verifier. Pure,
standard library only. The simulator stands beside it, in `burst_rt.scheduler.simulator`.
"""

from burst_rt.scheduler.engine import (
    Abort,
    Engine,
    Event,
    Finish,
    Instruction,
    Issue,
    PeerGone,
    Schedule,
    State,
    TaskDone,
    TaskFailed,
)
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
from burst_rt.scheduler.loop import Driver, run
from burst_rt.scheduler.policy import Policy, critical_path, program_order
from burst_rt.scheduler.trace import Idle, Span, Trace, Wait, exposed, overlap, waits
from burst_rt.scheduler.verify import check_graph, check_messages, check_world, match_messages

__all__ = [
    "COMPUTE", "CONTROL", "DEVICE_LANES", "HOST_LANES", "NCCL_LANES", "NETWORK",
    "Abort", "Buffer", "Cost", "Driver", "Engine", "Event", "Finish", "Graph", "GraphBuilder",
    "Idle", "Instruction", "Issue", "Lane", "Message", "Op", "Operation", "Part", "PeerGone",
    "Policy", "Schedule", "Span", "State", "Task", "TaskDone", "TaskFailed", "Trace", "Wait",
    "check_graph", "check_messages", "check_world", "critical_path", "exposed", "match_messages",
    "overlap", "program_order", "run", "waits",
]  # fmt: skip
