"""`oallama simulate`: spans of the four streams against what is predicted, the machines, the report, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import placement_records as records
import pytest
from described_cases import TOKENS, described_problem, model, operators
from policy_cases import LOAD, PAIR, STREAMS
from policy_cases import problem as small_problem

from oallama.cli.main import exit_code
from oallama.cli.served import as_asked as as_asked_for
from oallama.core.errors import PlanError, UsageError
from oallama.core.options import Options
from oallama.core.profile import Profile
from oallama.core.types import Attention, PrefetchMode, Workload
from oallama.core.units import MIB
from oallama.device.card import Card
from oallama.device.cards import CARDS, USUAL_PC
from oallama.device.machines import MACHINES, machine_of
from oallama.place.decide import decide
from oallama.place.placement import Candidate, placed_by_plan, plan_record
from oallama.place.policies.registry import Rules
from oallama.place.problem import Problem
from oallama.place.simulate import ENGINES, KINDS, Course, Simulation, simulate
from oallama.placer import Placer
from oallama.placer.described import plan_for
from oallama.plan.plan import Plan
from oallama.profile.described import host_profile
from oallama.report.simulate import LOOKS, SimulationSetting, simulate_chart, simulate_document, simulate_tables
from oallama.report.table import plain

pytestmark = pytest.mark.usefixtures("small_cards")

TESTBEDS = Path(__file__).resolve().parents[2] / "scripts" / "reproduce" / "testbeds"
ROUNDING = 1e-9


def simulated(problem: Problem, decision: Candidate) -> Simulation:
    """As from the decision's plan."""
    of = model(problem.graph.n_layer)
    record = plan_record(decision, of, problem.operators, "a card", "")
    return simulate(problem, decision.workload, placed_by_plan(of.n_layer, problem.operators, record))


def check(problem: Problem, decision: Candidate) -> Simulation:
    made = simulated(problem, decision)
    assert made.prompt.seconds == pytest.approx(made.predicted.ttft_s, rel=ROUNDING)
    assert made.token.seconds == pytest.approx(made.predicted.tpot_s, rel=ROUNDING)
    assert made.predicted.ttft_s == pytest.approx(decision.predicted.ttft_s, rel=ROUNDING)
    assert made.predicted.tpot_s == pytest.approx(decision.predicted.tpot_s, rel=ROUNDING)
    for course in (made.prompt, made.token):
        check_course(course, one_after_another=not decision.placement.is_sliced)
    return made


def check_course(course: Course, one_after_another: bool) -> None:
    tolerance = ROUNDING * course.seconds
    for stream in ENGINES:
        works = [work for work in course.works if work.stream == stream]
        assert all(a.end_s <= b.start_s + tolerance for a, b in pairwise(works)), stream
        assert course.busy_s(stream) <= course.seconds + tolerance
    assert all(0 <= w.start_s < w.end_s <= course.seconds + tolerance and w.kind in KINDS for w in course.works)
    parts = [seconds for seconds, _ in course.parts().values()]
    assert parts == sorted(parts, reverse=True) and sum(parts) == pytest.approx(sum(w.seconds for w in course.works))
    if one_after_another:
        assert sum(work.seconds for work in course.works) == pytest.approx(course.seconds, rel=ROUNDING)
    # never is nothing going on for longer than a launch takes
    until = 0.0
    for work in sorted(course.works, key=lambda w: w.start_s):
        assert work.start_s <= until + 1e-4
        until = max(until, work.end_s)
    assert until == pytest.approx(course.seconds, abs=1e-4)


@pytest.mark.parametrize("prefetch", ["ahead", "layer"])
def test_spans_add_up_where_tokens_of_a_prompt_go_to_the_device(prefetch: PrefetchMode) -> None:
    load = Workload(n_prompt=512, n_gen=1, n_ctx=1024, n_ubatch=512)
    problem = small_problem(replace(STREAMS, cpu_rate=4e9, token_s_per_byte=1e-9), free=10**7, gpu_weights=0.2)
    decision = decide(problem, "scheinfer", load, "mixed", Rules(prefetch=prefetch))
    assert decision.placement.is_sliced and decision.placement.token_assignment
    made = check(problem, decision)
    assert ("in", "stream") in made.prompt.parts()


def test_a_device_that_does_nothing_by_itself_works_while_the_thread_waits() -> None:
    problem = small_problem(PAIR, 700_000)
    blocking = replace(problem, profile=replace(problem.profile, fingerprint={"device_asynchronous": False}))
    decision = decide(blocking, "hetegen", LOAD, "mixed")
    assert decision.placement.is_sliced and any(decision.placement.cg)
    token = check(blocking, decision).token
    assert {("in", "stream"), ("gpu", "slice"), ("cpu", "slice")} <= token.parts().keys()
    both = sorted((w.start_s, w.end_s) for w in token.works)
    assert all(end <= start + ROUNDING for (_, end), (start, _) in pairwise(both)), "nothing at the same time"


def test_whole_operators_run_in_graph_order_where_they_are() -> None:
    problem = described_problem("pc-12gb", 0.5)
    decision = decide(problem, "layers", Workload(64, 8, 256), "mixed")
    made = check(problem, decision)
    found = [w for w in sorted(made.token.works, key=lambda w: w.start_s) if w.kind == "operator"]
    assert [w.name for w in found] == [o.name for o in problem.operators]
    sides = dict(zip((o.name for o in problem.operators), decision.placement.on_device, strict=True))
    assert {w.stream for w in found} == {"cpu", "gpu"}
    assert all((w.stream == "gpu") == sides[w.name] for w in found)


def test_a_host_layer_of_a_large_prompt_is_streamed_and_computed_on_the_card() -> None:
    problem = described_problem("pc-24gb", 0.4)
    decision = decide(problem, "layers", Workload(512, 8, 1024), "mixed")
    made = check(problem, decision)
    name = problem.operators[0].name
    assert not decision.placement.on_device[0]
    assert {(w.stream, w.kind) for w in made.prompt.works if w.name == name} == {("in", "weights"), ("gpu", "operator")}
    assert {"cache", "weights"} <= {w.kind for w in made.prompt.works} and "weights" not in {
        w.kind for w in made.token.works
    }


@pytest.mark.parametrize("policy", ["layers", "split"])
def test_a_plan_says_in_which_layout_the_host_holds_each_operator(policy: str) -> None:
    problem = small_problem(PAIR, 700_000)
    pinned = replace(problem, profile=replace(problem.profile, fingerprint={"device_host_buffer": True}))
    record = plan_record(decide(pinned, policy, LOAD, "mixed"), model(), problem.operators, "a card", "")
    named = tuple(operator.layout for operator in record.operators)
    assert any(named) and placed_by_plan(model().n_layer, problem.operators, record).layouts == named


def test_a_plan_that_splits_what_the_device_cannot_compute_is_refused() -> None:
    problem = small_problem(PAIR, 700_000)
    decision = decide(problem, "split", LOAD, "mixed")
    check(problem, decision)
    assert decision.placement.is_sliced
    on_cpu = tuple(case for case in problem.profile.cases if case.device == "CPU")
    without = replace(problem, profile=replace(problem.profile, cases=on_cpu))
    assert on_cpu
    with pytest.raises(PlanError, match="cannot compute"):
        simulated(without, decision)


def placer(profile: Profile | None = None) -> Placer:
    return Placer(model(), operators(model(), "Q4_0"), (), Options.given(device="none"), profile)


def plan_on(machine: str) -> Plan:
    problem = described_problem(machine, 0.5)
    decision = decide(problem, "layers", Workload(64, 8, 256), "mixed")
    return plan_record(decision, model(), problem.operators, "a card", "")


def test_a_plan_is_simulated_on_any_machine_without_a_load() -> None:
    plan = plan_on("pc-12gb")
    small, large = (placer().simulate(plan, machine=MACHINES[name]) for name in ("pc-12gb", "pc-24gb"))
    assert plan.predicted is not None
    assert small.predicted.tpot_s == pytest.approx(plan.predicted.tpot_s, rel=1e-6)
    assert large.predicted.tpot_s < small.predicted.tpot_s
    longer = placer().simulate(plan, replace(plan.workload, n_prompt=128), MACHINES["pc-12gb"])
    assert longer.predicted.ttft_s > small.predicted.ttft_s


def test_a_plan_of_another_model_is_refused() -> None:
    other = replace(plan_on("pc-12gb"), model_fingerprint="e" * 64)
    with pytest.raises(PlanError, match="made for"):
        placer().simulate(other, machine=MACHINES["pc-12gb"])


def test_stock_fit_on_a_described_machine_keeps_to_the_memory_that_was_asked_for(monkeypatch) -> None:
    ops = operators(model(), "Q4_0")
    weights = sum(op.bytes for op in ops)
    monkeypatch.setattr("oallama.run.dry_loads.DryLoads.on_host", lambda *_: (weights, MIB, MIB))

    def fit(**options: object) -> Plan:
        asked = Placer(model(), ops, (), Options.given(device="none", **options))
        return plan_for(asked, MACHINES["pc-12gb"], Workload(64, 8, 256), "fit")

    whole, part = fit(), fit(vram=weights // 2 + 2 * MIB)
    assert part.memory.capacity == weights // 2 + 2 * MIB < whole.memory.capacity
    assert part.memory.spare >= 0
    assert 0 < part.n_gpu_layers < whole.n_gpu_layers == model().n_layer + 1
    with pytest.raises(UsageError, match="--vram"):
        fit(gpu_weights=0.5)


def test_a_plan_is_loaded_with_the_context_and_attention_that_are_asked_for() -> None:
    planned = replace(records.served().plan, attention=Attention("off", "f16", "f16"))

    def as_asked(**options: object) -> Plan:
        asked = Options.given(device="none", **options)
        return as_asked_for(Placer(model(), operators(model(), "Q4_0"), (), asked), planned)

    assert as_asked() == planned
    asked = as_asked(n_ctx=16384, n_ubatch=64, type_k="q8_0", flash_attn="on")
    assert asked == replace(
        planned,
        workload=replace(planned.workload, n_ctx=16384, n_ubatch=64),
        attention=Attention("on", "q8_0", "f16"),
    )


def test_a_plan_for_a_device_needs_one() -> None:
    profile = host_profile(USUAL_PC, model(), operators(model(), "Q4_0"), TOKENS)
    with pytest.raises(PlanError, match="name one with --device"):
        placer(profile).simulate(plan_on("pc-12gb"))


#
# machines
#


def test_the_presets_are_machines_that_people_buy() -> None:
    assert set(MACHINES) == {"pc-12gb", "pc-24gb"}
    for name, machine in MACHINES.items():
        assert machine.name == name and all(len(source) > 20 for _, source in machine.sources)


def test_an_unknown_machine_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"'pdp-11'.*pc-12gb.*pc-24gb"):
        machine_of("pdp-11")


def test_a_machine_may_come_from_a_file(tmp_path) -> None:
    host = {"name": "two cores", "bytes_per_s": 2e10, "flops_per_s": 1e11, "source": "STREAM"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "host": host, "card": "rtx3060"}))
    machine = machine_of(str(path))
    assert machine.card is CARDS["rtx3060-12"] and machine.host.bytes_per_s == 2e10
    card = {f: getattr(CARDS["h100"], f) for f in Card.__dataclass_fields__}
    path.write_text(json.dumps({"name": "mine", "host": host, "card": card}))
    assert machine_of(str(path)).card == CARDS["h100"]
    path.write_text(json.dumps({"name": "mine", "host": host, "card": card, "sources": {"CPU": "measured"}}))
    assert machine_of(str(path)).sources == (("CPU", "measured"),)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{", "not JSON"),
        ("[]", "needs name, host and card"),
        ('{"name": "m", "host": {"name": "h"}, "card": "rtx3060"}', "bytes_per_s is missing"),
        ('{"name": "m", "host": {"name": "h", "bytes_per_s": 0, "flops_per_s": 1, "source": ""}, "card": "rtx3060"}',
         "host: bytes_per_s must be above 0, not 0"),
        ('{"name": "m", "host": {"name": "h", "bytes_per_s": 1, "flops_per_s": 1, "source": ""}, "card": "pdp"}',
         "there is no card"),
        ('{"name": "m", "host": {"name": "h", "bytes_per_s": 1, "flops_per_s": 1, "source": ""}, "card": "rtx3060", '
         '"sources": ["a"]}', "sources must be texts"),
    ],
)  # fmt: skip
def test_a_bad_machine_file_is_refused(tmp_path, document: str, said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(document)
    with pytest.raises(UsageError, match=said):
        machine_of(str(path))
    with pytest.raises(UsageError, match="cannot read"):
        machine_of(str(tmp_path / "none.json"))


#
# report
#


@pytest.fixture(scope="module")
def made() -> tuple[SimulationSetting, Simulation]:
    problem = described_problem(f"{TESTBEDS}/scheinfer-a.json", 0.3)
    simulation = simulated(problem, decide(problem, "flexgen", Workload(64, 32, 512), "mixed"))
    machine = machine_of(f"{TESTBEDS}/scheinfer-a.json")
    return SimulationSetting(
        model(), "flexgen", machine.card.name, machine.description, machine.sources, ("a note",)
    ), simulation


def test_the_document_says_all_of_it(made) -> None:
    setting, simulation = made
    document = json.loads(json.dumps(simulate_document(setting, simulation)))
    assert {"simulated", "model", "machine", "policy", "workload", "ttft_s", "tpot_s", "total_s", "prompt", "token",
            "notes"} == document.keys()  # fmt: skip
    assert document["total_s"] == pytest.approx(document["ttft_s"] + 32 * document["tpot_s"])
    assert document["ttft_s"] == document["prompt"]["seconds"] and document["tpot_s"] == document["token"]["seconds"]
    for phase in (document["prompt"], document["token"]):
        assert {"seconds", "busy", "parts", "spans"} == phase.keys() and set(phase["busy"]) == set(ENGINES)
        for span in phase["spans"]:
            assert {"stream", "kind", "name", "start_s", "end_s"} == span.keys()
        for stream in ENGINES:
            seconds = sum(s["end_s"] - s["start_s"] for s in phase["spans"] if s["stream"] == stream)
            assert phase["busy"][stream] == pytest.approx(seconds / phase["seconds"], abs=1e-9)
            assert seconds == pytest.approx(sum(p["seconds"] for p in phase["parts"] if p["stream"] == stream))


def test_the_tables_are_narrow_and_name_the_sources(made) -> None:
    text = "\n".join(plain(t) for t in simulate_tables(*made))
    assert (
        "TTFT" in text
        and "copy out" in text
        and "Table I" in text
        and "a note" in text
        and "copied when needed" in text
    )
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_picture_is_legible_on_any_background_and_keeps_inside(made) -> None:
    root = ElementTree.fromstring(simulate_chart(*made))
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    space = "{http://www.w3.org/2000/svg}"
    first, *bars = root.findall(f"{space}rect")
    assert (first.attrib["fill"], first.attrib["width"], first.attrib["height"]) == ("#ffffff", str(width), str(height))
    for bar in bars:
        assert float(bar.attrib["x"]) >= 0 and float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height
    texts = [text.text or "" for text in root.findall(f"{space}text")]
    assert {"CPU", "GPU", "copy in", "copy out"} <= set(texts) and "copied when needed" in texts
    assert set(LOOKS) == set(KINDS) and len({colour for _, colour in LOOKS.values()}) == len(LOOKS)


#
# command
#


def test_the_command_refuses_what_does_not_go_together(tmp_path, capsys) -> None:
    assert exit_code(["simulate", "m.gguf", "--machine", "pdp-11"]) == 2
    assert "pc-24gb" in capsys.readouterr().err
    assert exit_code(["simulate", "m.gguf", "p.json", "--policy", "oato"]) == 2
    assert "--policy" in capsys.readouterr().err
    assert exit_code(["simulate", "m.gguf", "--machine", "pc-12gb", "--device", "CUDA0"]) == 2
    assert "--device" in capsys.readouterr().err
