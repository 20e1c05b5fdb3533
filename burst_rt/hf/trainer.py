"""transformers' Trainer and TRL's over ranks: shared batches, counts, losses, evaluation, refusals.

    class Mine(burst_rt.hf.Trainer, transformers.Trainer): ...     # or trl.SFTTrainer
    Mine(model=model, args=args, train_dataset=dataset, context=ctx).train()

All ranks of a context get the same batch and each computes with its own part. Several contexts are
data parallel. A rank's loss is its part's sum over the number of labelled tokens of the whole step,
times the number of processes: transformers' own convention. So the mean over processes, which DDP
makes of the gradients and Trainer of the logged loss, is the mean over all tokens. The balancing
loss of a mixture of experts is of all contexts' tokens in a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from accelerate.data_loader import get_sampler, prepare_data_loader
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from burst_rt import telemetry
from burst_rt.batches import IGNORED_LABEL, LOSS_WEIGHTS
from burst_rt.context import Context
from burst_rt.errors import InputError
from burst_rt.hf.prepare import prepare
from burst_rt.hf.reporting import JobReporter
from burst_rt.hf.resuming import Resumable, draw_by_epoch
from burst_rt.hf.shard import KEYWORD, shard
from burst_rt.runtime.refusing import refuse

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

__all__ = ["Trainer"]

_NAME = "hf.Trainer"
# Training arguments that need more than one rank's tokens: what is expected, and what to do.
_EXPECTED: dict[str, tuple[object, str]] = {
    "average_tokens_across_devices": (True, "the loss is the mean over all ranks' tokens"),
    "label_smoothing_factor": (0, "its loss shifts labels after the cut"),
    "neftune_noise_alpha": (None, "its noise depends on how many tokens a rank has"),
    "use_liger_kernel": (False, "its losses have not been tried over ranks"),
    "auto_find_batch_size": (False, "ranks that run out of memory leave the others waiting"),
}


class _Alone:
    """This rank as a group: the loss of its own tokens. Trainer does the sums over ranks."""

    world_size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _named(device: torch.device) -> str:
    """accelerate calls the CPU cpu:0."""
    return f"{device.type}:{device.index or 0}"


_LABELS = {"labels", "shift_labels"}  # `tree_row` makes the latter


def _count_labels(batch: dict[str, Any], shifts: bool) -> torch.Tensor:
    """How much the labels of a batch count together, a float64 scalar on their device, for which
    nobody waits. shifts: whether the loss shifts them.
    """
    labels, weights = batch.get("shift_labels"), batch.get(LOSS_WEIGHTS)
    if labels is None:
        labels = batch["labels"]
        if shifts:
            labels, weights = labels[..., 1:], None if weights is None else weights[..., :-1]
    labelled = labels != IGNORED_LABEL
    # Not by a product: a weight may be NaN where nothing counts.
    counted: torch.Tensor = labelled if weights is None else weights.masked_fill(~labelled, 0)
    return counted.double().sum()


class Trainer(_Trainer):  # type: ignore[misc]  # of changing types, so Any
    """Goes before `transformers.Trainer`, or a trainer that derives from it, among the bases.

    Takes the arguments of that trainer, and these:

    context: the ranks that share each batch, made by `burst_rt.init`. All processes of
        torch.distributed are in such contexts, all of one size; each context trains on other
        batches. None: the trainer is as it is without this class.
    layout: a kind of layout, as `burst_rt.hf.shard` takes it.

    `per_device_train_batch_size` counts rows of a context's batch. The model is made to use
    attn_implementation="burst_rt", and `burst_rt.hf.prepare` is called for it. `train` and
    `evaluate` are collective over all processes; they block as their collectives do, in attention
    at most `timeout_s` for each call. Losses are the means over all tokens of all ranks.

    With telemetry, steps and spans are opened, and the first rank reports what is logged.

    A resumed run sees the rows that it would have seen, in the same order. Samplers that draw from
    a generator (`train_sampling_strategy="group_by_length"`, torch's random ones) begin each epoch
    at the generator's first seed plus the epoch's number. Refused when a run is resumed, unless
    `ignore_data_skip` is set: samplers of your own with neither a generator nor `set_epoch`, and a
    stream without a length after the first pass over it.

    Raises InputError, on every rank that waits for this one, for what is not done
    (docs/trainer.md has the list), and ContractMismatch where the ranks of a context get different
    batches.
    """

    model: Any
    model_wrapped: Any
    label_names: Any

    def __init__(
        self, *args: Any, context: Context | None = None, layout: str = "auto", **options: Any
    ) -> None:
        self.context = context
        self.layout = layout
        super().__init__(*args, **options)
        if context is None:
            return
        if not self.model_accepts_loss_kwargs:
            self._refuse(
                "model: expected one whose forward takes num_items_in_batch and other keywords, "
                f"got {type(self.model).__name__}"
            )
        if self.compute_loss_func is not None:
            self._refuse(
                "compute_loss_func: expected None, as it would get one rank's logits; override "
                "compute_loss, and give num_items_in_batch to its super()"
            )
        if self.compute_metrics is not None and not self.args.prediction_loss_only:
            self._refuse(
                "compute_metrics: expected None, as a rank has the logits of its own tokens alone; "
                "leave it out, or set prediction_loss_only=True"
            )
        self.add_callback(Resumable(self._refuse))
        self._reporting = JobReporter(len(self._leaders))
        self.add_callback(self._reporting)
        if self.model_init is None:
            self._make_ready(self.model)

    def _refuse(self, reason: str) -> NoReturn:
        runtime = self.context.runtime if self.context else None
        refuse(_NAME, InputError(f"{_NAME}: {reason}"), runtime)

    # This rank's place, and what is not supported.

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.context is None:
            return
        reason = self._why_not()
        if reason:
            self._refuse(reason)
        # A context is known by the number that its first rank has among all processes.
        first = self.context.first(lambda: self.accelerator.process_index)
        leader = torch.tensor([first], dtype=torch.int64, device=self.accelerator.device)
        sizes = Counter(self.accelerator.gather(leader).tolist())
        if set(sizes.values()) != {self.context.world_size}:  # as every rank sees
            raise InputError(
                f"{_NAME}: context: expected contexts of one size that share all "
                f"{self.accelerator.num_processes} processes of torch.distributed, got "
                f"{self.context.world_size} ranks here and {list(sizes.values())} processes by "
                "context; start the job by torchrun or burst-rt run, give "
                "TrainingArguments(use_cpu=True) on CPUs, and call burst_rt.init() or "
                "burst_rt.init(group=mesh['cp']) on every rank"
            )
        self._leaders = sorted(sizes)
        self._place = self._leaders.index(leader.item())
        self.accelerator.prepare_data_loader = self._prepare_data_loader

    def _why_not(self) -> str | None:
        """The first argument that is not supported, in words, or None."""
        assert self.context is not None
        args = self.args
        for name, (expected, why) in _EXPECTED.items():
            if (got := getattr(args, name)) != expected:
                return f"{name}: expected {expected}, got {got}: {why}"
        if args.n_gpu > 1:
            return (
                f"expected one GPU a process, got {args.n_gpu} (DataParallel); start a process for "
                "each GPU by torchrun or burst-rt run"
            )
        if self.is_deepspeed_enabled:
            return "deepspeed is not done; expected none; use DDP, Trainer's default"
        degrees = getattr(self.accelerator, "parallelism_config", None)
        if degrees is not None and (degrees.cp_size, degrees.sp_size, degrees.tp_size) != (1, 1, 1):
            return (
                f"parallelism_config: expected cp, sp and tp of 1, got {degrees.cp_size}, "
                f"{degrees.sp_size} and {degrees.tp_size}: the context cuts sequences itself; "
                "leave it out"
            )
        if args.accelerator_config.dispatch_batches:
            return (
                "dispatch_batches: expected None or False, got True, which deals the rows of a "
                "batch out to the ranks of a context"
            )
        if args.train_sampling_strategy == "batch_rebalance":
            return (
                "train_sampling_strategy: expected another than 'batch_rebalance', which deals out "
                "rows to each process"
            )
        if _named(args.device) != _named(self.context.device):
            return (
                f"the context's device is {self.context.device} and that of the arguments is "
                f"{args.device}; expected one; give burst_rt.init(device=...), or use_cpu=True"
            )
        return None

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        return model if self.context is None else self._make_ready(model)

    def _make_ready(self, model: Any) -> Any:
        if model.config._attn_implementation != KEYWORD:
            model.set_attn_implementation(KEYWORD)
        if (got := model.config._attn_implementation) != KEYWORD:
            self._refuse(
                f"model: {type(model).__name__} keeps attn_implementation={got!r}; expected a "
                "model of transformers whose attention can be chosen"
            )
        assert self.context is not None
        return prepare(model, self.context)

    # Training: of all ranks, whatever came before it.

    def train(self, *args: Any, **options: Any) -> Any:
        if self.context is None:
            return super().train(*args, **options)
        self._forget_evaluation()
        try:
            return super().train(*args, **options)
        except BaseException as error:
            self._reporting.abandon(error)
            raise

    def _forget_evaluation(self) -> None:
        """Lets `train` wrap a model that has been evaluated.

        Outside training, `evaluate` and `predict` compile the model and mark it as prepared, but
        leave it without DDP (`Accelerator.prepare_model(evaluation_mode=True)`). Trainer then
        trains it as it is: each rank steps with the gradients of its own tokens alone.
        """
        outer = getattr(self.model_wrapped, "_orig_mod", self.model_wrapped)  # torch.compile's
        if isinstance(outer, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            return
        self.model = self.model_wrapped = getattr(self.model, "_orig_mod", self.model)
        self.model.__dict__.pop("_is_accelerate_prepared", None)

    # Batches: the same for all ranks of a context.

    def _prepare_data_loader(self, loader: Any, *_: Any, **__: Any) -> Any:
        """Does what `Accelerator.prepare_data_loader` does, dealing to contexts instead of
        processes.
        """
        given = self.accelerator
        sampler = get_sampler(loader)
        seedable = given.use_seedable_sampler and isinstance(
            sampler, torch.utils.data.RandomSampler
        )
        if not seedable and getattr(sampler, "generator", self) is None:
            # One that draws from the process's own chance would draw something else on each rank.
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler.generator = torch.Generator().manual_seed(seed)
        prepared = prepare_data_loader(
            loader,
            given.device,
            num_processes=len(self._leaders),
            process_index=self._place,
            split_batches=given.split_batches,
            put_on_device=given.device_placement,
            rng_types=given.rng_types.copy(),
            dispatch_batches=False,
            even_batches=given.even_batches,
            use_seedable_sampler=given.use_seedable_sampler,
            data_seed=given.dataloader_config.data_seed,
            non_blocking=given.non_blocking,
            use_stateful_dataloader=given.use_stateful_dataloader,
        )
        if not seedable and isinstance(sampler, torch.utils.data.Sampler):
            draw_by_epoch(prepared, sampler)
        return prepared

    # Losses and counts.

    def get_cp_size(self) -> int:
        """Number of ranks that count each token of a batch, and one row of the global batch."""
        return super().get_cp_size() if self.context is None else self.context.world_size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The labels of a step, of all processes; where they have loss_weights, the sum of these.

        None where a batch has no labels.
        """
        if self.context is None:
            return super()._get_num_items_in_batch(batch_samples, device)
        if not all(_LABELS & x.keys() for x in batch_samples):
            return None
        added = torch.zeros(1, dtype=torch.float64, device=device)  # a stream may have ended
        for batch in batch_samples:
            added += _count_labels(batch, self._loss_shifts_labels).to(device)
        total = self.accelerator.gather(added).sum()
        return total / self.get_cp_size()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if self.context is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is None:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        if num_items_in_batch is None:
            self._refuse(f"expected labels in a batch, got {', '.join(inputs)}")
        if model.training:
            self._reporting.count(inputs)
        keywords = shard(inputs, self.context, self.layout, group=_Alone())
        info = keywords[KEYWORD]
        info.balanced_in = dist.group.WORLD if dist.is_initialized() else self.context
        if not hasattr(self, "aux_loss_enabled"):
            # Trainer multiplies the whole loss by the processes, and TRL all but this part of it.
            info.balanced_share = 1 / self.accelerator.num_processes
        # TRL adds up what ranks have counted in their tokens. `gather_for_metrics` would leave
        # ranks out where the last batch has fewer rows than there are ranks.
        self.accelerator.gather_for_metrics = self.accelerator.gather
        training: Any = vars(self).get("current_gradient_accumulation_steps")
        if not model.training:
            # TRL divides this part by the steps wherever the number of tokens is given.
            self.current_gradient_accumulation_steps = 1
        try:
            with telemetry.span("forward"):
                return super().compute_loss(model, keywords, return_outputs, num_items_in_batch)
        finally:
            del self.accelerator.gather_for_metrics
            if not model.training:
                self.current_gradient_accumulation_steps = training

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        with telemetry.span("data"):
            return super().get_batch_samples(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> Any:
        with telemetry.span("checkpoint"):
            return super()._save_checkpoint(*args, **options)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """The floating-point operations of one rank; Trainer adds up all processes'."""
        share: float = super().floating_point_ops(inputs) / self.get_cp_size()
        return share

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        if self.context is not None:
            counted = self.state.num_input_tokens_seen - before
            self.state.num_input_tokens_seen = before + counted // self.context.world_size

    # Evaluation: the loss alone.

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        if self.context is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]
        if not prediction_loss_only:
            self._refuse(
                "predictions are not done, as a rank has the logits of its own tokens alone; "
                "expected prediction_loss_only=True"
            )
        given = self.label_names
        if given == ["labels"] and inputs.get("labels") is None:
            self.label_names = ["shift_labels"]
        try:
            if any(inputs.get(name) is None for name in self.label_names):
                self._refuse(f"expected {', '.join(given)} in a batch, got none")
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        finally:
            self.label_names = given
        return self.accelerator.reduce(loss, "mean"), None, None

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        if self.context is not None:
            self.gather_function = self._gather_samples
        with telemetry.span("evaluation"):
            return super().evaluation_loop(*args, **options)

    def _gather_samples(self, x: torch.Tensor) -> torch.Tensor:
        """All contexts' samples, each once, without those that only fill the last batch up."""
        gathered = self.accelerator.gather(x).unflatten(0, (-1, len(x)))
        samples: torch.Tensor = gathered[self._leaders].flatten(0, 1)
        state = self.accelerator.gradient_state
        left = state.remainder if state.end_of_dataloader else 0
        return samples[:left] if left > 0 else samples
