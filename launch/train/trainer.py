"""One rank's part in a training step, and the state that a checkpoint carries.

For: forward, backward, reduction, update. Every rank of the world ends a step with the same
weights, bit for bit.
Not for: what surrounds the steps (loop.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from burst_rt import telemetry
from burst_rt.errors import ConfigError
from burst_rt.launch.train.checkpoint import Checkpoint, Manifest
from burst_rt.launch.train.config import TrainConfig
from burst_rt.launch.train.data import Corpus, sequences_at, training_starts
from burst_rt.launch.train.heldout import HeldoutLoss, measure_heldout
from burst_rt.launch.train.mesh import Mesh
from burst_rt.launch.train.metrics import StepRecord
from burst_rt.launch.train.model import Decoder
from burst_rt.launch.train.optim import MOMENTS, FlatGradients, learning_rate, make_optimizer
from burst_rt.launch.train.restore import SharedCheckpoint
from burst_rt.launch.train.sharded import ShardedDecoder

__all__ = ["Trainer"]


class Trainer:
    """Model, optimizer and gradients of one rank."""

    def __init__(self, config: TrainConfig, mesh: Mesh, corpus: Corpus) -> None:
        """Build the state of step 0."""
        self._config = config
        self._mesh = mesh
        self._corpus = corpus
        self._decoder = Decoder(config.model, seed=config.seed).to(mesh.world.device)
        self._model = ShardedDecoder(self._decoder, mesh.context, config.sharding)
        self._gradients = FlatGradients(self._decoder)
        self._optimizer = make_optimizer(self._decoder, weight_decay=config.weight_decay)

    @property
    def num_parameters(self) -> int:
        return self._decoder.num_parameters()

    def run_step(self, step: int, votes: Sequence[float] = ()) -> tuple[StepRecord, list[float]]:
        """Take step `step` (from 1); returns its record, and the sum of all ranks' `votes`, which
        travels with the loss.

        Collective; raises ConfigError on every rank when the loss is no longer finite.
        """
        config, mesh = self._config, self._mesh
        started_s = time.monotonic()
        before = mesh.context.stats()
        indices = mesh.share_of(config.batch)
        starts = training_starts(
            self._corpus.train, config.seq_len, seed=config.seed, step=step, indices=indices
        )
        self._gradients.zero()
        local_loss = self._model(*sequences_at(self._corpus.train, starts, config.seq_len))
        num_tokens = config.batch * config.seq_len
        (local_loss / num_tokens).backward()
        mesh.world.all_reduce(self._gradients.flat)
        grad_norm = self._gradients.clip(config.clip).item()
        lr = learning_rate(step - 1, peak=config.lr, warmup=config.warmup, steps=config.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

        after = mesh.context.stats()
        local = [
            local_loss.item(),
            after.wait_s - before.wait_s,
            after.bytes_sent - before.bytes_sent,
            *votes,
        ]
        sums = torch.tensor(local, dtype=torch.float64, device=mesh.world.device)
        mesh.world.all_reduce(sums)
        loss_sum, wait_s, bytes_sent, *voted = sums.tolist()
        if not math.isfinite(loss_sum) or not math.isfinite(grad_norm):
            raise _diverged(step, f"loss {loss_sum / num_tokens}, gradients {grad_norm}")
        step_s = time.monotonic() - started_s
        loss, tokens_per_s = loss_sum / num_tokens, num_tokens / step_s
        if mesh.world.rank == 0:
            telemetry.report(
                step, loss=loss, tokens_per_s=tokens_per_s, grad_norm=grad_norm, step_s=step_s
            )
        record = StepRecord(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            wait_fraction=wait_s / mesh.world.world_size / step_s,
            bytes_sent=round(bytes_sent),
        )
        return record, voted

    def measure_heldout(self, step: int) -> HeldoutLoss:
        """Loss on the held-out text after a step. Collective; raises ConfigError on every rank when
        it is no number to show.
        """
        config = self._config
        found = measure_heldout(
            self._model,
            self._mesh,
            self._corpus.heldout,
            seq_len=config.seq_len,
            limit=config.eval_sequences,
        )
        if not math.isfinite(found.perplexity):
            raise _diverged(step, f"held-out loss {found.loss}")
        if self._mesh.world.rank == 0:
            telemetry.report(step, heldout_loss=found.loss)
        return found

    def check_finite(self, step: int) -> None:
        """Raises ConfigError, on every rank, when the weights after a step are no longer finite:
        the loss tells only a step later.
        """
        if not all(
            bool(torch.isfinite(parameter).all()) for parameter in self._decoder.parameters()
        ):
            raise _diverged(step, "weights that are not finite")

    def checkpoint(self, step: int) -> Checkpoint:
        """The state after `step` steps; its tensors are the live ones, to be written before the
        next step.
        """
        named = list(self._decoder.named_parameters())
        weights = {name: parameter.detach() for name, parameter in named}
        moments = {
            f"{moment}.{name}": self._optimizer.state[parameter][moment]
            for name, parameter in named
            for moment in MOMENTS
        }
        return Checkpoint(Manifest(step, self._config, self._corpus.fingerprint), weights, moments)

    def restore(self, shared: SharedCheckpoint) -> None:
        """Continue from a checkpoint. Collective; raises ConfigError on every rank when its tensors
        do not fit.
        """
        step = shared.manifest.step
        live = self.checkpoint(step)
        shared.fill(self._mesh.world, live.weights, live.optimizer)
        for state in self._optimizer.state.values():
            state["step"].fill_(step)


def _diverged(step: int, how: str) -> ConfigError:
    return ConfigError(f"step {step}: training diverged ({how}); choose a smaller --lr.")
