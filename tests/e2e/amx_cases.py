"""What tests of AMX's layout do in a process that has it: python -m e2e.amx_cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.forced import ffn, forced
from e2e.logits import TOKENS, placed_logits, typical_nmse
from e2e.plugin_runs import loaded, logits_of

from ggml_bridge import selftest
from ggml_bridge.child import child_main
from ggml_bridge.layouts import KINDS
from oallama.core.types import Operator
from oallama.device.layouts import needs_no_repack
from oallama.device.load_params import load_bridge

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XXS", "MXFP4")


def rules() -> dict[str, Any]:
    """`layout type kind` -> whether stock llama.cpp keeps such weights in that layout, and whether that is right."""
    bridge = load_bridge()
    found = {}
    for layout in bridge.cpu_layouts():
        for type_name in TYPES:
            for kind in KINDS:
                case = (layout, type_name, 512, 96, *selftest.SHAPES[kind])
                found[f"{layout} {type_name} {kind}"] = [bridge.layout_takes(*case), bridge.layout_supports(*case)]
    return found


def stock(path: str, no_repack: bool) -> dict[str, Any]:
    load_bridge()
    with loaded(Path(path), told=False, use_extra_bufts=not no_repack) as context:
        logits_of(context, TOKENS[:4])
    return {}


def engine(path: str, device: str, attention_there: bool) -> dict[str, Any]:
    """What an engine holds, and the errors of its logits: against stock llama.cpp that is told to keep several matrices
    plain, against stock with all weights plain, and of these two."""

    def whole(operator: Operator) -> bool:
        return operator.role.startswith("attn") == attention_there

    case = forced(Path(path), device, whole=None if device == "none" else whole)
    with case.llama() as llama:
        found = placed_logits(llama, TOKENS)
        held = {buffer.buft: buffer.model for buffer in llama.buffers if buffer.model}
        planned = llama.memory.planned_device_bytes == llama.memory.device_bytes
    with loaded(Path(path)) as context:
        told = logits_of(context, TOKENS)
    with loaded(Path(path), use_extra_bufts=False) as context:
        plain = logits_of(context, TOKENS)
    return {
        "told": typical_nmse(found, told), "plain": typical_nmse(found, plain), "between": typical_nmse(told, plain),
        "held": held, "as_planned": planned, "no_repack": needs_no_repack(case.placer.operators),
    }  # fmt: skip


def memory(path: str) -> dict[str, Any]:
    """Host memory of weights that a plan of slices says, and that a load of it has; bytes of the slices."""
    case = forced(Path(path), "rpc-worker:1", ffn(0.5), layout="AMX")
    with case.llama() as llama:
        held = sum(buffer.model for buffer in llama.buffers if buffer.in_host_memory)
    pairs = zip(case.placer.operators, case.plan.operators, strict=True)
    slices = sum(round(p.cc * o.bytes) for o, p in pairs if 0 < p.cc < 1)
    return {"planned": case.plan.memory.weights_host, "held": held, "slices": slices}


def _handle(request: dict[str, Any], _progress: Any) -> dict[str, Any]:
    case = {"rules": rules, "stock": stock, "engine": engine, "memory": memory}[request.pop("case")]
    result: dict[str, Any] = case(**request)
    return result


if __name__ == "__main__":
    child_main(_handle)
