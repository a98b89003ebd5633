"""A Ctrl-C that arrives while llama.cpp's log calls back is raised when the log is closed, not lost."""

from __future__ import annotations

import pytest

from oallama.device.native_log import NativeLog, native_log


class Interrupted(NativeLog):
    def add(self, level: int, text: str) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_inside_the_callback_is_raised_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_cpp import llama_cpp as api

    monkeypatch.setattr("oallama.device.native_log.NativeLog", Interrupted)
    reached = False
    with pytest.raises(KeyboardInterrupt), native_log():
        api.llama_model_load_from_file(b"/no/such/file.gguf", api.llama_model_default_params())  # it logs an error
        reached = True
    assert reached
