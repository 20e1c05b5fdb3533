"""First tokens, chunks, and tokens by what is cached: `python -m benchmarks serve`.

The model is the byte-level one that `burst-rt train` makes, with the weights it begins with. Both
sides of a comparison run in turn in one job, so that the machine's noise hits them alike. Torch's
side is rank 0 alone, with as many threads as `--threads` says, while the other ranks sleep. A time
is the slowest rank's, from a common start.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple, TypeAlias

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import burst_rt
from benchmarks.options import WORLDS, parts_option
from burst_rt import KVCache, Mask, SlidingWindow
from burst_rt.drivers import BaseDriver
from burst_rt.launch.generate.models import bytes_source
from burst_rt.launch.measure.options import OUT
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.launch.measure.timing import alone_s, in_turn, progress_bar, slowest_s, versus
from burst_rt.launch.train.config import ModelConfig
from burst_rt.launch.train.model import Decoder
from burst_rt.scheduler import Graph

__all__ = ["MODEL", "PARTS", "Bench", "command"]

MODEL = ModelConfig(layers=2, dim=512, heads=8, kv_heads=2)
_PROMPTS = (4096, 8192, 16384, 32768)
_CACHED = tuple(1024 << power for power in range(8))
# Number of keys that a token sees where it does not see all that are cached.
_WINDOW = 1024
# Number of tokens that are timed for each pair that the other parts run.
_TOKENS_A_PAIR = 20

Rows: TypeAlias = list[dict[str, Cell]]


class _Token(NamedTuple):
    """The seconds of one rank in one token."""

    once: float  # the agreement of the ranks, and what the first layer does for later ones, too
    layer: float  # `Step.attend` of a later layer
    kernel: float  # in it, attention to the rank's own keys
    processor: float  # in it, the processor's time of the calling thread, kernel and polls included


class Bench:
    """One rank of the benchmark job. Every method blocks for the other ranks."""

    def __init__(
        self,
        ctx: burst_rt.Context,
        config: ModelConfig,
        *,
        pairs: int,
        max_tokens: int,
        chunk: int,
        threads: int,
    ) -> None:
        self.ctx, self.config, self.pairs = ctx, config, pairs
        self.max_tokens, self.chunk, self.threads = max_tokens, chunk, threads
        self._decoder = Decoder(config, seed=0)

    def first_token(self) -> Rows:
        """From a prompt to the scores of the first token, against torch in one process."""
        return [self._first_token(tokens) for tokens in self._up_to(_PROMPTS)]

    def _first_token(self, tokens: int) -> dict[str, Cell]:
        prompted, prompt = self._prompted(tokens), self._prompt(tokens)
        found: dict[str, Tensor] = {}

        def ours() -> None:
            found["ours"] = prompted(prompt, tokens)

        def theirs() -> None:
            at = torch.arange(tokens)
            found["theirs"] = self._decoder(prompt, at, _torch_attention)[0, -1]

        cold_s = slowest_s(self.ctx, ours)
        took = versus(
            partial(self._alone_s, theirs), partial(slowest_s, self.ctx, ours), self.pairs
        )
        return {
            "tokens": tokens,
            "ranks s": took.second_s,
            "torch s": took.first_s,
            "of torch's time, paired": took.paired,
            "first run s": cold_s,
            "scores differ x 1e7": 1e7 * self._difference(found),
        }

    def _difference(self, found: dict[str, Tensor]) -> float:
        """The relative difference of two results that rank 0 has, on every rank."""

        def difference() -> float:
            ours, theirs = (found[name].double() for name in ("ours", "theirs"))
            return float((ours - theirs).norm() / theirs.norm())

        return self.ctx.first(difference)

    def chunks(self) -> Rows:
        """A prompt in chunks against the same prompt at once."""
        return [self._chunks(tokens) for tokens in self._up_to(_PROMPTS) if tokens > self.chunk]

    def _chunks(self, tokens: int) -> dict[str, Cell]:
        prompted, prompt = self._prompted(tokens), self._prompt(tokens)
        whole, parts = (
            partial(slowest_s, self.ctx, partial(prompted, prompt, size))
            for size in (tokens, self.chunk)
        )
        took = versus(whole, parts, self.pairs)
        return {
            "tokens": tokens,
            "chunk": self.chunk,
            "whole s": took.first_s,
            "in chunks s": took.second_s,
            "more %": 100 * (took.paired - 1),
        }

    def token(self) -> Rows:
        """One layer's attention of one new token, by how much is cached.

        The lengths take turns. The runtime's share of a token is the slowest rank's time minus the
        longest time in any rank's kernel: messages, the merge, and everything that is not attention
        to keys. "window": the same where the token sees 1,024 of the keys, however many are cached.
        "once": what a token costs in addition, whatever the number of layers.
        """
        lengths = self._up_to(_CACHED)
        caches = {length: self._filled(length, 2, room=1) for length in lengths}
        new = self._new_tokens(1)
        masks = None, SlidingWindow(_WINDOW - 1)
        took: dict[tuple[int, Mask | None], list[_Token]] = defaultdict(list)
        for turn in range(1 + self.pairs * _TOKENS_A_PAIR):
            for at in product(lengths, masks):
                token = self._token(caches[at[0]], new, at[1])
                if turn:
                    took[at].append(token)
        return [
            self._token_row(length, *(took[length, mask] for mask in masks)) for length in lengths
        ]

    def _token(
        self, cache: KVCache, new: tuple[Tensor, Tensor, Tensor], mask: Mask | None
    ) -> _Token:
        self.ctx.stats()  # from here on, GPUs take times
        start_s = time.perf_counter()
        step = cache.step(1)
        step.attend(0, *new, mask=mask)
        first_s, first = time.perf_counter(), self.ctx.runtime.last_run
        processor_s = time.thread_time()
        step.attend(1, *new, mask=mask)
        processor_s = time.thread_time() - processor_s
        layer_s, later = time.perf_counter() - first_s, self.ctx.runtime.last_run
        cache.truncate(cache.lengths)  # drops the token
        of_first_s, of_later_s = map(_kernel_s, (first, later))
        once_s = first_s - start_s - of_first_s - (layer_s - of_later_s)
        return _Token(once_s, layer_s, of_later_s, processor_s)

    def _token_row(
        self, length: int, own: Sequence[_Token], windowed: Sequence[_Token]
    ) -> dict[str, Cell]:
        once, layer, kernel, processor, added = self._of_all_ranks(own)
        added.sort()
        return {
            "cached": length,
            "layer ms": 1e3 * median(layer),
            "processor ms": 1e3 * median(processor),
            "kernel ms": 1e3 * median(kernel),
            "runtime adds ms": 1e3 * median(added),
            "a tenth below ms": 1e3 * added[len(added) // 10],
            "adds, window ms": 1e3 * median(self._of_all_ranks(windowed)[-1]),
            "once a token ms": 1e3 * median(once),
        }

    def _of_all_ranks(self, own: Sequence[_Token]) -> list[list[float]]:
        """The worst rank's value of each field of a token; then the time that the runtime added.
        Collective.
        """
        of_ranks = torch.tensor(self.ctx.all_gather([list(token) for token in own])).double()
        once, layer, kernel, processor = of_ranks.amax(0).T.tolist()
        added = [a - b for a, b in zip(layer, kernel, strict=True)]
        return [once, layer, kernel, processor, added]

    def question(self) -> Rows:
        """One layer's attention of a question after a document, by keys and by queries."""
        document = min(32768, self.max_tokens)
        tokens = max(1, document // 32)
        cache = self._filled(document, 1, room=tokens)
        names = ("ring-kv", "ring-q", "auto")
        said = {}

        def attending(strategy: str) -> Callable[[], object]:
            cache.truncate(cache.lengths)  # drops the question before
            step = cache.step(tokens, sharded=True)
            said[strategy] = step.explain(self.config.heads, strategy=strategy)  # plans it, too
            return partial(step.attend, 0, *self._new_tokens(step.num_tokens), strategy=strategy)

        def took_s(strategy: str) -> float:
            return slowest_s(self.ctx, attending(strategy))

        turns = in_turn([partial(took_s, name) for name in names], self.pairs)
        took = list(zip(*turns, strict=True))
        rows: Rows = []
        for name, seconds in zip(names, took, strict=True):
            attend, sent = attending(name), self.ctx.stats().bytes_sent
            attend()
            most = max(self.ctx.all_gather(self.ctx.stats().bytes_sent - sent))
            rows.append(
                {
                    "document": document, "question": tokens, "strategy": name,
                    "ms": 1e3 * median(seconds),
                    "of ring-kv's time, paired": median(
                        [mine / by_keys for mine, by_keys in zip(seconds, took[0], strict=True)]
                    ),
                    "sent MiB": most / 2**20,
                    "plan": said[name].splitlines()[0],
                }
            )  # fmt: skip
        return rows

    def _alone_s(self, fn: Callable[[], object]) -> float:
        """Seconds of `fn` on rank 0, with the threads of torch's side, while other ranks sleep."""
        return alone_s(self.ctx, fn, self.threads)

    def _up_to(self, lengths: Iterable[int]) -> list[int]:
        """The lengths that are asked for; the largest allowed one where all are too long."""
        return [length for length in lengths if length <= self.max_tokens] or [self.max_tokens]

    def _prompted(self, tokens: int) -> Callable[[Tensor, int], Tensor]:
        """A function of a prompt and of the tokens of a chunk, with an empty cache of that size.

        It gives the scores `[vocab_size]` of the first token, on every rank, as `burst-rt generate`
        comes to them. Collective.
        """
        source = bytes_source(self._decoder, self.ctx, seq_len=tokens, dtype=torch.float32)
        model = source.cached(tokens, 0)

        def prompted(prompt_BS: Tensor, chunk: int) -> Tensor:
            model.kv.reset()
            return [model(part_BS) for part_BS in prompt_BS.split(chunk, 1)][-1]

        return prompted

    def _prompt(self, tokens: int) -> Tensor:
        made = torch.Generator().manual_seed(tokens)
        return torch.randint(self.config.vocab_size, (1, tokens), generator=made)

    def _filled(self, length: int, num_layers: int, *, room: int) -> KVCache:
        """A cache of random keys and values, with room for more."""
        cache = _cache(self.ctx, self.config, num_layers, length + room)
        step = cache.step(length, sharded=True)
        # The cached tensors do not depend on what the prompt itself sees, which is next to nothing
        # here.
        new = self._new_tokens(step.num_tokens)
        for layer in range(num_layers):
            step.attend(layer, *new, mask=SlidingWindow(1))
        step.commit()
        return cache

    def _new_tokens(self, num: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of one layer, the same on every rank that has as many tokens."""
        heads, kv_heads = self.config.heads, self.config.kv_heads
        made = torch.Generator().manual_seed(num)
        q, k, v = (
            torch.randn(1, num, each, self.config.head_dim, generator=made)
            for each in (heads, kv_heads, kv_heads)
        )
        return q, k, v


def _cache(ctx: burst_rt.Context, config: ModelConfig, num_layers: int, capacity: int) -> KVCache:
    return KVCache(
        ctx, num_layers=num_layers, batch=1, num_kv_heads=config.kv_heads,
        head_dim=config.head_dim, capacity=capacity, dtype=torch.float32,
    )  # fmt: skip


def _kernel_s(run: tuple[Graph, BaseDriver | None] | None) -> float:
    """Seconds that a decode attended to the rank's own keys."""
    _, driver = run or (None, None)
    assert driver is not None  # a decode was just made
    return sum(span.ended_s - span.started_s for span in driver.trace if span.name == "attend")


def _torch_attention(q_BSHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSGE, v_BSGE))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


PARTS = {
    "first-token": (
        Bench.first_token,
        "time to first token, against torch's fused attention in one process, same weights",
    ),
    "chunks": (Bench.chunks, "a prompt in chunks, against the same prompt at once"),
    "token": (Bench.token, "one layer's attention of one new token"),
    "question": (Bench.question, "one layer's attention of a question after a document"),
}


def measure(
    parts: list[str], pairs: int, max_tokens: int, chunk: int, threads: int, out: str | None
) -> None:
    """Runs the parts asked for, or all, on all ranks; rank 0 prints and writes."""
    with burst_rt.init(device="cpu", timeout_s=1200, stall_s=120) as ctx, torch.inference_mode():
        bench = Bench(ctx, MODEL, pairs=pairs, max_tokens=max_tokens, chunk=chunk, threads=threads)
        first = ctx.rank == 0
        with progress_bar(first, len(parts or PARTS)) as step:
            for part in parts or PARTS:
                step(part)
                run, title = PARTS[part]
                rows = run(bench)
                if first and rows:
                    publish(
                        f"{title}, {ctx.world_size} ranks x {torch.get_num_threads()} threads, "
                        f"torch x {threads} threads", rows, out,
                        f"{MODEL.layers} layers, dim {MODEL.dim}, {MODEL.heads} heads and "
                        f"{MODEL.kv_heads} kv heads x {MODEL.head_dim}, feed-forward "
                        f"{MODEL.hidden_dim}, float32; medians of {pairs}, interleaved",
                    )  # fmt: skip


@click.command()
@WORLDS
@parts_option(*PARTS)
@click.option(
    "--pairs",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each side, in turn; medians are reported. A token has 20 times as many.",
)
@click.option(
    "--max-tokens",
    default=131072,
    show_default=True,
    type=click.IntRange(64),
    help="Leave out longer prompts and caches.",
)
@click.option(
    "--chunk",
    default=2048,
    show_default=True,
    type=click.IntRange(17),
    help="Tokens of a prompt's chunk.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Threads of torch's process. The ranks share as many, at least one each. "
    "[default: the number of ranks]",
)
@OUT
def command(worlds: tuple[int, ...], threads: int | None, **options: object) -> None:
    """Serving over MPI ranks: time to first token against torch in one process, prompts in chunks,
    time of a token by what is cached, a question after a document.

    Default: 2 ranks. `prefill` simulates first tokens of large models.
    """
    for num_ranks in worlds or (2,):
        alone = threads or num_ranks
        share = max(1, alone // num_ranks)
        run_on_ranks(measure, num_ranks, {**options, "threads": alone}, threads=share)
