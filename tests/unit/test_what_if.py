"""`oallama what-if`: predictions from described cards, their order, document, table, chart, and the command's edges."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from worlds import HOST, ROUTED, SMALL, weights_of

from oallama.cli import main as cli_main
from oallama.core.options import Options
from oallama.core.profile import ProfileCase
from oallama.core.types import CPU_DEVICE, ModelInfo, Operator, Workload
from oallama.core.units import GIB, MIB
from oallama.cost.graph import build_graph
from oallama.cost.passes import passes_at
from oallama.cost.whole import placement_seconds
from oallama.device import cards as known
from oallama.device.cards import CARDS, preset
from oallama.place.attention import AttentionRule, with_attention
from oallama.place.decide import decide
from oallama.place.memory import RUNTIME_BYTES, usable
from oallama.place.problem import LoadBytes, Problem, costs_over
from oallama.place.pure_plan import WhatIf, probe_of, what_if
from oallama.place.verify import on_cpu
from oallama.placer.described import beside_each
from oallama.profile.described import described, host_profile, with_card
from oallama.profile.merge import empty
from oallama.report import chart
from oallama.report.table import WIDTH
from oallama.report.what_if import CLAIM, what_if_chart, what_if_document, what_if_foot, what_if_head, what_if_line

pytestmark = pytest.mark.usefixtures("small_cards")

LOAD = Workload(n_prompt=512, n_gen=64, n_ctx=1024)
TOKENS = (1, 32, 512)


def problem(card, n_expert=0, repacked=1.0):
    """Of a small model. repacked: how many times faster the CPU's repacked layout is than the plain one."""
    of = ROUTED if n_expert else SMALL
    ops = weights_of(of)
    profile = host_profile(HOST, of, ops, TOKENS)
    if repacked != 1.0:
        profile = replace(profile, cases=profile.cases + tuple(faster(case, repacked) for case in profile.cases))
    weights = sum(op.bytes for op in ops)
    probe = probe_of(LoadBytes(0, weights, 4 * MIB, MIB, 0), ops, of.n_layer, card.memory_bytes)
    described_profile = with_attention(with_card(profile, card, of, ops), "on")
    return Problem(ops, build_graph(of, ops), described_profile, probe, None, 0.9, None, host_room=2**40)


def faster(case: ProfileCase, factor: float) -> ProfileCase:
    return replace(case, layout="CPU_REPACK", seconds=case.seconds / factor)


def sized(mib: float, name: str = "rtx3060"):
    return replace(preset(name), memory_bytes=int(mib * MIB))


def small_rows(*sizes: float) -> tuple[ModelInfo, list[WhatIf]]:
    return SMALL, [what_if(problem(sized(mib)), sized(mib), LOAD) for mib in sizes]


#
# what is predicted
#


@pytest.mark.parametrize("name", CARDS)
def test_a_described_profile_gives_the_published_run_again(name):
    """LLaMA-2-7B Q4_0 whole on the card, priced by the cost model from the card's rates."""
    published = next(one for one in known._PUBLISHED if one.name == name)
    n_embd, n_ff, n_layer, n_vocab = 4096, 11008, 32, 32000
    of = ModelInfo("m.gguf", "llama", "m", n_layer, n_embd, n_ff, 32, 32, 128, 128, 0, 0, n_vocab, 4096, 1,
                   "f" * 64)  # fmt: skip
    shapes = {f"attn_{role}": (n_embd, n_embd, 1) for role in ("q", "k", "v", "output")}
    shapes |= {"ffn_gate": (n_embd, n_ff, 1), "ffn_up": (n_embd, n_ff, 1), "ffn_down": (n_ff, n_embd, 1)}
    ops = [
        Operator(f"blk.{i}.{role}.weight", i, role, "MUL_MAT", "Q4_0", shape, shape[0] * shape[1] * 18 // 32, 1.0)
        for i in range(n_layer)
        for role, shape in shapes.items()
    ]
    output = (n_embd, n_vocab, 1)
    ops.append(Operator("output.weight", None, "output", "MUL_MAT", "Q6_K", output, n_embd * n_vocab * 210 // 256, 1.0))
    profile = with_attention(described(known.USUAL_PC, preset(name), of, ops, (1, 512)), "on")
    whole = Problem(tuple(ops), build_graph(of, ops), profile, lambda *_: None, None, 0.9, None)

    def seconds(n_prompt, n_gen):
        costs = costs_over(whole, passes_at(0, n_prompt, n_gen, 512))
        return placement_seconds(costs, (True,) * len(ops), 0)

    assert 512 / seconds(512, 0) == pytest.approx(published.pp512, rel=0.05)
    assert 128 / seconds(0, 128) == pytest.approx(published.tg128, rel=0.05)


def test_where_all_fits_stock_is_the_best_plan():
    card = sized(1000)
    row = what_if(problem(card), card, LOAD)
    assert row.best is row.stock and row.best.policy == "fit" and row.gain == 1


def test_a_card_without_room_leaves_the_model_on_the_cpu():
    card = sized(0.5)
    of = problem(card, repacked=2.0)
    row = what_if(of, card, LOAD)
    assert row.best.policy == "cpu"
    assert row.best.predicted == on_cpu(of, LOAD, "mixed").predicted
    assert row.stock.memory.weights_gpu == 0


def test_stock_computes_the_hosts_share_in_the_plain_layout_and_ours_in_the_fastest():
    card = sized(8)
    slow, fast = (what_if(problem(card, repacked=factor), card, LOAD) for factor in (1.0, 3.0))
    assert fast.stock.predicted == slow.stock.predicted
    assert fast.best.predicted.tpot_s < slow.best.predicted.tpot_s


@pytest.mark.parametrize("n_expert", [0, 8])
def test_the_quick_search_is_near_the_long_one(n_expert):
    card = sized(10 if not n_expert else 50)
    of = problem(card, n_expert)
    quick, long = (decide(of, "scheinfer", LOAD, "mixed", quick=quick) for quick in (True, False))
    assert long.predicted.total_s * 0.999 <= quick.predicted.total_s <= 1.3 * long.predicted.total_s


def test_limits_of_the_device_that_is_here_do_not_hold_for_cards():
    card, made, of, options = sized(8), problem(sized(8)), SMALL, Options()

    class Loads:
        def on_host(self, load, attention):
            return sum(op.bytes for op in made.operators), 4 * MIB, MIB

    placer = SimpleNamespace(
        model=of, operators=made.operators, attention_rule=AttentionRule(of, options), dry_loads=Loads(),
        profile=lambda: host_profile(HOST, of, made.operators, TOKENS),
    )  # fmt: skip
    limits = ({}, {"vram": 3 * MIB, "gpu_weights": 0.1})
    free, limited = (next(beside_each(placer, replace(made, **limit), [card], LOAD, "auto")) for limit in limits)
    assert limited.best.memory == free.best.memory and free.best.memory.limit == free.stock.memory.limit
    assert limited.best.predicted == free.best.predicted


def test_the_ledger_is_in_proportion_to_the_layers_there():
    of = problem(sized(1000))
    row = what_if(of, sized(1000), LOAD)
    assert row.stock.memory.kv == 4 * MIB and row.stock.memory.compute == MIB
    half = of.probe(LOAD, replace(row.stock.placement, first_device_layer=2))
    assert half.kv == 2 * MIB
    assert half.weights_gpu == sum(op.bytes for op in of.operators)


def test_the_ledger_counts_each_instance_of_the_back_end_that_computes(monkeypatch):
    of, one = problem(sized(12)), MIB // 2
    monkeypatch.setitem(RUNTIME_BYTES, "CUDA", one)
    fit, split, cpu = (decide(of, policy, LOAD, "mixed") for policy in ("layers", "hetegen", "cpu"))
    assert (
        fit.placement.llama_uses_device(of.graph.n_layer) and not fit.placement.is_sliced and fit.memory.runtime == one
    )
    assert split.placement.is_sliced and split.memory.runtime == 2 * one
    assert cpu.memory.runtime == 0
    for memory in (fit.memory, split.memory):
        used = memory.weights_gpu + memory.kv + memory.compute + memory.staging
        assert used + memory.spare == memory.limit and memory.spare >= 0
        assert memory.limit == min(int(memory.fill * memory.capacity), memory.capacity - memory.runtime)
    elsewhere = replace(of.profile, fingerprint={**of.profile.fingerprint, "device_backend": "Vulkan"})
    assert decide(replace(of, profile=elsewhere), "layers", LOAD, "mixed").memory.runtime == 0


def test_what_a_back_end_takes_is_taken_from_what_is_kept_free(monkeypatch):
    of, capacity = problem(sized(12)), sized(12).memory_bytes
    limits = []
    for runtime in (0, capacity // 10, capacity // 5):
        monkeypatch.setitem(RUNTIME_BYTES, "CUDA", runtime)
        limits.append(decide(of, "layers", LOAD, "mixed").memory.limit)
    assert limits == [int(0.9 * capacity), int(0.9 * capacity), capacity - capacity // 5]
    assert usable(12 * GIB, 0.9, 128 * MIB) == int(0.9 * 12 * GIB), "plans of usual cards stay as they were"
    assert usable(MIB, 0.9, 2 * MIB) == 0


#
# what is said
#


def test_the_document_has_the_contracts_keys():
    of, rows = small_rows(8, 1000)
    document = json.loads(json.dumps(what_if_document(of, LOAD, rows[0].stock, rows)))
    assert document["emulated"] is True
    assert document["source"] == CLAIM
    for row in document["rows"]:
        assert {"gpu", "vram", "policy", "ttft_s", "tpot_s", "stock_ttft_s", "stock_tpot_s"} <= row.keys()
    assert [row["fits_whole"] for row in document["rows"]] == [False, True]
    assert document["rows"][1]["stock_n_gpu_layers"] == of.n_layer + 1


def test_the_table_says_what_it_is_and_is_narrow():
    of, rows = small_rows(8, 1000)
    text = said(of, rows)
    assert CLAIM in text
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("---")) + 1
    assert [line.split()[0] for line in lines[first : first + 2]] == [row.card.name for row in rows]
    assert len({len(line) for line in lines[first - 2 : first + 2]}) == 1, "columns are aligned before rows are known"


def said(of, rows, policy="auto", host=None):
    """What the command prints: head, a line for each card, foot."""
    alone = on_cpu(problem(sized(8)), LOAD, "mixed")
    lines = (what_if_line(of, row) for row in rows)
    return "\n".join([what_if_head(of, LOAD, host), *lines, what_if_foot(of, alone, rows, policy, host)])


def test_the_chart_is_one_svg_with_a_bar_for_each_time():
    of, rows = small_rows(8, 1000)
    root = ElementTree.fromstring(what_if_chart(replace(of, name="<b>&\x1b"), LOAD, rows))
    bars = [element for element in root.iter() if element.get("fill") in (chart.STOCK, chart.OURS)]
    assert len(bars) == 2 + 4 * len(rows)  # the legend's, and TTFT and TPOT of two plans
    assert CLAIM in "".join(root.itertext())
    assert all(float(bar.get("x")) + float(bar.get("width")) <= chart.WIDTH for bar in bars)


#
# the command
#


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "rtx9090"], "there is no card 'rtx9090'; choose one of gtx1650-4"),
        (["--gpu", ","], "names no card"),
        (["--chart", "cards.pdf"], "name a file that ends in .svg"),
        (["--vram-fill", "2"], "is outside 0..1"),
        (["--ram-speed", "fast"], "is no memory speed in GB/s"),
        (["--cores", "0"], "is not a whole number"),
        (["--profile", "p.json", "--cores", "4"], "goes without --cores"),
        ([], "no.gguf"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, tmp_path, arguments, says):
    assert cli_main.exit_code(["what-if", str(tmp_path / "no.gguf"), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err


@pytest.fixture
def answered(monkeypatch):
    """The command with a placer that knows the small model; what it was asked for."""
    asked = {}

    class Known:
        model = SMALL
        operators = weights_of(model)
        tensor_names = tuple(operator.name for operator in operators)

        def workload(self, n_prompt, n_gen):
            return Workload(n_prompt, n_gen, 1024)

        def profile(self):
            return empty({"others_cpu_percent": asked.get("busy", 0.0)})

    def alone_and_beside(placer, cards, load):
        asked["cards"] = [card.name for card in cards]
        asked["sizes"] = {card.memory_bytes for card in cards}
        asked["placer"] = placer
        of = problem(cards[0])
        return on_cpu(of, load, "mixed"), tuple(what_if(problem(card), card, load) for card in cards)

    def of_file(path, options, profile, prober):
        asked["device"] = options.device
        return Known()

    monkeypatch.setattr("oallama.placer.Placer.of_file", of_file)
    monkeypatch.setattr("oallama.placer.described.alone_and_beside", alone_and_beside)
    return asked


def test_the_command_prints_json_and_writes_a_chart(capsys, tmp_path, answered):
    chart = tmp_path / "cards.svg"
    arguments = ["m.gguf", "--gpu", "rtx3060,H100,rtx3060-12", "-p", "64", "-n", "8", "--json", "--chart", str(chart)]
    assert cli_main.exit_code(["what-if", *arguments]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert answered["cards"] == ["rtx3060-12", "h100"] and answered["device"] == "none"
    assert [row["gpu"] for row in document["rows"]] == answered["cards"]
    assert document["workload"] == {"n_prompt": 64, "n_gen": 8, "n_ctx": 1024}
    assert chart.read_text(encoding="utf-8").startswith("<svg")
    assert f"wrote {chart}" in said.err


def test_times_of_a_busy_machine_are_marked_in_one_line(capsys, answered, monkeypatch):
    monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "20")
    answered["busy"] = 60.0
    assert cli_main.exit_code(["what-if", "m.gguf", "--gpu", "rtx3060"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: ") and "60 % of the CPU" in line


def test_without_a_choice_all_cards_are_asked(capsys, answered):
    assert cli_main.exit_code(["what-if", "m.gguf"]) == 0
    assert answered["cards"] == list(CARDS)
    assert CLAIM in capsys.readouterr().out


def test_cards_and_the_computer_may_be_others(capsys, answered):
    asked = ["--gpu", "rtx3060,rtx4090", "--vram", "6GiB", "--ram-speed", "40", "--cores", "6"]
    assert cli_main.exit_code(["what-if", "m.gguf", *asked]) == 0
    assert answered["sizes"] == {6 * GIB}
    assert "beside 6 cores of Zen 4, memory of 40 GB/s" in " ".join(capsys.readouterr().out.split())
    assert answered["placer"].profile().fingerprint["described"]


def test_a_chart_that_cannot_be_written_is_said(capsys, tmp_path, answered):
    target = tmp_path / "no folder" / "cards.svg"
    assert cli_main.exit_code(["what-if", "m.gguf", "--gpu", "h100", "--chart", str(target)]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_only_cpu_times_of_the_profile_count():
    of = SMALL
    ops = weights_of(of)
    first = with_card(host_profile(HOST, of, ops, TOKENS), preset("h100"), of, ops)
    again = with_card(first, preset("rtx3060"), of, ops)
    assert {case.device for case in again.cases} == {CPU_DEVICE, "rtx3060-12"}


@pytest.mark.parametrize("policy", ["hetegen", "twinpilots", "flexgen", "atsinfer"])
def test_a_policy_of_choice_is_compared_whether_it_is_faster_or_not(policy):
    card = sized(8)
    row = what_if(problem(card), card, LOAD, policy)
    assert row.best.policy == policy and row.best.memory.spare >= 0
    none = sized(0.5)
    assert what_if(problem(none), none, LOAD, policy).best.policy == "cpu"
    assert f"the plan of policy {policy}" in " ".join(said(SMALL, [row], policy).split())
