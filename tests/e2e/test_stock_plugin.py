"""What the plug-in does in the pinned llama.cpp's own programs beyond splitting: layouts of the CPU, a second back end,
the report."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e.forced import attention, ffn, forced
from e2e.logits import assert_greedy
from e2e.stock import LlamaServer, environment, llama_server, needs_programs, program
from e2e.stock_plans import MODEL
from processes import here

from ggml_bridge.library import find_built, find_plugin
from oallama.core.types import PLAIN_LAYOUT, SPLIT_LAYOUT, Operator
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.run.plugin_report import PluginReport, ask_report, punctuality, reports_in
from oallama.run.weight_places import usable_plan

pytestmark = needs_programs

CARD = "emulated:rtx3060-12,vram=64MiB,scale=9,values=real"
PROMPT, ANSWER = "Once upon a time", 16


def exported(plan: Plan, folder: Path, target: str = "llama-server") -> str:
    """A plan's command line, as `export` writes it in two steps."""
    file = folder / "plan.json"
    plan.save(file)
    here("export", file, "--to", "plugin", "-o", file.with_suffix(".oallama"))
    return here("export", file, "--to", target).stdout.strip()


@pytest.fixture(scope="module")
def mixed() -> Plan:
    """On the emulated card: halves of all FFNs, the attention of three layers, the output. In host memory, the
    attention of a layer in each layout that the CPU has, and of one in that which llama.cpp prefers."""
    layouts = [*load_bridge().cpu_layouts(), None]

    def whole(operator: Operator) -> bool:
        return not is_ffn(operator) and (operator.layer is None or operator.layer >= len(layouts))

    case = forced(MODEL, CARD, ffn(0.5), whole=whole, probe=False)
    placed = tuple(
        replace(placement, layout=layouts[operator.layer])
        if attention(operator) and operator.layer is not None and operator.layer < len(layouts)
        else placement
        for operator, placement in zip(case.placer.operators, case.plan.operators, strict=True)
    )
    return replace(case.plan, operators=placed, workload=replace(case.plan.workload, n_prompt=32))


@pytest.fixture(scope="module")
def server(mixed: Plan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlamaServer, Path]]:
    folder = tmp_path_factory.mktemp("mixed")
    settings = {"OALLAMA_REPORT": str(folder / "report-%p.json")}
    with llama_server(exported(mixed, folder) + " -v", folder / "log", **settings) as made:
        yield made, folder


def pid_of(folder: Path) -> int:
    (pipe,) = folder.glob("report-*.json.ask")
    return int(pipe.name.split("-")[1].split(".")[0])


def asked(folder: Path) -> PluginReport:
    report = ask_report(folder, pid_of(folder), timeout_s=60)
    assert report is not None
    return report


def test_each_operator_is_in_the_layout_that_the_plan_says(server: tuple[LlamaServer, Path], mixed: Plan) -> None:
    found = dict(re.findall(r"tensor (\S+) .* buffer type overridden to (\S+)", server[0].said))
    usable, _ = usable_plan(mixed, Placer.load(MODEL, device="none").operators)
    for placement in usable.operators:
        if placement.gg < 1:
            expected = SPLIT_LAYOUT if placement.gg else placement.layout
            pinned = "Emulated0_Host"  # plain memory, as llama.cpp has it beside a card
            assert found[placement.name].replace(pinned, PLAIN_LAYOUT) == expected, placement
    assert {placement.layout for placement in usable.operators if placement.gg == 0} == set(load_bridge().cpu_layouts())
    held = set(re.findall(r"(\S+) model buffer size =", server[0].said))
    assert {"OALLAMA_Split", "Emulated0", *load_bridge().cpu_layouts()} - {PLAIN_LAYOUT} <= held


def test_it_says_what_the_cpu_alone_says(server: tuple[LlamaServer, Path]) -> None:
    assert_greedy(server[0].complete(prompt=PROMPT, n_predict=ANSWER), MODEL, PROMPT, ANSWER)


def test_the_report_is_written_on_request_and_when_the_model_is_freed(
    server: tuple[LlamaServer, Path], mixed: Plan
) -> None:
    made, folder = server
    before = asked(folder)
    made.complete(prompt=PROMPT, n_predict=ANSWER)
    after = asked(folder)
    assert after.usable and not after.problems
    n_layer = sum(is_ffn(o) for o in Placer.load(MODEL, device="none").operators) // 3
    assert after.stats.n_graphs - before.stats.n_graphs >= n_layer * ANSWER
    halves = sum(s.device_bytes for s in after.slices)
    assert halves and after.memory.device_weights == pytest.approx(halves, rel=0.01)
    names = {placement.name for placement in mixed.operators if 0 < placement.gg < 1}
    assert {s.name for s in after.slices} == names
    assert all(s.loaded and s.cc and s.gg for s in after.slices)
    assert sum(block.n_tokens for block in after.blocks) > sum(block.n_tokens for block in before.blocks)
    assert after.emulated is not None and after.emulated.n_graphs > 0
    assert punctuality(before, after, 1.0) is not None
    made.end()
    (last,) = reports_in(folder)
    assert last.stats == after.stats, "nothing was computed since"
    assert last.memory.device_weights == after.memory.device_weights, "as long as it was held"


def bench(line: str, *more: str, **settings: str) -> list[dict[str, Any]]:
    command = ["bash", "-c", f"{line} -r 1 -t 1 -o json {' '.join(more)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
                          env=environment(**settings))  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))


def test_llama_bench_runs_it_beside_the_emulated_card_and_leaves_a_report(mixed: Plan, tmp_path: Path) -> None:
    rows = bench(exported(mixed, tmp_path, "llama-bench"), OALLAMA_REPORT=str(tmp_path / "report-%p.json"))
    assert all({"OALLAMA", "Emulated"} <= set(row["backends"].split(",")) for row in rows)
    (report,) = reports_in(tmp_path)
    n_split = sum(0 < placement.gg < 1 for placement in mixed.operators)
    assert report.usable and len(report.slices) == n_split and report.stats.n_graphs > 0
    assert report.emulated is not None and report.emulated.bytes_in > 0


def test_a_cut_that_shrank_is_told(mixed: Plan, tmp_path: Path) -> None:
    """The card refuses the slices' memory: the seventh that is asked for, behind llama.cpp's own."""
    small = replace(mixed, device=f"{CARD},fail_alloc=7")
    bench(exported(small, tmp_path, "llama-bench"), "-p 0 -n 1", OALLAMA_REPORT=str(tmp_path / "report-%p.json"))
    (report,) = reports_in(tmp_path)
    assert report.usable and len(report.problems) == 1 and "has no room for" in report.problems[0]
    assert any(s.gg == 0 for s in report.slices)


@pytest.mark.parametrize("path", ["/no/such/library.so", str(find_built("ggml_bridge"))])
def test_a_second_back_end_that_is_none_is_one_sentence(path: str) -> None:
    settings = environment(GGML_BACKEND_PATH=str(find_plugin()), OALLAMA_EXTRA_BACKENDS=path)
    command = [program("llama-bench"), "-m", str(MODEL), "-ot", "ffn=OALLAMA_Split"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=settings)
    said = [line for line in done.stderr.splitlines() if line.startswith("oallama: ")]
    assert done.returncode == 1
    assert said[-1] == f"oallama: OALLAMA_EXTRA_BACKENDS names {path}, which is not a back end for this ggml"


@pytest.mark.parametrize(("parameters", "says"), [
    (None, "OALLAMA_EMULATED names no file"), ("/no/such/file", "which cannot be read"), (__file__, "line 1"),
])  # fmt: skip
def test_an_emulated_card_without_parameters_is_one_sentence(parameters: str | None, says: str) -> None:
    settings = {} if parameters is None else {"OALLAMA_EMULATED": parameters}
    environ = environment(GGML_BACKEND_PATH=str(find_built("ggml-emulated")), **settings)
    command = [program("llama-bench"), "--list-devices"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    said = [line for line in done.stderr.splitlines() if line.startswith("oallama: ")]
    assert len(said) == 1 and says in said[0], done.stderr
