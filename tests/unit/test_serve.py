"""`burst-rt serve` without ranks: texts of tokens, what requests ask for, what rank 0 decides."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from burst_rt.errors import ConfigError
from burst_rt.launch.serve.batch import read_lines
from burst_rt.launch.serve.desk import Desk, Talk
from burst_rt.launch.serve.protocol import Refusal, Reply, read_chat, read_completion
from burst_rt.launch.serve.sampling import Chosen, Sampler
from burst_rt.launch.serve.text import TextOfTokens
from burst_rt.launch.serve.turns import QueueFull, Request, Requests
from burst_rt.launch.serve.vocabulary import Vocabulary

_WORDS = "Bären, 熊 and 🐻 STOP at the river. "


def _of_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def _told(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The parts that are told of a text whose tokens are its bytes, and whether a stop ended it."""
    teller = TextOfTokens(_of_bytes, stops)
    parts = []
    for token in text.encode():
        parts.append(teller.put(token))
        if teller.stopped:
            return parts, True
    return [*parts, teller.end()], teller.stopped


def test_characters_are_told_when_they_are_whole() -> None:
    parts, _ = _told(_WORDS)
    assert "".join(parts) == _WORDS
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    assert max(map(len, parts)) == 1
    # What never becomes a character is told at the end.
    teller = TextOfTokens(_of_bytes)
    assert [teller.put(token) for token in b"a\xf0\x9f"] == ["a", "", ""]
    assert teller.end() == "\N{REPLACEMENT CHARACTER}"


def test_a_text_ends_before_the_first_stop() -> None:
    for stops in (("STOP",), ("river", "STOP"), ("STOPS", "STO", "P")):
        parts, stopped = _told(_WORDS, stops)
        assert stopped
        assert "".join(parts) == _WORDS[: min(at for s in stops if (at := _WORDS.find(s)) >= 0)]
    # What may be a stop's beginning is kept back, and told where it is none.
    teller = TextOfTokens(_of_bytes, ["abcd"])
    assert [teller.put(token) for token in b"xabcab"] == ["x", "", "", "", "abc", ""]
    assert (teller.end(), teller.stopped) == ("ab", False)


def test_texts_and_stops_drawn() -> None:
    chance = random.Random(0)
    for _ in range(500):
        text = "".join(chance.choice("abä") for _ in range(chance.randrange(30)))
        stops = tuple(
            "".join(chance.choice("abä") for _ in range(chance.randrange(1, 5)))
            for _ in range(chance.randrange(3))
        )
        found = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stops)]
        parts, stopped = _told(text, stops)
        assert stopped == bool(found)
        told = "".join(parts)
        if not found:
            assert told == text
            continue
        # The first stop that is whole ends the text, and of several the longest.
        ends = [s for s in stops if text[: found[0]].endswith(s)]
        assert told == text[: found[0] - max(map(len, ends))]


_SCORES = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def test_the_likeliest_of_the_top_k_are_drawn() -> None:
    made = torch.Generator().manual_seed(0)
    choose = Sampler(temperature=2.0, top_k=3).choose
    drawn = {choose(_SCORES, made).token for _ in range(300)}
    assert drawn == {1, 2, 3}
    assert Sampler(temperature=0).choose(_SCORES, made) == Chosen(1, 0.0)
    told = Sampler(temperature=0, num_likely=2).choose(_SCORES, made)
    logs = _SCORES.log_softmax(0).tolist()
    assert told.logprob == pytest.approx(logs[1])
    assert [token for token, _ in told.likely] == [1, 3]
    assert [log for _, log in told.likely] == pytest.approx([logs[1], logs[3]])
    with pytest.raises(ConfigError, match="scores are not numbers"):
        Sampler().choose(_SCORES * torch.nan, made)


_CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({**_CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({**_CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**_CHAT, "logprobs": 2}, "logprobs"),
        ({**_CHAT, "tools": [{"type": "function"}]}, "tools"),
        ({**_CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ({**_CHAT, "seed": 0.5}, "seed"),
        ({**_CHAT, "seed": True}, "seed"),
        ({**_CHAT, "seed": 2**63}, "seed"),
        ({**_CHAT, "temperature": float("nan")}, "temperature"),
        ({**_CHAT, "top_p": 0}, "top_p"),
        ({**_CHAT, "top_k": -1}, "top_k"),
        ({**_CHAT, "stop": ["a"] * 17}, "stop"),
        ({**_CHAT, "stop": 5}, "stop"),
        ({**_CHAT, "stream_options": {"what": 1}}, "stream_options"),
        ({**_CHAT, "model": 5}, "model"),
        ({**_CHAT, "max_tokens": 2.0}, "max_tokens"),
        ({**_CHAT, "prompt": "hi"}, "prompt"),
    ],
)
def test_what_a_chat_does_not_take_is_named(body: dict[str, Any], name: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_chat(body)
    assert (caught.value.status, caught.value.name) == (400, name)
    assert name in caught.value.why


def test_what_asks_for_nothing_is_taken() -> None:
    idle = {
        "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": [],
        "user": "me", "metadata": {"a": "b"}, "seed": None, "response_format": {"type": "text"},
    }  # fmt: skip
    asked = read_chat({**_CHAT, **idle})
    assert asked == read_chat(_CHAT)
    assert (asked.sampling, asked.most_tokens, asked.streams) == (Sampler(), None, False)
    assert read_completion({"prompt": "x"}).most_tokens == 16
    assert read_completion({"prompt": [1, 2]}).tokens == [1, 2]
    assert read_completion({"prompt": ["x"]}).prompt == "x"


def _vocabulary(tokens: tokenizers.Tokenizer, num_tokens: int) -> Vocabulary:
    """The vocabulary of a model whose last token is </s>."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")
    folder: Any = SimpleNamespace(tokenizer=tokenizer)
    model: Any = SimpleNamespace(
        config=transformers.LlamaConfig(vocab_size=num_tokens),
        generation_config=transformers.GenerationConfig(eos_token_id=num_tokens - 1),
    )
    return Vocabulary(folder, model)


def _sentence_pieces() -> Vocabulary:
    """A vocabulary whose tokenizer leaves out a text's first space, as Llama 2's does."""
    words = {"\u2581a": 0, "\u2581time": 1, "the": 2, "\u2581the": 3, "</s>": 4}
    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokens.decoder = tokenizers.decoders.Metaspace()
    return _vocabulary(tokens, 5)


def test_a_first_space_counts_where_a_text_goes_on() -> None:
    vocabulary = _sentence_pieces()
    assert vocabulary.decode([1, 3]) == "time the"
    for behind, text in (([0], " time"), ([], "time")):
        teller = TextOfTokens(vocabulary.decode, behind=behind)
        assert [teller.put(token) for token in (1, 3, 2)] == [text, " the", "the"]
    assert [vocabulary.word(token) for token in range(5)] == [" a", " time", "the", " the", ""]


def test_tokens_that_are_parts_of_a_character_have_its_bytes() -> None:
    """Clients put the bytes of such tokens together, as the protocol says."""
    letters = "\N{LATIN SMALL LETTER E WITH ACUTE}\N{SNOWMAN}"
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["</s>"])
    tokens.train_from_iterator([], trainer)
    by_level = _vocabulary(tokens, tokens.get_vocab_size())
    tokens = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {"a": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}, "</s>": 257}, [],
            byte_fallback=True,
        )
    )  # fmt: skip
    tokens.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    fallen_back = _vocabulary(tokens, 258)
    for vocabulary in (by_level, fallen_back):
        encoded = vocabulary.encode(read_completion({"prompt": f"a{letters}"}))
        assert vocabulary.decode(encoded) == f"a{letters}"
        assert len(encoded) == 6, "each byte is a token"
        told = [vocabulary.bytes_of(token) for token in encoded]
        assert told == [bytes([byte]) for byte in f"a{letters}".encode()]
    unnamed = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "\N{WHITE SQUARE}": 1}))
    unnamed.decoder = tokenizers.decoders.Replace("\N{WHITE SQUARE}", "\N{REPLACEMENT CHARACTER}")
    assert _vocabulary(unnamed, 3).bytes_of(1) is None


def test_answers_go_on_while_another_prompt_is_turned_into_tokens() -> None:
    requests = Requests(1, capacity=100, chunk=8, most_waiting=9, within_s=60.0)
    went_on = threading.Event()

    class Slow(Vocabulary):
        def encode(self, asked: Any) -> list[int]:
            assert went_on.wait(30), "the event loop waits for the tokenizer"
            return super().encode(asked)

    pieces = _sentence_pieces()
    pieces.__class__ = Slow
    desk = Desk(model="m", vocabulary=pieces, requests=requests)

    async def ask() -> list[int]:
        opening = asyncio.ensure_future(desk.open(read_completion({"prompt": [0, 1]})))
        await asyncio.sleep(0)
        went_on.set()
        return (await opening).request.prompt

    assert asyncio.run(ask()) == [0, 1]


def test_probabilities_are_of_the_likeliest_token_of_a_text() -> None:
    vocabulary = _sentence_pieces()
    asked = read_completion({"prompt": "a", "logprobs": 2})
    answer = Reply(
        asked=asked, model="m", num_prompt=1, word=lambda token: "xy"[token // 3], bytes_of=bytes
    )
    for first in range(3):
        answer.chosen.append(Chosen(3, -0.1, ((3, -0.1), (4, -2.5), (0, -3.0))))
        told = answer.part("y", first)["choices"][0]["logprobs"]
        assert told["text_offset"] == [first]
        assert told["top_logprobs"] == [{"y": -0.1, "x": -3.0}]
    assert answer.whole()["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2]
    answer = Reply(asked=asked, model="m", num_prompt=1, word=vocabulary.word, bytes_of=bytes)
    answer.chosen += [Chosen(1, -0.1), Chosen(2, -0.1), Chosen(3, -0.1)]
    told = answer.whole()["choices"][0]["logprobs"]
    assert (told["tokens"], told["text_offset"]) == ([" time", "the", " the"], [0, 5, 8])


def test_parts_of_an_answer_make_the_whole() -> None:
    asked = read_chat({**_CHAT, "stream": True, "stream_options": {"include_usage": True}})
    answer = Reply(asked=asked, model="m", num_prompt=3, word=str, bytes_of=bytes)
    parts = [answer.part(text, 0) for text in ("a", "b")]
    answer.ended, answer.text, answer.num_new = "stop", "ab", 2
    parts.append(answer.part("", 2))
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas == [{"role": "assistant", "content": "a"}, {"content": "b"}, {}]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "stop"]
    assert {part["id"] for part in parts} == {answer.whole()["id"]}
    assert answer.last_part()["usage"]["total_tokens"] == 5
    assert answer.whole()["choices"][0]["message"]["content"] == "ab"


_ASKED = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("{", "line 3 of .*: expected a JSON object: "),
        ("[]", "line 3 of .*: expected a JSON object: "),
        (json.dumps(_ASKED), "line 3 of .*: custom_id: expected a text of its own, got 'a' again"),
        (json.dumps(_ASKED | {"custom_id": 1}), "custom_id: expected a text of its own, got 1"),
        (json.dumps(_ASKED | {"custom_id": "b", "url": "/v1/embeddings"}), "got '/v1/embeddings'"),
        (json.dumps(_ASKED | {"custom_id": "b", "body": "x"}), "a body, an object; got .* 'x'"),
    ],
)
def test_a_file_of_other_lines_is_refused(tmp_path: Path, second: str, said: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(f"{json.dumps(_ASKED)}\n\n{second}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        read_lines(path, 9)


def test_a_text_may_have_other_ends_of_lines(tmp_path: Path) -> None:
    """JSON lines end with "\\n" alone."""
    path = tmp_path / "requests.jsonl"
    odd = _ASKED | {"body": {"prompt": "a\u2028b\u2029c\x85d"}}
    lines = [json.dumps(odd | {"custom_id": each}, ensure_ascii=False) for each in "ab"]
    path.write_bytes("\r\n".join(lines).encode())
    assert len(read_lines(path, 9)) == 2


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "other").write_bytes(b"\xff")
    for name, said in (("empty", "has no requests"), ("other", "utf-8"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=f"--requests: .*{said}"):
            read_lines(tmp_path / name, 9)


class _Ranks:
    """What ranks would do in turns: the tokens of the caches, and scores that count on from the
    last token.
    """

    def __init__(self, requests: Requests, num_rows: int, keep_states: bool = False) -> None:
        self.requests, self.keep_states = requests, keep_states
        self.rows = [list[int]() for _ in range(num_rows)]
        self.one = list[int]()
        self.most_chunk = self.num_read = 0

    def turn(self) -> bool:
        """Takes a turn; whether there was anything to do."""
        turn = self.requests.next_turn(0.0)
        if turn.over:
            return False
        of_rows = of_chunk = None
        if turn.begin:
            number, tokens = turn.begin
            assert tokens <= len(self.rows[number])
            if self.keep_states:
                assert tokens in (0, len(self.rows[number]))
            self.one = self.rows[number][:tokens]
        if any(turn.rows):
            for row, new in zip(self.rows, turn.rows, strict=True):
                row += new
            of_rows = torch.stack([self._scores(row) for row in self.rows])
        if turn.chunk:
            self.one += turn.chunk
            self.num_read += len(turn.chunk)
            self.most_chunk = max(self.most_chunk, len(turn.chunk))
            of_chunk = self._scores(self.one)
        if turn.place >= 0:
            self.rows[turn.place] = list(self.one)
        self.requests.took(turn, of_rows, of_chunk)
        return bool(any(turn.rows) or turn.chunk)

    @staticmethod
    def _scores(tokens: list[int]) -> torch.Tensor:
        # By all tokens: a row that has others than it should goes on otherwise.
        return torch.eye(1000)[(sum(tokens) + len(tokens)) % 1000]


def _wanted(prompt: list[int], num: int) -> list[int]:
    text = list(prompt)
    for _ in range(num):
        text.append(int(_Ranks._scores(text).argmax()))
    return text[len(prompt) :]


def _request(prompt: list[int], most: int, told: list[Any], **about: Any) -> Request:
    known: dict[str, Any] = {
        "prompt": prompt, "sampling": Sampler(temperature=0), "most_tokens": most,
        "ends": frozenset(), "generator": torch.Generator(), "tell": told.append,
    }  # fmt: skip
    return Request(**(known | about))


def test_drawn_requests_get_the_tokens_of_their_own_text() -> None:
    """Prompts that begin alike, more requests than rows, cancelled ones, in turns of any chunk."""
    chance = random.Random(1)
    for _ in range(30):
        num_rows, chunk = chance.randrange(1, 4), chance.choice((1, 3, 50))
        states = chance.random() < 0.3
        requests = Requests(
            num_rows, capacity=60, chunk=chunk, most_waiting=100, within_s=1e6, keep_states=states
        )
        ranks = _Ranks(requests, num_rows, states)
        common = [chance.randrange(9) for _ in range(30)]
        asked: list[tuple[Request, list[Any]]] = []
        for _ in range(12):
            own = [chance.randrange(9) for _ in range(chance.randrange(1, 8))]
            prompt = common[: chance.randrange(31)] + own
            told: list[Any] = []
            asked.append((_request(prompt, chance.randrange(1, 40), told), told))
            requests.put(asked[-1][0])
            for _ in range(chance.randrange(6)):
                ranks.turn()
            if chance.random() < 0.2:
                asked[chance.randrange(len(asked))][0].cancelled = True
        while ranks.turn():
            pass
        assert ranks.most_chunk <= chunk
        assert (requests.num_active, requests.num_waiting) == (0, 0)
        for request, told in asked:
            *tokens, why = told
            wanted = _wanted(request.prompt, len(tokens))
            assert [chosen.token for chosen in tokens] == wanted
            room = 60 - len(request.prompt) + 1
            if why == "length":
                assert len(tokens) == min(request.most_tokens, room)
            else:
                assert (why, request.cancelled) == ("error: cancelled", True)


def test_a_prompt_that_begins_like_a_row_is_read_from_there_on() -> None:
    requests = Requests(2, capacity=100, chunk=1000, most_waiting=9, within_s=1e6)
    ranks = _Ranks(requests, 2)
    for number, (prompt, reused) in enumerate(
        [([1] * 20, 0), ([1] * 20, 19), ([1] * 15 + [2] * 5, 15), ([3] * 5, 0)]
    ):
        before, told = requests.num_reused, list[Any]()
        requests.put(_request(prompt, 2, told))
        while ranks.turn():
            pass
        assert requests.num_reused - before == reused, number
        assert [chosen.token for chosen in told[:-1]] == _wanted(prompt, 2)


def test_short_prompts_are_read_one_after_another_and_a_long_one_between_tokens() -> None:
    requests = Requests(4, capacity=100, chunk=10, most_waiting=9, within_s=1e6)
    for token, length in enumerate((4, 4, 4, 25)):
        requests.put(_request([token] * length, 90, []))
    ranks = _Ranks(requests, 4)
    seen = []
    for _ in range(8):
        written = [len(row.tokens) for row in requests._rows]
        ranks.turn()
        wrote = any(len(row.tokens) > n > 0 for row, n in zip(requests._rows, written, strict=True))
        seen.append((ranks.num_read, wrote))
    # Tokens of prompts, and whether rows were written: never more than ten between two tokens.
    assert seen == [
        (4, False), (8, False), (12, True), (22, True), (32, True), (37, True), (37, True),
        (37, True),
    ]  # fmt: skip


def test_where_rows_have_states_a_prompt_goes_on_from_whole_rows_alone() -> None:
    requests = Requests(
        2, capacity=100, chunk=1000, most_waiting=9, within_s=1e6, keep_states=True
    )  # fmt: skip
    ranks, prompt = _Ranks(requests, 2, keep_states=True), [1] * 20
    for more, reused in (([], 0), ([2], 21), ([3] * 5, 0)):
        before, told = requests.num_reused, list[Any]()
        requests.put(_request(prompt + more, 2, told))
        while ranks.turn():
            pass
        assert requests.num_reused - before == reused
        assert [chosen.token for chosen in told[:-1]] == _wanted(prompt + more, 2)
        if not more:
            prompt = [*prompt, told[0].token]  # what the row has


def test_a_token_that_ends_texts_is_not_told() -> None:
    requests = Requests(1, capacity=100, chunk=1000, most_waiting=9, within_s=1e6)
    told: list[Any] = []
    wanted = _wanted([4, 5], 3)
    requests.put(_request([4, 5], 50, told, ends=frozenset(wanted[2:])))
    ranks = _Ranks(requests, 1)
    while ranks.turn():
        pass
    assert [x if isinstance(x, str) else x.token for x in told] == [*wanted[:2], "stop"]


def test_all_is_over_once_no_request_comes_and_all_have_ended() -> None:
    requests = Requests(1, capacity=100, chunk=1000, most_waiting=9, within_s=1e6)
    told: list[Any] = []
    requests.put(_request([4, 5], 3, told))
    requests.close()
    ranks = _Ranks(requests, 1)
    for _ in range(3):
        assert ranks.turn()
    assert told[-1] == "length"
    assert requests.next_turn(1e6).over
    late: list[Any] = []
    requests.put(_request([4], 3, late))
    assert late == ["error: no more requests are taken"]


def test_nobody_need_hear_of_a_request_any_more() -> None:
    """`burst-rt generate --requests ... | head -1`: where an answer cannot be printed, the loop in
    which the others are awaited has ended before they have."""
    requests = Requests(1, capacity=100, chunk=8, most_waiting=9, within_s=60.0)
    desk = Desk(model="m", vocabulary=_sentence_pieces(), requests=requests)

    async def ask() -> Talk:
        return await desk.open(read_completion({"prompt": [0, 1]}))

    talk = asyncio.run(ask())
    talk.request.cancelled = True
    assert not _Ranks(requests, 1).turn()


def test_limits_and_ends() -> None:
    requests = Requests(1, capacity=100, chunk=2, most_waiting=2, within_s=0.2)
    ranks = _Ranks(requests, 1)
    told: list[list[Any]] = [[] for _ in range(4)]
    asked = [_request([5] * 6, 1000, each) for each in told]
    requests.put(asked[0])
    ranks.turn()
    for request in asked[1:3]:
        requests.put(request)
    with pytest.raises(QueueFull):
        requests.put(asked[3])
    asked[1].cancelled = True
    requests.put(asked[3])  # in the place of one that nobody waits for
    assert told[1] == ["error: cancelled"]
    asked[2].began_s = time.monotonic() - 1
    ranks.turn()
    assert told[2] == ["error: it took longer than 0.2 s"], "though no row is free"
    while ranks.turn() and len(told[0]) < 5:
        pass
    requests.fail("the end")
    assert told[0][-1] == told[3][-1] == "error: the end"
    assert not ranks.turn()
    late: list[Any] = []
    requests.put(_request([1], 5, late, began_s=time.monotonic() - 1))
    assert not ranks.turn()
    assert late == ["error: it took longer than 0.2 s"]
