"""`burst_rt.hf` with models whose layers mix tokens by recurrences and short convolutions, too:
logits, loss and every gradient are those of one process, what they generate, and what is refused.
"""

from __future__ import annotations

import io
import sys
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from small_generation import BATCHES, generate, generate_alone
from small_hybrids import HYBRIDS, make_hybrid, truth_of_hybrid
from small_models import CACHE, KINDS, Truth, gradients, make_batch, seen

import burst_rt
import burst_rt.hf
from burst_rt.errors import ConfigError, InputError
from burst_rt.hf.rotary import hook_of

pytestmark = [
    pytest.mark.usefixtures("no_parts_left"),
    pytest.mark.filterwarnings("ignore:burst_rt.hf.shard. a part of a batch is gone"),
    # Of PEFT.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
_NAMES = list(HYBRIDS)
_LARGEST = 1e-5  # of the largest value, in float32
# A gradient much smaller than others of its model is a sum of terms that cancel, and is rounded as
# these are: its own largest value counts for no less than this part of the largest of all.
_SMALL = 1e-2


@cache
def _truth(name: str, kind: str) -> Truth:
    return truth_of_hybrid(name, kind)


def _differences(
    ctx: burst_rt.Context, model: Any, name: str, kind: str, layout: str = "auto"
) -> dict[str, float]:
    """Of this rank's copy of a model from what one process makes of its documents and rows."""
    batch, mine = make_batch(name, kind), deepcopy(model)
    mine.set_attn_implementation("burst_rt")
    burst_rt.hf.prepare(mine, ctx)
    part = burst_rt.hf.shard(batch, ctx, layout)
    output = mine(**part)
    output.loss.backward()
    burst_rt.average_gradients(mine.parameters(), group=ctx)
    whole = part["burst_rt"].batch.layout.unshard(output.logits.detach())
    return _compared(mine, output.loss, whole, name, kind)


def _compared(
    model: Any, loss: torch.Tensor, logits: torch.Tensor, name: str, kind: str
) -> dict[str, float]:
    return _off(model, loss, logits, _truth(name, kind), make_batch(name, kind))


def _off(
    model: Any, loss: torch.Tensor, logits: torch.Tensor, truth: Truth,
    batch: dict[str, torch.Tensor],
) -> dict[str, float]:  # fmt: skip
    meant, grads = seen(batch), gradients(model)
    assert grads.keys() == truth["gradients"].keys()
    least = _SMALL * max(float(x.abs().max()) for x in truth["gradients"].values())
    return {
        "loss": abs(loss.item() / truth["loss"] - 1),
        "logits": _difference(logits[meant], truth["logits"][meant]),
        "gradients": max(_difference(grads[x], y, least) for x, y in truth["gradients"].items()),
    }


def _difference(found: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest value, or over `least` where that is larger."""
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), least)


def _cases() -> list[Any]:
    """Packed rows of each model, and another kind; each kind in each world. All others are long."""
    few = set()
    for at, name in enumerate(_NAMES):
        few |= {(name, "packed", 2 + at % 3), (name, KINDS[at % 3], 1 + at % 4)}
    return [
        pytest.param(*case, marks=() if case in few else pytest.mark.long)
        for case in ((name, kind, n) for name in _NAMES for kind in KINDS for n in (1, 2, 3, 4))
    ]


@pytest.mark.parametrize(("name", "kind", "num_ranks"), _cases())
def test_hybrids_are_those_of_one_process(name: str, kind: str, num_ranks: int) -> None:
    """Each document, and each row without its padding, by itself."""
    model = make_hybrid(name)
    _truth(name, kind)  # before the ranks' deadlines
    found = burst_rt.run_local(
        num_ranks, lambda ctx: _differences(ctx, model, name, kind), timeout_s=60
    )
    wrong = [each for each in found if not max(each.values()) <= _LARGEST]
    assert not wrong


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced", "whole"])
@pytest.mark.parametrize("name", ["Qwen3Next", "Bamba"])
def test_layouts_of_runs(name: str, layout: str) -> None:
    model = make_hybrid(name)
    _truth(name, "packed")
    for found in burst_rt.run_local(
        3, lambda ctx: _differences(ctx, model, name, "packed", layout), timeout_s=60
    ):
        assert max(found.values()) <= _LARGEST


def test_models_without_attention_get_contiguous_shards() -> None:
    """All tokens are equal work, and states go from rank to rank once."""

    def kinds(ctx: burst_rt.Context) -> list[str]:
        found = []
        for name in ("Mamba2", "Bamba", "Mamba2"):
            model = make_hybrid(name)
            model.set_attn_implementation("burst_rt")
            burst_rt.hf.prepare(model, ctx)
            part = burst_rt.hf.shard(make_batch(name, "plain"), ctx)
            found.append(part["burst_rt"].batch.layout.kind)
        return found

    # One layout suits all models of a context.
    assert burst_rt.run_local(2, kinds)[0] == ["contiguous", "zigzag", "zigzag"]


def test_sixteen_bits() -> None:
    """As far from float32 as one process is."""
    name, kind = "OlmoHybrid", "right"
    model, alone = make_hybrid(name).bfloat16(), make_hybrid(name).bfloat16()
    output = alone(**make_batch(name, kind))
    output.loss.backward()
    expected = _compared(alone, output.loss, output.logits.detach(), name, kind)
    for found in burst_rt.run_local(
        2, lambda ctx: _differences(ctx, model, name, kind), timeout_s=60
    ):
        assert all(found[x] < 1.5 * expected[x] + 1e-3 for x in found), (found, expected)


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba2", "Jamba", "Mamba", "RecurrentGemma"])
def test_recomputed_layers_belong_to_their_call(name: str) -> None:
    """Two micro-batches, cut in other places, whose backwards come after both forwards."""
    model = make_hybrid(name)

    def rank(ctx: burst_rt.Context, recompute: bool) -> dict[str, torch.Tensor]:
        mine = deepcopy(model)
        mine.set_attn_implementation("burst_rt")
        burst_rt.hf.prepare(mine, ctx)
        if recompute:
            # transformers 5.23 has the other name.
            new = getattr(mine, "activation_checkpointing_enable", None)
            (new or mine.gradient_checkpointing_enable)()
        losses = [
            mine(**burst_rt.hf.shard(make_batch(name, kind), ctx, layout)).loss
            for kind, layout in (("packed", "balanced"), ("plain", "zigzag"))
        ]
        sum(losses).backward()
        return gradients(mine)

    expected = burst_rt.run_local(2, lambda ctx: rank(ctx, False), timeout_s=60)
    found = burst_rt.run_local(2, lambda ctx: rank(ctx, True), timeout_s=60)
    for ours, kept in zip(found, expected, strict=True):
        assert ours.keys() == kept.keys()
        assert all(torch.equal(x, kept[label]) for label, x in ours.items())


# Parts that PEFT is given; of Mamba layers others are read where these are called.
_ADAPTED = {
    "Qwen3Next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj", "down_proj"],
    "Bamba": ["in_proj", "out_proj", "q_proj", "down_proj"],
    "Jamba": ["in_proj", "x_proj", "out_proj", "q_proj", "down_proj"],
}


@pytest.mark.parametrize("name", _ADAPTED)
def test_adapters(name: str) -> None:
    """LoRA beside recurrences, of a model that was prepared before or after."""
    model, options = make_hybrid(name), LoraConfig(r=4, target_modules=_ADAPTED[name])
    options.init_lora_weights = False  # the first ones add nothing
    torch.manual_seed(1)
    adapted = get_peft_model(deepcopy(model), options)
    truth = truth_of_hybrid(name, "packed", deepcopy(adapted))
    model.set_attn_implementation("burst_rt")

    def rank(ctx: burst_rt.Context) -> dict[str, float]:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx) if ctx.world_size > 2 else deepcopy(model)
        mine = get_peft_model(mine, options)
        mine.load_state_dict(adapted.state_dict())
        burst_rt.hf.prepare(mine, ctx)
        part = burst_rt.hf.shard(make_batch(name, "packed"), ctx)
        output = mine(**part)
        output.loss.backward()
        trained = [x for x in mine.parameters() if x.requires_grad]
        assert all(x.grad is not None for x in trained)
        burst_rt.average_gradients(trained, group=ctx)
        whole = part["burst_rt"].batch.layout.unshard(output.logits.detach())
        return _off(mine, output.loss, whole, truth, make_batch(name, "packed"))

    for num_ranks in (2, 3):
        for found in burst_rt.run_local(num_ranks, rank, timeout_s=60):
            assert max(found.values()) <= _LARGEST


@pytest.mark.parametrize("inside", ["merged", "taken out"])
def test_the_model_inside_adapters_goes_on_alone(inside: str) -> None:
    """Both with the hooks of the model around it."""
    name = "Bamba"
    options = LoraConfig(r=4, target_modules=_ADAPTED[name], init_lora_weights=False)
    torch.manual_seed(1)
    adapted = get_peft_model(make_hybrid(name), options)
    truth = truth_of_hybrid(name, "packed", deepcopy(adapted))
    adapted.set_attn_implementation("burst_rt")

    def rank(ctx: burst_rt.Context) -> float:
        mine: Any = deepcopy(adapted)
        burst_rt.hf.prepare(mine, ctx)
        mine(**burst_rt.hf.shard(make_batch(name, "packed"), ctx))
        mine = mine.merge_and_unload() if inside == "merged" else mine.get_base_model()
        burst_rt.hf.prepare(mine, ctx)
        part = burst_rt.hf.shard(make_batch(name, "packed"), ctx)
        with torch.no_grad():
            output = mine(**part)
        whole = part["burst_rt"].batch.layout.unshard(output.logits)
        return _difference(whole, truth["logits"])

    assert max(burst_rt.run_local(2, rank, timeout_s=60)) <= _LARGEST


def test_a_model_with_adapters_generates() -> None:
    options = LoraConfig(r=4, target_modules=_ADAPTED["Bamba"], init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(make_hybrid("Bamba"), options).get_base_model().eval()
    expected = generate_alone(model, "beams")
    for found in burst_rt.run_local(
        2, lambda ctx: _generate_over_ranks(ctx, model, "beams"), timeout_s=60
    ):
        assert torch.equal(found["tokens"], expected["tokens"])
        assert _difference(found["logits"], expected["logits"]) <= _LARGEST


def test_adapters_that_would_count_for_nothing_are_refused() -> None:
    """transformers reads the weights below them."""
    model = make_hybrid("Jamba")
    model.set_attn_implementation("burst_rt")
    adapted = get_peft_model(model, LoraConfig(target_modules=["in_proj", "dt_proj"]))

    def rank(ctx: burst_rt.Context) -> None:
        mine = deepcopy(adapted)
        with pytest.raises(InputError, match=r"Mixer.dt_proj: expected no adapter, got a Linear"):
            burst_rt.hf.prepare(mine, ctx)  # which compares it with one process

    burst_rt.run_local(2, rank, timeout_s=60)


def test_a_call_of_the_base_model() -> None:
    """Of one whose head would hand nothing on to it."""
    name = "Mamba"
    model, truth = make_hybrid(name), make_hybrid(name)
    expected = truth.backbone(make_batch(name, "plain")["input_ids"])[0]

    def rank(ctx: burst_rt.Context) -> float:
        mine = deepcopy(model)
        burst_rt.hf.prepare(mine, ctx)
        part = burst_rt.hf.shard({"input_ids": make_batch(name, "plain")["input_ids"]}, ctx)
        hidden = mine.backbone(**part)[0].detach()
        return _difference(part["burst_rt"].batch.layout.unshard(hidden), expected.detach())

    assert max(burst_rt.run_local(2, rank, timeout_s=60)) <= _LARGEST


@pytest.mark.parametrize("name", ["Qwen3Next", "Mamba", "MiniMax"])
def test_other_calls_of_a_prepared_model_are_as_before(name: str) -> None:
    """Its copies and what is unpickled of it are prepared as well."""
    model, batch = make_hybrid(name), make_batch(name, "plain")
    expected = model(**batch).logits

    def rank(ctx: burst_rt.Context) -> list[float]:
        mine = deepcopy(model)
        mine.set_attn_implementation("burst_rt")
        burst_rt.hf.prepare(mine, ctx)
        part = burst_rt.hf.shard(batch, ctx)
        mine(**part)
        raw = io.BytesIO()
        torch.save(mine, raw)
        raw.seek(0)
        found = []
        for each in (mine, deepcopy(mine), torch.load(raw, weights_only=False)):
            burst_rt.hf.prepare(each, ctx)  # changes nothing
            ours = part["burst_rt"].batch.layout.unshard(each(**part).logits.detach())
            each.set_attn_implementation("eager")
            assert torch.equal(each(**batch).logits, expected)
            found.append(_difference(ours, expected.detach()))
        return found

    assert max(max(found) for found in burst_rt.run_local(2, rank, timeout_s=60)) <= _LARGEST


def _generated() -> list[Any]:
    """Each model in turns, in chunks and with beams; two of these, and each world, are not long.

    Sampling takes processes; threads share torch's generator.
    """
    few = set()
    for at, name in enumerate(_NAMES):
        few |= {(name, "turns" if at % 2 else "beams", 2 + at % 3), (name, "chunks", 1 + at % 4)}
    return [
        pytest.param(*case, marks=() if case in few else pytest.mark.long)
        for case in ((name, case, n) for name in _NAMES for case in _CASES for n in (1, 2, 3, 4))
    ]


_CASES = ("turns", "chunks", "beams")


@pytest.mark.parametrize(("name", "case", "num_ranks"), _generated())
def test_hybrids_generate_what_one_process_does(name: str, case: str, num_ranks: int) -> None:
    """What it makes of each row by itself, without padding and without a cache."""
    model = make_hybrid(name).eval()
    expected = generate_alone(model, case)
    for found in burst_rt.run_local(
        num_ranks, lambda ctx: _generate_over_ranks(ctx, model, case), timeout_s=60
    ):
        assert torch.equal(found["tokens"], expected["tokens"])
        assert _difference(found["logits"], expected["logits"]) <= _LARGEST


def _generate_over_ranks(ctx: burst_rt.Context, model: Any, case: str) -> dict[str, torch.Tensor]:
    mine = deepcopy(model)
    mine.set_attn_implementation("burst_rt")
    cache = burst_rt.hf.Cache(mine, ctx, capacity=140, batch=BATCHES[case], block=8)
    return generate(mine, case, cache)


@pytest.mark.parametrize("name", ["Lfm3", "RecurrentGemma", "Mamba", "MiniMax", "KimiLinear"])
def test_a_few_tokens_at_a_time(name: str) -> None:
    """Every rank runs all of them, and the padding at their left is no token."""
    model, ids = make_hybrid(name).eval(), make_batch(name, "plain")["input_ids"][:, :30]
    padding = (0, 4)
    with torch.no_grad():
        expected = [model(row[None, p:]).logits for row, p in zip(ids, padding, strict=True)]

    @torch.no_grad()
    def rank(ctx: burst_rt.Context) -> None:
        mine, logits = deepcopy(model), list[torch.Tensor]()
        if name != "Mamba":  # which has none
            mine.set_attn_implementation("burst_rt")
        cache = burst_rt.hf.Cache(mine, ctx, capacity=40, block=8)
        shown = torch.ones_like(ids)
        shown[1, : padding[1]] = 0
        for part in ids.split([3, 5, 1, 16, 5], 1):
            mask = shown[:, : cache.get_seq_length() + part.shape[1]]
            with torch.no_grad() if len(logits) % 2 else torch.inference_mode():
                logits.append(mine(part, attention_mask=mask, **{CACHE: cache}).logits)
        found = torch.cat(logits, 1)
        for row, p in enumerate(padding):
            assert _difference(found[row, p:], expected[row][0]) <= _LARGEST

    burst_rt.run_local(2, rank, timeout_s=60)


def test_states_of_a_call_that_failed_count_for_nothing() -> None:
    """The same tokens again, and another text after `reset`; states cannot be cropped."""
    model, ids = make_hybrid("Qwen3_5").eval(), make_batch("Qwen3_5", "plain")["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits[:, -1]

    def rank(ctx: burst_rt.Context) -> None:
        mine = deepcopy(model)
        mine.set_attn_implementation("burst_rt")
        cache = burst_rt.hf.Cache(mine, ctx, capacity=140, block=8)

        def last(tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = mine(tokens, **{CACHE: cache}).logits
            return logits[:, -1]

        with torch.no_grad():
            last(ids[:, :40])
            broken = mine.model.norm.register_forward_pre_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                last(ids[:, 40:])
            broken.remove()
            assert _difference(last(ids[:, 40:]), expected) <= _LARGEST
            with pytest.raises(InputError, match="some of whose layers keep states"):
                cache.crop(-1)
            cache.reset()
            assert _difference(last(ids), expected) <= _LARGEST

    burst_rt.run_local(2, rank, timeout_s=60)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def _refusals(
    name: str, layout: str = "auto", *, prepared: bool = True, **options: Any
) -> list[str]:
    model = make_hybrid(name)
    model.set_attn_implementation("burst_rt")

    def rank(ctx: burst_rt.Context) -> str:
        mine = deepcopy(model)
        burst_rt.hf.prepare(mine if prepared else deepcopy(model), ctx)
        part = burst_rt.hf.shard(make_batch(name, "plain"), ctx, layout)
        with pytest.raises(InputError) as caught:
            mine(**part, **options)
        assert ctx.all_reduce(torch.ones(1)).item() == 2  # the context is usable
        return str(caught.value)

    return burst_rt.run_local(2, rank, timeout_s=60)


def test_striped_tokens_are_refused() -> None:
    for said in _refusals("Qwen3Next", "striped"):
        assert "zigzag" in said
        assert "striped" in said


@pytest.mark.parametrize("name", ["OlmoHybrid", "FalconMamba"])
def test_generating_is_refused(name: str) -> None:
    for said in _refusals(name, use_cache=True):
        assert "use_cache: expected none: " in said
        assert "generate with burst_rt.hf.Cache" in said
    cache = transformers.DynamicCache(config=make_hybrid(name).config)
    for said in _refusals(name, past_key_values=cache):
        assert "past_key_values: expected none: " in said


@pytest.mark.parametrize("name", ["GraniteMoeHybrid", "Jamba"])
def test_a_routers_loss_is_of_all_ranks_tokens(name: str) -> None:
    model, batch = make_hybrid(name), make_batch(name, "plain")
    model.router_aux_loss_coef = 1.0
    whole = deepcopy(model)(**batch, output_router_logits=True)
    assert whole.aux_loss > 0.5
    model.set_attn_implementation("burst_rt")

    def rank(ctx: burst_rt.Context) -> None:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        found = mine(**burst_rt.hf.shard(batch, ctx), output_router_logits=True)
        torch.testing.assert_close(found.loss, whole.loss, rtol=1e-5, atol=0)

    burst_rt.run_local(2, rank, timeout_s=60)


def test_a_hybrid_that_was_not_prepared_is_refused() -> None:
    for said in _refusals("Qwen3_5", prepared=False):
        assert "call burst_rt.hf.prepare(model, ctx) once" in said


def test_a_layer_by_itself_is_refused() -> None:
    model = make_hybrid("Qwen3_5")
    model.set_attn_implementation("burst_rt")

    def rank(ctx: burst_rt.Context) -> None:
        mine = deepcopy(model)
        burst_rt.hf.prepare(mine, ctx)
        part = burst_rt.hf.shard(make_batch("Qwen3_5", "plain"), ctx)
        hidden = torch.zeros(2, part["input_ids"].shape[1], 32)
        with pytest.raises(InputError, match=r"a part of it \(Qwen3_5GatedDeltaNet"):
            mine.model.layers[0].linear_attn(hidden, burst_rt=part["burst_rt"])

    burst_rt.run_local(2, rank, timeout_s=60)


def test_a_loss_of_one_ranks_logits_is_refused() -> None:
    model = make_hybrid("Bamba")
    model.z_loss_coefficient = 0.1

    def rank(ctx: burst_rt.Context) -> None:
        with pytest.raises(InputError, match=r"z_loss_coefficient: expected 0, got 0\.1"):
            burst_rt.hf.prepare(model, ctx)

    burst_rt.run_local(2, rank, timeout_s=60)


def test_layers_of_a_later_release_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_hybrid("Mamba2")
    module = sys.modules[type(model).__module__]

    def prepared(said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            burst_rt.run_local(1, lambda ctx: burst_rt.hf.prepare(model, ctx), timeout_s=60)

    monkeypatch.setattr(module, "mamba2_chunk_scan", lambda hidden_states, dt: None)
    prepared(f"mamba2_chunk_scan.hidden_states, dt. of transformers {transformers.__version__}")
    monkeypatch.undo()
    monkeypatch.setattr(module.Mamba2Mixer, "forward", _forward_of_another(module))
    prepared("one that calls fused_scan")


def test_hybrids_of_a_release_that_is_not_known_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_hybrid("Bamba")
    model.set_attn_implementation("burst_rt")

    def compared(ctx: burst_rt.Context) -> str:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        hook = hook_of(mine)
        assert hook is not None
        return hook.compared

    assert burst_rt.run_local(2, compared, timeout_s=60) == [""] * 2
    monkeypatch.setattr(sys.modules["burst_rt.hf.prepare"], "KNOWN_RELEASES", ("6.0",))
    assert burst_rt.run_local(2, compared, timeout_s=60) == ["with loss"] * 2


def _forward_of_another(module: Any) -> Any:
    """A forward, as in that module, that mixes by a function nobody knows."""
    names = {"__name__": module.__name__, "fused_scan": lambda x: x}
    exec(
        "def forward(self, hidden_states, **options):\n    return fused_scan(hidden_states)", names
    )
    return names["forward"]


def test_a_forward_that_was_replaced_is_refused() -> None:
    model = make_hybrid("Lfm2")
    layer = model.model.layers[0].conv
    layer.forward = layer.forward
    with pytest.raises(InputError, match="Lfm2ShortConv: expected the forward of transformers"):
        burst_rt.run_local(1, lambda ctx: burst_rt.hf.prepare(model, ctx), timeout_s=60)


def test_softmax_attention_of_another_implementation_is_refused() -> None:
    """Layers that mix over the ranks do not stand for those that attend."""
    model, batch = make_hybrid("Jamba"), make_batch("Jamba", "plain")
    model.set_attn_implementation("eager")

    def rank(ctx: burst_rt.Context) -> None:
        mine = burst_rt.hf.prepare(deepcopy(model), ctx)
        with pytest.raises(InputError, match="load it with attn_implementation='burst_rt'"):
            mine(**burst_rt.hf.shard(batch, ctx))

    burst_rt.run_local(2, rank, timeout_s=60)
