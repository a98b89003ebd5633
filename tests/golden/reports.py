"""The files of tests/golden/report: reports of made-up records as text, JSON, SVG and HTML.

    PYTHONPATH=tests/unit:tests python tests/golden/reports.py

writes them anew; `git diff` shows what has changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

import placement_records
import report_records as records
from worlds import HOST, SMALL, World, model_info, placed, some_plan, weights_of

from oallama.core.history import BlockRuns
from oallama.core.types import MemoryBreakdown, StreamSettings, Workload
from oallama.core.units import MIB
from oallama.device.cards import preset
from oallama.device.machines import machine_of
from oallama.placer.described import alone_and_beside
from oallama.plan.plan import Plan
from oallama.profile.described import host_profile
from oallama.report.html import affinity_html
from oallama.report.operators import AffinityReport, report_document, report_tables
from oallama.report.placement_page import placement_document, placement_html
from oallama.report.plan import plan_sentences
from oallama.report.simulate import simulate_svg, simulate_tables
from oallama.report.table import Table, plain
from oallama.report.what_if import what_if_document, what_if_table

FOLDER = Path(__file__).parent / "report"
TESTBED = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "testbeds" / "scheinfer-a.json"


def text_of(*tables: Table) -> str:
    return "\n".join(plain(table) for table in tables)


def json_of(document: Any) -> str:
    return folded(document) + "\n"


def folded(value: Any, margin: str = " ") -> str:
    """JSON with what fits in a line on one."""
    line = json.dumps(value, allow_nan=False, ensure_ascii=False)
    if len(margin) + len(line) <= 120 or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {folded(each, margin + ' ')}" for key, each in value.items()]
        return "{\n" + ",\n".join(margin + row for row in rows) + "\n" + margin[1:] + "}"
    rows = [folded(each, margin + " ") for each in value]
    return "[\n" + ",\n".join(margin + row for row in rows) + "\n" + margin[1:] + "]"


def changes(base: str, text: str) -> str:
    """Lines of it that are not as in another report."""
    return "\n".join(unified_diff(base.splitlines(), text.splitlines(), n=0, lineterm="")) + "\n"


def body_of(page: str) -> str:
    """Without style, scripts and their policy, which other tests read; an element a line."""
    page = re.sub(r"(<(style|script)[^>]*>).*?(</\2>)", r"\1\3", page, flags=re.DOTALL)
    page = re.sub(r'(http-equiv="Content-Security-Policy" content=")[^"]*', r"\1", page)
    return re.sub(r"\s*\n\s*", "\n", page)


#
# affinity-report
#


def mixed() -> AffinityReport:
    """Report with every kind of row: the plan's own cuts, hot experts, an operator that the device cannot compute."""
    of = records.moe(n_layer=2)
    rows = list(of.operators)
    rows[0] = replace(
        rows[0], t_gpu_s=None, saved_s=None, benefit_s_per_byte=None, affinity=0.0, placement=placed(rows[0].name)
    )
    rows[1] = replace(rows[1], placement=placed(rows[1].name, gg=0.25, cg=0.25))
    expert = next(i for i, row in enumerate(rows) if row.role == "ffn_up_exps")
    rows[expert] = replace(rows[expert], placement=placed(rows[expert].name, hot=(0, 1, 2)))
    return records.with_plan(
        replace(of, operators=tuple(rows), of_plan=True), operators=tuple(row.placement for row in rows),
        policy="scheinfer", token_assignment=((31, 0), (512, 400)),
        streaming=StreamSettings(n_slots=2, prefetch="layer"),
    )  # fmt: skip


def ran(policy: str = "scheinfer", measured: bool = False) -> AffinityReport:
    report = records.with_run(records.dense(n_layer=4), measured)
    return replace(report, run=replace(report.run, plan=replace(report.run.plan, policy=policy)))


NOTHING = MemoryBreakdown(
    capacity=0, fill=0.9, limit=0, weights_gpu=0, weights_host=5, kv=0, compute=0, staging=0, spare=0
)


def affinities() -> Iterator[tuple[str, str]]:
    yield "affinity-dense.txt", text_of(*report_tables(records.dense()))
    yield "affinity-moe.txt", text_of(*report_tables(records.moe()))
    yield "affinity-all.txt", text_of(*report_tables(mixed(), every_row=True))
    yield "affinity-run.txt", (run := text_of(*report_tables(ran())))
    yield "affinity-run-measured.diff", changes(run, text_of(*report_tables(ran(measured=True))))
    yield "affinity-run-stock.diff", changes(run, text_of(*report_tables(ran("fit"))))
    on_cpu = records.with_plan(replace(ran(), device="CPU", baselines=()), memory=NOTHING)
    yield "affinity-cpu.diff", changes(run, text_of(*report_tables(on_cpu)))
    yield "affinity-hostile.txt", text_of(*report_tables(records.hostile(), every_row=True))
    yield "affinity.json", json_of(report_document(mixed()))
    yield "affinity.html", body_of(affinity_html(mixed()))
    alone, beside = (body_of(affinity_html(report)) for report in (replace(ran(), run=None), ran()))
    yield "affinity-run-html.diff", changes(alone, beside)
    nothing = records.report(records.model(n_layer=0), [("output", None, "output", "F16", (8, 8, 1))], capacity=0)
    yield "affinity-empty.html", body_of(affinity_html(records.with_plan(replace(nothing, operators=()), operators=())))


#
# plans
#

OPERATORS = list(weights_of(model_info(n_layer=4, n_embd=256)))
TABLE = ((31, 0), (32, 9), (64, 40), (128, 90), (256, 190), (300, 220), (512, 400))


def cut() -> Plan:
    """Layers 0 to 2 cut alike, layer 3 on the host, half of the output streamed, attention on the device."""
    shares: dict[int | None, tuple[float, float]] = {3: (0.0, 0.0), None: (0.5, 0.5)}
    places = (
        placed(op.name, gg=1.0)
        if op.role.startswith("attn")
        else placed(op.name, gg=shares.get(op.layer, (0.25, 0.25))[0], cg=shares.get(op.layer, (0.25, 0.25))[1])
        for op in OPERATORS
    )
    return some_plan(places, device="RPC0", policy="scheinfer", n_gpu_layers=5)


def plans() -> Iterator[tuple[str, str]]:
    """Sentences of `oallama plan` and `run`."""
    still = some_plan([placed(op.name, gg=0.25) for op in OPERATORS])
    hot = [replace(p, gg=0.0, cc=1.0, cg=0.0, hot_experts=(0, 2, 5)) if "blk.1.ffn" in p.name else p
           for p in cut().operators]  # fmt: skip
    told = {
        "a plan that streams": cut(),
        "that shares out tokens": replace(
            cut(), token_assignment=TABLE, streaming=StreamSettings(n_slots=1, prefetch="layer", kept_twice=True)
        ),
        "that streams for prompts alone": replace(still, token_assignment=((64, 32),)),
        "that streams nothing": still,
        "with hot experts": replace(cut(), operators=tuple(hot)),
        "of the CPU": some_plan([placed(op.name) for op in OPERATORS], device="none"),
    }
    lines = []
    for name, plan in told.items():
        lines += [f"# {name}", *plan_sentences(plan, OPERATORS), ""]
    yield "plan.txt", "\n".join(lines)


def placements() -> Iterator[tuple[str, str]]:
    state = {"status": "ready", "on_device": True, "said": None, "restarts": 0, "pid": 1, "ready_at": 1.0}
    runs = [BlockRuns("blk.1.ffn_gate.weight", batch=1, n_runs=2, n_tokens=2, cpu_s=6.0, wait_s=3.0, other_s=1.0)]
    served = placement_records.served(n_layer=2)
    yield "placement.json", json_of(placement_document(served, state, {"processing": 1}, runs))
    yield "placement.html", body_of(placement_html(served))
    yield "placement-cpu.json", json_of(placement_document(placement_records.on_cpu(served), state, None))
    yield "placement-cpu.html", body_of(placement_html(placement_records.on_cpu(served)))


#
# what is predicted for machines that are not here
#


def simulations() -> Iterator[tuple[str, str]]:
    machine = machine_of(str(TESTBED))
    workload = Workload(n_prompt=64, n_gen=32, n_ctx=512)
    world = World(model=SMALL, host=machine.host, card=machine.card, share=0.3, workload=workload)
    plan = world.plan("flexgen")
    noted = replace(plan, notes=("a note",))
    simulation = world.simulate(plan)
    yield "simulate.txt", text_of(*simulate_tables(SMALL, noted, machine, simulation))
    yield "simulate.svg", simulate_svg(SMALL, noted, machine, simulation)


def cards() -> Iterator[tuple[str, str]]:
    workload = Workload(n_prompt=512, n_gen=64, n_ctx=1024)
    world = World(model=replace(SMALL, name="<b>&\x1b"), workload=workload)
    placer = world.alone(host_profile(HOST, SMALL, world.operators, (1, 32, 512)))
    chosen = [replace(preset("rtx3060"), memory_bytes=n * MIB) for n in (16, 1000)]
    alone, beside = alone_and_beside(placer, [(card,) for card in chosen], workload)
    rows = list(beside)
    yield "what-if.txt", text_of(what_if_table(placer.model, workload, alone, rows))
    yield "what-if-policy.txt", text_of(what_if_table(placer.model, workload, alone, rows, "hetegen", HOST))
    document = what_if_document(placer.model, workload, alone, rows, HOST)
    yield "what-if.json", json_of(rounded(document))


def rounded(value: Any) -> Any:
    """Predictions of plans in four digits, which another order of sums does not change."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


MADE: tuple[Callable[[], Iterator[tuple[str, str]]], ...] = (
    affinities, plans, placements, simulations, cards,
)  # fmt: skip

if __name__ == "__main__":
    from oallama.planner.runtime import RUNTIME_BYTES

    RUNTIME_BYTES["CUDA"] = 0  # as in the fixture small_cards
    for old in FOLDER.iterdir():
        old.unlink()
    for made in MADE:
        for name, text in made():
            (FOLDER / name).write_text(text, encoding="utf-8")
