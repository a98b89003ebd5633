"""What this process holds, exactly enough that one load which is not freed shows. Linux with glibc only.

Resident memory alone says little: malloc gives new threads arenas of their own, and each keeps what was freed in it.
So a script that asks here runs with ONE_ARENA, and free pages are given back before they are counted.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Held:
    """allocated: bytes of malloc in use, those it mapped included. anonymous: bytes of resident memory that is no
    file's. mapped_models: mappings of .gguf files."""

    allocated: int
    anonymous: int
    mapped_models: int
    descriptors: int
    threads: int
    children: int


class _Mallinfo2(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")),
    )


def held_now() -> Held:
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    malloc = libc.mallinfo2()
    libc.malloc_trim(0)
    process = psutil.Process()
    status = Path("/proc/self/status").read_text()
    return Held(
        malloc.uordblks + malloc.hblkhd,
        int(status.split("RssAnon:")[1].split()[0]) << 10,
        sum(line.endswith(".gguf") for line in Path("/proc/self/maps").read_text().splitlines()),
        process.num_fds(),
        threading.active_count(),
        len(process.children()),
    )


def say_held() -> None:
    """One line for `nothing_grew`."""
    print(json.dumps(asdict(held_now())), flush=True)


def nothing_grew(script: str, *arguments: object, timeout_s: float) -> None:
    """Run the script in a process of its own; it says twice what it holds, and the second is as the first."""
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script, tests, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **ONE_ARENA},
    )
    assert done.returncode == 0, done.stderr
    before, after = (Held(**json.loads(line)) for line in done.stdout.splitlines())
    assert after.allocated - before.allocated < 1 << 20
    assert after.anonymous - before.anonymous < 2 << 20
    assert (after.mapped_models, after.threads, after.children) == (0, 1, 0)
    assert after.descriptors == before.descriptors
