"""`oallama what-if`: predictions from described cards, and the command's edges. Its report: tests/golden/report."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from worlds import HOST, ROUTED, SMALL, World, model_info, there, total_s

from oallama.cli import main as cli_main
from oallama.core.options import Options
from oallama.core.types import Workload
from oallama.core.units import MIB
from oallama.device import cards as known
from oallama.device.cards import CARDS, preset
from oallama.device.machines import Machine
from oallama.place.pure_plan import WhatIf
from oallama.placer import Placer
from oallama.placer.described import alone_and_beside, plan_for
from oallama.profile.described import host_profile
from oallama.report.what_if import CLAIM

pytestmark = pytest.mark.usefixtures("small_cards")

LOAD = Workload(n_prompt=512, n_gen=64, n_ctx=1024)


def sized(mib: float):
    return replace(preset("rtx3060"), memory_bytes=int(mib * MIB))


def row_of(mib: float, policy: str = "auto", **facts: object) -> WhatIf:
    """A card of so much memory beside a small model's CPU."""
    world = World(**{"model": SMALL, "workload": LOAD, **facts})
    profile = host_profile(HOST, world.model, world.operators, (1, 32, 512))
    layouts = (case for case in world.profile.cases if case.layout == "CPU_REPACK")
    placer = world.alone(replace(profile, cases=(*profile.cases, *layouts)))
    (row,) = alone_and_beside(placer, [sized(mib)], LOAD, policy)[1]
    return row


#
# what is predicted
#


@pytest.mark.parametrize("name", CARDS)
def test_a_described_profile_gives_the_published_run_again(name):
    """LLaMA-2-7B Q4_0 whole on the card, priced by the cost model from the card's rates."""
    published = next(one for one in known._PUBLISHED if one.name == name)
    llama = model_info(n_layer=32, n_embd=4096, n_ff=11008, n_head=32, n_head_kv=32, n_embd_head_k=128,
                       n_embd_head_v=128, n_vocab=32000)  # fmt: skip
    world = World(model=llama, host=known.USUAL_PC, card=preset(name), tokens=(1, 512), share=1.5)

    def seconds(n_prompt, n_gen):
        plan = replace(world, workload=Workload(n_prompt=n_prompt, n_gen=n_gen, n_ctx=512)).plan("fit")
        assert there(world, plan) == list(world.operators)
        return total_s(plan)

    assert 512 / seconds(512, 0) == pytest.approx(published.pp512, rel=0.05)
    assert 128 / (seconds(1, 128) - seconds(1, 0)) == pytest.approx(published.tg128, rel=0.05)


def test_where_all_fits_stock_is_the_best_plan():
    row = row_of(1000)
    assert row.best is row.stock and row.best.policy == "fit" and row.gain == 1 and row.fits_whole


def test_a_card_without_room_leaves_the_model_on_the_cpu():
    row = row_of(0.5, repacked=2.0)
    assert row.best.policy == "cpu" and row.stock.memory.weights_gpu == 0


def test_stock_computes_the_hosts_share_in_the_plain_layout_and_ours_in_the_fastest():
    slow, fast = (row_of(12, repacked=factor) for factor in (0.0, 3.0))
    assert fast.stock.predicted == slow.stock.predicted
    assert fast.best.predicted.tpot_s < slow.best.predicted.tpot_s


@pytest.mark.parametrize(("model", "mib"), [(SMALL, 14), (ROUTED, 54)])
def test_the_quick_search_is_near_the_long_one(model, mib):
    machine = Machine(name="m", description="", host=HOST, card=sized(mib), sources=())
    long = total_s(plan_for(World(model=model).alone(), machine, LOAD, "scheinfer"))
    quick = row_of(mib, "scheinfer", model=model).best
    assert quick.policy == "scheinfer" and 0.999 * long <= quick.predicted.total_s <= 1.3 * long


def test_limits_of_the_device_that_is_here_do_not_hold_for_cards():
    free, limited = (row_of(12, options=options) for options in (Options(), Options(vram=3 * MIB, gpu_weights=0.1)))
    assert limited.best.memory == free.best.memory and free.best.memory.limit == free.stock.memory.limit
    assert limited.best.predicted == free.best.predicted


def test_the_ledger_is_in_proportion_to_the_layers_there():
    whole, part = row_of(1000).stock, row_of(16).stock
    n_layers = SMALL.n_layer - part.placement.first_device_layer
    assert 0 < n_layers < SMALL.n_layer
    assert part.memory.kv == whole.memory.kv * n_layers // SMALL.n_layer
    assert part.memory.compute == whole.memory.compute == 2048 * 512


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
def busy(monkeypatch) -> list[float]:
    """The command with a placer that knows the small model and its CPU, without loads; the CPU's load while it was
    measured, which a test may change."""
    percent = [0.0]
    world = World(model=SMALL, workload=LOAD)

    def of_file(path, options, profile, prober):
        assert options.device == "none"
        made = host_profile(HOST, world.model, world.operators, (1, 32, 512))
        made = replace(made, fingerprint={**made.fingerprint, "others_cpu_percent": percent[0]})
        return Placer(world.model, world.operators, (), options, made, prober)

    monkeypatch.setattr("oallama.placer.Placer.of_file", of_file)
    counted = world.alone().dry_loads
    monkeypatch.setattr("oallama.placer.measured.DryLoads", lambda *_: counted)
    return percent


def answer(capsys, *arguments: str):
    assert cli_main.exit_code(["what-if", "m.gguf", *arguments]) == 0
    return capsys.readouterr()


def test_the_command_prints_json_and_writes_a_chart(capsys, tmp_path, busy):
    chart = tmp_path / "cards.svg"
    chosen = ("--gpu", "rtx3060,H100,rtx3060-12", "-p", "64", "-n", "8")
    said = answer(capsys, *chosen, "--json", "--chart", str(chart))
    document = json.loads(said.out)
    assert [row["gpu"] for row in document["rows"]] == ["rtx3060-12", "h100"]
    assert document["workload"] == {"n_prompt": 64, "n_gen": 8, "n_ctx": 4096}
    assert chart.read_text(encoding="utf-8").startswith("<svg")
    assert f"wrote {chart}" in said.err


def test_times_of_a_busy_machine_are_marked_in_one_line(capsys, busy, monkeypatch):
    monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "20")
    busy[0] = 60.0
    (line,) = answer(capsys, "--gpu", "rtx3060").err.splitlines()
    assert line.startswith("note: ") and "60 % of the CPU" in line


def test_without_a_choice_all_cards_are_asked(capsys, busy):
    said = answer(capsys).out
    assert CLAIM in said and all(f"\n{name} " in said for name in CARDS)


def test_cards_and_the_computer_may_be_others(capsys, busy):
    asked = ["--gpu", "rtx3060,rtx4090", "--vram", "6GiB", "--ram-speed", "40", "--cores", "6"]
    said = answer(capsys, *asked).out
    assert len(re.findall(r"^rtx\S+ +6 GiB", said, re.MULTILINE)) == 2
    assert "beside 6 cores of Zen 4, memory of 40 GB/s" in " ".join(said.split())


def test_a_chart_that_cannot_be_written_is_said(capsys, tmp_path, busy):
    target = tmp_path / "no folder" / "cards.svg"
    assert cli_main.exit_code(["what-if", "m.gguf", "--gpu", "h100", "--chart", str(target)]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["hetegen", "twinpilots", "flexgen", "atsinfer"])
def test_a_policy_of_choice_is_compared_whether_it_is_faster_or_not(policy):
    row = row_of(14, policy)
    assert row.best.policy == policy and row.best.memory.spare >= 0
    assert row_of(0.5, policy).best.policy == "cpu"
