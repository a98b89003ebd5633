"""A device that goes: each command ends in one sentence and exit code 1, and the process can go on with another."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys

import pytest
from e2e.cut_proxy import CutProxy

from ggml_bridge.rpc import RpcServer

OPENED_AND_LISTED = """
import os, signal, sys
from oallama.core.errors import DeviceError
from oallama.device.load_params import load_bridge
from oallama.device.opening import list_devices, open_device
load_bridge()
def names(): return [device.name for device in list_devices() if device.backend == "RPC"]
for endpoint in sys.argv[1:]:
    pid = os.fork()  # a process that lost a server while connecting cannot connect any more
    if pid:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    signal.alarm(60)  # instead of for ever
    said = "opened"
    try:
        with open_device(f"rpc://{endpoint}"):
            said = "|".join(["opened", *names()])
    except DeviceError as error:
        said = str(error)
    with open_device("cpu-pair"):
        print(said, *names(), sep="|", flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a broken connection is seen in Linux's list of connections")
def test_a_server_that_goes_at_any_command_of_connecting_is_a_device_error() -> None:
    """And who lists devices afterwards neither waits for it nor sees it."""
    n_cuts = 9  # connecting takes 8 commands, so the last cut is of none
    with RpcServer() as server, contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(CutProxy(server.endpoint, cut_at)) for cut_at in range(1, n_cuts + 1)]
        command = [sys.executable, "-c", OPENED_AND_LISTED, *(proxy.endpoint for proxy in proxies)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert proxies[-1].n_commands == n_cuts - 1, "every command was cut once"
    said = done.stdout.splitlines()
    assert said[1::2] == ["0"] * n_cuts, (said, done.stderr)
    assert said[-2].startswith("opened|RPC"), "the last one lost nothing"
    for line in said[:-2:2]:
        assert line.count("|") == 0, "no device of a lost server is listed"
        assert re.search(r"was lost while working|no RPC server can be reached", line), line
