"""A test device: ggml's RPC server over this machine's CPU, in a child process that ends with us.

It listens on 127.0.0.1, and serves any process of this machine that connects.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from oallama.core.errors import DeviceError
from oallama.core.units import format_ranges
from oallama.device.spec import DeviceSpec

if TYPE_CHECKING:
    from ggml_bridge.rpc import RpcServer


def start_worker(spec: DeviceSpec) -> RpcServer:
    """Start the worker with the requested threads, else one per CPU that it is pinned to. Raises DeviceError."""
    from ggml_bridge import BridgeError
    from ggml_bridge.rpc import RpcServer

    allowed = os.sched_getaffinity(0)
    if not set(spec.cpus) <= allowed:
        raise DeviceError(
            f"--device {spec}: this process may only run on CPUs {format_ranges(allowed)}; "
            "pin the worker to some of them"
        )
    try:
        return RpcServer(threads=spec.threads or max(len(spec.cpus), 1), cpus=spec.cpus or None)
    except (BridgeError, OSError) as error:
        raise DeviceError(f"the worker {spec} did not start: {error}") from None
