"""scripts/real_card machines: rows of tables as runs, data sheets as machines, and the page as its results."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from card_fit import fit
from card_machines import (
    MODELS,
    PAGE,
    PICTURE,
    RESULTS,
    SHEETS,
    Panels,
    errors,
    fitted,
    overflows,
    page,
    read_runs,
)
from card_model import DataSheet, Predictor, PublishedRun, Types, by_data_sheet, rates, read_models
from shared import read_toml, record

HEAD = "machine,model,quant,kv,build,ngl,ncmoe,ncffn,context,pp_test,pp_tps,tg_test,tg_tps,flag,source\n"
SHEET = DataSheet("a card", "rtx3090", dram_gb_per_s=50, cores_ghz=40)


def test_the_page_and_the_picture_are_what_the_results_give() -> None:
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(document)
    picture = PICTURE.read_text(encoding="utf-8")
    assert picture == Panels("Measured and predicted tokens per second of each machine", document).svg()
    assert len(list(ElementTree.fromstring(picture).iter())) > 500


def test_every_machine_has_a_data_sheet_and_every_row_its_report() -> None:
    sheets = {key: record(DataSheet, each, key) for key, each in read_toml(SHEETS).items()}
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert list(document) == list(sheets) and len(sheets) == 26
    for row in document.values():
        assert all(point["source"] and point["measured"] > 0 < point["predicted"] for point in row["points"])


def test_rows_as_runs(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        HEAD
        + "A,Qwen3-4B,Q4_K_M,f16,b1 ub2048,99,,,4096,pp512,100,tg64,10,,x\n"
        + "A,Qwen3-4B,Q4_K_M,f16,b1,,,30,65536,server@22k,100,server,10,ub1024,x\n"
        + "A,Qwen3-4B,Q4_K_M,f16,b1,20,,,,server 1470 tok,100,server,10,,x\n"
        + "A,Qwen3-4B,Q4_K_M,f16,b1,20,,,,,,tg,10,spill,x\n"
        + "A,Qwen3-4B,Q4_K_M,f16,b1,20,,,,pp512,100,tg64,10,ub512 branch,x\n"
    )
    first, second, third, fourth = read_runs(table, {"A": SHEET})
    assert (first.ubatch, first.n_prompt, first.n_gen, first.depth, first.after_prompt) == (2048, 512, 64, 0, False)
    assert (second.ngl, second.ncffn, second.n_prompt, second.ubatch) == (99, 30, 22000, 1024)
    assert (third.n_prompt, third.after_prompt) == (1470, True)
    assert (fourth.n_prompt, fourth.flag, fourth.prompt_tps) == (0, "spill", 0)
    assert read_runs(table, {"A": replace(SHEET, context_is_depth=True)})[0].depth == 4096


def test_types_of_a_mix() -> None:
    mix = Types("Q4_K", more="Q6_K", output_type="Q8_0", attention="Q8_0")
    more = [layer for layer in range(32) if mix.of("ffn_down", layer, 32) == "Q6_K"]
    assert more[:5] == [0, 1, 2, 3, 6] and more[-4:] == [28, 29, 30, 31] and len(more) == 16
    assert (mix.of("ffn_up", 0, 32), mix.of("attn_q", 9, 32), mix.of("ffn_gate_inp", 0, 32)) == ("Q4_K", "Q8_0", "F32")


def test_a_third_of_the_rows_tells_the_others() -> None:
    models = read_models(MODELS)
    asked = [PublishedRun("Qwen3-4B Q4_K_M", 0, ngl, 512, None, 512, 128, 1, 1, today=True) for ngl in range(0, 32, 4)]
    true = by_data_sheet(replace(SHEET, dram_gb_per_s=80))
    predictor = Predictor(true, models, asked)
    runs = [replace(run, eval_tps=predictor(run).eval_tps) for run in asked]
    start = by_data_sheet(SHEET)
    machine, left = fitted(runs, models, start, "eval", fit)
    assert len(left) == 5
    assert rates(machine, ["host.bytes_per_s"])["host.bytes_per_s"] == pytest.approx(true.host.bytes_per_s, rel=0.01)
    before, after = (errors(left, Predictor(one, models, runs), "eval") for one in (start, machine))
    assert before is not None and after is not None and after.worst < 0.01 < before.median


def test_what_is_more_than_the_card_holds() -> None:
    models, machine = read_models(MODELS), by_data_sheet(SHEET)
    run = PublishedRun("Qwen2.5-Coder-32B Q4_K_M", 0, 99, 512, None, 512, 128, 1, 1, today=True)
    assert not overflows(run, models, machine)
    assert overflows(replace(run, context=65536), models, machine)
