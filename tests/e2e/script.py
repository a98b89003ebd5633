"""Scripts that tests run in a process of their own, with forced plans at hand, and what such a process holds."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil

BEGIN = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import psutil
from e2e.forced import attention, everything, ffn, forced
from e2e.script import held_now
from oallama.device.load_params import load_bridge
model, device, *words = Path(sys.argv[2]), *sys.argv[3:]
"""
"""Head of every script: imports, and names for its arguments: model, device and further words."""


def started(script: str, model: Path, *words: object) -> subprocess.Popen[str]:
    """Start a script behind BEGIN, in a session of its own. malloc has one arena, so that what it holds can be counted:
    it gives new threads others, each of which keeps what was freed in it."""
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + script, str(Path(__file__).parents[1]), str(model), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )


def said(script: str, model: Path, *words: object, timeout_s: float = 280.0) -> list[list[int]]:
    """Run such a script; the numbers of each line that it prints."""
    with started(script, model, *words) as process:
        out, errors = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, errors
    return [[*map(int, line.split())] for line in out.splitlines()]


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    )  # fmt: skip


def held_now() -> tuple[int, int, int, int, int, int]:
    """Bytes of malloc in use and of resident memory that is no file's, mappings of models, file descriptors, threads
    and children. Linux with glibc only."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    malloc, process = libc.mallinfo2(), psutil.Process()
    libc.malloc_trim(0)
    return (
        malloc.uordblks + malloc.hblkhd,
        int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10,
        sum(mapping.path.endswith(".gguf") for mapping in process.memory_maps()),
        process.num_fds(),
        threading.active_count(),
        len(process.children()),
    )
