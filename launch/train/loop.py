"""A training run from its options to its last checkpoint, and the measurement of a checkpoint.

Both run on every rank of a world. Every rank ends a step with the same weights, bit for bit, and
the loss on held-out text is the same number for a world of any size, up to rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from burst_rt import telemetry
from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.job import launched
from burst_rt.launch.stopping import StopRequests, StopVotes
from burst_rt.launch.train.checkpoint import Checkpoint, Manifest, resolve
from burst_rt.launch.train.config import RunOptions, TrainConfig, option_name
from burst_rt.launch.train.data import (
    BYTES,
    Corpus,
    heldout_starts,
    load_corpus,
    sequences_at,
    training_starts,
)
from burst_rt.launch.train.folder import RunFolder
from burst_rt.launch.train.mesh import Mesh, open_mesh
from burst_rt.launch.train.model import (
    AdamW,
    AveragedGradients,
    Decoder,
    ShardedDecoder,
    ShardedModel,
    learning_rate,
)
from burst_rt.launch.train.report import Report, StepRecord
from burst_rt.launch.train.shared import SharedCheckpoint, open_same_folder, read_shared
from burst_rt.launch.train.summary import (
    Summary,
    perplexity,
    summarise_measurement,
    summarise_run,
    table,
)
from burst_rt.launch.world import StoppedBySignal, same_everywhere
from burst_rt.telemetry.wire import readable

if TYPE_CHECKING:
    from burst_rt.launch.train.pretrained import ModelFolder

__all__ = ["evaluate", "train"]


def train(
    world: Context, config: TrainConfig, options: RunOptions, chosen: Mapping[str, object]
) -> Summary | None:
    """Train to the end; return the summary on rank 0, None elsewhere. Collective over `world`.

    `chosen` holds the entries of `config` that the user named: they alone override the options of a
    run that is resumed. Raises ConfigError or InputError, the same on every rank, for what cannot
    run, and Stopped where a signal said so.
    """
    started_s = time.monotonic()
    options.validate()
    with ExitStack() as held:

        def take_folder() -> RunFolder:
            folder = RunFolder(world, options.out, resume=options.resume, elastic=options.elastic)
            held.callback(folder.release)
            return folder

        # A run that is resumed is held before it is read; a new folder is made once all else is
        # well.
        held_first = take_folder() if options.resume or options.elastic else None
        shared = None
        if held_first is not None and held_first.has_checkpoints:
            shared = read_shared(world, held_first.path)
        manifest = shared.manifest if shared else None
        decide = partial(resolve, config, chosen, manifest, world.world_size)
        asked, config = world.together(partial(decide, elastic=options.elastic))
        source = open_same_folder(world, config, shared)
        corpus = _load_same_corpus(world, config, source)
        if shared is not None and shared.manifest.corpus != corpus.fingerprint:
            raise ConfigError(
                f"--resume: {corpus.name} is not the text that {shared.folder} was trained on; "
                "point --data at the same files."
            )
        folder = held_first or take_folder()

        mesh = held.enter_context(open_mesh(world, config.context_parallel))
        done = shared.manifest.step if shared else 0
        mode = options.progress if world.rank == 0 else "none"
        report = Report(mode, steps=config.steps, done=done, world_size=world.world_size)
        held.callback(report.stop)
        trainer = Trainer(config, mesh, corpus, source, asked)
        if shared is not None:
            trainer.restore(shared)
            # Its files are mapped, and what is mapped cannot be deleted from NFS.
            del shared
        folder.open_metrics(after_step=done)
        report.say(_heading(trainer, folder, done))
        with StopRequests(offer=world.rank == 0) as requests:
            for step in range(done + 1, config.steps + 1):
                _advance(step, trainer, folder, report, requests)
        if source is not None:
            folder.save_model(partial(source.save, trainer.module))
        folder.conclude(
            f"{trainer.num_parameters / 1e6:.2f} M parameters, {config.seq_len:,} {corpus.unit}s a "
            f"sequence, {world.world_size} ranks",
            corpus.unit,
        )
        if world.rank != 0 or not folder.history:
            return None
        about = {
            "world_size": world.world_size,
            "data_parallel": mesh.data_size,
            "context_parallel": mesh.context.world_size,
            "num_parameters": trainer.num_parameters,
            "unit": corpus.unit,
            "out": str(folder.path),
            "elapsed_s": time.monotonic() - started_s,
        }
        summary = summarise_run(folder.history, done, about)
        report.conclude(table(summary.title, summary.rows))
        return summary


def evaluate(world: Context, path: Path | None, chosen: Mapping[str, object]) -> Summary | None:
    """Measure the checkpoint that `path` means, its configuration changed by the options that were
    `chosen`, or (None) the model that is among them; the result on rank 0, None elsewhere.

    Collective. Raises ConfigError or InputError, the same on every rank.
    """
    started_s = time.monotonic()
    shared = read_shared(world, path) if path else None
    trained = shared.manifest.config if shared else TrainConfig(model=str(chosen["model"]))
    config = world.together(lambda: trained.evaluated(chosen, world.world_size))
    source = open_same_folder(world, config, shared)
    corpus = _load_same_corpus(world, config, source)
    with open_mesh(world, config.context_parallel) as mesh:
        model = _make_model(config, mesh, source)
        if shared is not None:
            shared.fill(world, {n: p.detach() for n, p in model.module.named_parameters()})
        loss, num_tokens = _measure_heldout(model, mesh, corpus, config)
    if world.rank != 0:
        return None
    about = {
        "checkpoint": str(shared.folder) if shared else None,
        "step": shared.manifest.step if shared else None,
        "model": config.model,
        "world_size": world.world_size,
        "data": corpus.name,
        "same_text": corpus.fingerprint == shared.manifest.corpus if shared else None,
        "seq_len": config.seq_len,
        "unit": corpus.unit,
        "num_tokens": num_tokens,
        "elapsed_s": time.monotonic() - started_s,
    }
    return summarise_measurement(loss, corpus.heldout_bytes_per_token, about)


class Trainer:
    """Model, optimizer and gradients of one rank: takes steps, and holds a checkpoint's state."""

    def __init__(
        self, config: TrainConfig, mesh: Mesh, corpus: Corpus, source: ModelFolder | None,
        asked: TrainConfig,
    ) -> None:  # fmt: skip
        """Build the state of step 0. asked: the configuration that checkpoints keep. Collective;
        raises ConfigError on every rank.
        """
        self.config = config
        self.asked = asked
        self.mesh = mesh
        self.corpus = corpus
        self.source = source
        self._model = _make_model(config, mesh, source)
        self.module = self._model.module
        self._gradients = AveragedGradients(self.module)
        self._optimizer = AdamW(self.module, weight_decay=config.weight_decay)

    @property
    def num_parameters(self) -> int:
        return self._model.num_parameters()

    def run_step(self, step: int, stop_votes: StopVotes) -> tuple[StepRecord, StopVotes]:
        """Take step `step` (from 1); return its record, and the sum of all ranks' `stop_votes`.

        Collective; raises ConfigError on every rank when the loss is not finite.
        """
        config, mesh, text = self.config, self.mesh, self.corpus.train
        started_s = time.monotonic()
        before = mesh.context.stats()
        indices = mesh.share_of(config.batch)
        self._gradients.zero()
        with telemetry.span("data"):
            starts = training_starts(
                text, config.seq_len, seed=config.seed, step=step, indices=indices
            )
            sequences = sequences_at(text, starts, config.seq_len)
        with telemetry.span("forward"):
            mean = self._model(*sequences, group=mesh.world)
        with telemetry.span("backward"):
            mean.backward()
        with telemetry.span("average gradients"):
            self._gradients.average(mesh.world)
        with telemetry.span("optimizer"):
            norm = torch.linalg.vector_norm(self._gradients.flat)
            nn.utils.clip_grads_with_norm_(self.module.parameters(), config.clip, norm)
            grad_norm = norm.item()
            lr = learning_rate(step - 1, peak=config.lr, warmup=config.warmup, steps=config.steps)
            self._optimizer.step(lr, self._gradients.trained)

        after = mesh.context.stats()
        waited_s, sent = after.wait_s - before.wait_s, after.bytes_sent - before.bytes_sent
        # The ranks' requests to stop ride in the sum of the step's figures: a round of their own
        # would cost every step as much as this one does.
        figures = [waited_s, sent, *stop_votes]
        sums = torch.tensor(figures, dtype=torch.float64, device=mesh.world.device)
        wait_s, bytes_sent, *all_votes = mesh.world.all_reduce(sums).tolist()
        loss = mean.item()
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise _diverged(step, f"loss {loss}, gradients {grad_norm}")
        step_s = time.monotonic() - started_s
        num_tokens = config.batch * config.seq_len
        record = StepRecord(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            step_s=step_s,
            tokens_per_s=num_tokens / step_s,
            wait_fraction=wait_s / mesh.world.world_size / step_s,
            bytes_sent=round(bytes_sent),
        )
        if mesh.world.rank == 0:
            telemetry.report(
                step,
                loss=loss,
                tokens_per_s=record.tokens_per_s,
                grad_norm=grad_norm,
                learning_rate=lr,
                step_s=step_s,
            )
        return record, all_votes

    def measure_heldout(self, step: int) -> float:
        """Mean loss of a token on the held-out text after a step. Collective; raises ConfigError
        on every rank when the loss cannot be shown as a number.
        """
        loss, _ = _measure_heldout(self._model, self.mesh, self.corpus, self.config)
        if not math.isfinite(perplexity(loss)):
            raise _diverged(step, f"held-out loss {loss}")
        if self.mesh.world.rank == 0:
            telemetry.report(step, heldout_loss=loss)
        return loss

    def check_finite(self, step: int) -> None:
        """Raise ConfigError, on every rank, when the weights after a step are not finite. The loss
        would tell only a step later.
        """
        if not all(bool(torch.isfinite(weight).all()) for weight in self.module.parameters()):
            raise _diverged(step, "weights that are not finite")

    def checkpoint(self, step: int) -> Checkpoint:
        """The state after `step` steps. Its tensors are the live ones, to be written before the
        next step.
        """
        weights = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        source = self.source.fingerprint if self.source else ""
        # A later start may have all the ranks again that were asked for.
        manifest = Manifest(step, self.asked, self.corpus.fingerprint, source)
        return Checkpoint(manifest, weights, self._optimizer.moments)

    def restore(self, shared: SharedCheckpoint) -> None:
        """Continue from a checkpoint. Collective; raises ConfigError on every rank when its tensors
        do not fit.
        """
        step = shared.manifest.step
        live = self.checkpoint(step)
        shared.fill(self.mesh.world, live.weights, live.optimizer)
        # Those that have moved go on, as they would have, whether or not a gradient comes again.
        self._gradients.trained |= self._optimizer.resume(step)


@torch.no_grad()
def _measure_heldout(
    model: ShardedModel, mesh: Mesh, corpus: Corpus, config: TrainConfig
) -> tuple[float, int]:
    """Mean loss of a token in nats, and the number of tokens: those of at most
    `config.eval_sequences` (0: all) sequences of the held-out stream, which holds at least one.
    Collective over the mesh's world.
    """
    starts = heldout_starts(corpus.heldout, config.seq_len, config.eval_sequences)
    total = torch.zeros(1, dtype=torch.float64, device=mesh.world.device)
    for index in mesh.share_of(len(starts)):
        sequence = sequences_at(corpus.heldout, [starts[index]], config.seq_len)
        total += model(*sequence, group=mesh.context)
    # Every rank of a group has the mean of the group's sequences.
    mesh.world.all_reduce(total)
    loss = total.item() / mesh.context.world_size / len(starts)
    return loss, len(starts) * config.seq_len


def _make_model(config: TrainConfig, mesh: Mesh, source: ModelFolder | None) -> ShardedModel:
    """The byte-level model, or the one of `source`, with its first weights. Collective."""
    if config.architecture is not None:
        decoder = Decoder(
            config.architecture,
            seed=config.seed,
            checkpoint_activations=config.checkpoint_activations,
        )
        return ShardedDecoder(decoder, mesh.context, config)
    from burst_rt.launch.train.pretrained import ShardedPretrained

    assert source is not None
    model = ShardedPretrained(mesh.world.together(source.load), mesh.context, config)
    mesh.world.together(model.check)
    return model


def _load_same_corpus(world: Context, config: TrainConfig, source: ModelFolder | None) -> Corpus:
    """The text of `config`, which is long enough and the same on every rank."""
    encoding = source.encoding if source else BYTES
    corpus = world.together(lambda: load_corpus(config.data_path, encoding))
    same_everywhere(world, "the text that --data names", corpus.fingerprint)
    corpus.check_length(config.seq_len)
    return corpus


def _advance(
    step: int, trainer: Trainer, folder: RunFolder, report: Report, requests: StopRequests
) -> None:
    """Take one step, and do what is due after it. Raises Stopped, with a checkpoint of this step,
    where any rank was asked to stop.
    """
    config = trainer.config

    def due(every: int) -> bool:
        return step == config.steps or (every > 0 and step % every == 0)

    with telemetry.step(step):
        record, stop_votes = trainer.run_step(step, requests.votes())
    stop = requests.heard(stop_votes) if step < config.steps else None
    if due(config.eval_every):
        with telemetry.span("evaluation"):
            loss = trainer.measure_heldout(step)
        record = replace(record, heldout_loss=loss, heldout_perplexity=perplexity(loss))
    folder.append(record)
    report.show(record)
    if stop or due(config.checkpoint_every):
        trainer.check_finite(step)
        with telemetry.span("checkpoint"):
            folder.save(trainer.checkpoint(step), keep=config.keep_checkpoints)
    if stop:
        raise StoppedBySignal(stop, f"after step {step}; resume with: {folder.resume_command}")


def _diverged(step: int, how: str) -> ConfigError:
    return ConfigError(f"step {step}: training diverged ({how}); choose a smaller --lr.")


def _heading(trainer: Trainer, folder: RunFolder, done: int) -> str:
    config, mesh, corpus = trainer.config, trainer.mesh, trainer.corpus
    fitted = [
        f"{option_name(name)} {after} in place of {before}\n"
        for name, before in vars(trainer.asked).items()
        if (after := getattr(config, name)) != before
    ]
    left_out = ""
    if corpus.left_out:
        number, first = len(corpus.left_out), readable(corpus.left_out[0])
        files = "file that is" if number == 1 else "files that are"
        left_out = f"left out: {number:,} {files} not UTF-8 text, such as {first}\n"
    restarts = launched.restarts()
    if restarts and not done:
        fitted.append(
            f"restart {restarts} found no checkpoint in {folder.path}, and begins again: where "
            "restarts may move to other hosts, --out must be on a file system of them all\n"
        )
    return (
        f"{f'resuming after step {done}' if done else 'training'}: "
        f"{trainer.num_parameters / 1e6:.2f} M parameters, "
        f"{config.batch} x {config.seq_len:,} {corpus.unit}s a step, {config.dtype}\n"
        f"ranks: {mesh.world.world_size} ({mesh.data_size} data x {mesh.context.world_size} "
        f"context), layout {config.layout}, on {mesh.world.device}\n{''.join(fitted)}"
        f"text: {corpus.name}, {corpus.num_documents:,} documents, {corpus.size_bytes / 1e6:.1f} "
        f"MB, of which {len(corpus.heldout) / 1e6:.1f} MB held out\n{left_out}"
        f"{f'model: {config.model}{chr(10)}' if config.model else ''}"
        f"out: {folder.path}"
    )
