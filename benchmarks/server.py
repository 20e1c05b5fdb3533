"""`burst-rt serve` beside transformers' `generate` in one process: `python -m benchmarks server`.

The server has `-n` ranks of one thread, the process as many threads as there are ranks. Both have
the same random Llama, and take turns, so that the machine's noise hits them alike.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx2 as httpx
import torch
import transformers

from burst_rt.launch.measure.options import OUT
from burst_rt.launch.measure.report import Cell, publish
from burst_rt.launch.measure.timing import versus
from burst_rt.launch.train.export import byte_tokenizer

__all__ = ["command"]

_PROMPTS = (2048, 8192)
_REQUESTS, _PROMPT, _NEW = 8, 512, 32
_START_S = 120.0


@click.command("server")
@click.option("-n", "num_ranks", type=click.IntRange(1), default=2, help="Ranks, and threads.")
@click.option("--repeats", type=click.IntRange(1), default=5, help="Turns of each side.")
@click.option("--out", type=OUT, help="JSON file to add the figures to.")
def command(num_ranks: int, repeats: int, out: Path | None) -> None:
    """First tokens of long prompts, and eight requests at once, over HTTP."""
    torch.set_num_threads(num_ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        alone = _make(folder)
        with _serving(folder, num_ranks) as url:
            rows = [
                _row(f"first token of {tokens:,}", alone, url, [tokens], 1, repeats)
                for tokens in _PROMPTS
            ]
            each = [_PROMPT] * _REQUESTS
            title = f"{_REQUESTS} requests of {_PROMPT} + {_NEW} tokens"
            rows.append(_row(title, alone, url, each, _NEW, repeats))
    publish(
        "burst-rt serve beside generate in one process", rows, out,
        note="One process answers one request after the other. Below 1 the server is faster.",
    )  # fmt: skip


def _make(folder: Path) -> Any:
    byte_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1408, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=16384,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[0] = 0  # so that some other token is likelier, and no text ends early
    model.save_pretrained(folder)
    return model


@contextmanager
def _serving(folder: Path, num_ranks: int) -> Iterator[str]:
    command = [sys.executable, "-P", "-m", "burst_rt.launch.main", "serve", "--model", str(folder)]
    command += ["-n", str(num_ranks), "--port", "0", "--capacity", "9000", "--rows", "8"]
    with (folder.parent / "err").open("w+") as err:
        server = subprocess.Popen(command, stderr=err)
        try:
            deadline_s = time.monotonic() + _START_S
            while not (
                at := re.search(r"^serving \S+ at ([^\s,]+)", _read(err.name), re.MULTILINE)
            ):
                if server.poll() is not None or time.monotonic() > deadline_s:
                    raise click.ClickException(f"the server did not start:\n{_read(err.name)}")
                time.sleep(0.1)
            yield at[1]
        finally:
            server.terminate()
            server.wait()


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _row(
    what: str, alone: Any, url: str, lengths: list[int], new: int, repeats: int
) -> dict[str, Cell]:
    """One comparison. lengths: tokens of each request's prompt; new: tokens that it gets."""
    took = versus(
        partial(_alone_s, alone, lengths, new), partial(_served_s, url, lengths, new), repeats
    )
    return {
        "what": what, "server s": took.second_s, "one process s": took.first_s,
        "time / one process's, paired": took.paired,
    }  # fmt: skip


def _prompt(length: int) -> list[int]:
    """Tokens that no prompt before began with."""
    return torch.randint(1, 256, (length,)).tolist()


def _alone_s(model: Any, lengths: list[int], new: int) -> float:
    began_s = time.perf_counter()
    for length in lengths:
        prompt = torch.tensor([_prompt(length)])
        model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return time.perf_counter() - began_s


def _served_s(url: str, lengths: list[int], new: int) -> float:
    # A client that is made anew reads certificates for a while.
    with httpx.Client(timeout=600) as client, ThreadPoolExecutor(len(lengths)) as pool:
        began_s = time.perf_counter()
        answers = [*pool.map(partial(_ask, client, url, new), map(_prompt, lengths))]
        took_s = time.perf_counter() - began_s
    assert all(tokens == new for tokens in answers)
    return took_s


def _ask(client: httpx.Client, url: str, new: int, prompt: list[int]) -> int:
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0}
    answer = client.post(f"{url}/completions", json=body).raise_for_status().json()
    return int(answer["usage"]["completion_tokens"])
