"""A Ctrl-C that arrives while C code calls back into Python is handed on, not lost."""

from __future__ import annotations

import ctypes
import signal
import threading
from pathlib import Path

import pytest

from oallama.device.interrupt import held_interrupt
from oallama.device.native_log import native_log
from oallama.placer import Placer
from oallama.run.load import LoadProgress

MODEL = Path(__file__).resolve().parents[2] / "models/oallama-stories-q4_0.gguf"


def test_a_ctrl_c_between_two_lines_of_the_log_is_raised_at_the_end() -> None:
    from llama_cpp import llama_cpp as api

    params = api.llama_model_default_params()
    # no Python runs when this arrives: as with a real one, the next function to be entered is the log's callback
    params.progress_callback = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, api.llama_progress_callback)
    reached = False
    with pytest.raises(KeyboardInterrupt), native_log() as log:
        model = api.llama_model_load_from_file(str(MODEL).encode(), params)
        if model:
            api.llama_model_free(model)
        reached = True
    assert reached and log.lines


def test_a_ctrl_c_in_the_progress_callback_stops_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    on_progress = LoadProgress._on_progress

    def interrupted(self: LoadProgress, share: float, user_data: object) -> bool:
        signal.raise_signal(signal.SIGINT)
        shares.append(share)
        return on_progress(self, share, user_data)

    monkeypatch.setattr(LoadProgress, "_on_progress", interrupted)
    placer = Placer.load(MODEL, device="none", threads=1)
    plan = placer.cpu_plan(8, 8)
    with pytest.raises(KeyboardInterrupt):
        placer.engine(plan)
    assert len(shares) == 1


def test_what_is_held_is_told_at_once_and_raised_at_the_end() -> None:
    told: list[str] = []
    reached = False
    with pytest.raises(KeyboardInterrupt), held_interrupt(lambda: told.append("outer")):
        with held_interrupt(lambda: told.append("inner")):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert told == ["inner", "inner"]
        assert told == ["inner", "inner", "outer"], "the outer one holds what the inner one hands on"
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_raised_although_the_stopped_call_failed() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, held_interrupt():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("the load was stopped")
    assert isinstance(raised.value.__context__, ValueError)


def test_a_handler_of_the_program_s_own_gets_it() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with held_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_the_handler_alone() -> None:
    found: list[object] = []

    def work() -> None:
        with held_interrupt():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
