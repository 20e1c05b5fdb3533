"""Runs the program of docs/serving.md, and compares every token with the same model on one process
without a cache. `args[0]`: the page; `args[1]`: tokens of the prompt.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

_page, _length = Path(sys.argv[1]).read_text(encoding="utf-8"), int(sys.argv[2])
_program = "\n".join(re.findall(r"```python\n(.*?)```", _page, re.DOTALL))
names: dict[str, Any] = {}
assert "(1, 700)" in _program
exec(_program.replace("(1, 700)", f"(1, {_length})"), names)


def _next_without_a_cache(ids: torch.Tensor) -> int:
    x, positions = names["table"][ids], torch.arange(ids.shape[1], device=ids.device)[None]
    for layer in range(2):
        q, k, v = (each.transpose(1, 2) for each in names["project"](layer, x, positions))
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        x = x + out.flatten(-2) @ names["back"][layer]
    return int((x[0, -1] @ names["table"].T).argmax())


ids = names["prompt"]
for _ in range(8):
    ids = torch.cat((ids, ids.new_tensor([[_next_without_a_cache(ids)]])), 1)
expected = ids[:, _length:]
assert torch.equal(names["tokens"], expected), (names["tokens"], expected)
assert torch.equal(names["answer"], expected)  # on every rank, of the prompt that rank 0 had
assert len(expected.unique()) > 1
assert names["cache"].lengths == (_length + 8,)
assert names["rows"].lengths == (62, 151, 92)
sent = names["ctx"].stats().bytes_sent
assert (sent > 0) == (names["ctx"].world_size > 1)
if names["ctx"].rank == 0:
    print("the same tokens")
