"""The plug-in's report: read, added up over processes, asked for."""

import json
import os
import threading
from dataclasses import asdict, replace

import pytest
from worlds import weight

from ggml_bridge.emulated import EmulatedStats
from ggml_bridge.split import MeasuredBlockTimes, SplitMemory, SplitStats
from oallama.core.history import BlockRuns
from oallama.profile.routing import counted, unknown_routing
from oallama.run.plugin_report import (
    PluginReport,
    TensorExpertCounts,
    ask_report,
    punctuality,
    read_report,
    reports_in,
    runs_of,
)

N_EXPERT = 4
EXPERTS = [
    weight(role=role, k=64, n=64, layer=layer, n_expert=N_EXPERT, used=2)
    for layer in (0, 1)
    for role in ("ffn_gate_exps", "ffn_up_exps")
]
OPERATORS = [*EXPERTS, weight(role="output", k=64, n=64)]
EMPTY = PluginReport(1, 0, True, (), (), SplitMemory(0, 0, 0, 0, 0, 0), SplitStats(), SplitStats(), (), (), None)


def text_of(report):
    return json.dumps({"oallama_report": 1, **asdict(report), "a key of later": {}})


def write(folder, report):
    (folder / f"report-{report.pid}.json").write_text(text_of(report), encoding="utf-8")


def test_what_is_written_is_read_and_keys_may_come_to_it(tmp_path):
    told = replace(
        EMPTY,
        request=3,
        problems=("not as planned: x",),
        blocks=(MeasuredBlockTimes("blk.0.ffn_gate.weight", 4, 2, 7, 0.1, 0.2, 0.3, 0.4),),
        experts=(TensorExpertCounts("blk.0.ffn_gate_exps.weight", "single", 5, (4, 3, 2, 1), (5, 4, 0, 0), (9, 0)),),
        emulated=EmulatedStats(late_s=0.5),
    )
    write(tmp_path, told)
    assert read_report(tmp_path / "report-1.json") == told
    assert list(reports_in(tmp_path)) == [told]


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"7", b'{"oallama_report": 2}', b'{"oallama_report": 1}', b"\xff\xfe",
     text_of(EMPTY).replace('"pid": 1', '"pid": "1"').encode(), b"[" * 10000],
)  # fmt: skip
def test_a_file_that_is_no_report_counts_as_none(text, tmp_path):
    assert read_report(tmp_path / "report-1.json") is None
    (tmp_path / "report-1.json").write_bytes(text)
    assert read_report(tmp_path / "report-1.json") is None and list(reports_in(tmp_path)) == []


def test_runs_of_several_starts_are_added_up():
    first, again = (MeasuredBlockTimes("a block", 8, n, 5 * n, 0.1, 0.2, 0.3, 0.4) for n in (1, 2))
    other = replace(first, batch=1)
    assert runs_of([first, other, again]) == [
        BlockRuns("a block", 8, 3, 15, pytest.approx(0.4), pytest.approx(0.6), pytest.approx(1.0)),
        BlockRuns("a block", 1, 1, 5, pytest.approx(0.2), pytest.approx(0.3), pytest.approx(0.5)),
    ]


def test_uses_of_experts_are_a_layers_of_its_first_operator_by_kind_of_batches():
    def told(*uses):
        experts = tuple(TensorExpertCounts(*each, ranks=each[-1], gaps=()) for each in uses)
        return replace(EMPTY, experts=experts).expert_counts(OPERATORS, N_EXPERT)

    found = unknown_routing("f" * 64, N_EXPERT, 2)
    for expert_counts in (
        told(
            ("blk.0.ffn_gate_exps.weight", "single", 5, (4, 3, 2, 1)),
            ("blk.0.ffn_up_exps.weight", "single", 5, (4, 3, 2, 1)),  # the same tokens once more
            ("blk.0.ffn_gate_exps.weight", "several", 7, (14, 0, 0, 0)),
            ("blk.1.ffn_up_exps.weight", "single", 1, (1, 1, 0, 0)),  # the gate lies on the device
            ("blk.9.ffn_gate_exps.weight", "single", 1, (1, 1, 0, 0)),
        ),
        told(("blk.0.ffn_gate_exps.weight", "single", 2, (0, 0, 2, 2))),  # a second start
        told(("blk.0.ffn_gate_exps.weight", "single", 2, (0, 0, 2))),
    ):
        found = counted(found, expert_counts)
    assert [(each.layer, each.n_tokens, each.latest) for each in found.decode] == [
        (0, 7, (4.0, 3.0, 4.0, 3.0)),
        (1, 1, (1.0, 1.0, 0.0, 0.0)),
    ]
    assert [(each.layer, each.n_tokens, each.latest) for each in found.prompt] == [(0, 7, (14.0, 0.0, 0.0, 0.0))]


def test_counts_since_an_earlier_report_leave_out_what_has_not_changed():
    block, told = (
        MeasuredBlockTimes("a block", 8, 1, 5, 0.1, 0.2, 0.3, 0.4),
        TensorExpertCounts("a", "single", 5, (4, 1), (3, 0), (5,)),
    )
    before = replace(EMPTY, stats=SplitStats(n_graphs=3), blocks=(block,), experts=(told,))
    more = replace(block, n_runs=3, n_tokens=15, host_s=0.5), replace(block, batch=1)
    uses = replace(told, n_tokens=8, uses=(6, 2), ranks=(4, 2), gaps=(8,)), replace(told, batches="several")
    after = replace(before, stats=SplitStats(n_graphs=9), single=SplitStats(n_graphs=2), blocks=more, experts=uses)
    done = after.since(before)
    assert (done.stats.n_graphs, done.single.n_graphs) == (6, 2)
    assert done.blocks == (MeasuredBlockTimes("a block", 8, 2, 10, 0.0, pytest.approx(0.3), 0.0, 0.0), more[1])
    assert done.experts == (TensorExpertCounts("a", "single", 3, (2, 1), (1, 2), (3,)), uses[1])
    same = after.since(after)
    assert same.stats == SplitStats() and same.blocks == same.experts == ()


def test_lateness_between_two_reports():
    before, after = (replace(EMPTY, emulated=EmulatedStats(late_s=late_s, n_shared=2)) for late_s in (0.5, 0.6))
    kept = punctuality(before, after, elapsed_s=1.0)
    assert kept is not None and kept.late_share == pytest.approx(0.1) and "late for 10.0%" in kept.fault
    assert punctuality(before, before, 1.0).fault == ""
    assert punctuality(EMPTY, after, 1.0) is None


def test_a_report_is_asked_for_and_nobody_who_answers_costs_no_time(tmp_path):
    assert ask_report(tmp_path, 1, timeout_s=600) is None, "there is no pipe"
    os.mkfifo(tmp_path / "report-1.json.ask")
    assert ask_report(tmp_path, 1, timeout_s=600) is None, "nobody listens"
    pipe = os.open(tmp_path / "report-1.json.ask", os.O_RDWR)
    assert ask_report(tmp_path, 1, timeout_s=0.01) is None, "nobody answers"
    os.read(pipe, 100)

    def answer():
        write(tmp_path, replace(EMPTY, request=int(os.read(pipe, 100))))

    thread = threading.Thread(target=answer)
    thread.start()
    assert ask_report(tmp_path, 1, timeout_s=60).request > 0
    thread.join()
    os.close(pipe)
