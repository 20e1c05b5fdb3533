"""Rank program on emulated GPUs: runs the programs of pages of the guide, `args`, one by one, with
fewer tokens.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from emulated.cuda import BOOKS

_DOCS = Path(__file__).parents[3] / "docs"
for page in sys.argv[1:]:
    text = (_DOCS / f"{page}.md").read_text(encoding="utf-8")
    # Of every language, so that the end of one block is not taken for the start of another.
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    program = "\n".join(block for language, block in blocks if language == "python")
    program = program.replace("4_096", "1_024").replace("2_048", "512")
    exec(compile(program, f"{page}.md", "exec", dont_inherit=True), {"__name__": page})
    torch.cuda.synchronize()
    assert BOOKS.streams(torch.cuda.current_device()), "nothing ran on the GPU"
    print(f"emulated page {page}", flush=True)
