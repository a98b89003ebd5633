"""Loads a plan over two devices in a process of its own: python -m e2e.several_devices_cases.

llama.cpp overlaps micro-batches over devices only where no split back end is registered, and that takes memory. In a
test's own process another test may have registered it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from e2e.logits import TOKENS, assert_stock, placed_logits

from ggml_bridge.child import child_main
from oallama.device.load_params import load_bridge
from oallama.device.opening import open_device
from oallama.placer import Placer
from oallama.plan.plan import Plan

TWO = "emulated:rtx3060,vram=2GiB,scale=1,values=real,emulated:gtx1650,vram=1GiB,scale=1,values=real"
OPTIONS = {"device": TWO, "threads": 1, "n_ubatch": 64, "flash_attn": "on"}


def held(buffers: Sequence[Any]) -> dict[str, int]:
    """Bytes of each device."""
    found: dict[str, int] = {}
    for buffer in buffers:
        if not buffer.in_host_memory:
            found[buffer.device] = found.get(buffer.device, 0) + buffer.model + buffer.context + buffer.compute
    return found


def load(request: dict[str, Any], _progress: Any) -> dict[str, Any]:
    """Bytes that each device holds under a plan, whose logits are stock llama.cpp's."""
    path, plan = request["path"], Plan.from_json(request["plan"])
    options = {**OPTIONS, "device": request.get("device", TWO)}
    with Placer.load(path, **options).llama(plan, logits_all=True) as llama:
        assert_stock(placed_logits(llama, TOKENS), path, TOKENS)
        return held(llama.buffers)


def link(request: dict[str, Any], _progress: Any) -> dict[str, Any]:
    """Seconds of copies of so many bytes from and to a device, as the profile times them."""
    with open_device(request["device"]) as device:
        found = {}
        for kind in ("d2h", "h2d"):
            for n_bytes in request["sizes"]:
                with load_bridge().transfer(device.name, kind, False, n_bytes) as timer:
                    found[f"{kind} {n_bytes}"] = min(timer.run(3))
        return found


def handle(request: dict[str, Any], progress: Any) -> dict[str, Any]:
    return load(request, progress) if "plan" in request else link(request, progress)


if __name__ == "__main__":
    child_main(handle)
