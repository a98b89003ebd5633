"""A device that makes no progress ends the process in one sentence. One that answers, or waits for a stopped process,
does not."""

import os
import signal
import subprocess
import sys
import time

import psutil
from processes import until

STOPPED_S = 1.5  # longer than the device may be silent

SILENT = """
import time
from oallama.device.native_abort import Watchdog
with Watchdog("RPC0", 0.1):
    time.sleep(60)
"""
ANSWERS = """
import time
from oallama.device import native_abort as watchdog
watchdog.WATCH_S = 0.01
with watchdog.Watchdog("RPC0", 1.0) as watched:
    for _ in range(25):
        time.sleep(0.1)
        watched.beat()
print("done")
"""
STOPPED = """
import os, signal, time
from oallama.device import native_abort as watchdog
watchdog.WATCH_S = 0.01
with watchdog.Watchdog("RPC0", 1.0):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)
print("done")
"""


def test_a_device_that_makes_no_progress_ends_the_process():
    ended = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (1, "oallama: the device was lost: RPC0 did not answer for 0 s\n")


def test_a_device_that_answers_is_left_alone():
    """For two and a half times as long as it may be silent."""
    ended = subprocess.run([sys.executable, "-c", ANSWERS], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "done\n")


def test_the_time_in_which_the_process_was_stopped_does_not_count():
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as process:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        time.sleep(STOPPED_S)
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate()[0] == "done\n"
    assert process.returncode == 0
