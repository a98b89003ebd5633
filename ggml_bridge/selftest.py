"""Multiplies with every layout the CPU offers and compares with the plain F32 product.

A build of ggml can be broken in one layout only: compiled for another CPU (SIGILL), or by a compiler that drops the
stores which fill AMX's tile configuration (SIGSEGV in the first batched mul-mat, ggml-org/llama.cpp#26954). So each
layout is tried in a child process of its own, and its death is the answer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from ggml_bridge.bridge import load
from ggml_bridge.child import child_main, run_in_child
from ggml_bridge.errors import BridgeError
from ggml_bridge.library import import_interface_only

K, N, E, N_EXPERT_USED = 512, 160, 4, 2
N_TOKENS_AND_THREADS = ((1, 1), (7, 1), (64, 2))

_NMSE_LIMITS = {"F32": 1e-8, "F16": 1e-6, "BF16": 1e-4}
_QUANTISED_NMSE_LIMIT = 5e-4  # quantising the activations to 8 bits alone costs 2e-5 to 5e-5

_MODULE = "ggml_bridge.selftest"
_TIMEOUT_S = 120.0


def check_layouts() -> dict[str, str]:
    """Try each CPU layout, about a second each: `ok`, or in one sentence why it must not be used.

    Raises BridgeError when not even the layouts can be listed: then nothing of this build of ggml can be used.
    """
    layouts = run_in_child(_MODULE, {"layout": None}, timeout_s=_TIMEOUT_S)["layouts"]
    return {layout: _check_in_child(layout) for layout in layouts}


def test_layout(layout: str) -> dict[str, Any]:
    """Compute every case of one layout in this process: {"ok", "reason"}. May crash."""
    bridge = load()
    cases = []
    for info in bridge.types():
        for n_expert_used in (0, N_EXPERT_USED):
            e = E if n_expert_used else 1
            if not info.mul_mat or not bridge.layout_supports(layout, info.name, K, N, e, n_expert_used):
                continue
            for n_tokens, n_threads in N_TOKENS_AND_THREADS:
                with bridge.mul_mat("CPU", layout, info.name, K, N, e, n_expert_used, n_tokens, 0, n_threads) as timer:
                    nmse = timer.check()
                limit = _NMSE_LIMITS.get(info.name, _QUANTISED_NMSE_LIMIT)
                op = "MUL_MAT_ID" if n_expert_used else "MUL_MAT"
                ok = nmse <= limit  # false for NaN, which JSON does not know
                nmse = nmse if math.isfinite(nmse) else sys.float_info.max
                cases.append(
                    {"op": op, "type": info.name, "n_tokens": n_tokens, "nmse": nmse, "limit": limit, "ok": ok}
                )
    reason = _reason(cases)
    return {"ok": not reason, "reason": reason}


def _reason(cases: list[dict[str, Any]]) -> str:
    wrong = [case for case in cases if not case["ok"]]
    if not cases:
        return "it multiplies by no type of weight"
    if not wrong:
        return ""
    first = wrong[0]
    return (
        f"{len(wrong)} of {len(cases)} products are wrong, first {first['op']} {first['type']} with"
        f" {first['n_tokens']} tokens: NMSE {first['nmse']:.1e}, at most {first['limit']:.0e} expected"
    )


def _check_in_child(layout: str) -> str:
    try:
        result = run_in_child(_MODULE, {"layout": layout}, timeout_s=_TIMEOUT_S)
    except BridgeError as error:
        return str(error)
    return "ok" if result["ok"] else str(result["reason"])


def _handle(request: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    if request["layout"] is None:
        return {"layouts": load().cpu_layouts()}
    return test_layout(request["layout"])


if __name__ == "__main__":
    child_main(_handle, import_interface_only)
