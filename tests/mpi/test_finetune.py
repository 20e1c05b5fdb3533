"""The example that fine-tunes a model of transformers under FSDP2: losses, norms of gradients and
the model that it writes are those of one process without burst_rt.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from example_checks import EXAMPLES
from jobs import run_job
from tolerances import LOSSES
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from burst_rt.launch.train.export import byte_tokenizer

_TOKENS, _EPOCHS, _LR = 150, 2, 0.01
_DATA, _ACCUMULATED = 2, 2
_END = 0


def _make(folder: Path) -> LlamaForCausalLM:
    """A folder of a random model whose tokens are bytes, and the model."""
    byte_tokenizer().save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.2,
        eos_token_id=_END, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def _write_texts(folder: Path) -> list[list[int]]:
    """Documents of 15 to 200 tokens, and these tokens: a longer one than a row holds among them."""
    draw, documents = random.Random(0), []
    for number in range(16):
        text = "".join(draw.choice("aaab cd") for _ in range(draw.randrange(14, 200)))
        (folder / f"{number:02}.txt").write_text(text)
        documents.append([*text.encode(), _END])
    return documents


def _rows(documents: list[list[int]]) -> Iterator[list[list[int]]]:
    row: list[list[int]] = []
    pieces = (text[at : at + _TOKENS] for text in documents for at in range(0, len(text), _TOKENS))
    for piece in pieces:
        if sum(map(len, row)) + len(piece) > _TOKENS:
            yield row
            row = []
        row.append(piece)
    yield row


def _alone(model: LlamaForCausalLM, documents: list[list[int]]) -> list[tuple[float, float]]:
    """(loss, norm of gradients) of each step, document by document; the model is trained."""
    rows = list(_rows(documents))
    of_step = _DATA * _ACCUMULATED
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.0)
    steps = _EPOCHS * (len(rows) // of_step)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    found = []
    for epoch in range(_EPOCHS):
        order = random.Random(epoch).sample(rows, len(rows))
        for step in range(len(rows) // of_step):
            texts = [x for row in order[step * of_step : (step + 1) * of_step] for x in row]
            loss = _sum_of_losses(model, texts) / sum(len(x) - 1 for x in texts)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append((loss.item(), norm.item()))
    return found


def _sum_of_losses(model: Any, texts: list[list[int]]) -> torch.Tensor:
    losses = []
    for text in texts:
        ids = torch.tensor(text)
        logits = model(ids[None]).logits[0, :-1]
        losses.append(functional.cross_entropy(logits, ids[1:], reduction="sum"))
    return torch.stack(losses).sum()


def test_a_fine_tuned_model_is_that_of_one_process(tmp_path: Path) -> None:
    given, texts, out = (tmp_path / name for name in ("given", "texts", "out"))
    texts.mkdir()
    model, documents = _make(given), _write_texts(texts)
    model.set_attn_implementation("eager")
    expected = _alone(model, documents)
    assert expected[-1][0] < 0.7 * expected[0][0], "a training that learns little hides errors"
    job = run_job(
        EXAMPLES / "finetune.py",
        4,
        [
            str(given), str(texts), str(out), "--context", "2", "--tokens", str(_TOKENS),
            "--accumulate", str(_ACCUMULATED), "--epochs", str(_EPOCHS), "--lr", str(_LR),
            "--dtype", "float32",
        ],
        by="torchrun",
        warm="models",
    )  # fmt: skip
    assert job.exit_code == 0, job.text
    said = re.findall(r"step \d+: loss (\S+), norm (\S+)$", job.out, re.MULTILINE)
    found = [(float(loss), float(norm)) for loss, norm in said]
    assert len(found) == len(expected) > 4
    for mine, wanted in zip(found, expected, strict=True):
        assert mine == pytest.approx(wanted, rel=LOSSES), (found, expected)
    tuned = LlamaForCausalLM.from_pretrained(out)
    with torch.inference_mode():
        losses = [_sum_of_losses(each, documents).item() for each in (tuned, model)]
    assert losses[0] == pytest.approx(losses[1], rel=LOSSES)
    # What was for training alone is not kept.
    assert json.loads((out / "config.json").read_text()).get("use_cache", True)
