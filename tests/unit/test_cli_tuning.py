"""What a user is told to type, and the bars of what is measured."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from oallama.cli import gate as cli_gate
from oallama.cli.output import time_bar, turn_bar
from oallama.core.options import Options
from oallama.core.types import Workload
from oallama.core.units import MIB


def test_what_to_type_measures_what_was_run() -> None:
    asked = Options(device="emulated:rtx3060,link=12", vram=300 * MIB, threads=2, n_ctx=8192, type_k="q8_0")
    placer: Any = SimpleNamespace(model=SimpleNamespace(path="/my models/m.gguf"), options=asked)
    assert cli_gate.tuning(placer, Workload(n_prompt=19, n_gen=24, n_ctx=8192, n_past=100)) == (
        "`oallama tune '/my models/m.gguf' --device emulated:rtx3060,link=12 --vram 300MiB -t 2 -ctk q8_0 -p 19 -n 24 "
        "-c 8192 -d 100`"
    )


class Bar:
    """In place of tqdm's."""

    def __init__(self, total: int, bar_format: str, **_options: Any) -> None:
        self.total, self.bar_format, self.n, self.closed = total, bar_format, 0, False
        self.seen: list[Any] = []
        bars.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def set_description_str(self, doing: str, refresh: bool) -> None:
        self.seen.append(doing)

    def refresh(self) -> None:
        self.seen.append((self.n, self.total))


bars: list[Bar] = []


def test_the_bar_shows_the_time_and_never_gets_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm", Bar)
    monkeypatch.setattr("oallama.cli.output.is_terminal", lambda stream: stream is sys.stderr)
    times = iter([100.0, 100.0, 107.5, 130.0])
    with time_bar(20.0, lambda: next(times)) as show:
        show("plan")
        show("load split", expect=24)
        show("", done=42)
    assert bars[-1].seen == ["plan", (0, 20), "load split", (7, 20), (20, 20)]
    assert bars[-1].closed


def test_the_bar_of_a_comparison_has_words_first_and_then_one_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm", Bar)
    with turn_bar(True) as show:
        bar = bars[-1]
        show("plan")
        assert bar.seen == ["plan", (0, 0)] and "turn" not in bar.bar_format
        show("", expect=24)
        assert "turn" in bar.bar_format
        for _ in range(42):  # blocks that are measured again
            show("measure split", done=1)
    shown = [each for each in bar.seen if isinstance(each, tuple)]
    assert {total for _, total in shown[1:]} == {24}
    assert max(n for n, _ in shown) == 24
