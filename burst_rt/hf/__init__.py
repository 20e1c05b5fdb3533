"""Models of transformers over the ranks of a context.

    import burst_rt.hf
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="burst_rt")
    ctx = burst_rt.init()
    burst_rt.hf.prepare(model, ctx)  # says now what ranks would get wrong with this model
    part = burst_rt.hf.shard(batch, ctx)  # the same batch on every rank
    loss = model(**part).loss  # the mean over all tokens of all ranks, on every rank
    loss.backward()
    burst_rt.average_gradients(model.parameters(), group=ctx)  # or DDP, or FSDP2

Importing this registers "burst_rt" as an attention function and as a mask function of transformers,
and two losses that add up over ranks where a call is sharded. Needs the extra `hf`.
"""

from __future__ import annotations

from burst_rt.errors import MissingPackage

try:
    from burst_rt.hf.attention import register
    from burst_rt.hf.cache import Cache
    from burst_rt.hf.loss import register_losses
    from burst_rt.hf.prepare import prepare
    from burst_rt.hf.shard import shard
    from burst_rt.hf.trainer import Trainer
except ImportError as error:
    raise MissingPackage(
        f"burst_rt.hf needs transformers 5.23 and accelerate 1.15, or newer ones with the same "
        f"names ({error}); in the clone of burst_rt say: pip install '.[hf]' -c constraints.txt"
    ) from error

__all__ = ["Cache", "Trainer", "prepare", "shard"]

register()
register_losses()
