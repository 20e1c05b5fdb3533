"""A training run from its options to its last checkpoint, on every rank.

For: the walk around the steps: what to resume, when to measure, record and save.
Not for: options (cli.py), a step (trainer.py), or what is shown (report.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.launch.stopping import StopRequests
from burst_rt.launch.train.agreement import same_everywhere, together
from burst_rt.launch.train.config import RunOptions, TrainConfig
from burst_rt.launch.train.data import Corpus, load_corpus
from burst_rt.launch.train.folder import RunFolder
from burst_rt.launch.train.mesh import Mesh, open_mesh
from burst_rt.launch.train.report import LAST_STEPS, Report, Summary, choose_mode
from burst_rt.launch.train.restore import SharedCheckpoint, read_shared
from burst_rt.launch.train.session import Stopped
from burst_rt.launch.train.trainer import Trainer

__all__ = ["train"]


def train(
    world: Context, config: TrainConfig, options: RunOptions, chosen: Mapping[str, object]
) -> Summary | None:
    """Train to the end; return the summary on rank 0, None elsewhere. Collective over `world`.

    `chosen` are the entries of `config` that the user named: they alone override those of a run
    that is resumed. Raises ConfigError or InputError, the same on every rank, for what cannot run,
    and Stopped where a signal said so.
    """
    started_s = time.monotonic()
    options.validate()
    with ExitStack() as held:

        def take_folder() -> RunFolder:
            return held.enter_context(RunFolder(world, options.out, resume=options.resume))

        # What is resumed is this run's before it is read; a new folder is made when all else is
        # well.
        resumed = take_folder() if options.resume else None
        shared = read_shared(world, resumed.path) if resumed else None
        config = together(world, lambda: _resolve(config, shared, chosen, world.world_size))
        corpus = _load_same_corpus(world, config, shared)
        folder = resumed or take_folder()
        return _train_in(folder, world, config, options, corpus, shared, started_s)


def _train_in(
    folder: RunFolder,
    world: Context,
    config: TrainConfig,
    options: RunOptions,
    corpus: Corpus,
    shared: SharedCheckpoint | None,
    started_s: float,
) -> Summary | None:
    """`train`, once all is known to be well."""
    done = shared.manifest.step if shared else 0
    mode = choose_mode(options.progress, world.world_size) if world.rank == 0 else "none"
    with (
        open_mesh(world, config.context_parallel) as mesh,
        Report(mode, steps=config.steps, done=done) as report,
    ):
        trainer = Trainer(config, mesh, corpus)
        if shared is not None:
            trainer.restore(shared)
        folder.open_metrics(after_step=done)
        report.say(_heading(config, mesh, corpus, trainer, folder, done))
        with StopRequests(offer=world.rank == 0) as requests:
            for step in range(done + 1, config.steps + 1):
                _advance(step, config, trainer, folder, report, requests)
        folder.plot(
            f"{trainer.num_parameters / 1e6:.2f} M parameters, {config.seq_len:,} bytes a "
            f"sequence, {world.world_size} ranks"
        )
        if world.rank != 0:
            return None
        summary = _summarise(mesh, trainer, folder, done, time.monotonic() - started_s)
        report.conclude(summary)
        return summary


def _advance(
    step: int,
    config: TrainConfig,
    trainer: Trainer,
    folder: RunFolder,
    report: Report,
    requests: StopRequests,
) -> None:
    """Take one step, and what is due after it. Raises Stopped, with a checkpoint of this step,
    where any rank was asked to stop.
    """

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


def _resolve(
    config: TrainConfig,
    shared: SharedCheckpoint | None,
    chosen: Mapping[str, object],
    world_size: int,
) -> TrainConfig:
    """The configuration that runs, checked."""
    if shared is not None:
        config = shared.manifest.resumed(chosen)
    config.validate(world_size)
    return config


def _load_same_corpus(
    world: Context, config: TrainConfig, shared: SharedCheckpoint | None
) -> Corpus:
    corpus = together(world, lambda: load_corpus(config.data_path))
    same_everywhere(world, "the text that --data names", corpus.fingerprint)
    corpus.check_length(config.seq_len)
    if shared is not None and shared.manifest.corpus != corpus.fingerprint:
        raise ConfigError(
            f"--resume: {corpus.name} is not the text that {shared.folder} was trained on; point "
            "--data at the same files."
        )
    return corpus


def _heading(
    config: TrainConfig, mesh: Mesh, corpus: Corpus, trainer: Trainer, folder: RunFolder, done: int
) -> str:
    context_size = mesh.context.world_size
    return (
        f"{'resuming after step ' + str(done) if done else 'training'}: "
        f"{trainer.num_parameters / 1e6:.2f} M parameters, "
        f"{config.batch} x {config.seq_len:,} bytes a step, {config.dtype}\n"
        f"ranks: {mesh.world.world_size} ({mesh.data_size} data x {context_size} context), layout "
        f"{config.layout}, on {mesh.world.device}\n"
        f"text: {corpus.name}, {corpus.num_documents:,} documents, {corpus.size_bytes / 1e6:.1f} "
        "MB, "
        f"of which {len(corpus.heldout) / 1e6:.1f} MB held out\n"
        f"out: {folder.path}"
    )


def _summarise(
    mesh: Mesh, trainer: Trainer, folder: RunFolder, done: int, elapsed_s: float
) -> Summary:
    records = folder.history
    last, recent = records[-1], [record for record in records if record.step > done]
    assert last.heldout_loss is not None
    assert last.heldout_perplexity is not None
    return Summary(
        world_size=mesh.world.world_size,
        data_parallel=mesh.data_size,
        context_parallel=mesh.context.world_size,
        num_parameters=trainer.num_parameters,
        steps=last.step,
        resumed_after=done,
        loss_first=records[0].loss,
        loss_last=statistics.fmean(record.loss for record in records[-LAST_STEPS:]),
        heldout_loss=last.heldout_loss,
        heldout_perplexity=last.heldout_perplexity,
        tokens_per_s=statistics.median(record.tokens_per_s for record in recent),
        wait_fraction=sum(record.wait_fraction * record.step_s for record in recent)
        / sum(record.step_s for record in recent),
        bytes_sent=sum(record.bytes_sent for record in recent),
        elapsed_s=elapsed_s,
        out=str(folder.path),
    )
