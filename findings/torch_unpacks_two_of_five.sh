#!/usr/bin/env bash
# One would guess: torch 2.13 has FlashAttention-4 behind its own operators for those who install the package and call
#   torch.nn.attention.activate_flash_attention_impl("FA4"); where the two do not fit, activating says so.
# In fact: it activates without a word. torch unpacks two results of the package's forward, which gives five in the releases of this autumn (among them what a backward of
#   other models keeps), so every forward raises "too many values to unpack".
# Who is hurt: programs that call scaled_dot_product_attention, and are switched to FA4 in one line: they stop in their first forward, with an error that names neither
#   package. Tools that try the new implementation and go on with the old one have to catch ValueError.
# Versions: torch 2.13.0 with flash-attn-4 4.0.0b36 (its newest release then; PyPI has pre-releases only). Its kernels are compiled for sm_90, for tensors without memory, by the
#   function that torch's operator calls; needs no GPU. Seen on 2026-11-30.
# Output:
#     flash-attn-4 4.0.0b36: the forward gives 5 results, out and lse among them
#     torch 2.13.0: activated; its forward raises ValueError: too many values to unpack (expected 2)
# Decided here: burst_rt/kernels/flash4.py calls the package itself, passes out and lse to be written, and looks at no result.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${flash_4[@]}"
export FLASH_ATTENTION_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_NUM_SMS=132
cat > "$work/program.py" <<'EOF'
from importlib.metadata import version

import torch
from finding import expect
from flash_attn.cute.interface import _flash_attn_fwd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import _fa4, activate_flash_attention_impl

activate_flash_attention_impl("FA4")
with FakeTensorMode():
    q, k, v = (torch.empty(1, 1024, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    results = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    shapes = [None if x is None else tuple(x.shape) for x in results]
    expect(shapes == [(1, 1024, 8, 128), (1, 8, 1024), None, None, None], f"the package's results {shapes}")
    print(f"flash-attn-4 {version('flash-attn-4')}: the forward gives {len(results)} results, out and lse among them")
    try:
        _fa4._fa4_run_forward(q, k, v, None, None, None, None, None, True, None, None, None)
        said = "works"
    except ValueError as error:
        said = f"raises ValueError: {error}"
print(f"torch {version('torch')}: activated; its forward {said}")
expect("too many values to unpack" in said, f"torch's forward {said}")
EOF
"$python" -W ignore "$work/program.py" 2> "$work/err" || { tail -n 5 "$work/err" >&2; exit 1; }
