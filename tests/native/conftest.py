"""Fixtures of the bridge's tests. What may abort runs in a child process: see native_cases.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from native_helpers import RunHere
from rpc_server import RpcServer

import ggml_bridge
from ggml_bridge.child import run_in_child

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def bridge() -> ggml_bridge.Bridge:
    return ggml_bridge.load()


@pytest.fixture(scope="module")
def server() -> Iterator[RpcServer]:
    """A worker for the tests of one module; it serves one client at a time."""
    with RpcServer(threads=1) as server:
        yield server


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> RunHere:
    """run_in_child for a module of this folder."""
    folders = [str(HERE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))

    def run(module: str, request: dict[str, Any], **options: Any) -> dict[str, Any]:
        return run_in_child(module, request, **{"timeout_s": 60.0, **options})

    return run
