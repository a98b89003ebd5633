"""Interruptions: a Ctrl-C in C code and in what Python drops, a device that makes no progress, threads that are refused
memory, folders of programs that were killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from interrupts import interrupted_often, native_log_callback
from processes import until

import ggml_bridge
from ggml_bridge import threads
from oallama.core.temporary import temporary_folder
from oallama.device.interrupt import held_interrupt
from oallama.device.native_log import native_log
from oallama.placer import Placer
from oallama.run.load_checks import release

MODEL = Path(__file__).resolve().parents[2] / "models/oallama-stories-q4_0.gguf"


def llama():
    placer = Placer.load(MODEL, device="none", threads=1)
    return placer.llama(placer.plan("cpu", workload=placer.workload(8, 8), measure=False))


@pytest.mark.parametrize("hold_interrupt", [True, False])
def test_a_ctrl_c_at_any_moment_gives_the_log_back(hold_interrupt):
    """Else what is logged next would go to a callback that is gone, which ends the process."""
    before, moment = native_log_callback(), 0

    def use():
        with native_log(hold_interrupt):
            time.monotonic()

    for moment in interrupted_often(use):
        assert native_log_callback() == before, f"moment {moment}"
    assert moment > 10


def test_a_ctrl_c_in_the_progress_callback_stops_the_load(monkeypatch):
    api = ggml_bridge.load().libraries.llama_cpp.llama_cpp
    callback_type, shares = api.llama_progress_callback, []

    def interrupted(on_progress):
        def call(share, data):
            signal.raise_signal(signal.SIGINT)
            shares.append(share)
            return on_progress(share, data)

        return callback_type(call)

    monkeypatch.setattr(api, "llama_progress_callback", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llama()
    assert len(shares) == 1


def test_what_is_held_is_told_at_once_and_raised_at_the_end():
    told = []
    reached = False
    with pytest.raises(KeyboardInterrupt), held_interrupt(lambda: told.append("outer")):
        with held_interrupt(lambda: told.append("inner")):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert told == ["inner", "inner"]
        assert told == ["inner", "inner", "outer"], "the outer one holds what the inner one hands on"
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_ctrl_c_in_what_frees_a_llama_is_raised(monkeypatch):
    _internals = ggml_bridge.load().libraries.llama_cpp._internals

    free = _internals.LlamaBatch.__del__
    n_freed = 0

    def interrupted(self):
        nonlocal n_freed
        n_freed += 1
        signal.raise_signal(signal.SIGINT)
        free(self)

    monkeypatch.setattr(_internals.LlamaBatch, "__del__", interrupted)
    made = llama()
    with pytest.raises(KeyboardInterrupt):
        made.close()
    assert n_freed == 1
    made.close()


def held_noting(closed):
    """A device and what lies on it, which note when they have been closed."""
    held = ExitStack()
    held.callback(closed.append, "device")
    held.callback(closed.append, "held")
    held.callback(time.sleep, 0.005)
    return held


def test_a_ctrl_c_at_any_moment_of_closing_leaves_the_device_until_what_is_on_it_is_freed():
    """A worker that ends before takes this process with it: ggml aborts where it misses the server."""
    closed = []
    held = held_noting(closed)
    n_done = moment = 0

    def close():
        release(held)

    for moment in interrupted_often(close):
        n_done += closed != []
        if not closed:  # nothing had begun
            close()
        assert closed == ["held", "device"], moment
        closed.clear()
        held = held_noting(closed)
    assert n_done > moment / 2 > 10


# ---- in a process of its own


def ran(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


DROPPED = """
import signal, time, weakref
from oallama.device import interrupt

interrupt.AGAIN_S = {again_s}
def send(*_):
    signal.raise_signal(signal.SIGINT)
class Collected:
    __del__ = send
class Referred:
    pass

{arm}
try:
    if {weak}:
        referred = Referred()
        reference = weakref.ref(referred, send)
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
def test_an_interrupt_that_python_drops_arrives_once_more(weak, again_s):
    """Also where it would arrive at once: what it finds is the hook, from which it would be dropped again."""
    nap_s = 600 if again_s else 0.1  # a signal that comes between Python's check for signals and a sleep ends no sleep
    for arm, wait_s, says in (
        ("interrupt.drop_no_interrupt()", 600, "arrived\n"),
        ("", 0, "dropped\n"),  # or Python drops none any more
    ):
        done = ran(DROPPED.format(arm=arm, weak=weak, again_s=again_s, wait_s=wait_s, nap_s=nap_s))
        assert (done.returncode, done.stdout) == (0, says)


WATCHED = """
import os, signal, time
from oallama.device import native_abort as watchdog
watchdog.WATCH_S = 0.01
with watchdog.Watchdog("RPC0", {silent_s}) as watched:
    {work}
print("done")
"""


def test_a_device_that_makes_no_progress_ends_the_process_and_one_that_answers_does_not():
    """The second works for two and a half times as long as it may be silent."""
    ended = ran(WATCHED.format(silent_s=0.1, work="time.sleep(60)"))
    assert (ended.returncode, ended.stderr) == (1, "oallama: the device was lost: RPC0 did not answer for 0 s\n")
    ended = ran(WATCHED.format(silent_s=1.0, work="for _ in range(25): time.sleep(0.1); watched.beat()"))
    assert (ended.returncode, ended.stdout) == (0, "done\n")


def test_the_time_in_which_the_process_was_stopped_does_not_count():
    code = WATCHED.format(silent_s=1.0, work="os.kill(os.getpid(), signal.SIGSTOP); time.sleep(0.1)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        time.sleep(1.5)  # longer than the device may be silent
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate()[0] == "done\n"
    assert process.returncode == 0


# ---- threads, and folders


def test_a_thread_that_does_not_begin_is_an_error(monkeypatch):
    """As one whose memory was refused before its first line: CPython then prints, and ends it."""
    monkeypatch.setattr(threads, "BEGIN_S", 0.3)
    monkeypatch.setattr(threads.Thread, "_bootstrap", lambda self: None)
    with pytest.raises(MemoryError, match="did not start"):
        threads.Thread(target=print).start()


def test_a_thread_that_begins_is_as_any():
    done = threading.Event()
    thread = threads.Thread(target=done.set, name="of the test")
    thread.start()
    thread.join()
    assert done.is_set() and not thread.is_alive() and thread.name == "of the test"
    with pytest.raises(RuntimeError, match="only be started once"):
        thread.start()


HOLD = """
import sys
from pathlib import Path
from oallama.core.temporary import temporary_folder
with temporary_folder("a-", Path(sys.argv[1])) as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def held(parent):
    """A program that holds a temporary folder until its standard input ends, and the folder."""
    program = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return program, Path(program.stdout.readline().strip())


def test_a_temporary_folder_is_removed_at_the_end_with_what_is_in_it(tmp_path):
    with pytest.raises(ValueError, match="of the block"), temporary_folder("a-", tmp_path) as folder:
        (folder / "file").write_text("x")
        raise ValueError("of the block")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_program_left_is_removed_and_what_a_live_one_has_is_kept(tmp_path):
    killed, left = held(tmp_path)
    alive, kept = held(tmp_path)
    with killed, alive:
        killed.kill()
        killed.wait()
        assert left.exists()
        with temporary_folder("a-", tmp_path) as folder:
            assert sorted(tmp_path.iterdir()) == sorted([kept, folder])
        alive.communicate("")
    assert list(tmp_path.iterdir()) == []
