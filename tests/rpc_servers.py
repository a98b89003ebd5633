"""RPC servers that tests connect to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ggml_bridge.rpc import RpcServer
from oallama.device.rpc_link import was_lost


@contextlib.contextmanager
def rpc_server() -> Iterator[RpcServer]:
    """A server of one thread, at a port where this process lost none before: there it can never connect again."""
    with contextlib.ExitStack() as passed_by:
        while was_lost((server := passed_by.enter_context(RpcServer(threads=1))).endpoint):
            pass
        yield server
