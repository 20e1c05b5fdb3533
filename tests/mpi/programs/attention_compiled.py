"""A compiled function around attention on every rank: the same bits as without the compiler,
forward and backward; an unused result too.
"""

from __future__ import annotations

import pytest
import torch
from worlds import Case

import burst_rt
from burst_rt.errors import ContractMismatch, InputError


def main() -> None:
    torch.set_num_threads(1)
    case = Case(48, heads=2)
    inputs = case.inputs()
    with burst_rt.init(timeout_s=60) as ctx:
        layout = ctx.layout(48)

        def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            burst_rt.burst_attention(k, q, v, layout=layout)  # nobody uses this one
            out, lse = burst_rt.burst_attention(
                2 * q, k, v, causal=True, layout=layout, return_lse=True
            )
            return out.sin().sum() + lse.sum()

        # Older compilers run the call between two graphs.
        compiled = torch.compile(model, fullgraph=torch.__version__ >= "2.13", backend="aot_eager")
        results = []
        for function in (model, compiled):
            q, k, v = (layout.shard(x).requires_grad_() for x in inputs[:3])
            before = ctx.stats()
            value = function(q, k, v)
            results.append((value.detach(), *torch.autograd.grad(value, (q, k, v))))
            after = ctx.stats()
            results[-1] += (
                torch.tensor([after.calls - before.calls, after.bytes_sent - before.bytes_sent]),
            )
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True)), results

        # A compiled program keeps the numbers of its calls for the backwards.
        q, k, v = (layout.shard(x) for x in inputs[:3])
        inputs_of = [[x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
        values = [compiled(*each) for each in inputs_of]
        with pytest.raises(ContractMismatch, match="whose backward this is: call"):
            values[ctx.rank % 2].backward()
        values = [compiled(*each) for each in inputs_of]
        for value, each in zip(values, inputs_of, strict=True):
            found = torch.autograd.grad(value, each)
            assert all(torch.equal(x, y) for x, y in zip(found, results[0][1:4], strict=True))

        # One rank's bad input reaches all, compiled or not, and the next call works.
        q, k, v = (layout.shard(x) for x in inputs[:3])
        with pytest.raises(InputError) as caught:
            compiled(q[:, :3] if ctx.rank == 1 else q, k, v)
        assert caught.value.peer == 1
        compiled(q, k, v)


main()
