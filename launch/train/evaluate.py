"""`burst-rt eval`: the held-out perplexity of a checkpoint, the same for a world of any size.

With `-n` the command launches itself on that many ranks; without it, it is one rank of whatever started it (mpirun, srun, nothing).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from burst_rt.context import Context
from burst_rt.launch.train.agreement import same_everywhere, together
from burst_rt.launch.train.config import TrainConfig
from burst_rt.launch.train.data import load_corpus
from burst_rt.launch.train.heldout import measure_heldout
from burst_rt.launch.train.mesh import open_mesh
from burst_rt.launch.train.model import Decoder
from burst_rt.launch.train.relaunch import chosen_options, relaunch
from burst_rt.launch.train.restore import SharedCheckpoint, read_shared
from burst_rt.launch.train.session import job_world
from burst_rt.launch.train.sharded import ShardedDecoder

__all__ = ["Evaluation", "command", "evaluate"]

_EPILOG = """\\b
Examples:
  burst-rt eval --checkpoint runs/book                  the run's newest checkpoint, on one rank
  burst-rt eval --checkpoint runs/book -n 4 --sequences 0
                                                        all of its held-out text, on four ranks
  burst-rt eval --checkpoint runs/book/checkpoints/step-00000060 --seq-len 65536 -n 2
  mpirun -n 4 burst-rt eval --checkpoint runs/book      under an MPI launcher of your own; srun likewise"""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured: loss in nats a byte over `num_tokens` bytes; `same_text` says whether training held out the very same."""

    checkpoint: str
    step: int
    world_size: int
    data: str
    same_text: bool
    seq_len: int
    num_tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float
    elapsed_s: float


@click.command("eval", epilog=_EPILOG, context_settings={"show_default": True, "max_content_width": 120})
@click.option(
    "--checkpoint", required=True, type=click.Path(path_type=Path), help="Folder of a run (its newest checkpoint) or of one checkpoint."
)
@click.option("-n", "num_ranks", type=click.IntRange(min=1), help="Launch on this many ranks of this machine. Without it: be one rank.")
@click.option(
    "--data", type=click.Path(path_type=str), help="Text file or folder, split as for training. [default: what it was trained on]"
)
@click.option("--seq-len", type=int, help="Bytes of a sequence. [default: as in training]")
@click.option("--sequences", "eval_sequences", type=int, help="Held-out sequences to measure on; 0: all. [default: as in training]")
@click.option("--context-parallel", type=int, help="Ranks that share a sequence; must divide the ranks. [default: all]")
@click.option("--layout", help="zigzag, contiguous or striped. [default: as in training]")
@click.option("--dtype", help="float32 or bfloat16. [default: as in training]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.pass_context
def command(context: click.Context, /, checkpoint: Path, num_ranks: int | None, as_json: bool, **values: object) -> None:
    """Measure the perplexity of a checkpoint on held-out text.

    A checkpoint of any world is measured on any other: the number is the same up to rounding.
    """
    if num_ranks is not None:
        sys.exit(relaunch(context, "burst_rt.launch.train.evaluate", num_ranks))
    chosen = {name: value for name, value in chosen_options(context).items() if name in values}
    with job_world() as world:
        evaluation = evaluate(world, checkpoint, {"context_parallel": None, **chosen})
    if evaluation is None:
        return
    if as_json:
        print(json.dumps(asdict(evaluation)), flush=True)
    else:
        _show(evaluation)


def evaluate(world: Context, path: Path, options: dict[str, object]) -> Evaluation | None:
    """Measure the checkpoint that `path` means, its configuration changed by `options`; the result on rank 0, None elsewhere.

    Collective. Raises ConfigError or InputError, the same on every rank.
    """
    started_s = time.monotonic()
    shared = read_shared(world, path)
    config = together(world, lambda: _configure(shared, options, world.world_size))
    corpus = together(world, lambda: load_corpus(config.data_path))
    same_everywhere(world, "the text that --data names", corpus.fingerprint)
    corpus.check_length(config.seq_len)
    with open_mesh(world, config.context_parallel) as mesh:
        decoder = Decoder(config.model, seed=config.seed).to(world.device)
        shared.fill(world, {name: parameter.detach() for name, parameter in decoder.named_parameters()})
        model = ShardedDecoder(decoder, mesh.context, config.sharding)
        heldout = measure_heldout(model, mesh, corpus.heldout, seq_len=config.seq_len, limit=config.eval_sequences)
    if world.rank != 0:
        return None
    return Evaluation(
        checkpoint=str(shared.folder),
        step=shared.manifest.step,
        world_size=world.world_size,
        data=corpus.name,
        same_text=corpus.fingerprint == shared.manifest.corpus,
        seq_len=config.seq_len,
        num_tokens=heldout.num_tokens,
        loss=heldout.loss,
        perplexity=heldout.perplexity,
        bits_per_byte=heldout.bits_per_byte,
        elapsed_s=time.monotonic() - started_s,
    )


def _configure(shared: SharedCheckpoint, options: dict[str, object], world_size: int) -> TrainConfig:
    config = TrainConfig.resumed(shared.manifest.config, options)
    # The batch is training's; here every group takes whole sequences one by one.
    config = replace(config, batch=world_size)
    config.validate(world_size)
    return config


def _show(evaluation: Evaluation) -> None:
    # Under mpirun stdout looks like a terminal even where it is a file, so no colours.
    table = Table(title="held-out text", title_justify="left", show_header=False)
    table.add_row("checkpoint", f"{evaluation.checkpoint} (step {evaluation.step})")
    note = "" if evaluation.same_text else "; not the text it was trained on"
    table.add_row("text", f"{evaluation.data}{note}")
    table.add_row("measured", f"{evaluation.num_tokens:,} bytes in sequences of {evaluation.seq_len:,}, on {evaluation.world_size} ranks")
    table.add_row("loss", f"{evaluation.loss:.6f} nats per byte ({evaluation.bits_per_byte:.4f} bits)")
    table.add_row("perplexity", f"{evaluation.perplexity:.5f}")
    table.add_row("time", f"{evaluation.elapsed_s:.1f} s")
    Console(color_system=None, highlight=False).print(table)


if __name__ == "__main__":
    command(prog_name="burst-rt eval")
