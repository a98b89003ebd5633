"""What a user is told to type, and the bars of what is measured."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from oallama.cli import gate as cli_gate
from oallama.cli.output import _shown_on, time_bar
from oallama.core.options import Options
from oallama.core.types import Workload
from oallama.core.units import MIB


def test_what_to_type_measures_what_was_run() -> None:
    asked = Options(device="emulated:rtx3060,link=12", vram=300 * MIB, threads=2, n_ctx=8192, type_k="q8_0")
    placer: Any = SimpleNamespace(model=SimpleNamespace(path="/my models/m.gguf"), options=asked)
    assert cli_gate.tuning(placer, Workload(19, 24, 8192, n_past=100)) == (
        "`oallama tune '/my models/m.gguf' --device emulated:rtx3060,link=12 --vram 300MiB -t 2 -ctk q8_0 -p 19 -n 24 "
        "-c 8192 -d 100`"
    )


def test_the_bar_shows_the_time_and_never_gets_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    def bar(**options: Any) -> Any:
        bars.append(SimpleNamespace(total=options["total"], n=0, closed=False, seen=[]))
        bars[0].set_description_str = lambda doing, refresh: bars[0].seen.append(doing)
        bars[0].refresh = lambda: bars[0].seen.append((bars[0].n, bars[0].total))
        bars[0].close = lambda: setattr(bars[0], "closed", True)
        return bars[0]

    monkeypatch.setattr("tqdm.tqdm", bar)
    monkeypatch.setattr("oallama.cli.output.is_terminal", lambda stream: stream is sys.stderr)
    times = iter([100.0, 100.0, 107.5, 130.0])
    with time_bar(20.0, lambda: next(times)) as show:
        show("plan")
        show("load split", expect=24)
        show("", done=42)
    assert bars[0].seen == ["plan", (0, 20), "load split", (7, 20), (20, 20)]
    assert bars[0].closed


def test_the_bar_of_a_comparison_has_words_first_and_then_one_total() -> None:
    shown: list[tuple[int, int]] = []
    bar = SimpleNamespace(total=0, n=0, bar_format="words", set_description_str=lambda *_, **__: None)
    bar.refresh = lambda: shown.append((bar.n, bar.total))
    show = _shown_on(bar)
    show("plan")
    assert (shown, bar.bar_format) == ([(0, 0)], "words")
    show("", expect=24)
    assert "turn" in bar.bar_format
    for _ in range(42):  # blocks that are measured again
        show("measure split", done=1)
    assert {total for _, total in shown[1:]} == {24}
    assert max(n for n, _ in shown) == 24
