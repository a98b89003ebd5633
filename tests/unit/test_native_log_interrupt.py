"""A Ctrl-C that arrives while C code calls back into Python is handed on, not lost."""

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from interrupts import interrupted_often, native_log_callback

from oallama.device.interrupt import held_interrupt
from oallama.device.native_log import native_log
from oallama.placer import Placer
from oallama.run.load import LoadProgress
from oallama.run.setup import release

MODEL = Path(__file__).resolve().parents[2] / "models/oallama-stories-q4_0.gguf"


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
    shares = []
    on_progress = LoadProgress._on_progress

    def interrupted(self, share, user_data):
        signal.raise_signal(signal.SIGINT)
        shares.append(share)
        return on_progress(self, share, user_data)

    monkeypatch.setattr(LoadProgress, "_on_progress", interrupted)
    placer = Placer.load(MODEL, device="none", threads=1)
    plan = placer.plan("cpu", workload=placer.workload(8, 8), measure=False)
    with pytest.raises(KeyboardInterrupt):
        placer.engine(plan)
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


def test_a_ctrl_c_in_what_frees_an_engine_is_raised(monkeypatch):
    from llama_cpp import _internals

    free = _internals.LlamaBatch.__del__
    n_freed = 0

    def interrupted(self):
        nonlocal n_freed
        n_freed += 1
        signal.raise_signal(signal.SIGINT)
        free(self)

    monkeypatch.setattr(_internals.LlamaBatch, "__del__", interrupted)
    placer = Placer.load(MODEL, device="none", threads=1)
    engine = placer.engine(placer.plan("cpu", workload=placer.workload(8, 8), measure=False), progress=False)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert n_freed == 1
    engine.close()


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
