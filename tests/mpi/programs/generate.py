"""Rank program: `generate` of small models over ranks, beside what one process generates.

`generate.py TRUTHS RESULTS` reads what `small_generation.truth` gives for every model and case, and
writes the largest difference of logits on any rank, infinite where tokens differ; and how many
tokens of a prompt a rank ran through the model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from small_generation import BATCHES, PROMPT, Generated, generate, make_decoder
from small_hybrids import HYBRIDS
from small_models import CACHE, fully_sharded

import burst_rt
import burst_rt.hf

_BLOCK = 8


def main(ctx: burst_rt.Context, truths: dict[str, dict[str, Generated]]) -> dict[str, float]:
    found = {}
    for name, by_case in truths.items():
        model = make_decoder(name, "burst_rt").to(ctx.device)
        caches = {
            batch: burst_rt.hf.Cache(model, ctx, capacity=128, batch=batch, block=_BLOCK)
            for batch in {BATCHES[case] for case in by_case}
        }
        for case, truth in by_case.items():
            cache = caches[BATCHES[case]]
            cache.reset()
            # The other ranks' own seeds count for nothing.
            off = _difference(generate(model, case, cache, seed=7 + ctx.rank), truth)
            found[f"{name} {case}"] = _largest(off, ctx)
        for cache in caches.values():
            cache.close()
        # What `prepare` has left.
        assert not model._forward_pre_hooks or ctx.world_size > 1 or name in HYBRIDS
    found["a rank's tokens"] = _largest(_most_tokens(ctx), ctx)
    found["rank 0 decides"] = _largest(_difference_with_noise(ctx, truths["Llama"]), ctx)
    if ctx.world_size > 1:
        dist.init_process_group("gloo")
        found["FSDP2"] = _largest(_difference_under_fsdp2(ctx, truths["Llama"]), ctx)
        dist.destroy_process_group()
    return found


def _difference(found: Generated, truth: Generated) -> float:
    if not torch.equal(found["tokens"], truth["tokens"]):
        return float("inf")
    off = (found["logits"] - truth["logits"]).abs().max() / truth["logits"].abs().max()
    return float(off)


def _largest(x: float, ctx: burst_rt.Context) -> float:
    return torch.tensor(ctx.all_gather(x), dtype=torch.float64).max().item()


def _count_tokens(*modules: torch.nn.Module) -> list[int]:
    """A list that gets the number of tokens of each call of these modules from now on."""
    counts: list[int] = []

    def count(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        counts.append(args[0].shape[1])

    for module in modules:
        module.register_forward_pre_hook(count)
    return counts


def _most_tokens(ctx: burst_rt.Context) -> float:
    """The most tokens that this rank runs through the embedding or an MLP in one call."""
    model = make_decoder("Llama", "burst_rt").to(ctx.device)
    counts = _count_tokens(model.model.embed_tokens, model.model.layers[1].mlp)
    cache = burst_rt.hf.Cache(model, ctx, capacity=PROMPT, block=_BLOCK)
    counts.clear()  # of the token by which the cache is made
    prompt = torch.ones(1, PROMPT, dtype=torch.int64, device=ctx.device)
    model.generate(prompt, **{CACHE: cache}, max_new_tokens=1, use_cache=True)
    assert len(counts) == 2
    return max(counts)


def _difference_with_noise(ctx: burst_rt.Context, truths: dict[str, Generated]) -> float:
    """The same logits, though those of the other ranks are far off while tokens are decoded."""
    model = make_decoder("Llama", "burst_rt").to(ctx.device)
    cache = burst_rt.hf.Cache(model, ctx, capacity=128, block=_BLOCK)

    def spoil(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        decoding = cache.get_seq_length() >= PROMPT
        return output.flip(-1) if ctx.rank and decoding else output

    model.lm_head.register_forward_hook(spoil)
    return _difference(generate(model, "chunks", cache), truths["chunks"])


def _difference_under_fsdp2(ctx: burst_rt.Context, truths: dict[str, Generated]) -> float:
    model = fully_sharded(make_decoder("Llama", "burst_rt").to(ctx.device))
    counts = _count_tokens(model.model.embed_tokens)
    cache = burst_rt.hf.Cache(model, ctx, capacity=128, block=_BLOCK)
    assert counts == [1], "a tested model was compared"
    return _difference(generate(model, "chunks", cache), truths["chunks"])


if __name__ == "__main__":
    with burst_rt.init() as ctx:
        results = main(ctx, torch.load(sys.argv[1]))
        if ctx.rank == 0:
            with open(sys.argv[2], "w", encoding="utf-8") as file:
                json.dump(results, file)
