"""Text on the ranks of a world: rank 0 decides each token and tells the others."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import Tensor

from burst_rt.context import Context
from burst_rt.errors import ConfigError, DeviceError
from burst_rt.launch.generate.models import CachedModel, Source, bytes_source, folder_source
from burst_rt.launch.generate.options import GenerateOptions
from burst_rt.launch.train.config import TrainConfig
from burst_rt.launch.train.model import Decoder
from burst_rt.launch.train.shared import open_same_folder, read_shared
from burst_rt.launch.train.summary import table
from burst_rt.telemetry import TokenMeter

if TYPE_CHECKING:
    from burst_rt.launch.train.pretrained import ModelFolder

__all__ = ["generate", "no_tokenizer", "open_model", "sample"]

_NOT_A_NUMBER = -1
# So many tokens are sorted first.
_LIKELIEST = 256


def generate(world: Context, options: GenerateOptions) -> None:
    """Print prompt and text, then a table of figures on standard error, on rank 0. Collective.

    Raises ConfigError or InputError, the same on every rank, for what cannot run.
    """
    config, folder, loaded = open_model(world, options)
    if folder is not None:
        source = folder_source(folder, loaded, world, dtype=_dtype(options), chat=options.chat)
    else:
        assert isinstance(loaded, Decoder)
        if options.chat:
            raise no_tokenizer("--chat")
        source = bytes_source(loaded, world, seq_len=config.seq_len, dtype=_dtype(options))
    prompt = world.first(lambda: _prompt(options))
    tokens = world.together(lambda: _encode(source, prompt, options))
    try:
        model = source.cached(len(tokens), options.max_new_tokens)
    except DeviceError as error:
        raise ConfigError(error.message) from error
    meter = TokenMeter(model.kv, to=source.streamer() if world.rank == 0 else None)
    before = world.stats().bytes_sent
    with torch.inference_mode():
        _run(world, model, tokens, source.ends, options, meter)
    totals = torch.tensor([world.stats().bytes_sent - before, model.kv.nbytes], device=world.device)
    bytes_sent, cache_bytes = world.all_reduce(totals).tolist()
    if world.rank == 0:
        _show(meter, model, source.unit, len(tokens), bytes_sent, cache_bytes)


def sample(
    scores_V: Tensor, *, temperature: float, top_p: float, generator: torch.Generator
) -> int:
    """The next token: drawn among the most likely ones that together have the probability `top_p`,
    or the most likely one where the temperature is 0. -1 if the scores are not numbers. Only what
    is drawn from leaves the device of the scores.

    Nucleus sampling, arXiv 1904.09751.
    """
    # Below 0, so that no temperature makes infinity of a score.
    scores_V = scores_V.double() - scores_V.max()
    if scores_V.isnan().any() or math.isnan(temperature):
        return _NOT_A_NUMBER
    if temperature == 0:
        return int(scores_V.argmax())
    shares_V = (scores_V / temperature).softmax(0)
    if top_p >= 1:
        return _draw(shares_V.cpu(), generator)
    # Sorting all tokens takes longer than all else, and a few have nearly all of the probability.
    count = min(_LIKELIEST, len(shares_V))
    likely, tokens = shares_V.topk(count)
    while count < len(shares_V) and likely.sum() < top_p:
        count = min(8 * count, len(shares_V))
        likely, tokens = shares_V.topk(count)
    likely = likely.cpu()
    likely[likely.cumsum(0) - likely >= top_p] = 0
    return int(tokens[_draw(likely, generator)])


def _draw(shares: Tensor, generator: torch.Generator) -> int:
    """A place, drawn by shares that need not add up to 1. One number is drawn for any length."""
    ends = shares.cumsum(0)
    at = torch.rand(1, generator=generator, dtype=shares.dtype, device="cpu") * ends[-1]
    # A product that is rounded up would be behind the last place.
    at = at.minimum(ends[-1].nextafter(ends.new_zeros(())))
    return int(torch.searchsorted(ends, at, right=True))


def _run(
    world: Context,
    model: CachedModel,
    prompt: list[int],
    ends: frozenset[int],
    options: GenerateOptions,
    meter: TokenMeter,
) -> None:
    generator = torch.Generator().manual_seed(options.seed)

    def draw(scores_V: Tensor) -> int:
        return sample(
            scores_V,
            temperature=options.temperature,
            top_p=options.top_p,
            generator=generator,
        )

    tokens_BS = torch.tensor([prompt], device=world.device)
    meter.put(tokens_BS)
    for _ in range(options.max_new_tokens):
        scores_V = model(tokens_BS)
        token = world.first(partial(draw, scores_V))
        if token == _NOT_A_NUMBER:
            raise ConfigError(
                "the model's scores are not numbers: its weights are damaged, or too large for "
                f"--dtype {options.dtype}; try --dtype float32."
            )
        if token in ends:
            break
        tokens_BS = torch.tensor([[token]], device=world.device)
        meter.put(tokens_BS[0])
    meter.end()


def open_model(
    world: Context, options: GenerateOptions
) -> tuple[TrainConfig, ModelFolder | None, torch.nn.Module]:
    """The model with its weights, the same on every rank, and its folder, unless it is the
    byte-level one. Collective.
    """
    shared = read_shared(world, options.checkpoint) if options.checkpoint else None
    begun = shared.manifest.config if shared else None
    config = world.together(lambda: options.source(begun))
    folder: ModelFolder | None = None
    model: torch.nn.Module
    if config.architecture is not None:
        model = Decoder(config.architecture, seed=config.seed).eval()
    else:
        folder = open_same_folder(world, replace(config, seq_len=1), shared)
        assert folder is not None
        model = world.together(folder.load)
    if shared is not None:
        shared.fill(world, {n: p.detach() for n, p in model.named_parameters()})
    return config, folder, model


def no_tokenizer(option: str) -> ConfigError:
    """The error for an option that the byte-level model does not take."""
    return ConfigError(
        f"{option}: expected a model of transformers with a tokenizer, got a byte-level one; use "
        "--prompt, or a folder that `burst-rt export` writes."
    )


def _dtype(options: GenerateOptions) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, options.dtype)
    return dtype


def _prompt(options: GenerateOptions) -> bytes:
    if options.prompt_file is None:
        assert options.prompt is not None  # one of the two is given
        return os.fsencode(options.prompt)  # the bytes that the shell gave
    return Path(options.prompt_file).read_bytes()


def _encode(source: Source, prompt: bytes, options: GenerateOptions) -> list[int]:
    tokens = source.encode(prompt)
    if not tokens:
        raise ConfigError("--prompt: expected at least one token, got an empty text; write one.")
    longest, wanted = source.longest, len(tokens) + options.max_new_tokens
    if longest is not None and wanted > longest:
        raise ConfigError(
            f"--prompt: expected at most {longest:,} {source.unit}s, as the model was made for, "
            f"with the text; got {len(tokens):,} and --max-new-tokens {options.max_new_tokens:,}; "
            "shorten one of them."
        )
    return tokens


def _show(
    meter: TokenMeter,
    model: CachedModel,
    unit: str,
    num_prompt: int,
    bytes_sent: int,
    cache_bytes: int,
) -> None:
    kv = model.kv
    rows = {
        "prompt": f"{num_prompt:,} {unit}s",
        f"time to first {unit}": _seconds(meter.time_to_first_token_s),
        f"time per {unit}": (
            f"{_seconds(meter.mean_token_s)} (the last: {_seconds(meter.last_token_s)})"
        ),
        f"{unit}s/s": "-" if meter.tokens_per_s is None else f"{meter.tokens_per_s:.1f}",
        "sent by attention": f"{bytes_sent:,} bytes, all ranks together",
        "cache": (
            f"{kv.lengths[0]:,} of {kv.capacity:,} {unit}s; {cache_bytes:,} bytes, all ranks "
            "together"
        ),
    }
    Console(stderr=True, color_system=None, highlight=False).print(table("generated", rows))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"
