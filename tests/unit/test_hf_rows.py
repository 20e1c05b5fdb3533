"""`hf.Cache.extend` and `KVCache.copy`: requests of different lengths as rows of one cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from small_generation import make_decoder
from small_hybrids import make_hybrid, token_by_token
from small_models import CACHE

import burst_rt
import burst_rt.hf
from burst_rt.errors import BurstError, ContractMismatch, InputError

_NEW = 5
_PROMPTS = (70, 300, 23)
# A window, windows beside whole attention, sinks, experts.
_HYBRIDS = ("Qwen3_5", "Bamba", "Mamba", "RecurrentGemma", "Lfm2", "MiniMax", "Zamba2")
_MODELS = ("Llama", "Mistral", "Gemma3", "GptOss", "Mixtral", "Qwen3")


def _prompt(length: int) -> torch.Tensor:
    return torch.randint(1, 60, (1, length), generator=torch.Generator().manual_seed(length))


@torch.inference_mode()
def _alone(model: Any, length: int) -> list[int]:
    """The likeliest tokens after a prompt, one after the other, by one process without a cache."""
    text = _prompt(length)
    for _ in range(_NEW):
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    new: list[int] = text[0, length:].tolist()
    return new


def _in_rows(ctx: burst_rt.Context, model: Any) -> list[list[int]]:
    """The same, each request one step behind the one before it, all in one cache."""
    model = deepcopy(model)
    one, rows = (
        burst_rt.hf.Cache(model, ctx, capacity=400, batch=batch, block=16) for batch in (1, 3)
    )
    assert one.kv is not None
    assert rows.kv is not None
    found: list[list[int]] = [[], [], []]
    with torch.inference_mode():
        for number in range(len(_PROMPTS) + _NEW):
            if number < len(_PROMPTS):
                one.reset()
                best = -1
                for chunk in _prompt(_PROMPTS[number]).split(64, 1):
                    best = int(model(chunk, **{CACHE: one}).logits[0, -1].argmax())
                rows.copy(number, one)
                found[number].append(best)
            new = [[row[-1]] if row and len(row) < _NEW else [] for row in found]
            if any(new):
                likeliest = rows.extend(new).argmax(-1).tolist()
                for row, token, taken in zip(found, likeliest, new, strict=True):
                    row += [token] * len(taken)
    assert rows.kv.lengths == tuple(length + _NEW - 1 for length in _PROMPTS)
    return found


@pytest.mark.parametrize("name", _MODELS)
def test_rows_of_different_lengths_generate_what_one_process_does(name: str) -> None:
    truth = [_alone(make_decoder(name, "eager"), length) for length in _PROMPTS]
    model = make_decoder(name, "burst_rt")
    for world_size in (1, 2, 3):
        every = burst_rt.run_local(world_size, lambda ctx: _in_rows(ctx, model), timeout_s=120)
        assert every == [truth] * world_size


_LLAMA = make_decoder("Llama", "burst_rt")
_EAGER = make_decoder("Llama", "eager")


def _scores_of_a_row(
    ctx: burst_rt.Context, model: Any, at: int, others: tuple[int, int], new: list[list[int]]
) -> torch.Tensor:
    """Of a request's next tokens in row `at`, beside rows with `others` tokens that get `new` ones.

    Between its tokens a prompt is read, as long as one of the others.
    """
    model = deepcopy(model)
    one, rows = (
        burst_rt.hf.Cache(model, ctx, capacity=1200, batch=batch, block=16) for batch in (1, 3)
    )
    scores, token = [], 5
    with torch.inference_mode():
        lengths = [*others[:at], 70, *others[at:]]
        for row, length in enumerate(lengths):
            if length:
                one.reset()
                model(_prompt(length), **{CACHE: one})
                rows.copy(row, one)
        for _ in range(3):
            scores.append(rows.extend([*new[:at], [token], *new[at:]])[at].clone())
            token = int(scores[-1].argmax())
            if max(others):
                model(_prompt(max(others) // 2), **{CACHE: one})
    return torch.stack(scores)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize(("world_size", "at"), [(1, 2), (2, 0)])
def test_the_bits_of_a_row_do_not_depend_on_the_others(name: str, world_size: int, at: int) -> None:
    """Nor on prompts that are read meanwhile. They may depend on the row's place; and experts
    compute the tokens of all rows at once.
    """
    model = make_decoder(name, "burst_rt")
    cases: list[tuple[tuple[int, int], list[list[int]]]] = [
        ((0, 0), [[], []]), ((300, 23), [[7], [9]]), ((1, 400), [[], [3]]),
    ]  # fmt: skip

    def run(ctx: burst_rt.Context) -> list[torch.Tensor]:
        return [_scores_of_a_row(ctx, model, at, *case) for case in cases]

    alone, *beside = burst_rt.run_local(world_size, run, timeout_s=120)[0]
    assert alone.abs().sum() > 0
    for scores in beside:
        assert torch.equal(scores, alone)


def _refused(ctx: burst_rt.Context, call: Callable[[Any, Any], object]) -> str:
    """The error of every rank, after which both caches work."""
    model = deepcopy(_LLAMA)
    one, rows = (
        burst_rt.hf.Cache(model, ctx, capacity=40, batch=batch, block=4) for batch in (1, 2)
    )
    with torch.inference_mode():
        model(_prompt(20), **{CACHE: one})
        assert rows.kv is not None
        with pytest.raises(InputError) as caught:
            call(one, rows)
        assert one.kv is not None
        one.kv.truncate(20)
        rows.copy(1, one)
        rows.extend([[], [3]])
    return caught.value.message


_WRONG: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "no lists": ("expected 2 lists of at most 16", lambda one, rows: rows.extend([1, 2])),
    "too few": ("expected 2 lists of at most 16", lambda one, rows: rows.extend([[1]])),
    "empty": ("not all empty", lambda one, rows: rows.extend([[], []])),
    "too many": ("at most 16", lambda one, rows: rows.extend([[1] * 17, []])),
    "no integers": ("expected 2 lists", lambda one, rows: rows.extend([[0.5], []])),
    "no room": (
        "the capacity is 40 tokens a sequence; sequence 0 has 40 and gets 1",
        lambda one, rows: _fill(one, rows),
    ),
    "no such row": ("row must be an integer of 0 to 1", lambda one, rows: rows.copy(2, one)),
    "no such source": (
        "source_row must be an integer of 0 to 0", lambda one, rows: rows.copy(0, one, 1)
    ),
    "too much": (
        "tokens must be an integer of 0 to 20", lambda one, rows: rows.copy(0, one, 0, 21)
    ),
    "no cache": ("source must be a KVCache", lambda one, rows: rows.kv.copy(0, one)),
    "a call of the model": (
        "expected rows of one length, got [20, 0] cached tokens; call cache.extend",
        lambda one, rows: _call(one, rows),
    ),
    "generate": (
        "expected rows of one length, got [20, 0] cached tokens; call cache.extend",
        lambda one, rows: _generate(one, rows),
    ),
    "no batch": ("expected two caches with batch=N", lambda one, rows: rows.copy(0, one.kv)),
    "other blocks": (
        "must have the same layers, heads, dtype and block",
        lambda one, rows: rows.copy(
            0, burst_rt.hf.Cache(one.model, one.ctx, capacity=40, batch=1, block=8)
        ),
    ),
}  # fmt: skip


def _call(one: Any, rows: Any) -> None:
    rows.copy(0, one)
    one.model(torch.ones(2, 1, dtype=torch.int64), **{CACHE: rows})


def _generate(one: Any, rows: Any) -> None:
    rows.copy(0, one)
    one.model.generate(_prompt(21).expand(2, -1), max_new_tokens=2, use_cache=True, **{CACHE: rows})


def _fill(one: Any, rows: Any) -> None:
    one.model(_prompt(20), **{CACHE: one})
    rows.copy(0, one)
    rows.extend([[1], []])


@pytest.mark.parametrize("case", _WRONG)
def test_what_rows_cannot_do_is_refused_on_every_rank(case: str) -> None:
    words, call = _WRONG[case]
    for message in burst_rt.run_local(2, lambda ctx: _refused(ctx, call), timeout_s=60):
        assert re.search(re.escape(words), message), message


@pytest.mark.parametrize("name", _HYBRIDS)
def test_rows_of_models_with_states_generate_what_one_process_does(name: str) -> None:
    model = make_hybrid(name).eval()
    with token_by_token(name):
        truth = [_alone(model, length) for length in _PROMPTS]
    if name not in ("Mamba", "Mamba2"):
        model.set_attn_implementation("burst_rt")
    for world_size in (1, 3):
        every = burst_rt.run_local(world_size, lambda ctx: _in_rows(ctx, model), timeout_s=120)
        assert every == [truth] * world_size


def test_states_are_of_whole_rows_and_copied_with_them() -> None:
    hybrid = make_hybrid("Qwen3Next").eval()
    hybrid.set_attn_implementation("burst_rt")

    def run(ctx: burst_rt.Context) -> None:
        model = deepcopy(hybrid)
        one, rows = (burst_rt.hf.Cache(model, ctx, capacity=80, batch=batch) for batch in (1, 2))
        assert one.keeps_states
        with torch.inference_mode():
            with pytest.raises(InputError, match=r"lists of at most 1 integers \(layers of the"):
                rows.extend([[1, 2], []])
            model(_prompt(40), **{CACHE: one})
            with pytest.raises(InputError, match="tokens: expected None: only whole rows have sta"):
                rows.copy(0, one, 0, 30)
            rows.copy(1, one)
            after = rows.extend([[], [7]])[1]
            one.reset()
            rows.copy(1, one)  # nothing, and no state
            again = torch.zeros(0)
            for token in (*_prompt(40)[0].tolist(), 7):
                again = rows.extend([[], [token]])[1]
            torch.testing.assert_close(again, after, rtol=1e-4, atol=1e-4)
            one.copy(0, rows, 1)
            more = model(torch.tensor([[5, 6]]), **{CACHE: one}).logits[0, -1]
            for token in (5, 6):
                again = rows.extend([[], [token]])[1]
            torch.testing.assert_close(again, more, rtol=1e-4, atol=1e-4)

    burst_rt.run_local(1, run)
    burst_rt.run_local(2, run)


def test_each_row_forgets_its_own_last_tokens() -> None:
    def run(ctx: burst_rt.Context) -> None:
        model = deepcopy(_LLAMA)
        one, rows = (burst_rt.hf.Cache(model, ctx, capacity=40, batch=b, block=4) for b in (1, 2))
        assert rows.kv is not None
        with torch.inference_mode():
            for row, length in enumerate((20, 13)):
                one.reset()
                model(_prompt(length), **{CACHE: one})
                rows.copy(row, one)
            rows.crop(-3)
            assert rows.kv.lengths == (17, 10)
            found = rows.extend([[7], [8]])
            for row, (length, token) in enumerate(((20, 7), (13, 8))):
                text = torch.cat([_prompt(length)[:, :-3], torch.tensor([[token]])], 1)
                expected = _EAGER(text, use_cache=False).logits[0, -1]
                torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)

    burst_rt.run_local(1, run)
    burst_rt.run_local(2, run)


@pytest.mark.parametrize("keep", [15, 0])
def test_what_extend_has_added_is_text_that_generate_goes_on_with(keep: int) -> None:
    """Where other tokens have been forgotten."""
    text = torch.cat([_prompt(20)[:, :keep], _prompt(21)[:, keep:]], 1)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    expected = _EAGER.generate(text, **options)

    def run(ctx: burst_rt.Context) -> None:
        model = deepcopy(_LLAMA)
        cache = burst_rt.hf.Cache(model, ctx, capacity=40, batch=1)
        with torch.inference_mode():
            model(_prompt(20), **{CACHE: cache})
            cache.crop(keep - 20)
            for token in text[0, keep:19].tolist():
                cache.extend([[token]])
            found = model.generate(text, **options, **{CACHE: cache})
        assert torch.equal(found, expected)

    burst_rt.run_local(1, run)
    burst_rt.run_local(2, run)


def test_padding_has_no_rows_of_its_own() -> None:
    def padding(ctx: burst_rt.Context) -> None:
        cache = burst_rt.hf.Cache(deepcopy(_LLAMA), ctx, capacity=40, batch=2)
        assert cache.kv is not None
        mask = torch.ones(2, 20, dtype=torch.int64)
        mask[0, :3] = 0
        with torch.inference_mode():
            cache.model(_prompt(20).expand(2, -1), attention_mask=mask, **{CACHE: cache})
            with pytest.raises(InputError, match=r"no padding, got padding \[3, 0\]"):
                cache.extend([[1], []])

    burst_rt.run_local(1, padding)


@pytest.mark.parametrize("differs", ["tokens", "row"])
def test_ranks_that_differ_do_not_go_on(differs: str) -> None:
    def run(ctx: burst_rt.Context) -> type[BurstError]:
        model, odd = deepcopy(_LLAMA), ctx.rank == 1
        one, rows = (burst_rt.hf.Cache(model, ctx, capacity=40, batch=batch) for batch in (1, 2))
        assert rows.kv is not None
        with torch.inference_mode():
            model(_prompt(20), **{CACHE: one})
            rows.copy(int(odd and differs == "row"), one)
            with pytest.raises(ContractMismatch) as caught:
                rows.extend([[4 if odd and differs == "tokens" else 3], []])
        return type(caught.value)

    assert burst_rt.run_local(2, run, timeout_s=60) == [ContractMismatch] * 2


def test_a_prefix_of_a_row_is_used_again() -> None:
    """Of this cache or another one; the rest of the row may be anything."""

    def run(ctx: burst_rt.Context) -> tuple[torch.Tensor, torch.Tensor]:
        model = deepcopy(_LLAMA)
        one, rows = (
            burst_rt.hf.Cache(model, ctx, capacity=100, batch=batch, block=4) for batch in (1, 2)
        )
        assert one.kv is not None
        assert rows.kv is not None
        with torch.inference_mode():
            whole = model(_prompt(50), **{CACHE: one}).logits[0, -1]
            rows.copy(0, one)
            rows.extend([[7, 8, 9], []])
            rows.copy(1, rows, 0, 31)
            one.reset()
            one.copy(0, rows, 1)
            again = model(_prompt(50)[:, 31:], **{CACHE: one}).logits[0, -1]
        return whole, again

    for world_size in (1, 3):
        for whole, again in burst_rt.run_local(world_size, run, timeout_s=60):
            torch.testing.assert_close(again, whole, rtol=1e-5, atol=1e-5)


def test_rows_may_fill_a_model_of_learned_positions() -> None:
    """What makes short rows as long as the longest had positions beyond the model's last one."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=32, n_embd=32, n_layer=1, n_head=2,
        attn_implementation="burst_rt",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()

    def run(ctx: burst_rt.Context) -> list[float]:
        own = burst_rt.hf.prepare(deepcopy(model), ctx)
        one, rows = (burst_rt.hf.Cache(own, ctx, capacity=32, batch=b, block=4) for b in (1, 2))
        with torch.inference_mode():
            for row, length in enumerate((31, 5)):
                one.reset()
                own(_prompt(length), **{CACHE: one})
                rows.copy(row, one)
            found: list[float] = rows.extend([[1], [2, 3, 4]])[:, :3].flatten().tolist()
        return found

    for found in burst_rt.run_local(2, run, timeout_s=60):
        plain = deepcopy(model)
        plain.set_attn_implementation("sdpa")
        for row, (length, new) in enumerate(((31, [1]), (5, [2, 3, 4]))):
            text = torch.cat([_prompt(length), torch.tensor([new])], 1)
            right = plain(text).logits[0, -1, :3].tolist()
            assert found[3 * row : 3 * row + 3] == pytest.approx(right, abs=1e-4)
