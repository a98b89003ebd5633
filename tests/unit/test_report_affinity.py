"""What holds for every affinity report, as tables and JSON. What they look like: tests/golden/report."""

from dataclasses import replace

import pytest
import report_records as records

from oallama.report.layout import operator_rows
from oallama.report.operators import (
    affinity_tables,
    compared_table,
    fold,
    memory_table,
    ranked_places,
    report_document,
    zero_text,
)


def test_a_many_layer_report_folds_to_one_line_per_kind_and_a_small_one_does_not():
    folded, _ = affinity_tables(records.dense())
    assert len(folded.rows) < 20
    every = affinity_tables(records.dense(), every_row=True)[0]
    assert [row[0] for row in every.rows] == [str(rank) for rank in range(1, 226)]
    assert len(affinity_tables(records.dense(n_layer=4))[0].rows) == 29


@pytest.mark.parametrize("make", [records.dense, records.moe])
def test_folding_loses_no_operator_layer_or_byte(make):
    report = make()
    for line in fold(report.operators):
        kind = (line.role, line.type, line.shape, line.backend)
        members = [o for o in report.operators if (o.role, o.type, o.shape, o.backend) == kind]
        assert (line.count, line.bytes) == (len(members), sum(o.bytes for o in members))
        assert line.layers == tuple(sorted(o.layer for o in members if o.layer is not None))
        assert (line.ranks[0], line.ranks[-1]) == (min(o.rank for o in members), max(o.rank for o in members))
        assert line.affinity == (min(o.affinity for o in members), max(o.affinity for o in members))
        assert min(o.t_cpu_s for o in members) <= line.t_cpu_s <= max(o.t_cpu_s for o in members)
    ranks = ",".join(row[-1] for row in affinity_tables(report)[1].rows).replace(" ", "").replace(",,", ",").split(",")
    spans = [[int(end) for end in part.split("-")] for part in ranks]
    named = [rank for span in spans for rank in range(span[0], span[-1] + 1)]
    assert sorted(named) == [row.rank for row in report.operators], "a list of ranks, not the least and the greatest"


def test_the_memory_breakdown_adds_up_as_shown():
    memory = records.dense().plan.memory
    rows = {name: int(exact.replace(",", "")) for name, _, exact in memory_table(records.dense()).rows}
    items = [rows[name] for name in ("weights", "KV cache", "compute buffers", "staging", "spare")]
    limit = next(value for name, value in rows.items() if name.startswith("= limit"))
    assert sum(items) == limit == memory.limit
    assert limit + rows["kept free"] == rows["= capacity"] == memory.capacity


@pytest.mark.parametrize(
    ("benefits", "said"),
    [
        ((3.0, -1.0, None), "Affinity 0.25 would mean that no time is saved"),
        ((-1.0, -2.0), "No operator saves time on the device."),
        ((2.0, 1.0), "Every operator saves time on the device."),
    ],
)
def test_the_scale_has_its_zero(benefits, said):
    best = records.dense(n_layer=1).operators[0]
    assert said in zero_text([replace(best, benefit_s_per_byte=value) for value in benefits])


def test_a_plan_that_is_the_one_of_run_has_one_row():
    report = records.with_plan(replace(records.with_run(records.dense(n_layer=8)), of_plan=True), policy="scheinfer")
    report = replace(report, run=replace(report.run, plan=report.plan))
    assert [row[0] for row in compared_table(report).rows] == ["stock --fit", "all CPU", "what run uses: scheinfer"]
    assert ranked_places(report) is None


def test_what_an_operator_saves_is_shown_as_the_ranking_has_it():
    """Not computed a second time: another formula of it shows."""
    report = records.dense()
    report = replace(report, operators=tuple(replace(row, saved_s=42e-6) for row in report.operators))
    for table in (affinity_tables(report, every_row=True)[0], affinity_tables(report)[0]):
        assert {row[-2] for row in table.rows} == {"+42.0"}
    assert {row.cells[9] for row in operator_rows(report.operators, report.places)} == {"+42.0"}
    assert {row["saved_s"] for row in report_document(report)["operators"]} == {42e-6}


def test_an_operator_that_loses_time_has_no_affinity_in_words():
    report = records.dense(n_layer=1)
    slow = replace(report.operators[0], saved_s=-1.0)
    report = replace(report, operators=(slow, *report.operators[1:]))
    row = next(row for row in affinity_tables(report)[0].rows if row[1] == slow.name)
    assert row[-1] == "-" and row[6].startswith("-")
    assert report_document(report)["operators"][0]["affinity"] == 1.0
