#!/usr/bin/env bash
# One would guess: FlashAttention-4 caps scores as torch does, softcap * tanh(score / softcap) in float32: what is off comes from 16-bit inputs and results.
# In fact: it compiles tanh to the GPU's approximation, one instruction for a score and no other way. By NVIDIA's document of PTX it is off by up to 2^-11 of its value.
#   With the cap of 50 that Gemma 2 has, a score near the cap is off by up to 50 * 2^-11 = 0.024, and its probability by 2.4 percent, where rounding the probability to
#   bfloat16 costs 0.4.
# Who is hurt: comparisons with a reference, and models that are served by another implementation than they were trained with. A tolerance for bfloat16 does not hold where
#   scores come near the cap.
# Versions: flash-attn-4 4.0.0b36, nvidia-cutlass-dsl 4.8.1, torch 2.13.0. Compiled ahead for sm_90 (the code that ptxas gets, PTX, is read); needs no GPU. Seen on 2026-11-30.
# Output:
#     without a softcap: 0 instructions tanh in the kernel
#     with softcap=50: 192 instructions tanh in the kernel, all of them tanh.approx.f32
# Decided here: burst_rt/kernels/flash4.py does not take calls with a softcap; the project's own kernels compute tanh in float32.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${flash_4[@]}"
export FLASH_ATTENTION_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_NUM_SMS=132 CUTE_DSL_KEEP_PTX=1
cat > "$work/program.py" <<'EOF'
import os
import pathlib
import re
import sys

import torch
from finding import expect
from flash_attn.cute.interface import _flash_attn_fwd
from torch._subclasses.fake_tensor import FakeTensorMode

cap = float(sys.argv[1])
with FakeTensorMode():
    q, k, v = (torch.empty(1, 1024, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    _flash_attn_fwd(q, k, v, causal=True, softcap=cap, return_lse=True)
(text,) = [path.read_text() for path in pathlib.Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob("*.ptx")]
found = re.findall(r"tanh[\w.]*", text)
if cap:
    print(f"with softcap={cap:g}: {len(found)} instructions tanh in the kernel, all of them {', '.join(sorted(set(found)))}")
    expect(found and set(found) == {"tanh.approx.f32"}, f"the tanh instructions {set(found)}")
else:
    print(f"without a softcap: {len(found)} instructions tanh in the kernel")
    expect(not found, "no tanh without a softcap")
EOF
for cap in 0 50; do
    mkdir "$work/$cap"
    CUTE_DSL_DUMP_DIR=$work/$cap "$python" -W ignore "$work/program.py" "$cap" 2> "$work/err" || { tail -n 5 "$work/err" >&2; exit 1; }
done
