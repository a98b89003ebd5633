"""A Ctrl-C that Python drops arrives once more."""

import subprocess
import sys

import pytest

DROPPED = """
import signal, sys, time, weakref
sys.path.insert(0, ".")
from oallama.device import interrupt
from oallama.device.interrupt import drop_no_interrupt

interrupt.AGAIN_S = {again_s}
class Collected:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

class Referred:
    pass

{arm}
try:
    if {weak}:
        referred = Referred()
        reference = weakref.ref(referred, lambda _: signal.raise_signal(signal.SIGINT))
        del referred
    else:
        Collected()
    end = time.monotonic() + {wait_s}
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, {nap_s}))
    print("dropped")
except KeyboardInterrupt:
    print("arrived")
"""


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("again_s", [0.01, 0.0])
def test_a_dropped_interrupt_arrives_once_more(weak, again_s):
    """Also where it would arrive at once: what it finds is the hook, from which it would be dropped again."""

    nap_s = 600 if again_s else 0.1  # a signal that comes between Python's check for signals and a sleep ends no sleep

    def run(arm, wait_s):
        code = DROPPED.format(arm=arm, weak=weak, again_s=again_s, wait_s=wait_s, nap_s=nap_s)
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    assert run("drop_no_interrupt()", 600) == "arrived\n"
    assert run("", 0) == "dropped\n", "or Python drops none any more"
