"""All-to-all in slices of heads: results, messages, the order of tasks, what it takes."""

from __future__ import annotations

import pytest
import torch
from worlds import Case, attend_over_threads

from assertions import assert_right
from burst_rt import Causal, Documents, Full
