"""Rank program: transformers' Trainer and TRL's SFTTrainer, on one process and over ranks.

`trainer.py FOLDER CONTEXTS:RUN...` does each run, a function each, on so many contexts, and writes
what it found to FOLDER/RANKS-CONTEXTS-RUN.json. On one process the trainers are the libraries' own,
with torch's attention.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import torch
import torch.distributed as dist
import transformers
import trl
from tokenizers import Tokenizer, models
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pad_sequence

import burst_rt
import burst_rt.hf
from burst_rt import Context, tree_row
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.hf import logits

STEPS = 20
_VOCABULARY = 64
_ROWS = 34  # of 30 to 93 tokens; two are left for the last step of an epoch
_BATCH = 4  # rows a step, in two parts
_WEIGHT = 1.0  # of the balancing loss, as much as the tokens'

Found = dict[str, Any]


class Plain(burst_rt.hf.Trainer, transformers.Trainer):  # type: ignore[misc]  # Any
    """transformers' own over ranks."""


class Tuning(burst_rt.hf.Trainer, trl.SFTTrainer):  # type: ignore[misc]  # Any
    """TRL's over ranks."""


def make_model() -> Any:
    transformers.set_seed(1)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def make_mixture() -> Any:
    transformers.set_seed(1)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=_VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            num_local_experts=4, num_experts_per_tok=2,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def make_rows(number: int, seed: int) -> datasets.Dataset:
    """Numbers that grow by one step in each row; in some, the first fifth has no labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(number):
        length, first, step = torch.randint(30, 94, (3,), generator=generator).tolist()
        ids = [1 + (first + step * i) % (_VOCABULARY - 1) for i in range(length)]
        prompt = length // 5 * (first % 2)
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return datasets.Dataset.from_list(rows)


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded behind."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [torch.tensor(row["labels"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
    }


def tokenizer() -> Any:
    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, _VOCABULARY)}}
    model = models.WordLevel(words, unk_token="<pad>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), pad_token="<pad>", eos_token="w1"
    )


def options(folder: Path, num_contexts: int, **others: Any) -> dict[str, Any]:
    """Training arguments: rows a step are the same for any number of contexts."""
    return {
        "output_dir": str(folder), "use_cpu": not torch.cuda.is_available(),
        "seed": 5, "report_to": "none", "disable_tqdm": True,
        "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "linear",
        "max_steps": STEPS, "logging_steps": 1, "logging_nan_inf_filter": False,
        "gradient_accumulation_steps": 2, "save_strategy": "no", "bf16": False,
        "ddp_find_unused_parameters": False,
        "per_device_train_batch_size": _BATCH // 2 // num_contexts,
        "per_device_eval_batch_size": _BATCH // num_contexts,
        "include_num_input_tokens_seen": "non_padding", **others,
    }  # fmt: skip


def trained(trainer: Any, **others: Any) -> Found:
    """What is logged in each step."""
    result = trainer.train(**others)
    steps = [each for each in trainer.state.log_history if "loss" in each]
    assert result.metrics["train_loss"] == trainer.state.log_history[-1]["train_loss"]
    wanted = ("loss", "grad_norm", "num_input_tokens_seen", "mean_token_accuracy", "entropy")
    found = {name: [step[name] for step in steps] for name in wanted if name in steps[0]}
    return {**found, "flops": trainer.state.total_flos}


def evaluated(trainer: Any, *, num_contexts: int) -> Found:
    """Losses of whole batches, and on one context also with two rows in the last batch."""
    rows = make_rows(3 * _BATCH + 2, seed=9)
    found = {"whole": trainer.evaluate(rows.select(range(3 * _BATCH)))["eval_loss"]}
    if num_contexts == 1:
        found["part"] = trainer.evaluate(rows)["eval_loss"]
    return found


Run = Callable[[Path, Context | None, int], Found]


def make(folder: Path, context: Context | None, num_contexts: int, **others: Any) -> Any:
    """transformers' Trainer."""
    arguments = transformers.TrainingArguments(**options(folder, num_contexts, **others))
    return Plain(
        model=make_model(), args=arguments, data_collator=collate, context=context,
        train_dataset=make_rows(_ROWS, seed=2), eval_dataset=make_rows(_BATCH, seed=9),
    )  # fmt: skip


def plain(folder: Path, context: Context | None, num_contexts: int, **others: Any) -> Found:
    trainer = make(folder / "checkpoints", context, num_contexts, **others)
    # burst_rt.hf puts losses of its own before transformers', which Trainer must still know.
    assert trainer._loss_shifts_labels
    with mock.patch.object(logits, "sum_of_losses", wraps=logits.sum_of_losses) as without:
        found = trained(trainer)
    # No step of a context has logits: it has one or two micro-batches.
    steps = trainer.state.max_steps
    assert without.call_count in (range(steps, 2 * steps + 1) if context else {0})
    return found | {"eval": evaluated(trainer, num_contexts=num_contexts)}


# After its first step DDP puts gradients into other buckets, and sums of four processes get other
# bits: a run that begins again has a first step again. Not where it looks for unused parameters.
_ONE_ORDER: dict[str, Any] = {"ddp_find_unused_parameters": True}
saved: Run = partial(plain, save_strategy="steps", save_steps=10, **_ONE_ORDER)


def resumed(folder: Path, context: Context | None, num_contexts: int) -> Found:
    trainer = make(folder / "resumed", context, num_contexts, **_ONE_ORDER)
    trainer.evaluate(make_rows(_BATCH, seed=9))
    return trained(trainer, resume_from_checkpoint=str(folder / "checkpoints" / "checkpoint-10"))


def loaded(folder: Path, context: Context | None, num_contexts: int) -> Found:
    trainer = make(folder / "loaded", context, num_contexts)
    path = folder / "checkpoints" / f"checkpoint-{STEPS}"
    trainer.model = transformers.AutoModelForCausalLM.from_pretrained(path)
    return {"eval": evaluated(trainer, num_contexts=num_contexts)}


def evaluated_first(
    folder: Path, context: Context | None, num_contexts: int, **others: Any
) -> Found:
    """Two trainings, each after an evaluation; the first after a prediction too."""
    others |= {"max_steps": 3, "prediction_loss_only": True}
    trainer = make(folder / "first", context, num_contexts, **others)
    rows = make_rows(_BATCH, seed=9)
    losses = [trainer.evaluate(rows)["eval_loss"], trainer.predict(rows).metrics["test_loss"]]
    found = trained(trainer)
    losses.append(trainer.evaluate(rows)["eval_loss"])
    again = trained(trainer)
    return {name: found[name] + again[name] for name in ("loss", "grad_norm")} | {"eval": losses}


compiled: Run = partial(evaluated_first, torch_compile=True, torch_compile_backend="eager")


def bf16(folder: Path, context: Context | None, num_contexts: int) -> Found:
    return trained(make(folder / "bf16", context, num_contexts, max_steps=6, bf16=True))


class Stream(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """Rows one after another, of no known length."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        yield from self.rows


def streamed(folder: Path, context: Context | None, num_contexts: int) -> Found:
    trainer = make(folder / "streamed", context, num_contexts, max_steps=4)
    trainer.train_dataset = Stream(make_rows(_ROWS, seed=2))
    return trained(trainer)


class Shuffled(torch.utils.data.Sampler[int]):
    """A sampler of the user's own, which draws from the process's chance."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self.rows)).tolist())


class ByEpoch(Shuffled):
    """Its order is that of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(len(self.rows), generator=generator).tolist())


class StreamByEpoch(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """Rows in the order of the epoch, of known length."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.order = rows, ByEpoch(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.rows[i] for i in self.order)


def weighted(rows: Any) -> Any:
    return torch.utils.data.WeightedRandomSampler([1.0] * len(rows), len(rows))


# By name: training arguments, a sampler, a stream in place of the rows.
SAMPLERS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "random": ({}, None, None),
    "random, not seedable": ({"accelerator_config": {"use_seedable_sampler": False}}, None, None),
    "sequential": ({"train_sampling_strategy": "sequential"}, None, None),
    "group_by_length": ({"train_sampling_strategy": "group_by_length"}, None, None),
    "weighted": ({}, weighted, None),
    "own, by epoch": ({}, ByEpoch, None),
    "own, by chance": ({}, Shuffled, None),
    "a stream by epoch": ({}, None, StreamByEpoch),
    "a stream of no length": ({}, None, Stream),
}
# 22 rows are 6 steps an epoch: inside the first, at its end, inside the second.
RESUMED_AT = (3, 6, 8)
_OVER_CONTEXTS = ("random", "random, not seedable", "group_by_length", "own, by epoch")


class Watched(Plain):
    """Notes the rows that it trains on; another sampler."""

    sampler: Any = None

    def __init__(self, **options: Any) -> None:
        self.seen: list[list[int]] = []
        super().__init__(**options)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.sampler is None:
            return super()._get_train_sampler(train_dataset)
        return self.sampler(self.train_dataset if train_dataset is None else train_dataset)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        self.seen.append(inputs["input_ids"].sum(1).tolist())
        return super().compute_loss(model, inputs, *args, **options)


def sampled(folder: Path, context: Context | None, num_contexts: int) -> Found:
    """Rows and losses by sampler: of a whole run, and of those that go on from its checkpoints."""
    found: Found = {}
    names = list(SAMPLERS) if num_contexts == 1 else _OVER_CONTEXTS
    for number, name in enumerate(names):
        arguments, sampler, stream = SAMPLERS[name]

        def run(
            resumed_at: int,
            place: Path = folder / f"sampled-{num_contexts}-{number}",
            arguments: dict[str, Any] = arguments,
            sampler: Any = sampler,
            stream: Any = stream,
        ) -> list[list[Any]] | str:
            rows = make_rows(22, seed=2)
            save = "no" if resumed_at else "steps"
            trainer = Watched(
                model=make_model(), context=context, data_collator=collate,
                train_dataset=rows if stream is None else stream(rows),
                args=transformers.TrainingArguments(
                    **options(
                        place, num_contexts, max_steps=9, save_strategy=save, save_steps=1,
                        **_ONE_ORDER, **arguments,
                    )
                ),
            )  # fmt: skip
            trainer.sampler = sampler
            before = str(place / f"checkpoint-{resumed_at}") if resumed_at else None
            try:
                losses = trained(trainer, resume_from_checkpoint=before)["loss"]
            except InputError as error:
                return str(error)
            return [trainer.seen, losses]

        found[name] = {str(at): run(at) for at in (0, *RESUMED_AT)}
    if dist.is_initialized():
        # Each rank has the rows of its context; the test looks at rank 0's.
        everyones = [found]
        dist.broadcast_object_list(everyones)
        (found,) = everyones
    return found


def make_tuning(
    folder: Path,
    context: Context | None,
    num_contexts: int,
    make_model: Callable[[], Any] = make_model,
    layout: str = "auto",
    **others: Any,
) -> Any:
    """TRL's SFTTrainer."""
    others = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": _BATCH, **others}
    arguments = trl.SFTConfig(**options(folder / "tuned", num_contexts, max_length=100, **others))
    rows = {"train_dataset": make_rows(_ROWS, seed=2), "eval_dataset": make_rows(14, seed=9)}
    return Tuning(
        model=make_model(), args=arguments, processing_class=tokenizer(), context=context,
        layout=layout, **rows,
    )  # fmt: skip


def tuned(folder: Path, context: Context | None, num_contexts: int, **others: Any) -> Found:
    trainer = make_tuning(folder, context, num_contexts, **others)
    found = trained(trainer)
    metrics = trainer.evaluate()
    wanted = ("eval_loss", "eval_mean_token_accuracy", "eval_entropy", "eval_num_tokens")
    return {**found, "eval": {name: metrics[name] for name in wanted}}


def mixed(folder: Path, context: Context | None, num_contexts: int) -> Found:
    """A mixture of experts with its balancing loss, which TRL adds unless it is told not to; in
    micro-batches, and evaluated before and after.
    """
    trainer = make_tuning(
        folder, context, num_contexts, make_model=make_mixture, max_steps=6,
        router_aux_loss_coef=_WEIGHT, gradient_accumulation_steps=2,
        per_device_train_batch_size=_BATCH // num_contexts // 2,
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    found = trained(trainer)
    found["eval_losses"] = [before, trainer.evaluate()["eval_loss"]]
    found["aux_loss"] = [each["aux_loss"] for each in trainer.state.log_history if "loss" in each]
    return found


def branching(folder: Path, context: Context | None, num_contexts: int) -> Found:
    """Answers to one question, as rows of trees over ranks, and one by one without a context."""
    generator = torch.Generator().manual_seed(3)

    def draw(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most, (1,), generator=generator))
        return torch.randint(1, _VOCABULARY, (length,), generator=generator).tolist()

    questions = []
    for number in range(16):
        question = draw(5, 20)
        questions.append([question + draw(3, 12) for _ in range(2 + number % 3)])

    def as_batch(rows: list[dict[str, list[list[int]]]]) -> dict[str, Any]:
        (row,) = rows
        if context is not None:
            return tree_row(row["answers"]).batch()
        return collate([{"input_ids": x, "labels": x} for x in row["answers"]])

    given = options(
        folder, num_contexts, max_steps=4, remove_unused_columns=False,
        per_device_train_batch_size=1, gradient_accumulation_steps=4 // num_contexts,
        per_device_eval_batch_size=1,
    )  # fmt: skip
    del given["include_num_input_tokens_seen"]  # a row has what answers share once
    trainer = Plain(
        model=make_model(), args=transformers.TrainingArguments(**given), data_collator=as_batch,
        context=context, train_dataset=[{"answers": answers} for answers in questions],
    )  # fmt: skip
    found = trained(trainer)
    # Contexts' batches count as one, whose mean is over tokens: both have the same.
    held_out = [{"answers": questions[0]}] * 2
    loss = trainer.evaluate(held_out)["eval_loss"]
    return {name: found[name] for name in ("loss", "grad_norm")} | {"eval": {"loss": loss}}


def unbalanced(folder: Path, context: Context | None, num_contexts: int) -> Found:
    """A mixture of experts without its balancing loss."""
    return tuned(
        folder, context, num_contexts, make_model=make_mixture, router_aux_loss_coef=0.0,
        max_steps=2,
    )  # fmt: skip


def balanced(folder: Path, context: Context | None, num_contexts: int) -> Found:
    """A mixture of experts whose configuration asks for its balancing loss, in micro-batches."""
    arguments = transformers.TrainingArguments(**options(folder, num_contexts, max_steps=6))
    model = make_mixture()
    model.config.output_router_logits, model.router_aux_loss_coef = True, _WEIGHT
    trainer = Plain(
        model=model, args=arguments, data_collator=collate, context=context,
        train_dataset=make_rows(_ROWS, seed=2),
    )  # fmt: skip
    found = trained(trainer)
    return found | {"eval": {"loss": trainer.evaluate(make_rows(_BATCH, seed=9))["eval_loss"]}}


def reported(folder: Path, context: Context | None, num_contexts: int) -> Found:
    """What both trainers log, with evaluations; the first fails in its last step but one."""
    others: dict[str, Any] = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    first = make(folder / "reported", context, num_contexts, **others)
    lines = []

    class Failing(transformers.TrainerCallback):  # type: ignore[misc]  # Any
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise KeyError

    first.add_callback(Failing())
    try:
        first.train()
    except KeyError:
        lines += first.state.log_history
    second = make_tuning(folder, context, num_contexts, **others)
    second.train()
    lines += second.state.log_history[:-1]  # the last is the summary
    timed = ("_runtime", "_per_second")  # by each rank's own clock
    return {"log": [{k: v for k, v in line.items() if not k.endswith(timed)} for line in lines]}


def packed(folder: Path, context: Context | None, num_contexts: int, layout: str = "auto") -> Found:
    """Rows of several documents, in micro-batches of different numbers of labels."""
    rows = _BATCH // 2 // num_contexts
    return tuned(
        folder, context, num_contexts, packing=True, dataloader_drop_last=True,
        gradient_accumulation_steps=2, per_device_train_batch_size=rows, layout=layout,
    )  # fmt: skip


def whole(folder: Path, context: Context | None, num_contexts: int) -> Found:
    """The same rows, in shards of different lengths."""
    return packed(folder, context, num_contexts, layout="whole")


def by_chance(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Other tokens on each rank."""
    batch = collate(rows)
    batch["input_ids"][0, 0] = 1 + int(os.environ["RANK"])
    return batch


def without_labels(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    del batch["labels"]
    return batch


def uneven(folder: Path, context: Context | None, num_contexts: int) -> Found:
    """Contexts of one and of three ranks."""
    groups = [dist.new_group(ranks) for ranks in ([0], [1, 2, 3])]
    with burst_rt.init(group=groups[min(dist.get_rank(), 1)]) as other:
        try:
            make(folder / "uneven", other, 2)
        except InputError as error:
            said = str(error)
        else:
            said = ""
    # By rank. The next context is made where every rank has left this one.
    everyones: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, said)
    return {"said": everyones}


def refused(folder: Path, context: Context | None, num_contexts: int) -> Found:
    """What each wrong argument is answered with."""
    said = {}

    @contextmanager
    def refusal(name: str) -> Iterator[None]:
        try:
            yield
        except (InputError, ContractMismatch) as error:
            said[name] = str(error)

    new = partial(make, folder / "refused", context, num_contexts)
    for name, value in {
        "label_smoothing_factor": 0.1,
        "average_tokens_across_devices": False,
        "neftune_noise_alpha": 5,
        "use_liger_kernel": True,
        "auto_find_batch_size": True,
        "train_sampling_strategy": "batch_rebalance",
        "accelerator_config": {"dispatch_batches": True},
    }.items():
        with refusal(name):
            new(**{name: value})
    arguments = transformers.TrainingArguments(**options(folder / "refused", num_contexts))
    with refusal("compute_loss_func"):
        Plain(model=make_model(), args=arguments, context=context, compute_loss_func=print)
    with refusal("compute_metrics"):
        Plain(model=make_model(), args=arguments, context=context, compute_metrics=print)
    trainer = new()
    with refusal("predict"):
        trainer.predict(make_rows(4, seed=9))
    trainer = new(prediction_loss_only=True)
    trainer.data_collator = without_labels
    with refusal("labels"):
        trainer.predict(make_rows(4, seed=9))
    with refusal("labels of a step"):
        trainer.train()
    trainer.data_collator = by_chance
    with refusal("batch"):
        trainer.train()
    # Nothing was broken.
    trainer = new(max_steps=2, train_sampling_strategy="group_by_length")
    return {"said": said, "loss": trained(trainer)["loss"]}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    contexts: dict[int, Context | None] = {1: burst_rt.init() if ranks > 1 else None}
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        contexts[2] = burst_rt.init(group=mesh["cp"])
    if ranks == 2 and "2:sampled" in names:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
        contexts[2] = burst_rt.init(group=mesh["cp"])
    for each in names:
        num_contexts, _, name = each.partition(":")
        run: Run = globals()[name]
        found = run(folder, contexts[int(num_contexts)], int(num_contexts))
        if ranks > 1:
            everyones: list[Found] = [{} for _ in range(ranks)]
            dist.all_gather_object(everyones, found)
            # Every rank has logged the same, bit for bit.
            assert all(other == found for other in everyones), everyones
        if os.environ.get("RANK", "0") == "0":
            (folder / f"{ranks}-{num_contexts}-{name}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        # Trainers keep groups that they have used. A thread of such a gloo group that frees the
        # tensors of its last collective while the interpreter ends aborts the process; a barrier
        # has none.
        dist.barrier()
        dist.destroy_process_group()


main(Path(sys.argv[1]), sys.argv[2:])
