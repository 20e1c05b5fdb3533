"""Attention on several hosts, call after call, until something goes wrong: then each rank writes
what it is told, and when, to ./ended-RANK. Once it is in its calls there is ./begun-RANK.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

import burst_rt
from burst_rt.errors import BurstError

# Tokens of a rank: over links of 100 Mbit/s a call takes about a second, nearly all of which is
# for messages.
_TOKENS, _HEADS, _HEAD_DIM = 1024, 16, 64

ctx = burst_rt.init(stall_s=2.0, timeout_s=4.0)
assert ctx.runtime.machine.ranks_per_node == 2, ctx.runtime.machine.ranks_per_node
layout = ctx.layout(_TOKENS * ctx.world_size)
q = torch.randn(1, layout.shard_len, _HEADS, _HEAD_DIM, device=ctx.device)
try:
    while True:
        burst_rt.burst_attention(q, q, q, layout=layout, strategy="ring-kv")
        Path(f"begun-{ctx.rank}").touch()
except BurstError as error:
    text = f"{time.time()} {type(error).__name__} {' '.join(str(error).split())}"
    note = Path(f"note-{ctx.rank}")
    note.write_text(text, encoding="utf-8")
    note.rename(f"ended-{ctx.rank}")  # whole or not at all: a launcher may end this rank meanwhile
    raise
