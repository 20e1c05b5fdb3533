"""Plans of models by their config.json: what is counted is what transformers' models have and do,
and what cannot be read is refused by its field.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from burst_rt.errors import BurstError, ConfigError, InputError
from burst_rt.launch.main import cli
from burst_rt.launch.plan.configuration import FAMILIES, read_config
from burst_rt.launch.plan.model import Question, forecast_model
from burst_rt.launch.plan.models import MODELS, Model, parse_model
from burst_rt.launch.plan.printed import print_model
from burst_rt.launch.plan.shards import OPTIMIZERS
from burst_rt.launch.plan.structure import layers_of
from burst_rt.launch.plan.sublayers import Attention, FeedForward, LayerSizes
from burst_rt.planning.machines import load_hardware
from burst_rt.planning.masks import Causal, Chunked, SlidingWindow
from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.scheduler import Cost

# Fields without which the defaults of a family make no model, or not the one that is meant.
_NEEDED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64},
    "lfm2": {"full_attn_idxs": [2, 5, 8]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"sliding_window": 4096, "head_dim": 128},
}
_BASE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SMALL = _BASE | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_FEW_HEADS = _BASE | {"num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_LATENT = _BASE | {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_DELTA = _SMALL | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}  # fmt: skip
_MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
# Small models of all kinds of layers.
_MODELS: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "gemma3_text": _SMALL
    | {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "gpt_oss": _SMALL | _EXPERTS,
    "mixtral": _SMALL | _EXPERTS,
    "deepseek_v3": _LATENT | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "qwen3_next": _DELTA
    | {
        "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": _DELTA,
    "kimi_linear": _LATENT
    | {
        "linear_attn_config": {
            "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
        },
        "num_experts": 8, "num_experts_per_token": 2,
    },
    "minimax": _SMALL | _EXPERTS,
    "mamba": _BASE | {"state_size": 8},
    "mamba2": {
        "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_heads": 8,
        "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16,
    },
    "bamba": _SMALL | _MAMBA_2 | {"attn_layer_indices": [1]},
    "falcon_h1": _SMALL | _MAMBA_2 | {"mamba_d_ssm": 128},
    "granitemoehybrid": _FEW_HEADS | _MAMBA_2 | _EXPERTS
    | {"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"] * 2},
    "nemotron_h": _SMALL
    | {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "jamba": _FEW_HEADS
    | {
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "zamba2": _BASE
    | {
        "num_attention_heads": 4, "num_key_value_heads": 4, "mamba_d_state": 16,
        "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 4, "chunk_size": 16,
        "num_mem_blocks": 1,
    },
    "lfm2": _FEW_HEADS | {"full_attn_idxs": [1]},
    "lfm2_moe": _FEW_HEADS
    | {
        "layer_types": ["conv", "full_attention"] * 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "num_dense_layers": 1,
    },
    "recurrent_gemma": _FEW_HEADS | {"lru_width": 64, "attention_window_size": 8},
}  # fmt: skip


def _sizes_of_qwen3(
    dim: int, layers: int, heads: int, kv_heads: int, **more: int
) -> dict[str, Any]:
    return {
        "hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": 151936, **more,
    }  # fmt: skip


def _read(folder: Path, family: str, **fields: Any) -> Model:
    AutoConfig.for_model(family, **fields).save_pretrained(folder)
    return read_config(folder, family)


def _kinds(model: Model) -> list[tuple[int, LayerSizes]]:
    return [(count, layer) for count, layer in model.layers if isinstance(layer, LayerSizes)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_published_sizes_of_every_family_are_read(tmp_path: Path, family: str) -> None:
    """A configuration's defaults are a published model: counted as transformers builds it."""
    fields = _NEEDED.get(family, {})
    model = _read(tmp_path, family, **fields)
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **fields)
        whole = AutoModelForCausalLM.from_config(config)
    assert model.num_weights == sum(weight.numel() for weight in whole.parameters())
    assert model.num_layers == config.num_hidden_layers
    # Outside of the layers are the embedding, the head and a norm, if layers share no weights.
    names = (embedding := whole.get_input_embeddings(), whole.get_output_embeddings())
    ends = {id(weight): weight.numel() for end in names for weight in end.parameters()}
    if family not in ("zamba", "zamba2"):
        assert embedding is not None
        assert 0 <= model.outside - sum(ends.values()) <= 2 * config.hidden_size


@pytest.mark.parametrize(
    ("family", "total", "active"),
    [
        # Mixtral, arXiv 2401.04088; DeepSeek-V3, arXiv 2412.19437; Qwen3-Next and Kimi Linear by
        # their names, 80B-A3B and 48B-A3B, which leave out embeddings.
        ("mixtral", 46.7e9, 12.9e9),
        ("deepseek_v3", 671e9, 37.5e9),
        ("llama", 6.74e9, 6.74e9),
        ("gpt_oss", 116.8e9, 5.71e9),
    ],
)
def test_totals_are_those_that_were_published(
    tmp_path: Path, family: str, total: float, active: float
) -> None:
    model = _read(tmp_path, family)
    assert model.num_weights == pytest.approx(total, rel=0.01)
    assert model.num_weights - model.inactive == pytest.approx(active, rel=0.01)


# What the published config.json of each has, where a family's defaults are another's.
_NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-8x7b": ("mixtral", {}),
    "deepseek-v3": ("deepseek_v3", {}),
    "gpt-oss-120b": ("gpt_oss", {}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "qwen3.5-9b": ("qwen3_5_text", {}),
    "qwen3-8b": ("qwen3", _sizes_of_qwen3(4096, 36, 32, 8, intermediate_size=12288)),
    "qwen3-32b": ("qwen3", _sizes_of_qwen3(5120, 64, 64, 8, intermediate_size=25600)),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        _sizes_of_qwen3(2048, 48, 32, 4, moe_intermediate_size=768, num_experts=128),
    ),
    "qwen3-235b-a22b": (
        "qwen3_moe",
        _sizes_of_qwen3(4096, 94, 64, 4, moe_intermediate_size=1536, num_experts=128),
    ),
}


@pytest.mark.parametrize("name", _NAMED)
def test_models_by_name_are_those_of_their_configurations(tmp_path: Path, name: str) -> None:
    family, sizes = _NAMED[name]
    read, named = _read(tmp_path, family, **sizes), MODELS[name]
    read_layers, named_layers = ({x: n for n, x in model.layers} for model in (read, named))
    assert read_layers == named_layers
    assert (read.num_weights, read.inactive) == (named.num_weights, named.inactive)


@pytest.mark.parametrize(
    ("name", "total"),
    [("llama-3-8b", 8.03e9), ("llama-3-70b", 70.6e9), ("llama-3-405b", 405.9e9)],
)
def test_llama_3_has_as_many_weights_as_were_published(name: str, total: float) -> None:
    assert MODELS[name].num_weights == pytest.approx(total, rel=2e-3)


@pytest.mark.parametrize("family", _MODELS)
def test_products_are_those_of_a_real_forward(family: str) -> None:
    """PyTorch counts the operations of a small model; experts and heads included."""
    config = AutoConfig.for_model(family, **_MODELS[family])
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = 32
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(3, 128, (1, tokens)), use_cache=False)
    counted = {
        str(operation).split(".")[-1]: flops
        for operation, flops in counter.get_flop_counts()["Global"].items()
    }
    layers = layers_of(model, config, family)
    # RG-LRU's gates are products of blocks.
    done = sum(counted.get(name, 0) for name in ("mm", "addmm", "baddbmm"))
    products = sum(
        sublayer.into.active + sublayer.out.active
        for layer in layers
        for sublayer in layer.sublayers
    )
    assert done == 2 * tokens * (products + config.hidden_size * config.vocab_size)
    if not any(layer.recurrence and layer.recurrence.has_state for layer in layers):
        cores = [layer.attention for layer in layers if layer.attention is not None]
        widths = sum(core.num_heads * (core.head_dim + core.v_head_dim) for core in cores)
        assert counted["bmm"] == 2 * tokens**2 * widths


def test_attention_has_its_layers_shape_and_mask(tmp_path: Path) -> None:
    def cores(family: str, **fields: Any) -> list[tuple[int, Attention | None]]:
        return [(n, layer.attention) for n, layer in _kinds(_read(tmp_path, family, **fields))]

    full = Attention(64, 8, 64, 64)
    assert cores("gpt_oss") == [(18, Attention(64, 8, 64, 64, SlidingWindow(127))), (18, full)]
    # Latent attention: 128 heads of 128 + 64 and of 128, in dense layers and in mixtures.
    latent = Attention(128, 128, 192, 128)
    assert cores("deepseek_v3") == [(3, latent), (58, latent)]
    (mistral,) = cores("mistral")
    assert mistral == (32, Attention(32, 8, 128, 128, SlidingWindow(4095)))
    assert cores("mistral", sliding_window=None) == [(32, Attention(32, 8, 128, 128))]
    chunks, _ = cores("llama4_text")
    assert chunks == (36, Attention(40, 8, 128, 128, Causal() & Chunked(8192)))
    windows = [core.window for _, core in cores("exaone4") if core is not None]
    assert windows == [SlidingWindow(4095), None]
    assert cores("qwen3", sliding_window=64, use_sliding_window=False)[0][1] == Attention(
        32, 32, 128, 128
    )


_WINDOWS = {"sliding_window": 8}
_SOME = _WINDOWS | {"layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, _WINDOWS) for family in ("mistral", "mixtral", "phi3", "starcoder2", "minimax")),
        *(
            (family, _SOME)
            for family in ("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "olmo3")
        ),
        *((family, _SOME | {"use_sliding_window": True}) for family in ("qwen2", "qwen3")),
        ("qwen2", _WINDOWS | {"use_sliding_window": False}),
        ("smollm3", _SOME | {"use_sliding_window": True}),
        ("ministral", _SOME),
        ("ministral3", _WINDOWS),
        ("qwen2_moe", _SOME | {"use_sliding_window": True, "num_experts": 4}),
        ("llama4_text", {"attention_chunk_size": 8, "num_local_experts": 4}),
        ("recurrent_gemma", {"attention_window_size": 8, "lru_width": 64}),
    ],
)
def test_masks_are_those_that_a_models_layers_get(family: str, fields: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **_SMALL | _EXPERTS | fields)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    given: list[torch.Tensor] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        given.append((kwargs["attention_mask"] if "attention_mask" in kwargs else args[2])[0, 0])

    for module in model.modules():
        if type(module).__name__.endswith("Attention") and hasattr(module, "o_proj"):
            module.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.randint(3, 128, (1, 32)), use_cache=False)
    layers = layers_of(model, config, family)
    windows = [layer.attention.window for layer in layers if layer.attention is not None]
    rows, columns = torch.arange(32)[:, None], torch.arange(32)[None]
    assert len(windows) > 0
    for window, mask in zip(windows, given, strict=True):
        ours = Causal() if window is None else Causal() & window
        assert torch.equal(mask == 0, ours.allows(rows, columns))


def test_recurrences_and_mixtures_have_their_sizes(tmp_path: Path) -> None:
    def recurrence(family: str, **fields: Any) -> RecurrenceSizes | None:
        kinds = _kinds(_read(tmp_path, family, **fields))
        return next(layer.recurrence for _, layer in kinds if layer.recurrence is not None)

    assert recurrence("qwen3_next") == RecurrenceSizes(
        rule="delta", num_heads=32, num_key_heads=16, key_dim=128, value_dim=128, chunk=64,
        channels=8192, kernel=4,
    )  # fmt: skip
    assert recurrence("mamba2") == RecurrenceSizes(
        rule="linear", num_heads=128, num_key_heads=8, key_dim=128, value_dim=64, chunk=256,
        channels=10240, kernel=4,
    )  # fmt: skip
    assert recurrence("jamba") == RecurrenceSizes(
        rule="scan", num_heads=8192, key_dim=16, channels=8192, kernel=4
    )
    assert recurrence("minimax") == RecurrenceSizes(
        rule="linear", num_heads=32, key_dim=128, value_dim=128, chunk=256
    )
    assert recurrence("lfm2", **_NEEDED["lfm2"]) == RecurrenceSizes(
        rule="convolution", num_heads=2560, channels=2560, kernel=3
    )
    (_, dense), (_, mixture) = _kinds(_read(tmp_path, "deepseek_v3"))
    assert dense.sublayers[1].core == FeedForward((18432,))
    assert mixture.sublayers[1].core == FeedForward((2048,), 256, 8)


def test_a_larger_models_text_model_is_read(tmp_path: Path) -> None:
    """Vision and audio are left out; so is what quantises the weights."""
    model = _read(tmp_path, "gemma3")
    assert model.about.startswith("gemma3_text: 22 layers of attention in a window of 4,096 and")
    assert model.num_weights == _read(tmp_path, "gemma3_text").num_weights
    config = AutoConfig.for_model("deepseek_v3").to_dict()
    plain = _read(tmp_path, "deepseek_v3").num_weights
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path / "config.json", "x").num_weights == plain


def test_six_numbers_and_a_configuration_say_the_same(tmp_path: Path) -> None:
    sizes = "layers=2,dim=512,heads=8,kv_heads=2,ffn=1024,vocab=1000"
    fields = {
        "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 1000,
    }  # fmt: skip
    read = _read(tmp_path, "llama", **fields)
    assert read.num_weights - parse_model(sizes).num_weights == 512  # the last norm
    machine = load_hardware("h100-sxm")
    for strategy in ("burst", "tensor-parallel+sequence"):
        ours, theirs = (
            forecast_model(Question(model, 8192, "train"), strategy, 2, machine)
            for model in (parse_model(sizes), read)
        )
        assert ours.sent_bytes == theirs.sent_bytes
        # The optimizer updates the last norm, too.
        norm = Cost(0, int(512 * OPTIMIZERS["adamw"].moved))
        rate = replace(machine.device.rates["default"], launch_s=0.0)
        assert ours.time_s < theirs.time_s < ours.time_s + 1.01 * rate.seconds(norm)
        assert theirs.memory_bytes - ours.memory_bytes < 10_000


def test_a_hybrid_sends_states_where_attention_sends_keys(tmp_path: Path) -> None:
    """More tokens, the same states: only the layers of attention send more."""
    hybrid = _read(tmp_path, "qwen3_next", **_MODELS["qwen3_next"])
    alone = _read(tmp_path, "mamba2", **_MODELS["mamba2"])
    machine = load_hardware("h100-sxm")

    def sent(model: Model, tokens: int) -> int:
        question = Question(model, tokens, "first-token")
        return forecast_model(question, "burst", 4, machine).sent_bytes

    assert sent(alone, 8192) == sent(alone, 65536) > 0
    ((_, delta), (_, attention)) = _kinds(hybrid)
    assert delta.recurrence is not None
    assert attention.attention is not None
    keys = attention.attention.kv_width * 2  # bytes of a token
    assert sent(hybrid, 65536) - sent(hybrid, 8192) == 3 * keys * (65536 - 8192) // 4


def test_a_window_is_cheaper_than_full_attention_and_no_window_is_too_long(tmp_path: Path) -> None:
    machine = load_hardware("h100-sxm")

    def took(window: int | None, mask: str = "causal") -> float | None:
        model = _read(tmp_path, "mistral", **_SMALL, sliding_window=window)
        question = Question(model, 16384, "first-token", mask)
        return forecast_model(question, "ring-kv", 4, machine).time_s

    full = took(None)
    assert full is not None
    assert (took(64) or 0) < full
    assert took(64) == took(64, "full") == took(None, "window:63")
    assert took(16384) == full


def test_plan_prints_what_it_read(tmp_path: Path) -> None:
    _read(tmp_path, "qwen3_next", **_MODELS["qwen3_next"])
    words = ["plan", "--world", "2", "--seq", "8K", "--hardware", "h100-sxm", "--layout", "auto"]
    argv = [*words, "--model", str(tmp_path)]
    done = CliRunner().invoke(cli, argv, catch_exceptions=False)
    first = done.stdout.splitlines()[0]
    assert re.fullmatch(
        r"qwen3_next: 3 layers of delta rule and mixture \(2 of 8 experts\), 1 of attention and "
        r"mixture \(2 of 8 experts\); 0\.\d+ million parameters, 0\.\d+ million active per token",
        first,
    )
    said = json.loads(CliRunner().invoke(cli, [*argv, "--json"]).stdout)
    assert said["about"] == first.partition(";")[0]
    assert said["parameters"] > said["active_parameters"] > 0
    assert said["model"] == str(tmp_path)
    # No strategy for recurrences has the striped layout.
    assert all(row["layout"] != "striped" for row in said["strategies"])
    done = CliRunner().invoke(cli, [*argv[:-3], "striped", *argv[-2:]])
    assert "a recurrence needs runs of consecutive tokens" in done.stdout
    simulated = CliRunner().invoke(
        cli, ["simulate", "--strategy", "burst", *argv[1:]], catch_exceptions=False
    )
    assert simulated.stdout.splitlines()[0] == first


def test_the_guide_shows_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_model(_read(tmp_path, "qwen3_5_text"))
    page = Path(__file__).parents[2] / "docs" / "choosing.md"
    assert f"```text\n{capsys.readouterr().out}```\n" in page.read_text(encoding="utf-8")


_LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: there is none; expected the config.json"),
        ("{", "cannot be read: .*; expected the config.json"),
        ("[]", "it is no JSON object"),
        ("[" * 100_000, "cannot be read: "),
        ("{}", "model_type: expected the name of a family, got None"),
        (json.dumps({"model_type": "bart"}), "model_type 'bart': an encoder and a decoder"),
        (json.dumps({"model_type": "gpt2"}), "model_type: expected one of bamba, .*, got 'gpt2'"),
        (
            json.dumps({"model_type": "llama", "hidden_size": 64}),
            "num_hidden_layers: expected it, got nothing; add it",
        ),
        (
            json.dumps({"model_type": "llama", "num_hidden_layers": 2}),
            "hidden_size: expected it, got nothing",
        ),
        (
            json.dumps(_LLAMA | {"num_hidden_layers": 10**9}),
            "num_hidden_layers: expected 1 to 4,096, got 1000000000",
        ),
        (
            json.dumps(_LLAMA | {"num_attention_heads": "many"}),
            "cannot make a model of it .*num_attention_heads.*: a field is missing or wrong",
        ),
        (json.dumps(_LLAMA | {"hidden_size": 0}), "cannot make a model of it"),
        (
            json.dumps(_LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 3}),
            "num_key_value_heads: expected a divisor of num_attention_heads, 4, got 3",
        ),
        (
            json.dumps({**_LLAMA, "model_type": "deepseek_v2", "num_experts_per_tok": None}),
            "num_experts_per_tok: expected the experts of a token, at least 1, got None",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_field(
    tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=f"^--model: .*{said}"):
        read_config(tmp_path, "x")


def test_a_family_that_transformers_does_not_know_and_code_of_a_folder(tmp_path: Path) -> None:
    """The folder's own code is not run."""
    run = tmp_path / "was_run"
    (tmp_path / "code.py").write_text(f"open({str(run)!r}, 'w')\n")
    config = _LLAMA | {"model_type": "new", "auto_map": {"AutoConfig": "code.NewConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"model_type 'new': transformers .* has no such family"):
        read_config(tmp_path, "x")
    config |= {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path, "x").num_layers == 2
    assert not run.exists()


def test_layers_whose_cost_is_not_known_are_refused() -> None:
    """DeepSeek-V3.2's attention chooses its keys; Gemma 3n's layers have more than two parts."""
    for family, module in (("deepseek_v32", "Attention.indexer"), ("gemma3n_text", "AltUp")):
        config = AutoConfig.for_model(family)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(InputError, match=f"{family}.*{module}, whose cost is not known"):
            layers_of(model, config, "x")


@pytest.mark.parametrize("path", ["missing/folder", "a\0b", "x" * 5000])
def test_a_path_that_is_none_is_told_with_what_a_model_may_be(path: str) -> None:
    words = ["plan", "--world", "2", "--seq", "8K", "--hardware", "h100-sxm", "--model", path]
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, InputError)
    assert "is no path of a config.json or of its folder" in str(done.exception)


def test_a_missing_transformers_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["plan", "--world", "2", "--seq", "8K", "--hardware", "h100", "--model", str(tmp_path)]
    with pytest.raises(BurstError, match=r"needs transformers.* pip install '\.\[hf\]'"):
        cli(words, standalone_mode=False)
