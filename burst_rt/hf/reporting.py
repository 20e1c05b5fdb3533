"""What a Trainer's job tells telemetry: its steps, their parts, and the figures that it logs."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback

from burst_rt import telemetry

__all__ = ["JobReporter"]

# The figures of Trainer's log that are reported, by the names that burst-rt train has for them.
_NAMES = {
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "eval_loss": "heldout_loss",
}


class JobReporter(TrainerCallback):  # type: ignore[misc]  # of changing types, so Any
    """Opens steps and spans on every rank, and reports on the first. num_contexts: that train on
    other batches each.
    """

    def __init__(self, num_contexts: int) -> None:
        self._num_contexts = num_contexts
        self._open = ExitStack()  # the step under way, and its spans
        self._optimizer = ExitStack()
        self._begin()

    def _begin(self) -> None:
        self._num_tokens, self._took_s = 0, 0.0
        # Since when the time belongs to the next step; None where that begins anew.
        self._since_s: float | None = None

    def abandon(self, error: BaseException) -> None:
        """Ends a step that a failure broke off."""
        self._open.__exit__(type(error), error, error.__traceback__)

    def count(self, inputs: dict[str, Any]) -> None:
        """Counts a micro-batch's tokens, padding included."""
        ids, embedded = inputs.get("input_ids"), inputs.get("inputs_embeds")
        if ids is not None:
            self._num_tokens += ids.numel()
        elif embedded is not None:
            self._num_tokens += embedded[..., 0].numel()

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._open.enter_context(telemetry.step(state.global_step + 1))
        if self._since_s is None:
            self._since_s = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._optimizer = self._open.enter_context(ExitStack())
        self._optimizer.enter_context(telemetry.span("optimizer"))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._optimizer.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._open.close()
        now_s = time.perf_counter()
        self._took_s += now_s - (now_s if self._since_s is None else self._since_s)
        self._since_s = now_s

    def on_evaluate(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._since_s = None

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._since_s = None

    def on_log(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        logs = known.get("logs") or {}
        values = {
            _NAMES[name]: value
            for name, value in logs.items()
            if name in _NAMES and isinstance(value, int | float)
        }
        if "loss" in values:
            if self._took_s > 0:
                values["tokens_per_s"] = self._num_tokens * self._num_contexts / self._took_s
            self._num_tokens, self._took_s = 0, 0.0
        if values and state.is_world_process_zero:
            telemetry.report(state.global_step, **values)
