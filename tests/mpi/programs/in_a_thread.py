"""Backwards in other orders on each rank, in a thread of the program's own."""

from __future__ import annotations

import threading

import torch

import burst_rt
from burst_rt.errors import ContractMismatch


def add(x: torch.Tensor) -> torch.Tensor:
    return ctx.all_reduce(x.clone())


def train(found: list[str]) -> None:
    function = burst_rt.differentiable(lambda x: (add(x), ()), lambda _, dx: add(dx))
    losses = [function(torch.ones(2, requires_grad=True)).sum() for _ in range(2)]
    try:
        losses[ctx.rank].backward()
    except ContractMismatch as error:
        found.append(str(error))


found: list[str] = []
with burst_rt.init() as ctx:
    thread = threading.Thread(target=train, args=(found,))
    thread.start()
    thread.join()
assert len(found) == 1, found
