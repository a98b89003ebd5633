"""What a user is told while the gate measures: what, why, how long, once, and how to skip it."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from oallama.bench.records import StockPlacement
from oallama.cli import gate as cli_gate
from oallama.cli.bars import _shown_on, time_bar
from oallama.cli.placement import PlacementOptions
from oallama.core.errors import DeviceError
from oallama.core.options import Options
from oallama.core.types import Predicted, Workload
from oallama.core.units import MIB
from oallama.gate.run import Gated
from oallama.gate.verdict import Race, Verdict


def verdict(*races: Race) -> Verdict:
    return Verdict({}, "stock-fit", StockPlacement(0), (), races, 0.5, 12.0)


def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measures: bool, found: Verdict
) -> list[str]:
    plan: Any = SimpleNamespace()

    def gated_plan(placer: Any, load: Any, progress: Any, begin: Any, budget_s: float | None, **_: Any) -> Gated:
        progress("plan")
        if measures:
            begin(found, 42.0)
            for doing in ("load split", "measure split"):
                progress(doing, done=1, expect=7)
        return Gated(plan, found, not measures, 180.0)

    monkeypatch.setattr("oallama.gate.run.gated_plan", gated_plan)
    assert cli_gate.measured(UNMEASURED, LOAD).plan is plan
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


def test_without_a_terminal_too_it_is_said_once_what_is_measured_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why, found = told(monkeypatch, capsys, True, verdict())
    for part in ("measuring the best plan against stock llama.cpp", "so that", "up to 42 s", "once", "--no-gate"):
        assert part in why
    assert found.startswith("oallama: using stock-fit's placement")


def test_a_verdict_is_one_line_and_where_it_is_open_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(told(monkeypatch, capsys, False, verdict())) == 1
    (line,) = told(monkeypatch, capsys, False, verdict(Race("split", 1.5)))
    assert "split is predicted 1.5× as fast" in line and line.endswith(f"{TUNE} (3 min) makes sure")


def at_run(monkeypatch: pytest.MonkeyPatch, known: Gated | None, **changes: Any) -> tuple[str, bool, list[str]]:
    """(plan, whether nothing was measured that could tell of a faster one, what was done) of a run."""
    done: list[str] = []

    def doing(name: str, result: Any) -> Any:
        return lambda *_, **__: (done.append(name), result)[1]

    plans = {name: SimpleNamespace(name=name, notes=(), operators=()) for name in ("stock", "gate", "policy")}
    monkeypatch.setattr("oallama.gate.run.remembered", doing("remembered", known))
    monkeypatch.setattr("oallama.gate.run.stock_at_once", doing("stock", plans["stock"]))
    monkeypatch.setattr("oallama.cli.placement.measured", doing("measured", SimpleNamespace(plan=plans["gate"])))
    policy: Any = SimpleNamespace(
        keeps_to_cpu=lambda placer: False, is_auto=True, plan=doing("planned", plans["policy"])
    )
    placer: Any = SimpleNamespace(operators=(), routing=None)
    options: dict[str, Any] = {"gate": True, "refresh_gate": False, "tune": "after", **changes}
    asked = PlacementOptions(plan_file=None, policy=policy, options=Options(), profile=None, **options)
    plan, unknown = asked.made_plan(placer, placer)
    return plan.name, unknown, done  # type: ignore[attr-defined]


def test_without_a_verdict_the_answer_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert at_run(monkeypatch, None) == ("stock", True, ["remembered", "stock"])
    assert at_run(monkeypatch, None, tune="never") == ("stock", True, ["remembered", "stock"])
    assert at_run(monkeypatch, None, tune="before") == ("gate", False, ["measured"])
    assert at_run(monkeypatch, None, refresh_gate=True) == ("gate", False, ["measured"])
    assert at_run(monkeypatch, None, gate=False) == ("policy", False, ["planned"])


def test_with_a_verdict_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(name="known", notes=(), operators=())
    known = Gated(plan, verdict(), True)
    for tune in ("after", "never"):
        assert at_run(monkeypatch, known, tune=tune) == ("known", False, ["remembered"])


UNMEASURED: Any = SimpleNamespace(known_profile=None, model=SimpleNamespace(path="m.gguf"), options=Options())
LOAD = Workload(19, 24, 4096)
TUNE = "`oallama tune m.gguf -p 19 -n 24`"


@pytest.mark.parametrize(
    ("best_s", "says"),
    [(None, "not known, as this machine was not measured"), (2.0, "at most 1.50 times as fast"), (2.9, "5% faster")],
)
def test_what_tuning_is_predicted_to_gain_is_one_line(
    best_s: float | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    placer: Any = UNMEASURED
    if best_s is not None:
        monkeypatch.setattr("oallama.place.explain.physical_bound", lambda *_: Predicted(1.0, 0.1, best_s))
        placer = SimpleNamespace(
            known_profile="measured",
            model=UNMEASURED.model,
            options=Options(),
            memory=None,
            problem_for=lambda plan: None,
            simulate=lambda plan, load: SimpleNamespace(predicted=Predicted(1.0, 0.1, 3.0)),
        )
    monkeypatch.setattr("oallama.gate.run.unsettled", lambda placer, load: None)
    line = cli_gate.tuning_gain(placer, LOAD, placer)
    assert says in line and line.endswith(f"{TUNE}, or --tune before") and "\n" not in line


def test_a_verdict_that_is_open_says_what_tuning_is_predicted_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oallama.gate.run.unsettled", lambda placer, load: (verdict(Race("split", 1.5)), 180.0))
    line = cli_gate.tuning_gain(UNMEASURED, LOAD, UNMEASURED)
    assert line.endswith(f"split is predicted 1.5× as fast: {TUNE} (3 min) makes sure")


def test_what_to_type_measures_what_was_run() -> None:
    asked = Options(device="emulated:rtx3060,link=12", vram=300 * MIB, threads=2, n_ctx=8192, type_k="q8_0")
    placer: Any = SimpleNamespace(model=SimpleNamespace(path="/my models/m.gguf"), options=asked)
    assert cli_gate.tuning(placer, Workload(19, 24, 8192, n_past=100)) == (
        "`oallama tune '/my models/m.gguf' --device emulated:rtx3060,link=12 --vram 300MiB -t 2 -ctk q8_0 -p 19 -n 24 "
        "-c 8192 -d 100`"
    )


def after_an_answer(monkeypatch: pytest.MonkeyPatch, ends: BaseException, begun: bool = False) -> None:
    def gated_plan(placer: Any, load: Any, begin: Any, most_s: float, **_: Any) -> None:
        assert most_s == cli_gate.LONGEST_S
        if begun:
            begin(verdict(Race("split", 1.5)), 42.0)
        raise ends

    monkeypatch.setattr("oallama.gate.run.gated_plan", gated_plan)
    monkeypatch.setattr(cli_gate, "ended_by_key", contextlib.nullcontext)
    cli_gate.tune_after(UNMEASURED, LOAD)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (KeyboardInterrupt(), f"the next run or {TUNE} goes on from here"),
        (DeviceError("lost"), "measuring failed: lost"),
        (OSError(28, "No space left on device"), "measuring failed: [Errno 28] No space left"),
    ],
)
def test_whatever_ends_the_measuring_after_an_answer_the_answer_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ends: BaseException, says: str
) -> None:
    after_an_answer(monkeypatch, ends)
    first, last = capsys.readouterr().err.splitlines()
    assert "any key ends it" in first
    assert says in last


def test_a_key_ends_the_measuring_with_what_is_predicted_and_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after_an_answer(monkeypatch, KeyboardInterrupt(), begun=True)
    _, how_long, last = capsys.readouterr().err.splitlines()
    assert "up to 42 s" in how_long and "any key ends it" in how_long
    assert last.endswith(f"split is predicted 1.5× as fast: {TUNE} (42 s) makes sure")


def test_a_signal_that_ends_the_command_ends_it_while_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_gate, "asked_to_end", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        after_an_answer(monkeypatch, KeyboardInterrupt())


def test_ctrl_c_before_it_is_measured_fails_no_run_either(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def talk(sentence: str) -> None:
        said.append(sentence)
        if len(said) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli_gate, "talk", talk)
    try:
        cli_gate.tune_after(UNMEASURED, LOAD)
    except KeyboardInterrupt:  # which would end the tests
        pytest.fail("the run was interrupted")
    assert "goes on from here" in said[-1]


def test_the_bar_shows_the_time_and_never_gets_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    def bar(**options: Any) -> Any:
        bars.append(SimpleNamespace(total=options["total"], n=0, closed=False, seen=[]))
        bars[0].set_description_str = lambda doing, refresh: bars[0].seen.append(doing)
        bars[0].refresh = lambda: bars[0].seen.append((bars[0].n, bars[0].total))
        bars[0].close = lambda: setattr(bars[0], "closed", True)
        return bars[0]

    monkeypatch.setattr("tqdm.tqdm", bar)
    monkeypatch.setattr("oallama.cli.bars.is_terminal", lambda stream: stream is sys.stderr)
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
