"""Strategies: how attention is spread over ranks. `table.py` has their names and programs.

A strategy turns a `Problem` into a `Program`: one graph for each rank and direction.

| strategy | forward sends | backward sends |
|---|---|---|
| `ring-kv` | K, V | K, V, dK, dV |
| `burst` | K, V | Q, dO, lse, delta, dQ |
| `ring-q` | Q, and the sums that out is made from | as `burst` |
| `auto` | as `ring-kv`, `direct` [1] or `ring-q` [2]: the fewest bytes | of both sides, too |
| `bidirectional` | K, V: one half each way round | as `auto`, one half each way round |
| `direct` | K, V: from the owner straight to each rank that needs them | as `auto`, the same way |
| `two-level:N` | K, V: inside nodes of N ranks, and between them | as `auto`, the same way |
| `all-to-all` | Q, K, V, out | Q, K, V, dO, lse, delta, dQ, dK, dV |
| `hybrid:N` | as `all-to-all` in groups of N ranks, as `auto` between them | the same |
| `sliced:N` | as `all-to-all` between nodes, in N slices; inside nodes as `auto` | the same |
| `burst-untiled` | as `burst`, without tiles in fast memory: to compare with | the same |
| `ring-naive` | K, then V; whole rows of scores: to compare with | K, then V, dV, then K, dK |

[1] `direct` only on one host, and for masks that are more than causal. [2] Only where queries are
so few that they and their sums are fewer bytes than keys and values.

A ring passes rows to the next rank, or, where a mask makes that fewer hops, to the rank before
("backwards"): under a window keys are needed by the next ranks, and queries need the keys of the
ranks before.

N may be left out. It is then the number of ranks of a host, where all hosts have as many; in
`hybrid` it is the largest divisor of that number that also divides the kv heads, and in `sliced`
the largest number up to 4 that divides the heads. On one host, or with a rank on each, `sliced` is
an all-to-all of all ranks.

Neither torch nor MPI is imported, so that planning and simulating need no accelerator's software.
"""

from burst_rt.planning.strategies.hybrid import Hybrid
from burst_rt.planning.strategies.program import AGREE, Choice, Footprint, Program
from burst_rt.planning.strategies.ring import Ring
from burst_rt.planning.strategies.ring_naive import RingNaive
from burst_rt.planning.strategies.table import STRATEGIES, check_name

__all__ = [
    "AGREE",
    "STRATEGIES",
    "Choice",
    "Footprint",
    "Hybrid",
    "Program",
    "Ring",
    "RingNaive",
    "check_name",
]
