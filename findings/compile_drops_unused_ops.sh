#!/usr/bin/env bash
# One would guess: an operator made with torch.library.custom_op is opaque to torch.compile, so it runs whenever the program's line is
#   reached; what it does inside (a message to another rank) happens.
# In fact: where nobody uses its result, the compiler takes the call out, from backend="aot_eager" on. Eagerly it runs. A rank that
#   ignores a result would then not take part in an exchange, while its peers wait. mutates_args=() says nothing of such effects;
#   the private torch.library._register_effectful_op does, and keeps the call.
# Who is hurt: whoever wraps communication, logging or counters in custom operators.
# Versions: torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     calls whose result is not used: eager 1, compiled 0, compiled and registered as effectful 1
# Decided here: burst_rt/attention/autograd.py registers the ops of attention as effectful and ordered.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect
from torch._library.effects import EffectType
from torch.library import _register_effectful_op

calls = []


def make(name):
    @torch.library.custom_op(name, mutates_args=())
    def send(x: torch.Tensor) -> torch.Tensor:
        calls.append(name)
        return x.clone()

    send.register_fake(torch.empty_like)

    def program(x):
        send(x)  # its result is not used
        return x + 1

    return program


def count(program, **options):
    calls.clear()
    torch.compile(program, fullgraph=True, **options)(torch.ones(2))
    return len(calls)


plain, effectful = make("finding::send"), make("finding::effectful_send")
_register_effectful_op("finding::effectful_send", EffectType.ORDERED)
plain(torch.ones(2))
eager, compiled, kept = len(calls), count(plain, backend="aot_eager"), count(effectful, backend="aot_eager")
print(f"calls whose result is not used: eager {eager}, compiled {compiled}, compiled and registered as effectful {kept}")
expect((eager, compiled, kept) == (1, 0, 1), "what the compiler drops")
EOF
"$python" "$work/program.py"
