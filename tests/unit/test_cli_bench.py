"""`oallama bench`: what was measured gets out, whatever fails behind it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from bench_cases import NAMES, report, result, series, stock

from oallama.bench.records import ArmResult, BenchTest
from oallama.cli import bench as bench_options
from oallama.cli.bench import ResultOptions
from oallama.cli.main import exit_code

SECONDS = [1.2, 1.21, 1.19, 1.2, 1.22, 1.18]
FOUND = result(
    (ArmResult(stock("stock-cpu", 0), report()), ArmResult(stock("stock-ngl", 99), report(*NAMES, n_gpu_layers=99))),
    series(BenchTest(64, 0), SECONDS, SECONDS),
)


def test_a_result_that_cannot_be_written_is_known_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("oallama.placer.Placer.of_file", lambda *_: pytest.fail("a model was read"))
    monkeypatch.chdir(tmp_path)
    assert exit_code(["bench", "a.gguf", "-o", "no/such/folder/result.json"]) == 2
    assert "there is no folder no" in capsys.readouterr().err


def test_json_goes_to_stdout_whatever_a_file_gets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "result.csv"
    file.write_text(bench_options.text_of(FOUND, "csv"))  # as `save` has done by then
    ResultOptions(("csv", str(file)), True).tell(FOUND)
    assert [row["arm"] for row in json.loads(capsys.readouterr().out)] == ["stock-cpu", "stock-ngl"]
    assert [row["arm"] for row in csv.DictReader(file.read_text().splitlines())] == ["stock-cpu", "stock-ngl"]
    ResultOptions(("csv", str(file)), False).tell(FOUND)
    assert capsys.readouterr().out == ""
