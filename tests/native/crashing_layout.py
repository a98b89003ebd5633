"""Stands in for the self-test on a machine whose AMX layout crashes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ggml_bridge.child import child_main


def handle(request: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    if request["layout"] is None:
        return {"layouts": ["AMX", "CPU"]}
    if request["layout"] == "AMX":
        print("tile configuration lost", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    return {"ok": True, "reason": ""}


if __name__ == "__main__":
    child_main(handle)
