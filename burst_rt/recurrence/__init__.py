"""What mixes tokens otherwise than by softmax: linear attention, state spaces, convolutions."""

from burst_rt.planning.recurrences import RecurrenceSizes
from burst_rt.recurrence.api import (
    causal_conv1d,
    gated_delta_rule,
    linear_attention,
    linear_recurrence,
    selective_scan,
    state_space,
)
from burst_rt.recurrence.call import RecurrencePlan
from burst_rt.recurrence.explain import RecurrenceExplanation, explain_recurrence

__all__ = [
    "RecurrenceExplanation",
    "RecurrencePlan",
    "RecurrenceSizes",
    "causal_conv1d",
    "explain_recurrence",
    "gated_delta_rule",
    "linear_attention",
    "linear_recurrence",
    "selective_scan",
    "state_space",
]
