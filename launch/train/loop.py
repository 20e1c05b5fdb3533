"""A training run from its options to its last checkpoint, and the measurement of a checkpoint.

Both run on every rank of a world. Every rank ends a step with the same weights, bit for bit, and
the loss on held-out text is the same number for a world of any size, up to rounding.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import burst_rt
from burst_rt import telemetry
from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.launch.stopping import StopRequests
from burst_rt.launch.train.checkpoint import Checkpoint, Manifest
from burst_rt.launch.train.config import RunOptions, TrainConfig, require_model
from burst_rt.launch.train.data import (
    BYTES,
    Corpus,
    heldout_starts,
    load_corpus,
    sequences_at,
    training_starts,
)
from burst_rt.launch.train.model import (
    AdamW,
    Decoder,
    FlatGradients,
    ShardedDecoder,
    ShardedModel,
    learning_rate,
)
from burst_rt.launch.train.report import LAST_STEPS, Evaluation, Report, StepRecord, Summary
from burst_rt.launch.train.world import (
    Mesh,
    RunFolder,
    SharedCheckpoint,
    Stopped,
    open_mesh,
    read_shared,
    same_everywhere,
    together,
)

if TYPE_CHECKING:
    from burst_rt.launch.train.pretrained import ModelFolder

__all__ = ["evaluate", "open_same_folder", "train"]


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
            return held.enter_context(RunFolder(world, options.out, resume=options.resume))

        def resolve() -> TrainConfig:
            resolved = shared.manifest.resumed(chosen) if shared else config.begun(chosen)
            resolved.validate(world.world_size)
            return resolved

        # A run that is resumed is held before it is read; a new folder is made once all else is
        # well.
        resumed = take_folder() if options.resume else None
        shared = read_shared(world, resumed.path) if resumed else None
        config = together(world, resolve)
        source = open_same_folder(world, config, shared)
        corpus = _load_same_corpus(world, config, source)
        if shared is not None and shared.manifest.corpus != corpus.fingerprint:
            raise ConfigError(
                f"--resume: {corpus.name} is not the text that {shared.folder} was trained on; "
                "point --data at the same files."
            )
        folder = resumed or take_folder()

        mesh = held.enter_context(open_mesh(world, config.context_parallel))
        done = shared.manifest.step if shared else 0
        mode = options.progress if world.rank == 0 else "none"
        report = held.enter_context(
            Report(mode, steps=config.steps, done=done, world_size=world.world_size)
        )
        trainer = Trainer(config, mesh, corpus, source)
        if shared is not None:
            trainer.restore(shared)
        folder.open_metrics(after_step=done)
        report.say(_heading(trainer, folder, done))
        with StopRequests(offer=world.rank == 0) as requests:
            for step in range(done + 1, config.steps + 1):
                _advance(step, trainer, folder, report, requests)
        folder.plot(
            f"{trainer.num_parameters / 1e6:.2f} M parameters, {config.seq_len:,} {corpus.unit}s a "
            f"sequence, {world.world_size} ranks",
            corpus.unit,
        )
        if source is not None:
            folder.save_model(partial(source.save, trainer.module))
        if world.rank != 0:
            return None
        summary = _summarise(trainer, folder, done, time.monotonic() - started_s)
        report.conclude(summary)
        return summary


def evaluate(world: Context, path: Path | None, chosen: Mapping[str, object]) -> Evaluation | None:
    """Measure the checkpoint that `path` means, its configuration changed by the options that were
    `chosen`, or (None) the model that is among them; the result on rank 0, None elsewhere.

    Collective. Raises ConfigError or InputError, the same on every rank.
    """
    started_s = time.monotonic()
    shared = read_shared(world, path) if path else None
    trained = shared.manifest.config if shared else TrainConfig(model=str(chosen["model"]))
    config = together(world, lambda: trained.evaluated(chosen, world.world_size))
    source = open_same_folder(world, config, shared)
    corpus = _load_same_corpus(world, config, source)
    with open_mesh(world, config.context_parallel) as mesh:
        model = _make_model(config, mesh, source)
        if shared is not None:
            shared.fill(world, {n: p.detach() for n, p in model.module.named_parameters()})
        heldout = _measure_heldout(model, mesh, corpus, config)
    if world.rank != 0:
        return None
    return Evaluation(
        checkpoint=str(shared.folder) if shared else None,
        model=config.model,
        step=shared.manifest.step if shared else None,
        world_size=world.world_size,
        data=corpus.name,
        same_text=corpus.fingerprint == shared.manifest.corpus if shared else None,
        seq_len=config.seq_len,
        unit=corpus.unit,
        num_tokens=heldout.num_tokens,
        loss=heldout.loss,
        perplexity=heldout.perplexity,
        bits_per_byte=heldout.loss / math.log(2) / corpus.heldout_bytes_per_token,
        elapsed_s=time.monotonic() - started_s,
    )


class Trainer:
    """Model, optimizer and gradients of one rank: takes steps, and holds a checkpoint's state."""

    def __init__(
        self, config: TrainConfig, mesh: Mesh, corpus: Corpus, source: ModelFolder | None
    ) -> None:
        """Build the state of step 0. Collective; raises ConfigError on every rank."""
        self.config = config
        self.mesh = mesh
        self.corpus = corpus
        self.source = source
        self._model = _make_model(config, mesh, source)
        self.module = self._model.module
        self._gradients = FlatGradients(self.module)
        self._optimizer = AdamW(self.module, weight_decay=config.weight_decay)

    @property
    def num_parameters(self) -> int:
        return self._model.num_parameters()

    def run_step(self, step: int, votes: Sequence[float]) -> tuple[StepRecord, list[float]]:
        """Take step `step` (from 1); return its record, and the sum of all ranks' `votes`.

        Collective; raises ConfigError on every rank when the loss is not finite.
        """
        config, mesh, text = self.config, self.mesh, self.corpus.train
        started_s = time.monotonic()
        before = mesh.context.stats()
        indices = mesh.share_of(config.batch)
        starts = training_starts(text, config.seq_len, seed=config.seed, step=step, indices=indices)
        self._gradients.zero()
        mean = self._model(*sequences_at(text, starts, config.seq_len), group=mesh.world)
        mean.backward()
        burst_rt.average_gradients(self.module.parameters(), group=mesh.world)
        grad_norm = self._gradients.clip(config.clip).item()
        lr = learning_rate(step - 1, peak=config.lr, warmup=config.warmup, steps=config.steps)
        self._optimizer.step(lr)

        after = mesh.context.stats()
        waited_s, sent = after.wait_s - before.wait_s, after.bytes_sent - before.bytes_sent
        local = [waited_s, sent, *votes]
        sums = torch.tensor(local, dtype=torch.float64, device=mesh.world.device)
        mesh.world.all_reduce(sums)
        wait_s, bytes_sent, *voted = sums.tolist()
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
                step_s=step_s,
            )
        return record, voted

    def measure_heldout(self, step: int) -> HeldoutLoss:
        """Loss on the held-out text after a step. Collective; raises ConfigError on every rank when
        the loss cannot be shown as a number.
        """
        found = _measure_heldout(self._model, self.mesh, self.corpus, self.config)
        if not math.isfinite(found.perplexity):
            raise _diverged(step, f"held-out loss {found.loss}")
        if self.mesh.world.rank == 0:
            telemetry.report(step, heldout_loss=found.loss)
        return found

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
        manifest = Manifest(step, self.config, self.corpus.fingerprint, source)
        return Checkpoint(manifest, weights, self._optimizer.moments)

    def restore(self, shared: SharedCheckpoint) -> None:
        """Continue from a checkpoint. Collective; raises ConfigError on every rank when its tensors
        do not fit.
        """
        step = shared.manifest.step
        live = self.checkpoint(step)
        shared.fill(self.mesh.world, live.weights, live.optimizer)
        self._optimizer.resume(step)


@dataclass(frozen=True)
class HeldoutLoss:
    """Mean cross-entropy of a token, in nats, over `num_tokens` tokens."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@torch.no_grad()
def _measure_heldout(
    model: ShardedModel, mesh: Mesh, corpus: Corpus, config: TrainConfig
) -> HeldoutLoss:
    """Loss over at most `config.eval_sequences` (0: all) sequences of the held-out stream, which
    holds at least one. Collective over the mesh's world.
    """
    starts = heldout_starts(corpus.heldout, config.seq_len, config.eval_sequences)
    total = torch.zeros(1, dtype=torch.float64, device=mesh.world.device)
    for index in mesh.share_of(len(starts)):
        sequence = sequences_at(corpus.heldout, [starts[index]], config.seq_len)
        total += model(*sequence, group=mesh.context)
    # Every rank of a group has the mean of the group's sequences.
    mesh.world.all_reduce(total)
    loss = total.item() / mesh.context.world_size / len(starts)
    return HeldoutLoss(loss, len(starts) * config.seq_len)


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
    module = together(mesh.world, source.load)
    model = ShardedPretrained(module, mesh.context, config)
    together(mesh.world, model.check)
    return model


def open_same_folder(
    world: Context, config: TrainConfig, shared: SharedCheckpoint | None
) -> ModelFolder | None:
    """The folder of `config`'s model, the same on every rank and as the checkpoint knows it; None
    for the byte-level model. Collective.
    """
    if config.model is None:
        return None
    folder = Path(config.model)

    def look() -> ModelFolder:
        # transformers may be missing, and takes seconds to load.
        require_model(folder)
        from burst_rt.launch.train.pretrained import open_folder

        return open_folder(folder, config.seq_len)

    source = together(world, look)
    for what, value in (
        ("configuration", source.fingerprint),
        ("weights", source.weights_fingerprint if world.world_size > 1 else ""),
    ):
        same_everywhere(world, f"the {what} of the model that --model names", value)
    if shared is not None and shared.manifest.source != source.fingerprint:
        raise ConfigError(
            f"--model: {folder}/config.json is not that of the model that {shared.folder} was "
            "trained from; point --model at the same model."
        )
    return source


def _load_same_corpus(world: Context, config: TrainConfig, source: ModelFolder | None) -> Corpus:
    """The text of `config`, which is long enough and the same on every rank."""
    encoding = source.encoding if source else BYTES
    corpus = together(world, lambda: load_corpus(config.data_path, encoding))
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

    record, votes = trainer.run_step(step, requests.votes())
    stop = requests.heard(votes) if step < config.steps else None
    if due(config.eval_every):
        heldout = trainer.measure_heldout(step)
        record = replace(record, heldout_loss=heldout.loss, heldout_perplexity=heldout.perplexity)
    folder.append(record)
    report.show(record)
    if stop or due(config.checkpoint_every):
        trainer.check_finite(step)
        folder.save(trainer.checkpoint(step), keep=config.keep_checkpoints)
    if stop:
        raise Stopped(stop, step, folder.path)


def _diverged(step: int, how: str) -> ConfigError:
    return ConfigError(f"step {step}: training diverged ({how}); choose a smaller --lr.")


def _heading(trainer: Trainer, folder: RunFolder, done: int) -> str:
    config, mesh, corpus = trainer.config, trainer.mesh, trainer.corpus
    return (
        f"{f'resuming after step {done}' if done else 'training'}: "
        f"{trainer.num_parameters / 1e6:.2f} M parameters, "
        f"{config.batch} x {config.seq_len:,} {corpus.unit}s a step, {config.dtype}\n"
        f"ranks: {mesh.world.world_size} ({mesh.data_size} data x {mesh.context.world_size} "
        f"context), layout {config.layout}, on {mesh.world.device}\n"
        f"text: {corpus.name}, {corpus.num_documents:,} documents, {corpus.size_bytes / 1e6:.1f} "
        f"MB, of which {len(corpus.heldout) / 1e6:.1f} MB held out\n"
        f"{f'model: {config.model}{chr(10)}' if config.model else ''}"
        f"out: {folder.path}"
    )


def _summarise(trainer: Trainer, folder: RunFolder, done: int, elapsed_s: float) -> Summary:
    mesh, records = trainer.mesh, folder.history
    last, recent = records[-1], [record for record in records if record.step > done]
    assert last.heldout_loss is not None
    assert last.heldout_perplexity is not None
    last_losses = [record.loss for record in records[-LAST_STEPS:]]
    speeds = [record.tokens_per_s for record in recent]
    bytes_sent = sum(record.bytes_sent for record in recent)
    step_s = sum(record.step_s for record in recent)
    waited_s = sum(record.wait_fraction * record.step_s for record in recent)
    return Summary(
        world_size=mesh.world.world_size,
        data_parallel=mesh.data_size,
        context_parallel=mesh.context.world_size,
        num_parameters=trainer.num_parameters,
        unit=trainer.corpus.unit,
        steps=last.step,
        resumed_after=done,
        loss_first=records[0].loss,
        loss_last=statistics.fmean(last_losses),
        heldout_loss=last.heldout_loss,
        heldout_perplexity=last.heldout_perplexity,
        tokens_per_s=statistics.median(speeds),
        wait_fraction=waited_s / step_s,
        bytes_sent=bytes_sent,
        elapsed_s=elapsed_s,
        out=str(folder.path),
    )
