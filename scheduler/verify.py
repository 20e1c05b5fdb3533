"""The verifier proves that all ranks' graphs fit: ordered accesses, paired sends, no deadlock.

`check_graph` checks the graph of one rank, `check_world` the graphs of all ranks. `check_share` is
one rank's share of `check_world`: it looks at the rank's own graph, and takes a statement of its
messages instead of the other ranks' graphs. A wrong graph is a defect of the code that built it, so
all raise `InternalError`; it names the rank, the tasks and what is wrong. What is proved:

* Edges run forward in program order, and a path orders every two conflicting accesses to one part:
  nothing is overwritten while it is read or in flight.
* Nothing is read that was never written: no part, and no bytes that are sent, or that an operation
  looks at. (A plan may receive only those bytes of a slot.)
* A communication lane that is ordered or bounded is issued in program order. A graph with an
  ordered communication lane has no other communication lane.
* Every send has its receive: peer, tag, order and size agree.
* No deadlock. `check_world` plays the graphs under rendezvous rules, by which a message moves only
  when both of its sides have been posted. `check_share` plays nothing. It requires tags that
  ascend, and then nothing can be stuck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from burst_rt.errors import InternalError
from burst_rt.scheduler.graph import Graph, Message, Task, overlap

__all__ = [
    "Endpoint", "Transfer", "check_graph", "check_share", "check_world", "match_messages",
]  # fmt: skip


class Transfer(NamedTuple):
    """A message, as both of its ranks must have it."""

    source: int
    receiver: int
    tag: int
    size_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.size_bytes} bytes from rank {self.source} to rank {self.receiver} with tag "
            f"{self.tag}"
        )


class Endpoint(NamedTuple):
    """One side of a message."""

    rank: int
    task: int  # the exchange
    number: int  # place among the sends of the exchange, or among its receives


def check_graph(graph: Graph) -> None:
    """Checks one rank's graph on its own. Raises InternalError."""
    ancestors: list[int] = []  # bit t of ancestors[v] is set where a path leads from t to v
    for v, before in enumerate(graph.predecessors):
        bits = 0
        for u in before:
            if not 0 <= u < v:
                raise InternalError(
                    f"rank {graph.rank}: {_say(graph, v)} depends on task {u}, which is not before "
                    "it: a cycle"
                )
            bits |= ancestors[u] | 1 << u
        ancestors.append(bits)
    _check_accesses(graph, ancestors)
    _check_lanes(graph)


def check_world(graphs: Sequence[Graph]) -> None:
    """Checks the graph of every rank, and that all of them together come to an end. `graphs[r]`
    belongs to rank r. Raises InternalError.
    """
    ranks = [graph.rank for graph in graphs]
    if ranks != list(range(len(graphs))) or any(
        graph.world_size != len(graphs) for graph in graphs
    ):
        sizes = [graph.world_size for graph in graphs]
        raise InternalError(
            f"expected the graph of every rank, in order; got ranks {ranks} of worlds of {sizes}"
        )
    for graph in graphs:
        check_graph(graph)
    _check_orders(graphs)
    _play(graphs)


def check_share(graph: Graph, stated: Iterable[Transfer]) -> None:
    """Checks a rank's own graph, and its messages against a statement. Raises InternalError.

    stated: all messages that this rank sends or receives; those between two ranks in their order.

    If the share of every rank holds, and each message is stated to both of its ranks, `check_world`
    holds. The messages of an exchange must have one tag, and the tags of a graph's exchanges must
    ascend in program order. Then there is no deadlock. Suppose some exchanges never end, and take
    the ones with the lowest tag. A task waits only for tasks before it in program order, whatever
    its lane. Exchanges before such an exchange have lower tags, so they end, and computes before it
    end too. So each of them is posted. The other side of each of its messages has the same tag. It
    has ended or is one of them, so it is posted too. Then the exchange ends.
    """
    check_graph(graph)
    built = _transfers(graph)
    wanted: dict[tuple[int, ...], list[Transfer]] = defaultdict(list)
    for transfer in stated:
        wanted[transfer[:2]].append(transfer)
    for ranks in dict.fromkeys((*built, *wanted)):
        for has, wants in zip_longest(built[ranks], wanted[ranks]):
            if has is None or has[0] != wants:
                raise InternalError(
                    f"rank {graph.rank}: {_say(graph, has[1]) if has else 'no task'} has "
                    f"{has[0] if has else wants}; stated is {wants or 'no such message'}"
                )


def _transfers(graph: Graph) -> dict[tuple[int, ...], list[tuple[Transfer, int]]]:
    """A graph's messages, each with its task, by sender and receiver. Raises InternalError where
    the tags of exchanges do not ascend in program order.
    """
    transfers: dict[tuple[int, ...], list[tuple[Transfer, int]]] = defaultdict(list)
    rank, last = graph.rank, None
    for task in graph.tasks:
        if not task.is_exchange:
            continue
        tags = {m.tag for m in (*task.sends, *task.recvs)}
        if len(tags) != 1 or (last is not None and min(tags) <= last):
            raise InternalError(
                f"rank {rank}: {_say(graph, task.id)} uses tags {sorted(tags)} after tag {last}; "
                "give each exchange one tag, higher than those of the exchanges before it"
            )
        (last,) = tags
        messages = [Transfer(rank, m.peer, m.tag, m.size_bytes) for m in task.sends]
        messages += [Transfer(m.peer, rank, m.tag, m.size_bytes) for m in task.recvs]
        for transfer in messages:
            transfers[transfer[:2]].append((transfer, task.id))
    return transfers


def _check_orders(graphs: Sequence[Graph]) -> None:
    """Raises InternalError where two ranks have their messages on ordered lanes in two orders."""
    by_rank = {graph.rank: graph for graph in graphs}
    for (source, receiver), (sends, recvs) in _flows(graphs).items():
        if _ordered(by_rank[source], sends) or _ordered(by_rank[receiver], recvs):
            # An ordered lane matches messages by their order alone: tags do not travel.
            wanted = [m.tag for _, m in recvs]
            offered = [m.tag for _, m in sends]
            if wanted != offered and sorted(wanted) == sorted(offered):
                raise InternalError(
                    f"rank {source} sends tags {offered} to rank {receiver}, which receives tags "
                    f"{wanted}: an ordered lane matches messages by order, so both orders must be "
                    "the same"
                )


def match_messages(graphs: Sequence[Graph]) -> dict[Endpoint, Endpoint]:
    """Maps each receive to the send that feeds it. Raises InternalError where one has no other
    side.
    """
    matched: dict[Endpoint, Endpoint] = {}
    by_rank = {graph.rank: graph for graph in graphs}
    for sends, recvs in _flows(graphs).values():
        matched.update(_pair(by_rank, sends, recvs))
    return matched


def _check_accesses(graph: Graph, ancestors: list[int]) -> None:
    last_writer: list[int | None] = [None] * len(graph.parts)
    readers: list[list[int]] = [[] for _ in graph.parts]
    come: dict[int, list[tuple[int, int]]] = {}  # bytes of parts that are not whole yet
    for task in graph.tasks:
        if come:
            _check_come(graph, task, come)
        for part in (*task.reads, *task.accumulates):
            writer = last_writer[part]
            if writer is None and not graph.parts[part].initialised:
                raise InternalError(
                    f"rank {graph.rank}: {_say(graph, task.id)} reads {graph.parts[part].name}, "
                    "which nothing wrote"
                )
            _require_path(graph, ancestors, writer, task.id, part)
            readers[part].append(task.id)
        for part in (*task.writes, *task.accumulates):
            for earlier in (*readers[part], last_writer[part]):
                if earlier != task.id:
                    _require_path(graph, ancestors, earlier, task.id, part)
            if part not in task.accumulates:
                is_new = last_writer[part] is None or bool(readers[part])
                _note_bytes(graph, task, part, come, is_new)
            last_writer[part] = task.id
            readers[part] = []


def _note_bytes(
    graph: Graph, task: Task, part: int, come: dict[int, list[tuple[int, int]]], is_new: bool
) -> None:
    """Notes the bytes of a part that a task writes; is_new: what the part held has been used."""
    whole = (0, graph.parts[part].size_bytes)
    written = [whole]
    if task.is_exchange and not graph.parts[part].initialised:
        before = [] if is_new else come.get(part, [whole])
        written = before + [(m.offset, m.end) for m in task.recvs if m.part == part]
    if _covers(written, whole):
        come.pop(part, None)
    else:
        come[part] = written


def _check_come(graph: Graph, task: Task, come: Mapping[int, list[tuple[int, int]]]) -> None:
    """Raises InternalError where a task uses bytes that no message has brought."""
    used = [(m.part, m.offset, m.end) for m in task.sends] or [*task.looks_at]
    if not task.is_exchange:
        whole = {*task.reads, *task.accumulates} - {part for part, *_ in used}
        used += [(part, 0, graph.parts[part].size_bytes) for part in whole]
    for part, start, stop in used:
        if part in come and not _covers(come[part], (start, stop)):
            does = "sends" if task.sends else "looks at (looks_at=)"
            raise InternalError(
                f"rank {graph.rank}: {_say(graph, task.id)} {does} the bytes {start} to {stop} of "
                f"{graph.parts[part].name}, of which only {sorted(come[part])} have come"
            )


def _covers(ranges: Iterable[tuple[int, int]], wanted: tuple[int, int]) -> bool:
    at, stop = wanted
    for begin, end in sorted(ranges):
        if begin > at:
            break
        at = max(at, end)
    return at >= stop


def _require_path(
    graph: Graph, ancestors: list[int], first: int | None, second: int, part: int
) -> None:
    if first is not None and not ancestors[second] >> first & 1:
        raise InternalError(
            f"rank {graph.rank}: {_say(graph, first)} and {_say(graph, second)} both use "
            f"{graph.parts[part].name} and nothing orders them"
        )


def _check_lanes(graph: Graph) -> None:
    for task in graph.tasks:
        if task.is_exchange:
            _check_lane_of(graph, task)
            _check_exchange(graph, task)
    # A transfer on a stream holds back the transfers that come after it. These are the same on
    # every rank only if all transfers of a graph are on that one stream.
    used = {task.lane for task in graph.tasks if task.is_exchange}
    if len(used) > 1 and any(graph.lanes[name].ordered for name in used):
        raise InternalError(
            f"rank {graph.rank}: exchanges are on lanes {sorted(used)}; a graph with exchanges on "
            "an ordered lane must have all its exchanges on that lane"
        )
    _check_tags(graph)


def _check_lane_of(graph: Graph, task: Task) -> None:
    lane = graph.lanes[task.lane]
    # A full lane holds back exchanges that a peer may wait for. The tasks that it holds back are
    # known only if it is issued in program order.
    if (lane.ordered or lane.max_in_flight is not None) and not lane.in_program_order:
        kind = "ordered" if lane.ordered else "bounded"
        raise InternalError(
            f"rank {graph.rank}: {_say(graph, task.id)} is on {kind} lane {lane.name!r}, which "
            "must be issued in program order"
        )
    if task.op is not None:
        raise InternalError(
            f"rank {graph.rank}: {_say(graph, task.id)} both computes and exchanges"
        )


def _check_tags(graph: Graph) -> None:
    # A free lane issues exchanges as they become ready, in any order. So two exchanges must not use
    # one tag with one peer.
    owner: dict[tuple[bool, int, int], int] = {}
    for task in graph.tasks:
        for outgoing, messages in ((True, task.sends), (False, task.recvs)):
            for m in messages:
                other = owner.setdefault((outgoing, m.peer, m.tag), task.id)
                if other != task.id:
                    raise InternalError(
                        f"rank {graph.rank}: {_say(graph, other)} and {_say(graph, task.id)} both "
                        f"use tag {m.tag} with rank {m.peer}; give each exchange its own tag"
                    )


def _check_exchange(graph: Graph, task: Task) -> None:
    what = f"rank {graph.rank}: {_say(graph, task.id)}"
    received = [m.part for m in task.recvs]
    if not {m.part for m in task.sends} <= {*task.reads} or not {*received} <= {*task.writes}:
        raise InternalError(f"{what} sends or receives parts it does not declare")
    # The messages of one exchange move in any order.
    if overlap(task.recvs) or {*received} & {*task.reads, *task.accumulates}:
        raise InternalError(
            f"{what} receives into the same bytes twice, or into a part that it also reads or sends"
        )
    for m in (*task.sends, *task.recvs):
        if not 0 <= m.peer < graph.world_size or m.peer == graph.rank:
            raise InternalError(
                f"{what} names rank {m.peer} as its peer, in a world of {graph.world_size}"
            )
        if m.offset < 0 or m.end > graph.parts[m.part].size_bytes:
            raise InternalError(
                f"{what} moves the bytes {m.offset} to {m.end} of {graph.parts[m.part].name}, "
                f"which has {graph.parts[m.part].size_bytes} bytes"
            )


_Flow: TypeAlias = list[tuple[Endpoint, Message]]


def _flows(graphs: Sequence[Graph]) -> dict[tuple[int, int], tuple[_Flow, _Flow]]:
    """The sends and the receives between each two of the given ranks, by (source, destination),
    both in program order.
    """
    ranks = {graph.rank for graph in graphs}
    flows: dict[tuple[int, int], tuple[_Flow, _Flow]] = defaultdict(lambda: ([], []))
    for graph in graphs:
        for task in graph.tasks:
            for i, m in enumerate(task.sends):
                if m.peer in ranks:
                    flows[graph.rank, m.peer][0].append((Endpoint(graph.rank, task.id, i), m))
            for i, m in enumerate(task.recvs):
                if m.peer in ranks:
                    flows[m.peer, graph.rank][1].append((Endpoint(graph.rank, task.id, i), m))
    return flows


def _ordered(graph: Graph, messages: _Flow) -> bool:
    return any(graph.lanes[graph.tasks[end.task].lane].ordered for end, _ in messages)


def _pair(graphs: Mapping[int, Graph], sends: _Flow, recvs: _Flow) -> dict[Endpoint, Endpoint]:
    waiting: dict[int, list[tuple[Endpoint, Message]]] = defaultdict(list)
    for end, m in reversed(sends):
        waiting[m.tag].append((end, m))
    matched: dict[Endpoint, Endpoint] = {}
    for end, m in recvs:
        if not waiting[m.tag]:
            raise InternalError(
                f"rank {end.rank}: {_say(graphs[end.rank], end.task)} receives tag {m.tag} from "
                f"rank {m.peer}, which never sends it"
            )
        source, sent = waiting[m.tag].pop()
        if sent.size_bytes != m.size_bytes:
            raise InternalError(
                f"rank {source.rank}: {_say(graphs[source.rank], source.task)} sends "
                f"{sent.size_bytes} bytes with tag {m.tag}, but "
                f"rank {end.rank}: {_say(graphs[end.rank], end.task)} expects {m.size_bytes} bytes"
            )
        matched[end] = source
    for left in waiting.values():
        for end, m in left:
            raise InternalError(
                f"rank {end.rank}: {_say(graphs[end.rank], end.task)} sends tag {m.tag} to rank "
                f"{m.peer}, which never receives it"
            )
    return matched


def _play(graphs: Sequence[Graph]) -> None:
    """Plays all ranks under rendezvous rules until every task is done. Raises InternalError with
    the tasks that are stuck.

    A task is posted when its predecessors are done; on a lane issued in program order the task
    before it must be done too. A computing task is done once it is posted. An exchange is done once
    the other side of each of its messages is posted. A real run may go further than this, and never
    less far.
    """
    needs = _other_sides(graphs)
    before, after = _orders(graphs)
    posted: set[tuple[int, int]] = set()
    done: set[tuple[int, int]] = set()
    nodes = [(g.rank, t.id) for g in graphs for t in g.tasks]
    queue = [(rank, task) for rank, task in nodes if not before[rank][task]]
    while queue:
        node = queue.pop()
        posted.add(node)
        for ended in (node, *needs[node]):
            if ended in posted and ended not in done and needs[ended] <= posted:
                done.add(ended)
                rank, finished = ended
                queue += [(rank, task) for task in _freed(finished, before[rank], after[rank])]
    stuck = [node for node in nodes if node not in done]
    if stuck:
        words = [_explain(graphs, node, needs[node] - posted, node in posted) for node in stuck[:4]]
        raise InternalError(f"deadlock: {'; '.join(words)}")


def _other_sides(graphs: Sequence[Graph]) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """For each task (rank, id) with messages: the tasks at the other ends of its messages."""
    sides: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for end, source in match_messages(graphs).items():
        sides[end.rank, end.task].add((source.rank, source.task))
        sides[source.rank, source.task].add((end.rank, end.task))
    return sides


def _freed(finished: int, before: list[set[int]], after: list[list[int]]) -> list[int]:
    """The tasks of a rank that waited for `finished` alone; takes it out of `before`."""
    free = []
    for successor in after[finished]:
        before[successor].discard(finished)
        if not before[successor]:
            free.append(successor)
            before[successor].add(-1)  # queued: never again
    return free


def _orders(graphs: Sequence[Graph]) -> tuple[list[list[set[int]]], list[list[list[int]]]]:
    """For each task of each rank: the tasks that must be done before it, and those after it; by
    edges, and by program order on the lanes that are issued so.
    """
    before = [list(map(set, graph.predecessors)) for graph in graphs]
    after = [list(map(list, graph.successors)) for graph in graphs]
    for graph in graphs:
        last: dict[str, int] = {}
        for task in graph.tasks:
            if graph.lanes[task.lane].in_program_order:
                if task.lane in last:
                    before[graph.rank][task.id].add(last[task.lane])
                    after[graph.rank][last[task.lane]].append(task.id)
                last[task.lane] = task.id
    return before, after


def _explain(
    graphs: Sequence[Graph],
    node: tuple[int, int],
    missing: Iterable[tuple[int, int]],
    is_posted: bool,
) -> str:
    rank, task = node
    what = f"rank {rank}: {_say(graphs[rank], task)}"
    if not is_posted:
        return f"{what} never starts"
    return f"{what} waits for " + ", ".join(
        f"rank {r} to reach {_say(graphs[r], t)}" for r, t in missing
    )


def _say(graph: Graph, task: int) -> str:
    node: Task = graph.tasks[task]
    return f"task {task} {node.name!r}"
