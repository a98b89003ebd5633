"""Multiplies with every layout the CPU offers and compares with the plain F32 product.

A build of ggml can be broken in one layout only: compiled for another CPU (SIGILL), or by a compiler that drops the
stores which fill AMX's tile configuration (SIGSEGV in the first batched mul-mat, ggml-org/llama.cpp#26954). A layout
can be broken for one kind of mul-mat only: AMX takes weights of three dimensions and writes past their products. So
each kind is tried in each layout in a child process of its own, and its death is the answer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from ggml_bridge.bridge import load
from ggml_bridge.child import child_main, run_in_child
from ggml_bridge.errors import BridgeError
from ggml_bridge.layouts import KINDS, fault_name
from ggml_bridge.library import import_interface_only

K, N, E, N_EXPERT_USED = 512, 160, 4, 2
SHAPES = dict(zip(KINDS, ((1, 0), (E, 0), (E, N_EXPERT_USED)), strict=True))
"""Kind -> matrices of the weight, and how many of them a token uses (0: all)."""
N_TOKENS_AND_THREADS = ((1, 1), (7, 1), (64, 2))

_NMSE_LIMITS = {"F32": 1e-8, "F16": 1e-6, "BF16": 1e-4}
_QUANTISED_NMSE_LIMIT = 5e-4  # quantising the activations to 8 bits alone costs 2e-5 to 5e-5

_MODULE = "ggml_bridge.selftest"
_TIMEOUT_S = 120.0


def check_layouts() -> dict[str, str]:
    """Try each CPU layout, about a second for each kind of mul-mat: layout -> `ok`, or in one sentence why it must not
    be used. A layout that is right for single matrices stays `ok`, and what it gets wrong comes by fault_name; the
    plain layout, which has to be right for all, does not.

    Raises BridgeError when not even the layouts can be listed: then nothing of this build of ggml can be used.
    """
    layouts: list[str] = run_in_child(_MODULE, {"layout": None}, timeout_s=_TIMEOUT_S)["layouts"]
    results: dict[str, str] = {}
    for layout in layouts:
        single, *others = KINDS
        results[layout] = _check_in_child(layout, single)
        faults = {kind: result for kind in others if (result := _check_in_child(layout, kind)) != "ok"}
        if layout == layouts[-1] and faults:
            results[layout] = next(iter(faults.values()))
        elif results[layout] == "ok":
            results |= {fault_name(layout, kind): result for kind, result in faults.items()}
    return results


def test_layout(layout: str, kind: str, progress: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Compute every case of one kind that ggml offers in a layout, in this process: {"ok", "reason"}. May crash;
    `progress` gets each type before that."""
    bridge = load()
    e, n_expert_used = SHAPES[kind]
    cases = []
    for info in bridge.types():
        if not info.mul_mat or not bridge.layout_takes(layout, info.name, K, N, e, n_expert_used):
            continue
        progress({"type": info.name})
        for n_tokens, n_threads in N_TOKENS_AND_THREADS:
            with bridge.mul_mat("CPU", layout, info.name, K, N, e, n_expert_used, n_tokens, 0, n_threads) as timer:
                nmse = timer.check()
            limit = _NMSE_LIMITS.get(info.name, _QUANTISED_NMSE_LIMIT)
            ok = nmse <= limit  # false for NaN, which JSON does not know
            nmse = nmse if math.isfinite(nmse) else sys.float_info.max
            cases.append({"type": info.name, "n_tokens": n_tokens, "nmse": nmse, "limit": limit, "ok": ok})
    reason = _reason(kind, cases)
    return {"ok": not reason, "reason": reason}


def _reason(kind: str, cases: list[dict[str, Any]]) -> str:
    wrong = [case for case in cases if not case["ok"]]
    if not cases and kind == KINDS[0]:
        return "it multiplies no weight type"
    if not wrong:
        return ""
    first = wrong[0]
    return (
        f"{len(wrong)} of {len(cases)} products are wrong, first {kind} {first['type']} with"
        f" {first['n_tokens']} tokens: NMSE {first['nmse']:.1e}, at most {first['limit']:.0e} expected"
    )


def _check_in_child(layout: str, kind: str) -> str:
    types: list[str] = []
    try:
        result = run_in_child(
            _MODULE, {"layout": layout, "kind": kind}, lambda told: types.append(told["type"]), timeout_s=_TIMEOUT_S
        )
    except BridgeError as error:
        return f"{kind} {types[-1]}: {error}" if types else str(error)
    return "ok" if result["ok"] else str(result["reason"])


def _handle(request: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    if request["layout"] is None:
        return {"layouts": load().cpu_layouts()}
    return test_layout(request["layout"], request["kind"], progress)


if __name__ == "__main__":
    child_main(_handle, import_interface_only)
