"""Logits of prepared models: the loss does without them, and what reads them gets them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import peft
import pytest
import torch
import transformers
from small_models import gradients, make_batch, make_model
from tolerances import LOSSES_OF_TRAINERS

import burst_rt
import burst_rt.hf
from burst_rt import Context
from burst_rt.errors import InputError
from burst_rt.hf.logits import Unmade

pytestmark = [
    pytest.mark.usefixtures("no_parts_left"),
    # PEFT asks a model by a name that transformers 5.24 has given up.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

_LARGEST = 1e-5  # of the largest value, in float32
_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip


def _scaled(name: str, **options: float) -> Any:
    config = getattr(transformers, f"{name}Config")(**_SMALL, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_attn_implementation("eager")
    return model.train()


def _frozen() -> Any:
    model = make_model("Llama")
    model.requires_grad_(requires_grad=False)
    model.model.norm.requires_grad_()
    return model


def _checkpointed() -> Any:
    model = make_model("Llama")
    # Its name since transformers 5.24.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()
    return model


def _adapted(*modules: str, saved: list[str] | None = None) -> Any:
    adapter = peft.LoraConfig(
        target_modules=list(modules), modules_to_save=saved, task_type="CAUSAL_LM",
        init_lora_weights=False,
    )  # fmt: skip
    return peft.get_peft_model(make_model("Llama"), adapter)


def _hooked() -> Any:
    model = make_model("Llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    return model


# Models, and whether their losses do without logits.
_MODELS: dict[str, tuple[Callable[[], Any], bool]] = {
    "plain": (lambda: make_model("Llama"), True),
    "a softcap and tied embeddings": (lambda: make_model("Gemma2"), True),
    "a bias and no shift": (lambda: make_model("ModernBert"), True),
    "a factor": (lambda: _scaled("Cohere", logit_scale=0.3), True),
    "a divisor": (lambda: _scaled("Granite", logits_scaling=3.0), True),
    "only a norm learns": (_frozen, True),
    "checkpointed layers": (_checkpointed, True),
    "LoRA": (lambda: _adapted("q_proj"), True),
    "LoRA on the head": (lambda: _adapted("q_proj", "lm_head"), False),
    "LoRA beside a head that learns": (lambda: _adapted("q_proj", saved=["lm_head"]), False),
    "a head with a hook": (_hooked, False),
}


@pytest.mark.parametrize("case", _MODELS)
def test_losses_gradients_and_logits_are_those_of_one_process(case: str) -> None:
    make, without = _MODELS[case]
    model = make()
    batch = make_batch("Llama", "plain")
    truth = deepcopy(model)
    expected = truth(**batch)
    expected.loss.backward()

    def run(ctx: Context) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
        mine = deepcopy(model)
        mine.set_attn_implementation("burst_rt")
        burst_rt.hf.prepare(mine, ctx)
        part = burst_rt.hf.shard(batch, ctx)
        output = mine(**part)
        output.loss.backward()
        if without:
            assert isinstance(output.logits, Unmade)
            assert output.logits.notes.made is None
        else:
            assert type(output.logits) is torch.Tensor
        logits = part["burst_rt"].batch.layout.unshard(output.logits.detach())
        learn = [x for x in mine.parameters() if x.requires_grad]
        burst_rt.average_gradients(learn, group=ctx)
        return output.loss.item(), logits, gradients(mine)

    for loss, logits, found in burst_rt.run_local(2, run, timeout_s=60):
        assert loss == pytest.approx(expected.loss.item(), rel=LOSSES_OF_TRAINERS)
        _compare(logits, expected.logits)
        assert found.keys() == gradients(truth).keys()
        for name, true in gradients(truth).items():
            _compare(found[name], true)


def _compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    error, largest = (found - expected).detach().abs().max(), expected.detach().abs().max()
    assert float(error) <= _LARGEST * float(largest)


def _outputs(ctx: Context, name: str = "Gemma2") -> tuple[Any, Any, Any]:
    """A model that is prepared, what it gives for a batch with labels, and what it gives for it
    without.
    """
    model = make_model(name)
    model.set_attn_implementation("burst_rt")
    burst_rt.hf.prepare(model, ctx)
    batch = make_batch(name, "plain")
    output = model(**burst_rt.hf.shard(batch, ctx))
    batch.pop("labels")
    return model, output, model(**burst_rt.hf.shard(batch, ctx))


def _saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


_READINGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a part": lambda x: x[:, 3:5, ::2],
    "the last": lambda x: x[0, -1],
    "the largest": lambda x: x.argmax(-1),
    "another type": lambda x: x.to(torch.float64),
    "probabilities": lambda x: x.float().softmax(-1),
    "entropies": lambda x: -(x.log_softmax(-1).exp() * x.log_softmax(-1)).sum(-1),
    "of others": lambda x: torch.cat([x, torch.zeros_like(x)]),
    "half": lambda x: x / 2,
    "as a factor": lambda x: 2 * x,
    "added": lambda x: 1 + x,
    "a view": lambda x: x.view(-1, 64).T.contiguous(),
    "a copy": lambda x: deepcopy(x.detach()),
    "changed": lambda x: x.detach().clone().mul_(3).add_(1),
    "written to": lambda x: torch.zeros_like(x).copy_(x),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "numbers": lambda x: torch.tensor(x.tolist()),
    "one number": lambda x: torch.tensor(x.max().item()),
    "rows": lambda x: torch.stack(list(x)),
    "pickled": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "saved": lambda x: _saved(x.detach()),
}


@pytest.mark.parametrize("reading", _READINGS)
def test_what_reads_logits_reads_those_of_a_call_without_labels(reading: str) -> None:
    read = _READINGS[reading]
    with burst_rt.init() as ctx:
        _, output, plain = _outputs(ctx)
        assert isinstance(output.logits, Unmade)
        assert output.logits.shape == plain.logits.shape
        found, expected = read(output.logits), read(plain.logits)
    assert found.dtype == expected.dtype
    # Those that were only noted are made by a sum.
    torch.testing.assert_close(found + 0, expected, rtol=1e-6, atol=1e-6)


def test_gradients_flow_through_logits_that_are_read() -> None:
    """A loss of one's own beside the model's, through the softcap and the tied embeddings."""
    with burst_rt.init() as ctx:
        model, output, plain = _outputs(ctx)
        parameters = list(model.parameters())
        extra = plain.logits.logsumexp(-1).square().mean()
        of_loss = torch.autograd.grad(output.loss, parameters, retain_graph=True)
        of_extra = torch.autograd.grad(extra, parameters)
        expected = [x + y for x, y in zip(of_loss, of_extra, strict=True)]
        loss = output.loss + output.logits.logsumexp(-1).square().mean()
        for x, y in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
            _compare(x, y)


def test_logits_that_are_gone_are_refused() -> None:
    with burst_rt.init() as ctx:
        model, output, _ = _outputs(ctx)
        assert "not made" in repr(output.logits)
        output.loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(InputError, match="changed its weights by now; read output"):
            output.logits.argmax(-1)
        _, output, _ = _outputs(ctx)
        kept = output.logits.float()
        output.logits.notes.data[1].untyped_storage().resize_(0)
        with pytest.raises(InputError, match="keeps its weights sharded by now"):
            kept.sum()


# The compiler asks for .grad after a cut.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_calls_without_labels_and_compiled_ones_have_plain_logits() -> None:
    with burst_rt.init() as ctx:
        model, output, plain = _outputs(ctx, "Llama")
        assert type(plain.logits) is torch.Tensor
        assert "forward" not in vars(model.lm_head)
        compiled = torch.compile(model, backend="eager")
        part = burst_rt.hf.shard(make_batch("Llama", "plain"), ctx)
        found = compiled(**part)  # type: ignore[no-untyped-call]
        assert type(found.logits) is torch.Tensor
        assert found.loss.item() == pytest.approx(output.loss.item(), rel=LOSSES_OF_TRAINERS)


def test_evaluations_have_logits_without_gradients() -> None:
    with burst_rt.init() as ctx:
        model = make_model("Gemma2").eval()
        model.set_attn_implementation("burst_rt")
        burst_rt.hf.prepare(model, ctx)
        batch = make_batch("Gemma2", "plain")
        expected = model(**burst_rt.hf.shard(batch, ctx))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                output = model(**burst_rt.hf.shard(batch, ctx))
                assert not output.loss.requires_grad
                assert output.loss.item() == expected.loss.item()
                assert isinstance(output.logits, Unmade)
                torch.testing.assert_close(output.logits + 0, expected.logits.detach() + 0)
