"""`burst-rt serve` on two ranks, asked by OpenAI's own client: what one process writes, alone and
among others; its limits; and its ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pytest
import torch
from jobs import python_and_environment, run_command
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3_5TextConfig

from burst_rt.launch.run import kill_job
from burst_rt.launch.train.export import byte_tokenizer

_START_S = 120.0
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "eos_token_id": 0,
    "max_position_embeddings": 4096,
}  # fmt: skip
_LETTERS = slice(ord("a"), ord("z") + 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**_SIZES, intermediate_size=48, head_dim=8)
    return _save(config, tmp_path_factory.mktemp("serve") / "letters")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of a model some of whose layers keep states."""
    types = ["linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(
        **_SIZES, intermediate_size=48, head_dim=8, layer_types=types, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    return _save(config, tmp_path_factory.mktemp("serve") / "letters")


def _save(config: PretrainedConfig, folder: Path) -> Path:
    """A folder of a random model that writes small letters; its tokens are bytes."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        head = torch.zeros_like(made.lm_head.weight)
        # The scores of all others are 0, and some letter has a higher one.
        head[_LETTERS] = 8 * made.lm_head.weight[_LETTERS]
        made.lm_head.weight.copy_(head)
    made.save_pretrained(folder)
    return folder


@dataclass
class _Server:
    """A server that runs. `url` ends with /v1."""

    process: subprocess.Popen[str]
    url: str
    err: Path

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        text = httpx.get(self.url.replace("/v1", "/metrics")).text
        found = re.search(rf"^burst_rt_serve_{name} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def ranks(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [x for x in below if "burst_rt.launch.serve" in " ".join(x.cmdline())][-2:]


@contextmanager
def _serving(model: Path, folder: Path, *options: str) -> Iterator[_Server]:
    python, environment = python_and_environment(None)
    err = folder / "err"
    with err.open("w") as stderr:
        process = subprocess.Popen(
            [python, "-P", "-m", "burst_rt.launch.main", "serve", "--model", str(model), "-n", "2",
             "--port", "0", "--capacity", "600", "--rows", "4", "--chunk", "64", *options],
            env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr, text=True,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + _START_S
        while not (said := re.search(r"^serving letters at (\S+)", err.read_text(), re.MULTILINE)):
            assert process.poll() is None, err.read_text()
            assert time.monotonic() < deadline_s, err.read_text()
            time.sleep(0.05)
        yield _Server(process, said[1].rstrip(","), err)
    finally:
        if process.poll() is None:
            kill_job(process)
        process.wait()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Server]:
    with _serving(model, tmp_path_factory.mktemp("server")) as served:
        yield served


@torch.inference_mode()
def _alone(model: Path, prompt: str, num_tokens: int) -> tuple[str, list[float]]:
    """The likeliest text after a prompt, by one process, and the logarithms of its likelihoods."""
    made = AutoModelForCausalLM.from_pretrained(model).eval()
    text, logs = torch.tensor([list(prompt.encode())]), []
    for _ in range(num_tokens):
        scores = made(text).logits[0, -1].log_softmax(0)
        logs.append(float(scores.max()))
        text = torch.cat([text, scores.argmax()[None, None]], 1)
    return bytes(text[0, -num_tokens:].tolist()).decode(), logs


def _prompts() -> list[str]:
    """Of 1 to 500 bytes, some of which begin alike."""
    same = "the quick brown fox jumps over the lazy dog, " * 11
    return ["x", same[:200], same[:450] + "!", same[:450] + "?", "ring " * 20, same[:33], *"abcdef"]


def test_a_prompt_goes_on_as_in_one_process(model: Path, server: _Server) -> None:
    prompt = _prompts()[1]
    text, logs = _alone(model, prompt, 12)
    answer = server.client().completions.create(
        model="letters", prompt=prompt, max_tokens=12, temperature=0, logprobs=2
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 200, "completion_tokens": 12, "total_tokens": 212,
    }  # fmt: skip
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list(text)
    assert choice.logprobs.token_logprobs == pytest.approx(logs, abs=1e-4)
    assert choice.logprobs.text_offset == list(range(12))
    assert all(len(likely) == 2 for likely in choice.logprobs.top_logprobs or ())
    # The tokens themselves are a prompt, too.
    again = server.client().completions.create(
        model="letters", prompt=list(prompt.encode()), max_tokens=12, temperature=0
    )
    assert again.choices[0].text == text


def test_a_chat_is_written_as_its_template_says(model: Path, server: _Server) -> None:
    prompt = "system: short\nuser: hello\nassistant: "
    text, logs = _alone(model, prompt, 9)
    messages: Any = [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    asked: dict[str, Any] = {
        "model": "letters", "messages": messages, "max_completion_tokens": 9, "temperature": 0,
        "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    answer = server.client().chat.completions.create(**asked)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    content = answer.choices[0].logprobs.content
    assert [x.logprob for x in content] == pytest.approx(logs, abs=1e-4)
    assert [x.top_logprobs[0].token for x in content] == list(text)

    parts = list(
        server.client().chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == text
    assert parts[-2].choices[0].finish_reason == "length"
    assert [x.token for p in parts[:-1] for x in p.choices[0].logprobs.content] == list(text)
    assert parts[-1].usage.completion_tokens == 9


@pytest.mark.parametrize("kind", ["model", "hybrid"])
def test_requests_of_a_file_get_what_the_server_would_give(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(kind)
    completion, chat = "/v1/completions", "/v1/chat/completions"
    lines = [
        {"custom_id": f"text {i}", "method": "POST", "url": completion,
         "body": {"prompt": prompt, "temperature": 0}}
        for i, prompt in enumerate(_prompts())
    ]  # fmt: skip
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 4, "model": "letters"}
    lines.append({"custom_id": "chat", "url": chat, "body": body})
    wrong = {
        "n": body | {"n": 2},
        "stream": body | {"stream": True},
        "model": body | {"model": "x"},
    }
    lines += [{"custom_id": name, "url": chat, "body": wrong} for name, wrong in wrong.items()]
    lines.append({"custom_id": "messages", "url": chat, "body": {"messages": []}})
    # The model was made for 4,096 tokens.
    lines.append({"custom_id": "long", "url": completion, "body": {"prompt": "x" * 4090}})
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    options = ["--requests", str(path), "--max-new-tokens", "7", "--rows", "3", "-n", "2"]
    words = ("generate", "--model", str(model), *options)
    job = run_command(words, cwd=tmp_path, timeout_s=90.0, warm="torch")
    assert job.exit_code == 0, job.text
    answers = {x["custom_id"]: x["response"] for x in map(json.loads, job.out.splitlines())}
    assert len(answers) == len(lines)
    for name in (*wrong, "messages"):
        refused = answers.pop(name)
        assert refused["status_code"] in (400, 404)
        assert refused["body"]["error"]["param"] == name
    assert answers.pop("long")["body"]["error"]["code"] == "context_length_exceeded"
    assert {answer["status_code"] for answer in answers.values()} == {200}
    chatted = answers.pop("chat")["body"]["choices"][0]["message"]["content"]
    assert chatted == _alone(model, "user: hello\nassistant: ", 4)[0]
    for i, prompt in enumerate(_prompts()):
        (choice,) = answers[f"text {i}"]["body"]["choices"]
        assert choice["text"] == _alone(model, prompt, 7)[0]
    said = re.search(r"answered 13 of 18 requests in .* s: ([\d,]+) tokens read, 88 wri", job.err)
    assert said, job.err
    # A prompt alone, as a chat: the answer is all that is printed.
    options = ["--prompt", "hello", "--chat", "--temperature", "0", "--max-new-tokens", "4"]
    words = ("generate", "--model", str(model), *options, "-n", "2")
    job = run_command(words, cwd=tmp_path, timeout_s=90.0, warm="torch")
    assert job.out == f"{chatted}\n"


def test_requests_at_once_get_what_they_get_alone(model: Path, server: _Server) -> None:
    """Twelve of them for four rows: the others wait, and rows are used again."""
    prompts = _prompts()
    truth = [_alone(model, prompt, 20)[0] for prompt in prompts]

    def ask(prompt: str) -> str:
        parts = server.client().completions.create(
            model="letters", prompt=prompt, max_tokens=20, temperature=0, stream=True
        )
        return "".join(part.choices[0].text for part in parts)

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == truth
    # Two prompts have 450 tokens in common: the second one is read from there on.
    assert ask(prompts[2]) == truth[2]
    before = server.metric("reused_prompt_tokens")
    assert ask(prompts[3]) == truth[3]
    assert server.metric("reused_prompt_tokens") >= before + 450
    assert server.metric("active_requests") == 0


def test_a_seed_gives_the_same_text_alone_and_among_others(server: _Server) -> None:
    def ask(seed: int) -> str:
        answer = server.client().completions.create(
            model="letters", prompt="once", max_tokens=30, seed=seed, temperature=1.5, top_p=0.9,
            extra_body={"top_k": 20},
        )  # fmt: skip
        return str(answer.choices[0].text)

    alone = [ask(seed) for seed in range(4)]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone


@pytest.mark.parametrize("streams", [False, True])
def test_a_text_ends_before_a_stop_sequence(model: Path, server: _Server, streams: bool) -> None:
    text, _ = _alone(model, "stop", 30)
    stop = text[10:14]
    given: dict[str, Any] = {
        "model": "letters", "prompt": "stop", "max_tokens": 30, "temperature": 0,
        "stop": ["never this", stop], "stream": streams,
    }  # fmt: skip
    answer = server.client().completions.create(**given)
    parts = list(answer) if streams else [answer]
    assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


_WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "another model": ({"model": "other"}, 404, "model: expected 'letters', got 'other'"),
    "no prompt": ({"prompt": ""}, 400, "prompt: expected one text"),
    "two prompts": ({"prompt": ["a", "b"]}, 400, "prompt: expected one text"),
    "no such token": ({"prompt": [5, 256]}, 400, "tokens must be below 256"),
    "too long": ({"prompt": "x" * 600}, 400, "the prompt has 600 tokens; expected 1 to 599"),
    "two answers": ({"n": 2}, 400, "n is not done here: expected 1"),
    "penalty": ({"presence_penalty": 0.5}, 400, "presence_penalty is not done here"),
    "unknown": ({"min_p": 0.1}, 400, "min_p is not known here"),
    "temperature": ({"temperature": 3}, 400, "temperature: expected a number of 0 to 2, got 3"),
    "top_p": ({"top_p": "much"}, 400, "top_p: expected a number"),
    "max_tokens": ({"max_tokens": 0}, 400, "max_tokens: expected a whole number of at least 1"),
    "stop": ({"stop": [""]}, 400, "stop: expected a text or at most 16"),
    "stream": ({"stream": 1}, 400, "stream: expected true or false, got 1"),
}


@pytest.mark.parametrize("case", _WRONG)
def test_what_is_not_done_is_refused_by_its_name(server: _Server, case: str) -> None:
    given, status, words = _WRONG[case]
    body = {"model": "letters", "prompt": "x", "max_tokens": 1, **given}
    answer = httpx.post(f"{server.url}/completions", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_what_is_no_request_is_refused(server: _Server) -> None:
    url = f"{server.url}/chat/completions"
    text = {"content-type": "application/json"}
    assert httpx.post(url, content="{", headers=text).status_code == 400
    assert httpx.post(url, content="[]", headers=text).status_code == 400
    half = '{"messages": [{"role": "user", "content": "\\ud800"}]}'
    assert "text in Unicode" in httpx.post(url, content=half, headers=text).text
    assert httpx.post(url, content="{}", headers={"content-type": "text/plain"}).status_code == 415
    assert httpx.post(url, json={}, headers={"host": "elsewhere.example"}).status_code == 421
    assert httpx.get(url).status_code == 405
    assert (
        httpx.get(url.replace("/chat/completions", "/models")).json()["data"][0]["id"] == "letters"
    )
    assert httpx.get(server.url.replace("/v1", "/health")).json() == {"status": "ok"}


def test_a_client_that_leaves_frees_its_row(server: _Server) -> None:
    parts = server.client().completions.create(
        model="letters", prompt="long", max_tokens=500, temperature=0, stream=True
    )
    next(iter(parts))
    assert server.metric("active_requests") == 1
    parts.close()
    body = {"model": "letters", "prompt": "long", "max_tokens": 500}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/completions", json=body, timeout=0.2)
    deadline_s = time.monotonic() + 30
    while server.metric("active_requests"):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert server.metric('requests_total{ended="cancelled"}') == 2


@pytest.mark.long
def test_many_clients_lose_nothing_and_memory_is_flat(model: Path, tmp_path: Path) -> None:
    """64 clients, three rounds after a first one, each with prompts of its own."""
    with _serving(model, tmp_path, "--rows", "8") as served:

        def ask(number: int) -> str:
            prompt = f"client {number}, " * (1 + number % 30)
            answer = served.client().completions.create(
                model="letters", prompt=prompt, max_tokens=10, temperature=0
            )
            return str(answer.choices[0].text)

        def held_bytes() -> int:
            return sum(rank.memory_info().rss for rank in served.ranks())

        found, held = [], []
        with ThreadPoolExecutor(64) as pool:
            for first in range(4):
                found.append(list(pool.map(ask, range(first * 64, first * 64 + 64))))
                held.append(held_bytes())
        assert all(len(text) == 10 for texts in found for text in texts)
        assert found[2][7] == _alone(model, f"client {135}, " * (1 + 135 % 30), 10)[0]
        assert served.metric('requests_total{ended="length"}') == 4 * 64
        assert max(held[1:]) - held[0] < 16 << 20, held


def test_keys_and_a_queue_with_a_bound(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    options = ["--api-key-file", "keys", "--rows", "1", "--queue", "1", "--body-mib", "1"]
    options += ["--capacity", "4000"]
    with _serving(model, tmp_path, *options) as served:
        for key in ("none", "firs", "first2"):
            with pytest.raises(openai.AuthenticationError, match="expected a key"):
                served.client(key).models.list()
        assert [x.id for x in served.client("second").models.list()] == ["letters"]
        client = served.client("first")
        given: dict[str, Any] = {"model": "letters", "max_tokens": 3900, "temperature": 0}
        held = [client.completions.create(prompt=prompt, stream=True, **given) for prompt in "ab"]
        next(iter(held[0]))  # is written, and the other one waits
        with pytest.raises(openai.RateLimitError, match="too many requests wait"):
            client.completions.create(prompt="c", **given)
        with pytest.raises(openai.APIStatusError, match="at most 1,048,576 bytes"):
            client.completions.create(prompt="x" * (1 << 20), **given)
        for parts in held:
            parts.close()


def test_a_rank_that_dies_ends_the_server_and_its_requests(model: Path, tmp_path: Path) -> None:
    with _serving(model, tmp_path, "--capacity", "4000") as served:
        parts = iter(
            served.client().completions.create(
                model="letters", prompt="x", max_tokens=3990, temperature=0, stream=True
            )
        )
        next(parts)
        served.ranks()[-1].kill()
        with pytest.raises(
            openai.APIError, match=r"a rank has failed|peer closed|Connection error"
        ):
            list(parts)
        assert served.process.wait(30) != 0
        assert re.search(r"rank [01] was killed by signal 9, SIGKILL", served.err.read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    with _serving(model, tmp_path, "--capacity", "4000") as served:
        parts = iter(
            served.client().completions.create(
                model="letters", prompt="x", max_tokens=3990, temperature=0, stream=True
            )
        )
        next(parts)
        served.process.send_signal(number)
        with pytest.raises(openai.APIError, match="the server was stopped"):
            list(parts)
        assert served.process.wait(30) == 128 + number
        last = served.err.read_text().rstrip().rpartition("\n")[2]
        assert last == f"burst-rt: stopped by {number.name} and open requests were ended"


def test_a_port_that_is_taken_is_told(model: Path, server: _Server) -> None:
    port = server.url.rpartition(":")[2].removesuffix("/v1")
    command = [sys.executable, "-P", "-m", "burst_rt.launch.main", "serve", "--model", str(model)]
    job = subprocess.run(
        [*command, "-n", "1", "--port", port], capture_output=True, text=True, timeout=_START_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert job.returncode == 78, job.stderr
    assert f"--port {port}: " in job.stderr


def test_errors_in_a_stream_are_events(server: _Server) -> None:
    """Of the protocol's shape, as raw text."""
    body = {"model": "letters", "prompt": "x", "max_tokens": 3, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "text_completion" for event in events[:-1])
