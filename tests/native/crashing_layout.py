"""Stands in for the self-test on a machine whose AMX layout crashes, and others for one kind of mul-mat."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ggml_bridge.child import child_main

CRASHING = {("AMX", "MUL_MAT"), ("HALF", "MUL_MAT_ID"), ("CPU", "3-D MUL_MAT")}


def handle(request: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    if request["layout"] is None:
        return {"layouts": ["AMX", "HALF", "CPU"]}
    if (request["layout"], request["kind"]) in CRASHING:
        if request["layout"] != "AMX":
            progress({"type": "Q4_0"})
        print("tile configuration lost", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    return {"ok": True, "reason": ""}


if __name__ == "__main__":
    child_main(handle)
