"""A run whose model writes letters, made without training; its text, found by one process.

That process has no cache.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from burst_rt.launch.generate.options import GenerateOptions
from burst_rt.launch.train.checkpoint import Checkpoint, Manifest, find_checkpoint, save_checkpoint
from burst_rt.launch.train.config import TrainConfig
from burst_rt.launch.train.model import Decoder

__all__ = ["PROMPT", "SEQ_LEN", "make_options", "make_run", "plain_text"]

SEQ_LEN = 900
# More than five blocks of a cache: the last of them is rank 1's of two, rank 2's of three. ä is two
# bytes.
PROMPT = "Bären and other animals, " * 26
_LETTERS = slice(ord(" "), ord("~") + 1)


def make_options(**changes: Any) -> GenerateOptions:
    """Those of `burst-rt generate` with their defaults."""
    options = GenerateOptions(
        checkpoint=None, model=None, prompt=None, prompt_file=None, requests=None, chat=False,
        rows=8, max_new_tokens=200, temperature=0.8, top_p=0.95, seed=0, dtype="float32",
    )  # fmt: skip
    return replace(options, **changes)


def make_run(folder: Path, *, ends: bool = False) -> Path:
    """A run of `burst-rt train`. ends: its model ends every text at once."""
    config = TrainConfig(seq_len=SEQ_LEN, layers=2, dim=32, heads=4, kv_heads=2, steps=1)
    assert config.architecture is not None
    decoder = Decoder(config.architecture, seed=3)
    with torch.no_grad():
        # Scores of what is no letter are 0; some letter has a higher one.
        head = torch.zeros_like(decoder.head.weight)
        head[_LETTERS] = 4 * decoder.head.weight[_LETTERS]
        decoder.head.weight.copy_(head)
        if ends:
            # All scores are 0: the first of them is that of byte 0, which ends a text.
            decoder.norm.weight.zero_()
    weights = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    save_checkpoint(folder, Checkpoint(Manifest(1, config, "text"), weights, weights), keep=1)
    return folder


@torch.no_grad()
def plain_text(run: Path, prompt: str, num_tokens: int) -> str:
    """The prompt and the most likely text after it: all of it again for every byte."""
    checkpoint = find_checkpoint(run)[1]
    architecture = checkpoint.manifest.config.architecture
    assert architecture is not None
    decoder = Decoder(architecture, seed=0)
    decoder.load_state_dict(checkpoint.weights)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    tokens = list(prompt.encode())
    for _ in range(num_tokens):
        scores = decoder(torch.tensor([tokens]), torch.arange(len(tokens)), attend)
        tokens.append(int(scores[0, -1].argmax()))
    return bytes(tokens).decode()
