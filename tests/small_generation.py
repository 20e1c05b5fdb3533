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
    "generate_alone",
    "make_decoder",
    "truth",
]

# Other hybrids are in tests/unit/test_hf_hybrids.py, without sampling. Mamba has no attention, and
# needs transformers 5.24; Kimi Linear's attention keeps latents in one process.
_HYBRIDS = ("Qwen3Next", "KimiLinear", *(("Mamba",) if CACHE == "cache" else ()))
DECODERS = (
    *(name for name in _ALL if name not in ("Gemma3Bidirectional", "Gemma4")), *_HYBRIDS,
)  # fmt: skip
# Cases beside the first two, which every model has: what they add is the same for all models, but
# for Phi3's "longrope", whose boundary the sampled tokens cross.
_MORE = {
    "Llama": ("sampled", "beams"),
    "Gemma3": ("beams",),
    "Phi3": ("sampled",),
    "Qwen3Next": ("sampled",),
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
    model = (make_hybrid if name in _HYBRIDS else make_model)(name).eval()
    model.set_attn_implementation(implementation)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # for training
    return model


def truth(name: str, case: str) -> Generated:
    """What one process generates, without a cache that was given."""
    model = make_decoder(name, "eager")
    # A Mamba of transformers does not go on from its cache by several tokens.
    return generate_alone(model, case) if name == "Mamba" else generate(model, case)


def generate(model: Any, case: str, cache: Any = None, seed: int = 7) -> Generated:
    """The tokens of a case, and the logits that each was chosen by."""
    prompts, shown = _prompts()
    options: dict[str, Any] = {CACHE: cache, "use_cache": True}
    if case == "chunks":  # the first are padding alone
        options["prefill_chunk_size"] = 20
    elif case == "sampled":
        prompts, shown = prompts[:, :39], shown[:, :39]
        options |= {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9}
        torch.manual_seed(seed)
    return _generated(model, case, prompts, shown, _tokens(_LATER), options)


def generate_alone(model: Any, case: str) -> Generated:
    """What one process makes of each row by itself, without padding and without a cache."""
    found = []
    prompts, shown = _prompts()
    for row in range(len(prompts)):
        at = slice(0 if case == "turns" else int((shown[row] == 0).sum()), None)
        prompt, later = prompts[row, at][None], _tokens(_LATER)[row][None]
        options = {"use_cache": False}
        each = _generated(model, case, prompt, torch.ones_like(prompt), later, options)
        tokens = torch.cat([prompts[row, : at.start][None], each["tokens"]], 1)
        found.append({**each, "tokens": tokens})
    return {
        "tokens": torch.cat([each["tokens"] for each in found]),
        "logits": torch.cat([each["logits"] for each in found], 1),
    }


def _prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, and which of their tokens are no padding, but in two turns."""
    prompts = _tokens(PROMPT)
    shown = torch.ones_like(prompts)
    shown[0, :30] = 0
    shown[1, :9] = 0
    return prompts, shown


def _generated(
    model: Any,
    case: str,
    prompts: torch.Tensor,
    shown: torch.Tensor,
    later: torch.Tensor,
    options: dict[str, Any],
) -> Generated:
    prompts, shown, later = (x.to(model.device) for x in (prompts, shown, later))
    options = {
        "max_new_tokens": _NEW, "min_new_tokens": _NEW, "do_sample": False,
        "return_dict_in_generate": True, "output_logits": True, **options,
    }  # fmt: skip
    if case == "turns":
        first = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        longer = torch.cat([first.sequences, later], 1)
        second = model.generate(longer, attention_mask=torch.ones_like(longer), **options)
        logits = (*first.logits, *second.logits)
        return {"tokens": second.sequences.cpu(), "logits": torch.stack(logits).cpu()}
    if case == "beams":
        options["num_beams"] = 3
    found = model.generate(prompts, attention_mask=shown, **options)
    return {"tokens": found.sequences.cpu(), "logits": torch.stack(found.logits).cpu()}


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 64, (2, count), generator=torch.Generator().manual_seed(count))
