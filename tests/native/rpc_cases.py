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
    if case == "lose the server":
        with bridge.mul_mat(device, None, "Q4_0", 512, 96, working_set_bytes=0) as timer:
            timer.run(1)
            os.kill(request["pid"], signal.SIGKILL)
            timer.run(100)
    raise AssertionError(case)


if __name__ == "__main__":
    child_main(handle)
