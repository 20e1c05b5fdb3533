"""Runs the program of docs/serving.md with a small model, and compares every token with the same
model on one process without a cache. `args[0]`: the page; `args[1]`: tokens of the prompt.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import torch

import burst_rt

_page, _length = Path(sys.argv[1]).read_text(encoding="utf-8"), int(sys.argv[2])
(_program,) = re.findall(r"```python\n(.*?)```", _page, re.DOTALL)
_VOCAB, _HEADS, _KV_HEADS, _D = 50, 8, 2, 64
_WIDTH = 32

_made = torch.Generator().manual_seed(0)


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_made) / math.sqrt(shape[0])


_table = _weight(_VOCAB, _WIDTH) * 3
_layers = [
    (_weight(_WIDTH, (_HEADS + 2 * _KV_HEADS) * _D), _weight(_HEADS * _D, _WIDTH)) for _ in range(2)
]
prompt = torch.randint(_VOCAB, (1, _length), generator=_made)
chosen: list[int] = []


def embed(ids: torch.Tensor) -> torch.Tensor:
    return _table[ids]


def project(layer: int, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    turned = x + torch.sin(positions[..., None] / 10)
    q, k, v = (turned @ _layers[layer][0]).split(
        [_HEADS * _D, _KV_HEADS * _D, _KV_HEADS * _D], dim=-1
    )
    return q.unflatten(-1, (-1, _D)), k.unflatten(-1, (-1, _D)), v.unflatten(-1, (-1, _D))


def merge(layer: int, out: torch.Tensor) -> torch.Tensor:
    return out.flatten(-2) @ _layers[layer][1]


def last_of(step: burst_rt.Step, x: torch.Tensor) -> torch.Tensor:
    ctx = names["ctx"]
    last = torch.zeros(1, _WIDTH)
    if not step.sharded:
        return x[:, -1]
    if step.last_owner[0] == ctx.rank:
        last = x[:, -1].clone()
    summed: torch.Tensor = ctx.all_reduce(last)
    return summed


def choose(last: torch.Tensor) -> torch.Tensor:
    chosen.append(int((last @ _table.T).argmax()))
    return torch.tensor([[chosen[-1]]])


def _next_without_a_cache(ids: torch.Tensor) -> int:
    x, positions = embed(ids), torch.arange(ids.shape[1])[None]
    for layer in range(2):
        q, k, v = (each.transpose(1, 2) for each in project(layer, x, positions))
        attend = torch.nn.functional.scaled_dot_product_attention
        x = x + merge(layer, attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2))
    return int((x[:, -1] @ _table.T).argmax())


names: dict[str, Any] = {
    "prompt": prompt, "embed": embed, "project": project, "merge": merge, "last_of": last_of,
    "choose": choose,
}  # fmt: skip
exec(_program, names)

ids = prompt
expected = []
for _ in range(8):
    expected.append(_next_without_a_cache(ids))
    ids = torch.cat((ids, torch.tensor([[expected[-1]]])), 1)
assert chosen == expected, (chosen, expected)
assert names["cache"].lengths == (_length + 8,)
sent = names["ctx"].stats().bytes_sent
assert (sent > 0) == (names["ctx"].world_size > 1)
if names["ctx"].rank == 0:
    print("the same tokens")
