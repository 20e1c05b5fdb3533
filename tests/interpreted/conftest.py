"""Tests of the Triton kernels without a GPU, under Triton's interpreter.

TRITON_INTERPRET=1 must be set before triton is imported, and changes it for the whole process; so these are run by a process of their own:
`TRITON_INTERPRET=1 pytest tests/interpreted`, which is what tests/unit/test_triton.py does. Any other run of pytest passes them over.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
