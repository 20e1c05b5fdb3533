"""What small models generate, by one process or with a cache over ranks."""

from __future__ import annotations

from typing import Any

import torch
from small_hybrids import make_hybrid
from small_models import CACHE, make_model
from small_models import DECODERS as _ALL

__all__ = [
    "BATCHES",
    "DECODERS",
    "PROMPT",
    "Generated",
    "cases",
    "generate",
    "make_decoder",
    "truth",
]

# Other hybrids are in tests/unit/test_hf_hybrids.py, without sampling.
_HYBRID = "Qwen3Next"
DECODERS = (
    *(name for name in _ALL if name not in ("Gemma3Bidirectional", "Gemma4")), _HYBRID,
)  # fmt: skip
# Cases beside the first two, which every model has: what they add is the same for all models, but
# for Phi3's "longrope", whose boundary the sampled tokens cross.
_MORE = {
    "Llama": ("sampled", "beams"),
    "Gemma3": ("beams",),
    "Phi3": ("sampled",),
    _HYBRID: ("sampled",),
}
PROMPT = 75
# Rows of the cache: prompts, times beams.
BATCHES = {"turns": 2, "chunks": 2, "sampled": 2, "beams": 6}
_NEW = 3
_LATER = 21

Generated = dict[str, torch.Tensor]


def cases(name: str) -> tuple[str, ...]:
    """The cases that a model is tried with. Attention in chunks is not done behind padding."""
    first = ("turns",) if name == "Llama4" else ("turns", "chunks")
    return (*first, *_MORE.get(name, ()))


def make_decoder(name: str, implementation: str) -> Any:
    model = (make_hybrid if name == _HYBRID else make_model)(name).eval()
    model.set_attn_implementation(implementation)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # for training
    return model


def truth(name: str, case: str) -> Generated:
    """What one process generates, without a cache that was given."""
    return generate(make_decoder(name, "eager"), case)


def generate(model: Any, case: str, cache: Any = None, seed: int = 7) -> Generated:
    """The tokens of a case, and the logits that each was chosen by."""
    prompts = _tokens(PROMPT)
    shown = torch.ones_like(prompts)
    shown[0, :30] = 0
    shown[1, :9] = 0
    options = {
        "max_new_tokens": _NEW, "min_new_tokens": _NEW, CACHE: cache,
        "use_cache": True, "do_sample": False, "return_dict_in_generate": True,
        "output_logits": True,
    }  # fmt: skip
    if case == "turns":
        first = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        longer = torch.cat([first.sequences, _tokens(_LATER)], 1)
        second = model.generate(longer, attention_mask=torch.ones_like(longer), **options)
        logits = (*first.logits, *second.logits)
        return {"tokens": second.sequences, "logits": torch.stack(logits)}
    if case == "chunks":  # the first are padding alone
        options["prefill_chunk_size"] = 20
    elif case == "sampled":
        prompts, shown = prompts[:, :39], shown[:, :39]
        options |= {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9}
        torch.manual_seed(seed)
    elif case == "beams":
        options["num_beams"] = 3
    found = model.generate(prompts, attention_mask=shown, **options)
    return {"tokens": found.sequences, "logits": torch.stack(found.logits)}


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 64, (2, count), generator=torch.Generator().manual_seed(count))
