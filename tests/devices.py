"""Devices of tests, which oallama knows in a checkout where OALLAMA_TEST_DEVICES is 1: oallama/core/extensions.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from oallama.core.errors import UsageError
from oallama.device.cpu import parse_cpus

POOL = Path(__file__).with_name("rpc_pool.py")
REAL = "emulated:vram=2GiB,scale=1,values=real"

_pools: list[subprocess.Popen[str]] = []  # each ends with its stdin


def worker(text: str) -> str:
    """`rpc-worker[:THREADS[:CPUS]]`: an RPC server on this machine's CPU, for each process that connects another. The
    first process that asks starts them; those that it starts use them, too."""
    _, threads, cpus, *more = [*text.split(":"), "", ""]
    try:
        pinned = parse_cpus(cpus) if cpus else ()
        n_threads = int(threads or max(len(pinned), 1))
    except ValueError as error:
        raise UsageError(f"--device {text!r}: {error}") from None
    if not 0 < n_threads <= 1024 or any(more):
        raise UsageError(f"--device {text!r} is not a worker; write e.g. rpc-worker, rpc-worker:2 or rpc-worker:1:1")
    words = [str(n_threads), *map(str, pinned)]
    variable = "_".join(["OALLAMA_TEST_POOL", *words])
    if variable not in os.environ:
        command = [sys.executable, str(POOL), *words]
        pool = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert pool.stdout is not None
        os.environ[variable] = pool.stdout.readline().strip()
        pool.wait()
        _pools.append(pool)
    return f"rpc://{os.environ[variable]}"


DEVICES: Mapping[str, Callable[[str], str]] = {"cpu-pair": lambda text: REAL, "rpc-worker": worker}
"""By the word that their text begins with: the text of the device that each stands for."""
