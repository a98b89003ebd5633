"""What the RPC tests do with a server, in a child process: ggml aborts when a server is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import ggml_bridge
from ggml_bridge.child import child_main


def handle(request: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    bridge = ggml_bridge.load()
    [device] = bridge.rpc_add(request["endpoint"])
    case = request["case"]
    if case == "device":
        again = bridge.rpc_add(request["endpoint"])
        info = bridge.device(device)
        return {"name": device, "again": again, "type": info.type, "backend": info.backend, "total": info.memory_total}
    if case == "mul_mat":
        results = {}
        for kind in ("F16", "Q4_0", "Q4_K"):
            for e, used, n_tokens in ((1, 0, 1), (4, 0, 3), (8, 2, 5)):
                with bridge.mul_mat(device, None, kind, 512, 96, e, used, n_tokens, 1 << 20) as timer:
                    results[f"{kind} {e} {used} {n_tokens}"] = timer.check()
        return results
    if case == "transfer":
        results = {}
        for direction in ("h2d", "d2h"):
            for n_bytes in (1, 1 << 12, 1 << 23):
                with bridge.transfer(device, direction, False, n_bytes) as timer:
                    results[f"{direction} {n_bytes}"] = timer.run(9)
        return results
    if case == "pinned":
        bridge.transfer(device, "h2d", True, 4096)
    if case == "boundary":
        with (
            bridge.boundary(device, 4096, 5) as there,
            bridge.boundary(device, 4096, 5, on_cpu=True) as here,
            bridge.launch(device) as launch,
        ):
            splits = [there.n_splits, here.n_splits]
            return {"splits": splits, "there": there.run(9), "here": here.run(9), "launch": launch.run(9)}
    if case == "layer_rest":
        shape = {"n_embd": 256, "n_head": 8, "n_head_kv": 4, "head_dim_k": 32, "head_dim_v": 32, "n_ff": 512}
        results = {}
        for flash_attn in (True, False):
            with bridge.layer_rest(device, 3, 256, **shape, flash_attn=flash_attn) as timer:
                results[str(flash_attn)] = timer.run(3)
        return results
    if case == "sharing":
        there = bridge.mul_mat_case(device, None, "Q4_0", 1024, 1024, working_set_bytes=1 << 24)
        here = bridge.mul_mat_case("CPU", "CPU", "Q4_0", 1024, 1024, working_set_bytes=1 << 24)
        pairs = {
            "cpu and link": bridge.share_link(here, device, 1 << 20, 0.1),
            "device and link": bridge.share_link(there, device, 1 << 20, 0.2),
            "cpu and device": bridge.share_compute(here, there, 0.2),
        }
        return {pair: {name: getattr(found, name) for name in found.__slots__} for pair, found in pairs.items()}
    if case == "issue":
        results = {"wait": bridge.copy_wait(device, False, 1 << 24)}
        with bridge.launch_issue(device) as issue, bridge.launch(device) as launch:
            results["launch"] = {"issue": issue.run(25), "launch": launch.run(25)}
        for n_bytes in (1 << 12, 1 << 24):
            with bridge.issue(device, False, n_bytes) as issue, bridge.transfer(device, "h2d", False, n_bytes) as copy:
                results[str(n_bytes)] = {"issue": issue.run(9), "copy": copy.run(9)}
        return results
    if case == "lose the server":
        with bridge.mul_mat(device, None, "Q4_0", 512, 96, working_set_bytes=0) as timer:
            timer.run(1)
            os.kill(request["pid"], signal.SIGKILL)
            timer.run(100)
    raise AssertionError(case)


if __name__ == "__main__":
    child_main(handle)
