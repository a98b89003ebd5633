"""A process that was stopped for a while, as by Ctrl-Z, takes no device for lost that had no time to answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from processes import until

STOPPED_S = 1.5  # longer than the device may be silent

LOOKS = """
import os, signal, threading
looks, answered = [], threading.Event()

def alive():
    looks.append(None)
    if len(looks) == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    if len(looks) == 6:
        answered.set()
    return True
"""
GUARD = """
from oallama.device import guard
guard.POLL_S = 0.01
print(guard.Guard("a device", alive, stall_s=1.0).call(lambda: answered.wait(60)), flush=True)
"""
WATCHDOG = """
from oallama.profile import child
child.WATCH_S = 0.01
with child.Watchdog("a device", alive, 1.0):
    print(answered.wait(60), flush=True)
"""


@pytest.mark.parametrize("code", [GUARD, WATCHDOG], ids=["guard", "watchdog"])
def test_the_time_in_which_it_was_stopped_does_not_count(code: str) -> None:
    with subprocess.Popen([sys.executable, "-c", LOOKS + code], stdout=subprocess.PIPE, text=True) as process:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        time.sleep(STOPPED_S)
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate()[0] == "True\n"
    assert process.returncode == 0
