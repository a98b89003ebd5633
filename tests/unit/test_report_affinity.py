"""The affinity report as tables, CSV, Markdown and JSON: complete, in order, and adding up."""

import csv
import io
import json
from dataclasses import replace

import pytest
import report_records as records

from oallama.core.types import MemoryLedger
from oallama.report.affinity import (
    AFFINITY_KEYS,
    affinity_csv,
    affinity_markdown,
    affinity_tables,
    as_run,
    compared_table,
    convergence_text,
    fold,
    ledger_table,
    ranked_places,
    report_document,
    report_tables,
    run_text,
    zero_affinity,
    zero_text,
)
from oallama.report.table import plain
from oallama.report.text import PAPERS


def test_every_row_shows_every_operator_in_rank_order():
    report = records.dense()
    rows = affinity_tables(report, every_row=True)[0].rows
    assert [row[0] for row in rows] == [str(rank) for rank in range(1, 226)]
    assert {row[1] for row in rows} == {operator.name for operator in report.operators}


def test_a_many_layer_report_folds_to_one_line_per_kind_and_a_small_one_does_not():
    folded, _ = affinity_tables(records.dense())
    assert len(folded.rows) < 20
    assert "--all shows every operator" in folded.footer[0]
    assert len(affinity_tables(records.dense(n_layer=4))[0].rows) == 29


def test_folding_loses_no_operator_layer_or_byte():
    report = records.moe()
    folds = fold(report.operators)
    assert sum(line.count for line in folds) == len(report.operators)
    assert sum(line.bytes for line in folds) == sum(operator.bytes for operator in report.operators)
    for line in folds:
        members = [
            o
            for o in report.operators
            if (o.role, o.type, o.shape, o.backend) == (line.role, line.type, line.shape, line.backend)
        ]
        assert line.layers == tuple(sorted(o.layer for o in members if o.layer is not None))
        assert line.rank == (min(o.rank for o in members), max(o.rank for o in members))
        assert line.affinity == (min(o.affinity for o in members), max(o.affinity for o in members))
        assert min(o.t_cpu_s for o in members) <= line.t_cpu_s <= max(o.t_cpu_s for o in members)


def test_an_operator_that_the_device_cannot_compute_shows_no_device_time():
    report = records.dense(n_layer=1)
    first = replace(report.operators[0], t_gpu_s=None, benefit_s_per_byte=None, backend="CPU")
    report = replace(report, operators=(first, *report.operators[1:]))
    assert affinity_tables(report)[0].rows[0][4:7:2] == ("-", "-"), "device, saved"
    assert fold(report.operators)[0].t_gpu_s is None
    assert report_document(report)["operators"][0]["t_gpu_s"] is None


def test_the_ledger_adds_up_as_shown():
    report = records.dense()
    memory = report.memory
    rows = {name: int(exact.replace(",", "")) for name, _, exact in ledger_table(report).rows}
    items = [rows[name] for name in ("weights", "KV cache", "compute buffers", "staging", "spare")]
    limit = next(value for name, value in rows.items() if name.startswith("= limit"))
    assert sum(items) == limit == memory.limit
    assert limit + rows["kept free"] == rows["= capacity"] == memory.capacity


def test_without_a_device_there_is_no_ledger_but_the_sentences_stay():
    empty = MemoryLedger(0, 0.9, 0, 0, 5, 0, 0, 0, 0)
    tables = report_tables(replace(records.dense(n_layer=1), memory=empty, baselines=()))
    assert len(tables) == 1
    assert any(sentence.startswith("Predicted: TTFT 412 ms") for sentence in tables[0].footer)


@pytest.mark.parametrize("every_row", [False, True])
@pytest.mark.parametrize("make", [records.dense, records.moe])
def test_the_text_fits_80_columns_and_loses_no_operator(make, every_row):
    report = make()
    tables = report_tables(report, every_row)
    lines = "\n".join(plain(t) for t in tables).splitlines()
    assert max(map(len, lines)) <= 80
    if every_row:
        assert [row[0] for row in tables[0].rows] == [str(row.rank) for row in report.operators]
        return
    ranks = ",".join(row[-1] for row in tables[1].rows).replace(" ", "").replace(",,", ",").split(",")
    spans = [[int(end) for end in part.split("-")] for part in ranks]
    named = [rank for span in spans for rank in range(span[0], span[-1] + 1)]
    assert sorted(named) == [row.rank for row in report.operators], "a list of them, not the least and the greatest"


def test_what_is_saved_has_its_sign_and_the_scale_its_zero():
    report = records.dense(n_layer=2)
    best, worst = report.operators[0], report.operators[-1]

    def benefits(*values):
        return [replace(best, benefit_s_per_byte=value) for value in values]

    assert zero_affinity(benefits(3.0, -1.0)) == 0.25
    assert "would have affinity 0.25" in zero_text(benefits(3.0, -1.0, None))
    assert zero_text(benefits(-1.0, -2.0)) == "No operator saves time on the device."
    assert zero_text(benefits(2.0, 1.0)) == "Every operator saves time on the device."
    slow = replace(worst, t_cpu_s=1e-6, t_gpu_s=1500e-6, t_transfer_s=1e-6)
    fast = replace(best, t_cpu_s=2000e-6, t_gpu_s=0.0, t_transfer_s=-1e-6)
    table = report_tables(replace(report, operators=(fast, slow)))[0]
    saved = [column.heading for column in table.columns].index("saved")
    assert [row[saved] for row in table.rows] == ["+2,001", "-1,500"]


def test_was_it_worth_it():
    table = compared_table(records.dense())
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("stock --fit", "1.20"),
        ("all CPU", "2.00"),
        ("OATO's ranking alone", "1.00"),
    ]
    assert table.rows[1][3] == "1,211 tokens/s"
    assert table.title == "Was it worth it? Predicted for 512 + 128 tokens"
    assert "OATO's ranking alone" in affinity_markdown(records.dense())
    document = report_document(records.dense())
    assert document["baselines"][0]["predicted"]["total_s"] == 5.34
    assert document["measured"]["cpu"] == "Example CPU 1000"


def test_what_it_was_measured_on_is_said():
    (said,) = (s for t in report_tables(records.dense()) for s in t.footer if s.startswith("Measured"))
    assert said == "Measured on Example CPU 1000 beside CUDA0 (Example GPU), 2026-11-21."


def test_the_sentences_say_how_the_iteration_ended():
    assert convergence_text(records.dense()) == "The affinities were stable after 3 iterations."
    assert "ran in a cycle (7 iterations)" in convergence_text(records.moe())


def test_csv_has_every_operator_with_all_digits():
    report = records.moe()
    rows = list(csv.DictReader(io.StringIO(affinity_csv(report))))
    assert list(rows[0]) == list(AFFINITY_KEYS)
    for row, operator in zip(rows, report.operators, strict=True):
        assert row["name"] == operator.name
        assert row["layer"] == ("" if operator.layer is None else str(operator.layer))
        assert float(row["t_cpu_s"]) == operator.t_cpu_s
        assert row["shape"] == "x".join(map(str, operator.shape))


def test_markdown_holds_both_tables_and_the_notes():
    text = affinity_markdown(records.moe())
    assert text.count("| --- |") >= 1
    assert "## Memory of CUDA0" in text
    assert "The KV cache was lowered to 4096 tokens so that it fits." in text


def test_json_has_the_keys_of_the_contract():
    document = json.loads(json.dumps(report_document(records.dense()), allow_nan=False))
    assert {"model", "device", "phase", "iterations", "converged", "operators", "memory"} <= document.keys()
    assert list(document["operators"][0]) == list(AFFINITY_KEYS)
    memory = document["memory"]
    assert set(memory) == {
        *("capacity", "fill", "limit", "weights_gpu", "weights_host", "kv", "compute", "staging", "spare")
    }
    assert document["operators"][0]["rank"] == 1
    assert document["operators"][-1]["layer"] == records.dense().operators[-1].layer


def test_hostile_names_reach_a_terminal_as_text_only():
    text = "\n".join(plain(t) for t in report_tables(records.hostile(), every_row=True))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\x00" not in text
    assert "\\x1b[31m" in text


def test_the_report_of_a_plan_shows_its_splits_and_streams():
    report = records.sliced()
    text = " ".join(" ".join(plain(t) for t in report_tables(report, words=PAPERS)).split())
    assert "a plan of policy scheinfer" in text and "stable after" not in text
    assert text.count("50/25/25 %") == len({(o.role, o.type) for o in report.operators if o.backend == "split"})
    assert "layer by layer, through a ring of 2 slots" in text
    assert "0 of 31, 400 of 512" in text
    rows = list(csv.DictReader(io.StringIO(affinity_csv(report))))
    assert {(row["gg"], row["cg"], row["cc"]) for row in rows if row["backend"] == "split"} == {("0.25", "0.25", "0.5")}
    assert json.loads(json.dumps(report_document(report)))["streaming"]["prefetch"] == "layer"


def test_a_report_without_splits_has_no_table_of_them():
    assert not any(t.title == "Divided operators" for t in report_tables(records.dense()))


def test_the_plan_that_run_uses_says_where_operators_are_and_the_ranking_beside_it():
    report = records.with_run(records.dense(n_layer=8))
    shown = as_run(report)
    assert {row.name: row.rank for row in shown.operators} == {row.name: row.rank for row in report.operators}
    assert {row.backend for row in shown.operators if row.role.startswith("ffn") and (row.layer or 0) < 3} == {"split"}
    folded = fold(shown.operators, ranked_places(report))
    assert sum(line.count for line in folded) == len(report.operators)
    assert {(line.backend, line.ranked) for line in folded} >= {("split", "GPU"), ("CPU", "GPU")}
    text = " ".join(" ".join(plain(t) for t in report_tables(report)).split())
    assert "run oato operator" in text and "Divided operators" in text and "told" in text
    rows = {row[0]: row[-1] for row in compared_table(report).rows}
    assert rows["what run uses: scheinfer"] == "1.00"
    assert rows["OATO's ranking alone"] == "8.90"
    assert "this plan" not in text


@pytest.mark.parametrize(
    ("measured", "policy", "says"),
    [
        (True, "scheinfer", "uses policy scheinfer: it was measured"),
        (False, "scheinfer", "once it was measured to be faster"),
        (False, "fit", "stock llama.cpp's own placement"),
    ],
)
def test_the_report_says_what_run_uses_and_why(measured, policy, says):
    report = records.with_run(records.dense(n_layer=8), measured)
    report = replace(report, run=replace(report.run, policy=policy))
    assert says in run_text(report)
    assert run_text(records.dense()) == ""
    assert "what-if" in run_text(replace(report, device="CPU"))


def test_a_plan_that_is_the_one_of_run_has_one_row():
    report = replace(records.with_run(records.sliced()), policy="scheinfer")
    report = replace(report, run=replace(report.run, predicted=report.predicted))
    assert [row[0] for row in compared_table(report).rows][-1] == "what run uses: scheinfer"
    assert ranked_places(report) is None
    assert not any(row[0] == "policy scheinfer" for row in compared_table(report).rows)


def test_an_operator_that_loses_time_has_no_affinity_in_words():
    report = records.dense(n_layer=1)
    slow = replace(report.operators[0], t_gpu_s=1.0)
    report = replace(report, operators=(slow, *report.operators[1:]))
    row = next(row for row in affinity_tables(report)[0].rows if row[1] == slow.name)
    assert row[-1] == "-"
    assert report_document(report)["operators"][0]["affinity"] == 1.0
