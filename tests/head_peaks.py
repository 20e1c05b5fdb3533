"""Prints the peak memory of heads without logits, forward and backward, in this process.

`linear_cross_entropy`'s over what its docstring says, and then that of a model of transformers over
its whole logits in float32.
"""

from __future__ import annotations

import torch
import transformers
from resident import peak

import burst_rt
import burst_rt.hf

# Three chunks of the head; a model's chunks are to be a small part of its logits.
TOKENS, MODEL_TOKENS, CLASSES, WIDTH = 1536, 4096, 32000, 128


# oneDNN then widens what it multiplies: AVX-512 without its instructions for bfloat16.
WIDENED = torch.ops.mkldnn._is_mkldnn_bf16_supported() and not torch.cpu._is_avx512_bf16_supported()


def head(ctx: burst_rt.Context, dtype: torch.dtype, *, frozen: bool) -> float:
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, dtype=dtype, requires_grad=not frozen)
    labels = torch.randint(CLASSES, (TOKENS,))
    rows = max((64 << 20) // (CLASSES * 4), WIDTH)
    # A chunk's logits; and sums of gradients.
    stated = rows * CLASSES * (8 if dtype == torch.float32 else 10) + hidden.nbytes
    if dtype == torch.bfloat16 and WIDENED:
        stated += rows * CLASSES * 4
    if not frozen:  # and of 16 bits a product, also in 32 bits
        stated += weight.numel() * (4 if dtype == torch.float32 else 10)

    def run() -> None:
        loss = burst_rt.linear_cross_entropy(hidden, weight, labels, group=ctx)
        loss.backward()

    run()  # warms up
    hidden.grad = weight.grad = None
    return peak(run) / stated


def model(ctx: burst_rt.Context) -> float:
    config = transformers.LlamaConfig(
        vocab_size=CLASSES, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    llama.set_attn_implementation("burst_rt")
    burst_rt.hf.prepare(llama, ctx)
    ids = torch.randint(CLASSES, (1, MODEL_TOKENS))

    def run() -> None:
        part = burst_rt.hf.shard({"input_ids": ids, "labels": ids}, ctx)
        llama(**part).loss.backward()

    run()
    llama.zero_grad()
    return peak(run) / (MODEL_TOKENS * CLASSES * 4)


torch.set_num_threads(1)
with burst_rt.init(device="cpu") as ctx:
    print(head(ctx, torch.float32, frozen=False))
    print(head(ctx, torch.float32, frozen=True))
    print(head(ctx, torch.bfloat16, frozen=False))
    print(model(ctx))
