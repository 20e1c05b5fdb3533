#!/usr/bin/env bash
# One would guess: a query whose mask hides every key gets 0, or NaN; not a mixture of what is hidden from it.
# In fact: torch and onnxruntime (operator Attention, opset 23) give 0. jax.nn.dot_product_attention gives the mean of *all* values, hidden ones
#   too, and the gradient of such a row goes to all of them. transformers' eager attention does as JAX: its masks hold the lowest float, not -inf.
# Who is hurt: who compares two of them on padded rows; who trains on losses of padding, where hidden tokens then get gradients; who
#   splits keys into blocks, some of which a row does not see.
# Versions: torch 2.13.0 (CPU), transformers 5.23.0, onnxruntime 1.32.0, onnx 1.23.2, jax 0.10.2. Seen on 2026-11-27.
# Output:
#     torch: 0.0, gradients of the values [0.0, 0.0, 0.0, 0.0]
#     transformers, eager: 4.0, gradients of the values [0.25, 0.25, 0.25, 0.25]
#     onnxruntime: 0.0
#     jax: 4.0, gradients of the values [0.25, 0.25, 0.25, 0.25]
# Decided here: docs/masks.md, "Good to know": a query that sees no key gets 0, and zero gradients; docs/transformers.md, "What a batch may
#   hold": the logits of padding mean nothing, and tests/small_models.py (`seen`) compares those of other tokens only.
set -euo pipefail
source "$(dirname "$0")/common.sh"
cat > "$work/case.py" <<'EOF'
import numpy as np

# One head, four keys of one number each: what a row gets is easily told from the mean of the values.
q = k = np.ones((1, 1, 4, 1), np.float32)
v = np.array([1, 2, 4, 9], np.float32).reshape(1, 1, 4, 1)
shown = np.tril(np.ones((4, 4), bool))
shown[2] = False
MEAN = 4.0
EOF
cp "$work/case.py" "$work/lib/case.py"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from case import MEAN, k, q, shown, v
from finding import expect
from transformers import LlamaConfig
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

q, k, v, shown = (torch.from_numpy(x) for x in (q, k, v, shown))
v.requires_grad_()
out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)[0, 0, 2, 0]
(gradient,) = torch.autograd.grad(out, v)
print(f"torch: {out.item()}, gradients of the values {gradient.flatten().tolist()}")
expect(out == 0 and not gradient.any(), "torch")
mask = eager_mask(batch_size=1, q_length=4, kv_length=4, mask_function=lambda b, h, i, j: (j <= i) & (i != 2), dtype=torch.float32)
layer = torch.nn.Module().eval()
layer.num_key_value_groups = 1
out = eager_attention_forward(layer, q, k, v, mask, scaling=1.0)[0][0, 2, 0, 0]
(gradient,) = torch.autograd.grad(out, v)
print(f"transformers, eager: {out.item()}, gradients of the values {gradient.flatten().tolist()}")
expect(out == MEAN and gradient.all(), "transformers")
EOF
"$python" "$work/program.py"
environment jax==0.10.2 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > "$work/program.py" <<'EOF'
import jax
import numpy as np
import onnxruntime
from case import MEAN, k, q, shown, v
from finding import expect
from onnx import TensorProto, helper

value = lambda name, kind, shape: helper.make_tensor_value_info(name, kind, shape)
inputs = [value(name, TensorProto.FLOAT, [1, 1, 4, 1]) for name in "qkv"] + [value("shown", TensorProto.BOOL, [4, 4])]
graph = helper.make_graph([helper.make_node("Attention", ["q", "k", "v", "shown"], ["out"])], "one", inputs,
                          [value("out", TensorProto.FLOAT, [1, 1, 4, 1])])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
out = session.run(None, {"q": q, "k": k, "v": v, "shown": shown})[0][0, 0, 2, 0]
print(f"onnxruntime: {out}")
expect(out == 0, "onnxruntime")


def of_row(v):
    tokens_first = (np.swapaxes(q, 1, 2), np.swapaxes(k, 1, 2), v)
    return jax.nn.dot_product_attention(*tokens_first, mask=shown[None, None])[0, 2, 0, 0]


out, gradient = jax.value_and_grad(of_row)(np.swapaxes(v, 1, 2))
print(f"jax: {out}, gradients of the values {gradient.flatten().tolist()}")
expect(out == MEAN and gradient.all(), "jax")
EOF
"$python" "$work/program.py"
