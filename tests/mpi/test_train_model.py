"""Models of transformers on real MPI jobs: fine-tuned and measured as one process does it, and the
byte-level model exported as one.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from jobs import Job, run_command
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tolerances import LOSSES
from torch import Tensor
from torch.nn import functional

import burst_rt
from burst_rt.errors import ConfigError, InputError
from burst_rt.launch.main import cli
from burst_rt.launch.train.checkpoint import find_checkpoint
from burst_rt.launch.train.config import RunOptions, TrainConfig
from burst_rt.launch.train.data import (
    Corpus,
    heldout_starts,
    load_corpus,
    sequences_at,
    training_starts,
)
from burst_rt.launch.train.export import byte_tokenizer
from burst_rt.launch.train.loop import evaluate, train
from burst_rt.launch.train.model import Decoder, learning_rate
from burst_rt.launch.train.pretrained import ShardedPretrained, open_folder

# Primes: no world divides them.
_SEQ_LEN, _HELDOUT = 61, 3
_STEPS, _KEPT, _BATCH, _LR = 6, 3, 2, 1e-3
_VOCABULARY = 320
_TRAIN = [
    "--seq-len", str(_SEQ_LEN), "--batch", str(_BATCH), "--steps", str(_STEPS), "--warmup", "2",
    "--lr", str(_LR), "--eval-sequences", str(_HELDOUT), "--checkpoint-every", str(_KEPT),
]  # fmt: skip
_TEXTS = {
    "a.txt": "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 150,
    "b.txt": "Käse, Brötchen und Äpfel — überall gibt es größere Straßen; Ā 日本語 🙂\n" * 90,
}


def _job(cwd: Path, *arguments: str) -> Job:
    return run_command(arguments, cwd=cwd, warm="models")


def _read(job: Job) -> dict[str, Any]:
    assert job.exit_code == 0, job.text
    assert job.err == "", job.text
    result = json.loads(job.out)
    assert isinstance(result, dict)
    return result


def _records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name, content in _TEXTS.items():
        (folder / name).write_text(content)
    return folder


def _make(folder: Path, config: Any) -> Path:
    """A folder of transformers with random weights, large enough to matter, and a tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(_TEXTS.values()), trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>"
    ).save_pretrained(folder)
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _small(kind: Any, **changes: Any) -> Any:
    return kind(
        **{
            "vocab_size": _VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "initializer_range": 0.2,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("llama"), _small(transformers.LlamaConfig))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, llama: Path, text: Path) -> Path:
    """A run of two ranks that share each sequence."""
    folder = tmp_path_factory.mktemp("runs")
    job = _job(
        folder, "train", "-n", "2", "--model", str(llama), *_TRAIN, "--data", str(text), "--out",
        "tuned",
    )  # fmt: skip
    assert (job.exit_code, job.err) == (0, ""), job.text
    return folder / "tuned"


def _corpus(folder: Path, text: Path) -> Corpus:
    return load_corpus(text, open_folder(folder, _SEQ_LEN).encoding)


def _load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )


def _loss(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens, with transformers' own attention and torch's own mean; and the
    balancing loss that a mixture of experts is asked for.
    """
    output = model(tokens, use_cache=False)
    loss = functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    balancing = output.get("aux_loss")
    return loss if balancing is None else loss + model.router_aux_loss_coef * balancing


@pytest.fixture(scope="module")
def alone(llama: Path, text: Path) -> tuple[list[float], list[float]]:
    return _trained_alone(llama, text)


def _trained_alone(folder: Path, text: Path) -> tuple[list[float], list[float]]:
    """The losses and norms of gradients of one process without burst_rt's attention, losses or
    gradients.
    """
    model, stream = _load(folder), _corpus(folder, text).train
    groups = [
        {"params": [x for x in model.parameters() if (x.dim() >= 2) == decays], "weight_decay": d}
        for decays, d in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(1, _STEPS + 1):
        starts = training_starts(stream, _SEQ_LEN, seed=0, step=step, indices=range(_BATCH))
        loss = _loss(model, *sequences_at(stream, starts, _SEQ_LEN))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, peak=_LR, warmup=2, steps=_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def test_documents_become_tokens_with_eos_between_them(llama: Path, text: Path) -> None:
    corpus = _corpus(llama, text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    train, heldout = [], []
    for content in _TEXTS.values():
        whole = content.encode()
        before = whole[: len(whole) - len(whole) * 5 // 100].decode(errors="ignore")
        train.append(before)
        heldout.append(content.removeprefix(before))
    for stream, parts in ((corpus.train, train), (corpus.heldout, heldout)):
        assert tokenizer.decode(stream) == "<end>".join(parts)
        assert stream.tolist() == tokenizer("<end>".join(parts)).input_ids
    assert corpus.heldout_bytes == len("\0".join(heldout).encode())


def test_fine_tuning_gives_the_losses_of_one_process(
    tuned: Path,
    alone: tuple[list[float], list[float]],
    llama: Path,
    text: Path,
    tmp_path: Path,
) -> None:
    # Two groups of one rank, a sequence each.
    summary = _read(
        _job(
            tmp_path, "train", "-n", "2", "--context-parallel", "1", "--model", str(llama),
            *_TRAIN, "--data", str(text), "--out", "two", "--json",
        )
    )  # fmt: skip
    for run in (tuned, tmp_path / "two"):
        for name, expected in zip(("loss", "grad_norm"), alone, strict=True):
            found = [record[name] for record in _records(run)]
            assert found == pytest.approx(expected, rel=LOSSES), (run, name)
    assert (summary["unit"], summary["bytes_sent"]) == ("token", 0)
    assert summary["heldout_loss"] == pytest.approx(_records(tuned)[-1]["heldout_loss"], rel=LOSSES)


def test_fine_tuning_balances_experts_over_all_ranks(text: Path, tmp_path: Path) -> None:
    config = _small(
        transformers.MixtralConfig, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True, router_aux_loss_coef=1.0,
    )  # fmt: skip
    mixtral = _make(tmp_path / "mixtral", config)
    alone = _trained_alone(mixtral, text)
    for size in ("1", "2"):  # a sequence each, or parts of both
        job = _job(
            tmp_path, "train", "-n", "2", "--context-parallel", size, "--model", str(mixtral),
            *_TRAIN, "--data", str(text), "--checkpoint-activations", "--out", size,
        )  # fmt: skip
        assert job.exit_code == 0, job.text
        for name, expected in zip(("loss", "grad_norm"), alone, strict=True):
            found = [record[name] for record in _records(tmp_path / size)]
            assert found == pytest.approx(expected, rel=LOSSES), (size, name)
    # What a text is worth is not how experts share it.
    tuned = _load(tmp_path / "2" / "model")
    tuned.config.output_router_logits = False
    heldout = _corpus(mixtral, text).heldout
    with torch.no_grad():
        losses = [
            _loss(tuned, *sequences_at(heldout, [start], _SEQ_LEN)).item()
            for start in heldout_starts(heldout, _SEQ_LEN, _HELDOUT)
        ]
    found_loss = _records(tmp_path / "2")[-1]["heldout_loss"]
    assert found_loss == pytest.approx(sum(losses) / len(losses), rel=LOSSES)
    folder = str(tmp_path / "2" / "model")
    assert _job(
        tmp_path, "generate", "-n", "2", "--model", folder, "--prompt", "The", "--max-new-tokens",
        "2",
    ).exit_code == 0  # fmt: skip


def test_a_run_leaves_a_folder_that_transformers_loads(tuned: Path, llama: Path) -> None:
    model = _load(tuned / "model")
    weights = find_checkpoint(tuned)[1].weights
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    before = load_file(llama / "model.safetensors")
    assert not any(torch.equal(before[name], weights[name]) for name in before)
    tokenizers = [transformers.AutoTokenizer.from_pretrained(x) for x in (llama, tuned / "model")]
    first, second = (tokenizer(_TEXTS["b.txt"]).input_ids for tokenizer in tokenizers)
    assert first == second


def test_a_resumed_run_goes_on_bit_for_bit(tuned: Path, tmp_path: Path) -> None:
    run, last = tmp_path / "run", Path("checkpoints", f"step-{_STEPS:08}")
    shutil.copytree(tuned, run, ignore=shutil.ignore_patterns(last.name, "model"))
    # Activations that are computed again change no bit, and no ring goes round again for them.
    again = "--checkpoint-activations"
    job = _job(tmp_path, "train", "-n", "2", "--resume", "--out", str(run), again)
    assert job.exit_code == 0, job.text
    assert f"resuming after step {_KEPT}" in job.out
    for name in ("loss", "bytes_sent", "heldout_loss"):
        assert [r[name] for r in _records(run)] == [r[name] for r in _records(tuned)], name
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (run / last / name).read_bytes() == (tuned / last / name).read_bytes()
    assert (run / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "config",
    [
        # Unlike a Llama's, its queries and keys have norms.
        _small(transformers.Qwen3Config),
        # No attention at all.
        _small(transformers.FalconMambaConfig, state_size=4, time_step_rank=4),
    ],
    ids=["Qwen3", "FalconMamba"],
)
def test_perplexity_is_that_of_one_process(tmp_path: Path, text: Path, config: Any) -> None:
    folder = _make(tmp_path / "model", config)
    found = _read(
        _job(
            tmp_path, "eval", "-n", "2", "--model", str(folder), "--data", str(text), "--seq-len",
            str(_SEQ_LEN), "--eval-sequences", "0", "--json",
        )
    )  # fmt: skip
    corpus, model = _corpus(folder, text), _load(folder)
    starts = heldout_starts(corpus.heldout, _SEQ_LEN, 0)
    assert len(starts) > 2
    with torch.no_grad():
        loss = _loss(model, *sequences_at(corpus.heldout, starts, _SEQ_LEN)).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["num_tokens"] == len(starts) * _SEQ_LEN
    bits = loss / math.log(2) * len(corpus.heldout) / corpus.heldout_bytes
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert found["model"] == str(folder)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, Path]:
    """A run of the byte-level model, and what `burst-rt export` made of it."""
    place = tmp_path_factory.mktemp("exported")
    config = TrainConfig(
        data=str(text), seq_len=97, steps=8, warmup=2, layers=2, dim=24, heads=6, kv_heads=2,
        eval_sequences=3,
    )  # fmt: skip
    options = RunOptions(out=place / "run", progress="none")
    burst_rt.run_local(1, lambda world: train(world, config, options, {}), timeout_s=60)
    done = CliRunner().invoke(cli, ["export", str(place / "run"), str(place / "model")])
    assert done.exit_code == 0, done.output
    return place / "run", place / "model"


def test_an_exported_model_has_the_same_scores(exported: tuple[Path, Path]) -> None:
    run, folder = exported
    checkpoint = find_checkpoint(run)[1]
    architecture = checkpoint.manifest.config.architecture
    assert architecture is not None
    decoder = Decoder(architecture, seed=5)
    decoder.load_state_dict(checkpoint.weights)
    tokens = torch.from_numpy(np.frombuffer(_TEXTS["b.txt"].encode()[:97], np.uint8).astype(int))

    def attend(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    with torch.no_grad():
        expected = decoder(tokens[None], torch.arange(97), attend)
        found = _load(folder)(tokens[None]).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_byte_is_a_token(exported: tuple[Path, Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported[1])
    # All bytes that UTF-8 has, and what stands for bytes in a tokenizer's own files.
    texts = [
        "", " a  b\n\n\tc ", "don't . , ! stop", "Ā ĀĠĊ čġ", *_TEXTS.values(),
        "".join(map(chr, range(1, 0x800))), "\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff 🙂",
        "e\u0301 \ufb01 \u200b", "<end> </s> <s>",
    ]  # fmt: skip
    for text in texts:
        tokens = tokenizer.encode(text)
        assert bytes(tokens) == text.encode(), text
        assert tokenizer.decode(tokens) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (0, 256)
    assert tokenizer.decode([97, 0, 98], skip_special_tokens=True) == "ab"
    assert byte_tokenizer().encode("a\0b") == [97, 0, 98]


def test_an_exported_model_is_measured_and_trained_as_any_other(
    exported: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    run, folder = exported
    chosen = {"model": str(folder), "data": str(text), "seq_len": 97, "eval_sequences": 3}
    (expected,) = burst_rt.run_local(1, lambda world: evaluate(world, run, {}), timeout_s=60)
    (found,) = burst_rt.run_local(1, lambda world: evaluate(world, None, chosen), timeout_s=60)
    assert expected is not None
    assert found is not None
    for name in ("perplexity", "bits_per_byte"):
        assert found.figures[name] == pytest.approx(expected.figures[name], rel=1e-5)
    assert found.figures["num_tokens"] == expected.figures["num_tokens"] == 3 * 97
    config = TrainConfig(model=str(folder), data=str(text), seq_len=97, steps=1, eval_sequences=3)
    again = RunOptions(out=tmp_path / "again", progress="none")
    (summary,) = burst_rt.run_local(1, lambda world: train(world, config, again, {}), timeout_s=60)
    assert summary is not None
    # A step at a small rate changes little.
    assert summary.figures["heldout_loss"] == pytest.approx(expected.figures["loss"], rel=1e-2)
    assert _records(tmp_path / "again")[0]["lr"] < 1e-4


def test_a_fine_tuned_checkpoint_is_measured_and_exported_too(tuned: Path, tmp_path: Path) -> None:
    (found,) = burst_rt.run_local(1, lambda world: evaluate(world, tuned, {}), timeout_s=60)
    assert found is not None
    assert found.figures["same_text"] is True
    assert found.figures["loss"] == pytest.approx(_records(tuned)[-1]["heldout_loss"], rel=1e-5)
    folder = tmp_path / "deep" / "model"
    done = CliRunner().invoke(cli, ["export", str(tuned), str(folder)])
    assert done.exit_code == 0, done.output
    name = "model.safetensors"
    assert (folder / name).read_bytes() == (tuned / "model" / name).read_bytes()
    with pytest.raises(ConfigError, match="is there already; choose another FOLDER"):
        cli(["export", str(tuned), str(folder)], standalone_mode=False)


def _changed(folder: Path, place: Path, name: str, change: Callable[[Path], object]) -> Path:
    """A copy of a folder whose file `name` has changed."""
    shutil.copytree(folder, place)
    change(place / name)
    return place


def _with(**entries: object) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def _rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Tensors of a file, changed in place."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _lose_a_weight(path: Path) -> None:
    _rewrite(path, lambda tensors: tensors.pop("model.norm.weight"))


def _cast(dtype: torch.dtype, last: str = "") -> Callable[[Path], object]:
    """The weights whose names end so."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: x.to(dtype) for name, x in tensors.items() if name.endswith(last)}

    return lambda path: _rewrite(path, change)


_BLOCK = 16
_FP8 = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK], "fmt": "e4m3"}


def _fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit weights, and a scale for each block of them."""
    blocks = x.unflatten(0, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
    scales = blocks.abs().amax((1, 3)) / 448
    return (blocks / scales[:, None, :, None]).reshape(x.shape).to(torch.float8_e4m3fn), scales


def _quantise(path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name], tensors[f"{name}_scale_inv"] = _fp8(tensors[name])

    _rewrite(path, change)


def _dequantised(path: Path) -> None:
    """The numbers that `_quantise` leaves, as float32."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weights, scales = _fp8(tensors[name])
            whole = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
            tensors[name] = weights.float() * whole

    _rewrite(path, change)


def _of_another_quantiser(path: Path) -> None:
    _quantise(path)
    _with(quantization_config={"quant_method": "modelopt"})(path.parent / "config.json")


_BROKEN: list[tuple[str, Callable[[Path], object], str]] = [
    ("config.json", lambda path: path.write_text("{"), "config.json' is not a valid JSON file"),
    ("config.json", _with(model_type="nothing"), "model type `nothing`"),
    ("config.json", _with(vocab_size=999), "lm_head.weight.* missing or of another shape"),
    ("config.json", _with(num_hidden_layers=3), "model.layers.2.* missing or of another shape"),
    ("config.json", _with(max_position_embeddings=60), "max_position_embeddings, 60, got 61"),
    (
        "config.json",
        _with(num_attention_heads=5),
        "cannot read .*multiple of the number of attention",
    ),
    ("config.json", _with(num_key_value_heads=0), "cannot read .*division"),
    ("model.safetensors", lambda path: path.write_bytes(b"xx"), "cannot read .*header too small"),
    ("model.safetensors", _lose_a_weight, "model.norm.weight missing"),
    ("config.json", _with(num_attention_heads=5), "hidden size .32. is not a multiple of"),
    ("config.json", _with(num_key_value_heads=0), "integer .*division or modulo by zero"),
    ("model.safetensors", _cast(torch.int8), "stored as I8, which mean nothing without scales: lm"),
    ("model.safetensors", _cast(torch.uint8, "1.mlp.up_proj.weight"), "U8.*: model.layers.1.mlp."),
    ("model.safetensors", _quantise, "as F8_E4M3, .*layers.0.mlp.down_proj.weight.*got none"),
    ("model.safetensors", _of_another_quantiser, "as F8_E4M3, .*knows .got modelopt"),
    ("config.json", _with(quantization_config={"quant_method": "bitnet"}), "stay so .* .bitnet"),
    ("tokenizer.json", lambda path: path.write_text("{}"), "cannot read"),
    ("tokenizer_config.json", _with(eos_token=None), "has no EOS token"),
]


# torch's compiler, which BitNet's layers load.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize(("name", "change", "words"), _BROKEN)
def test_a_folder_that_cannot_be_used_is_refused(
    llama: Path, text: Path, tmp_path: Path, name: str, change: Callable[[Path], object], words: str
) -> None:
    folder = _changed(llama, tmp_path / "folder", name, change)
    chosen = {"model": str(folder), "data": str(text), "seq_len": _SEQ_LEN}
    with pytest.raises(ConfigError, match=words) as raised:
        burst_rt.run_local(1, lambda world: evaluate(world, None, chosen), timeout_s=60)
    assert "\n" not in str(raised.value)


def test_weights_that_are_left_out_are_told(
    llama: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _changed(llama, tmp_path / "folder", "config.json", _with(num_hidden_layers=1))
    chosen = {"model": str(folder), "data": str(text), "seq_len": _SEQ_LEN}
    burst_rt.run_local(1, lambda world: evaluate(world, None, chosen), timeout_s=60)
    assert "are left out: model.layers.1." in caplog.text


def _heldout_loss(folder: Path, text: Path) -> float:
    chosen = {"model": str(folder), "data": str(text), "seq_len": _SEQ_LEN}
    (found,) = burst_rt.run_local(1, lambda world: evaluate(world, None, chosen), timeout_s=60)
    assert found is not None
    return float(found.figures["loss"])


def test_what_weights_were_cast_to_is_told(
    llama: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.safetensors"
    double = _changed(llama, tmp_path / "double", name, _cast(torch.float64))
    assert _heldout_loss(double, text) == _heldout_loss(llama, text)
    assert "stored as F64: transformers has made float32 of them" in caplog.text
    caplog.clear()
    fp8 = _changed(llama, tmp_path / "fp8", name, _quantise)
    _with(quantization_config=_FP8)(fp8 / "config.json")
    plain = _changed(llama, tmp_path / "plain", name, _dequantised)
    assert _heldout_loss(fp8, text) == pytest.approx(_heldout_loss(plain, text), rel=1e-6)
    assert caplog.text.count("stored as F8_E4M3") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_usual(
    llama: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    """In several files, too, of which others in the folder are none."""
    folder = tmp_path / "half"
    shutil.copytree(llama, folder)
    (folder / "model.safetensors").unlink()
    _load(llama).to(dtype).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    save_file({"other": torch.zeros(2, dtype=torch.int8)}, folder / "other.safetensors")
    assert _heldout_loss(folder, text) == pytest.approx(_heldout_loss(llama, text), rel=1e-2)
    assert caplog.text == ""


def test_integers_that_are_no_weights_are_left_out(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Old folders of GPT-2 have each layer's mask."""
    config = transformers.GPT2Config(
        vocab_size=_VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=64
    )
    folder = _make(tmp_path / "gpt2", config)
    before = _heldout_loss(folder, text)
    caplog.clear()
    mask = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()
    _rewrite(folder / "model.safetensors", lambda tensors: tensors.update({"h.0.attn.bias": mask}))
    assert _heldout_loss(folder, text) == before
    assert caplog.text == ""


def test_ranks_that_see_other_files_are_refused(llama: Path, text: Path, tmp_path: Path) -> None:
    other = _changed(llama, tmp_path / "other", "config.json", _with(rms_norm_eps=1e-5))
    weights = tmp_path / "weights"
    shutil.copytree(llama, weights)
    transformers.LlamaForCausalLM(_small(transformers.LlamaConfig)).save_pretrained(weights)
    for second, words in ((other, "configuration"), (weights, "weights")):
        folders = (llama, second)

        def refused(world: burst_rt.Context, folders: tuple[Path, Path] = folders) -> str:
            chosen = {"model": str(folders[world.rank]), "data": str(text), "seq_len": _SEQ_LEN}
            with pytest.raises(ConfigError) as raised:
                evaluate(world, None, chosen)
            return str(raised.value)

        said = burst_rt.run_local(2, refused, timeout_s=60)
        assert said[0] == said[1]
        assert f"the {words} of the model that --model names differs between ranks" in said[0]


def test_a_resumed_run_wants_its_own_model(
    tuned: Path, llama: Path, text: Path, tmp_path: Path
) -> None:
    def resume(run: Path, chosen: dict[str, object]) -> None:
        options = RunOptions(out=run, resume=True, progress="none")
        chosen = {"steps": 99, **chosen}
        burst_rt.run_local(
            1, lambda world: train(world, TrainConfig(), options, chosen), timeout_s=60
        )

    other = _changed(llama, tmp_path / "other", "config.json", _with(rms_norm_eps=1e-5))
    with pytest.raises(ConfigError, match=r"other/config.json is not that of the model"):
        resume(tuned, {"model": str(other)})
    with pytest.raises(ConfigError, match="--heads: of the byte-level model alone"):
        resume(tuned, {"heads": 2})
    moved = tmp_path / "moved"
    shutil.copytree(llama, moved)
    (text / "c.txt").write_text("more text")
    try:
        with pytest.raises(ConfigError, match="is not the text"):
            resume(tuned, {"model": str(moved)})
    finally:
        (text / "c.txt").unlink()


def test_what_only_ranks_can_refuse_is_one_line(llama: Path, text: Path, tmp_path: Path) -> None:
    # Another model's tokenizer gives tokens that this model does not know.
    config = _small(transformers.LlamaConfig, vocab_size=150)
    folder = _make(tmp_path / "few", config)
    job = _job(
        tmp_path, "train", "-n", "2", "--model", str(folder), "--data", str(text), "--seq-len",
        "61", "--out", "never",
    )  # fmt: skip
    assert job.exit_code == 78, job.text
    (line,) = job.err.splitlines()
    assert line.startswith("burst-rt: ConfigError: --model: the tokenizer in "), line
    assert "the model knows 150 (vocab_size)" in line
    assert not (tmp_path / "never").exists()


_OTHER_WAYS = [
    (
        transformers.xLSTMConfig(
            vocab_size=64, hidden_size=32, num_blocks=2, num_heads=2, use_cache=False
        ),
        "xLSTMForCausalLM over 2 ranks is not what it is on one process",
    ),
    (
        transformers.MambaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4, use_mambapy=False
        ),
        None,
    ),
    (
        transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2),
        "BloomForCausalLM cannot take its attention from burst_rt",
    ),
    (_small(transformers.LlamaConfig), None),
]


@pytest.mark.parametrize(("config", "words"), _OTHER_WAYS)
def test_a_model_that_ranks_would_get_wrong_is_refused(config: Any, words: str | None) -> None:
    made = [
        transformers.AutoModelForCausalLM.from_config(
            type(config)(**config.to_dict()), attn_implementation="burst_rt"
        ).eval()
        for _ in range(2)
    ]
    made[1].load_state_dict(made[0].state_dict())

    def check(world: burst_rt.Context) -> str:
        try:
            ShardedPretrained(made[world.rank], world, TrainConfig(seq_len=16)).check()
        except (ConfigError, InputError) as error:
            return str(error)
        return ""

    for said in burst_rt.run_local(2, check, timeout_s=60):
        assert (words is None) == (said == ""), said
        assert words is None or words in said
