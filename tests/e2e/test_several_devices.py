"""Two emulated cards of different speed in one process: stock llama.cpp's numbers, and each card's memory as planned.

no_alloc loads have processes of their own, and so have loads whose memory is compared with them: several_devices_cases.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import numpy as np
import pytest
from e2e.described_card import slow_cpu_fast_card
from e2e.forced import Forced, Share, Where, attention, everything, ffn, forced, movable, nothing, written
from e2e.logits import TOKENS, Logits, assert_stock, placed_logits
from e2e.races import FASTER, SLOWER, Measured, racing
from e2e.several_devices_cases import OPTIONS, TWO
from gguf_factory import write_llama_shape
from processes import ROOT
from seeds import crossed

from ggml_bridge.child import run_in_child
from oallama.bench.arms import ArmMaker
from oallama.bench.prepare import default_arms, shared_setting
from oallama.bench.process import ArmProcess
from oallama.bench.records import BenchTest
from oallama.bench.verify import problems, same_as
from oallama.cli.placement_options import PlacementOptions
from oallama.cli.policy import PolicyOptions
from oallama.core.codec import to_json
from oallama.core.errors import UsageError
from oallama.core.types import SPLIT_LAYOUT, Operator, SplitSettings, StreamSettings, Workload
from oallama.core.units import MIB
from oallama.cost.blocks import is_ffn
from oallama.placer import Given, Placer
from oallama.placer.report import report_over
from oallama.placer.tuned import result_key, tuned_plan
from oallama.plan.plan import Plan
from oallama.planner.placement import DeviceSlices
from oallama.planner.policies.stock import MOST_PROMISING
from oallama.planner.policies.stock_devices import stock_over_devices
from oallama.profile.store import FOLDER_VARIABLE
from oallama.report.html import affinity_html
from oallama.report.operators import report_document, report_tables
from oallama.report.placement_page import Served, placement_html
from oallama.report.table import plain
from oallama.tune.run import TuneOutcome, tune
from oallama.tuned.result import MOST_TESTS, ClassResult, Key
from oallama.tuned.store import result_path

ASKED = Workload(64, 32, 256)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(path: Path, **options: object) -> Placer:
    placer = Placer.load(path, **OPTIONS, **options)
    for member, link in zip(placer.members, (1e9, 4e8), strict=True):
        member._profile = slow_cpu_fast_card(path, link)
    return placer


def large(models: Path) -> Path:
    """A model of four layers."""
    return write_llama_shape(models / "large.gguf", 4, 512, 2048, 8, 4, 2000, "Q4_0")


def all_logits(placer: Placer, n_gen: int) -> Workload:
    """Of 64 tokens, with room for the logits of each."""
    return replace(placer.workload(64, n_gen, 256), n_outputs=0)


def loaded(plan: Plan, path: Path) -> dict[str, int]:
    """Bytes of each device under a plan, with which a process of its own has stock llama.cpp's logits."""
    asked = {"path": str(path), "plan": plan.to_json()}
    return run_in_child("e2e.several_devices_cases", asked, env={"PYTHONPATH": str(ROOT / "tests")}, timeout_s=300.0)


@pytest.mark.parametrize(
    ("arch", "layers", "whole"),
    [
        (arch, *there)
        for arch, there in crossed(
            ["llama", "llama-tied", "qwen3moe"],
            [
                ((2, 4), lambda operator: True),
                ((5, 1), lambda operator: True),  # the output alone
                ((3, 3), attention),
                ((2, 2), lambda operator: operator.layer != 3),  # two layers on the host, and one within a range
            ],
        )
    ],
)
def test_forced_ranges_have_stocks_numbers(models: Path, arch: str, layers: tuple[int, int], whole: object) -> None:
    placer = opened(written(models, arch, weight_type="F16", n_layer=5))
    n_layer, n = placer.model.n_layer, sum(layers)

    def there(operator: Operator) -> bool:
        return operator.layer_in(n_layer) > n_layer - n and whole(operator) and operator.name != "token_embd.weight"

    names = [operator.name for operator in placer.operators if there(operator)]
    plan = placer.plan(Given(names, n, device_layers=layers), workload=all_logits(placer, 8))
    assert plan.device_layers(placer.operators, n_layer) == layers and plan.version == 3
    assert_memory(plan, loaded(plan, placer.model.path), placer.model.n_embd)


def assert_memory(plan: Plan, found: dict[str, int], n_embd: int) -> None:
    """Up to one activation of a micro-batch, which is far below 1 % of a model that is worth two cards. With every
    layer on a device llama.cpp overlaps micro-batches, with four copies of what one device gets from another; it
    counts those of one activation too many where it allocates nothing."""
    assert len(found) == 2
    activation = 4 * 64 * n_embd
    overlaps = all(placement.gg == 1 for placement in plan.operators)
    for number, memory in enumerate(plan.memory.devices):
        planned = memory.weights_gpu + memory.kv + memory.compute
        least = planned - (4 if overlaps else 1) * activation
        most = max(planned + activation, 1.01 * planned) + memory.staging  # a small batch takes only a part of it
        assert min(least, 0.99 * planned) <= found[f"Emulated{number}"] <= most


def test_a_planned_model_lies_on_both_cards(models: Path) -> None:
    path = large(models)
    placer = opened(path, vram=f"{7 * MIB},{12 * MIB}")
    plan = placer.plan(workload=all_logits(placer, 64))
    assert plan.policy == "ranges" and plan.memory.fits and len(plan.memory.devices) == 2
    assert all(device.weights_gpu > 0 for device in plan.memory.devices)
    assert_memory(plan, loaded(plan, path), placer.model.n_embd)


def test_what_neither_card_holds_is_split(models: Path) -> None:
    """As planned, in a process that loads the plan; and beside both cards in llama-server."""
    path = large(models)
    placer = opened(path, vram=f"{8 * MIB},{6 * MIB}")
    plan = placer.plan(workload=all_logits(placer, 64))
    assert plan.policy == "ranges" and plan.memory.fits and plan.version == 3 and plan.n_on("split")
    assert_memory(plan, loaded(plan, path), placer.model.n_embd)
    both = beside_each(path, ffn(0.25, 0.25)).with_breakdown(staging=2 * MIB)
    assert {row.device for row in both.plan.operators if row.backend == "split"} == {0, 1}
    with both.engine(once=True) as engine:
        answer = engine.generate("one two", max_tokens=8, temperature=0)
        assert answer.n_gen == 8 and not any("not as planned" in warning for warning in engine.warnings)
        report = engine.split_report()
        assert report is not None and report.stats.bytes_streamed > report.single.bytes_streamed


def test_a_card_that_would_slow_the_others_is_left_out_and_said(models: Path) -> None:
    """The first holds everything. The plan runs on its card alone."""
    path = large(models)
    placer = opened(path, vram=f"{64 * MIB},{6 * MIB}")
    plan = placer.plan(n_prompt=64, n_gen=64, n_ctx=256)
    first, second = (str(member.device) for member in placer.members)
    assert plan.device == first and plan.version == 2
    assert f"{second} is not used: with it no plan is predicted to be faster" in plan.notes
    with placer.llama(plan, logits_all=True) as llama:
        assert llama.device == "Emulated0"
        assert_stock(placed_logits(llama, TOKENS), path, TOKENS)


def test_stocks_own_placement_is_a_rival_over_all_cards_and_on_each_alone(models: Path) -> None:
    """--fit keeps to each card's memory, and what it says is what is loaded."""
    path = large(models)
    placer = opened(path, vram=f"{6 * MIB},{8 * MIB}")
    tests = (BenchTest(64, 16, 0),)
    maker = ArmMaker(placer, shared_setting(placer, tests), tests)
    assert default_arms(placer) == ("stock-fit", "stock-fit@0", "stock-fit@1", "auto")
    over, *alone = (maker.make(name) for name in default_arms(placer)[:3])  # the last is a plan
    assert over.stock is not None and len(over.stock.device_layers) == 2 and min(over.stock.device_layers) > 0
    likely = stock_over_devices(placer.problem("on"), placer.workload(64, 16, 256))
    assert likely is not None, "as what-if takes --fit to do"
    pairs = zip(likely.placement.device_layers, over.stock.device_layers, strict=True)
    assert all(abs(ours - theirs) <= 1 for ours, theirs in pairs)
    assert [len(each.setting.load.device.split("emulated")) - 1 for each in (over, *alone)] == [2, 1, 1]
    reports = {}
    for arm in (over, *alone, maker.make("auto")):
        with closing(ArmProcess(arm)) as process:
            report = process.load([operator.name for operator in placer.operators])
            assert not problems(arm, report, placer.operators, placer.model.n_layer)
            assert 0.3 * arm.setting.cap.device_bytes < report.device_bytes <= arm.setting.cap.device_bytes
            process.warm_up(tests)
            assert process.measure(tests)[tests[0]].seconds > 0
        reports[arm.name] = report
    assert reports["stock-fit"].device == "Emulated0,Emulated1" and not same_as(list(reports.items()))
    assert {"device Emulated0", "device Emulated1"} <= reports["stock-fit"].buffers.keys()
    with pytest.raises(UsageError, match="names 2 devices; choose from 0 to 1"):
        maker.make("stock-fit@2")
    with pytest.raises(UsageError, match="stock-best uses one device"):
        maker.make("stock-best")


BORDER = 3


def beside_each(path: Path, share: Share, on_host: Where = nothing, bare: bool = False, **fields: Any) -> Forced:
    """Make a plan that splits operators beside the device of their layer: the first device has the layers before
    BORDER, the second those behind. Whole operators are there, too, unless they are left on the host. bare: the first
    device has slices alone; any bytes of them will do. n_g: tokens of 64 that each device computes. hot: its
    experts."""
    n_layer, hot, n_g = Placer.load(path, **OPTIONS).model.n_layer, fields.get("hot", ()), fields.pop("n_g", 0)
    table = ((32, 0), (64, n_g)) if n_g else ()

    def whole(operator: Operator) -> bool:
        left = on_host(operator) or (bare and operator.layer_in(n_layer) < BORDER) or (hot and operator.routed)
        return share(operator) is None and movable(operator) and not left

    first, layers = (BORDER, 0) if bare else (0, BORDER)
    second = DeviceSlices(settings=SplitSettings(table, fields.get("streaming")))
    return forced(
        path, TWO, share, whole=whole, first_device_layer=first, device_layers=(layers, n_layer + 1 - BORDER),
        token_assignment=table, behind_first=(second,), gg_bytes=int(bare), **fields,
    )  # fmt: skip


def one_by_one(llama: Any, tokens: Sequence[int]) -> Logits:
    """As placed_logits, of batches of one token."""
    llama.reset()
    for token in tokens:
        llama.eval([token])
    return np.array(llama.scores[: len(tokens)])


@pytest.mark.parametrize(
    ("arch", "share", "on_host", "fields"),
    [
        (arch, *case)
        for arch, case in crossed(
            ["llama", "qwen3moe", "gpt-oss", "gemma2", "olmo2"],
            [
                (ffn(0.5), nothing, {}),  # blocks that live on their device
                # and plain ones between
                (ffn(0.5), lambda operator: is_ffn(operator) and operator.layer == BORDER, {}),
                (ffn(0.25, 0.25), nothing, {"layout": "CPU", "n_g": 20}),  # streamed
                (everything(0.5), nothing, {}),  # attention and FFNs apart
                (everything(0.5), attention, {}),
                (ffn(0.5), nothing, {"bare": True}),
                (nothing, nothing, {"hot": (0, 2, 3), "layout": "CPU", "streaming": StreamSettings(exchange="eager")}),
                (nothing, nothing, {"hot": (0, 2)}),
            ],
        )
    ],
)
def test_splits_beside_each_device_have_stocks_numbers(
    models: Path, arch: str, share: Share, on_host: Where, fields: dict[str, Any]
) -> None:
    """Hot experts of a model without experts are whole ranges."""
    path = written(models, arch, weight_type="F16", n_layer=5)
    case = beside_each(path, share, on_host, **fields).with_breakdown(staging=16 * MIB)
    assert case.plan.version == 3 and Plan.from_json(json.loads(json.dumps(case.plan.to_json()))) == case.plan
    with case.llama() as llama:
        assert llama.device == "Emulated0,Emulated1"
        held = {buffer.device for buffer in llama.buffers if buffer.buft == SPLIT_LAYOUT and buffer.model}
        assert held == (
            {"", "Emulated0", "Emulated1"} if any(row.backend == "split" for row in case.plan.operators) else set()
        )
        assert_stock(placed_logits(llama, TOKENS), path, TOKENS)
        assert_stock(one_by_one(llama, TOKENS[:6]), path, TOKENS[:6])


#
# tuning
#


def to_tune(models: Path) -> Placer:
    return opened(large(models), vram=f"{10 * MIB},{11 * MIB}", n_ctx=256)


@pytest.fixture(scope="module")
def planned(models: Path) -> Path:
    """A cache with the candidates for short questions, none of them measured."""
    folder = models / "planned"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        assert tune(to_tune(models), ASKED, most_s=0).left_s > 0
    return folder


def raced(race: Measured, models: Path, planned: Path, cache: Path) -> tuple[Placer, TuneOutcome, ClassResult]:
    """What a race finds for short questions."""
    shutil.copytree(planned, cache)
    placer = to_tune(models)
    found = race.tune(placer, ASKED)
    (made,) = found.result.classes
    return placer, found, made


def test_a_plan_over_both_cards_that_wins_is_loaded_to_the_byte(
    models: Path, planned: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever loads a plan later: they all take what `made_plan` and Placer.run take."""
    race = racing(FASTER)
    placer, found, made = raced(race, models, planned, cache)
    assert made.won is not None and found.plan.policy == "ranges" and len(found.plan.memory.devices) == 2
    assert made.tries[0].device == "" and len(made.tries[0].placement.device_layers) == 2
    n_most = 1 + len(placer.members) + MOST_PROMISING
    assert len(made.tries) <= n_most and len(made.races) <= MOST_TESTS, "the race takes no longer than on one device"
    fresh = to_tune(models)
    tuned = tuned_plan(fresh, ASKED)
    assert tuned is not None and tuned.plan.to_json() == found.plan.to_json()
    asked = PlacementOptions(None, PolicyOptions(), fresh.options, None, tuned=True, tune="off")
    with click.Context(click.Command("run")):
        assert asked.made_plan(fresh, ASKED) == (tuned.plan, False)
    engine = Mock(return_value=nullcontext(Mock()))
    monkeypatch.setattr(Placer, "engine", engine)
    fresh.run("one two", max_tokens=4)
    assert engine.call_args.args == (tuned.plan,)


def test_stock_on_one_card_alone_that_wins_is_loaded_there(models: Path, planned: Path, cache: Path) -> None:
    race = replace(racing(SLOWER), stock=lambda name: 0.5 if "--device emulated:rtx3060" in name else 1.0)
    placer, found, made = raced(race, models, planned, cache)
    first = str(placer.members[0].device)
    assert made.won is None and made.tries[made.rival].device == first and found.plan.device == first
    assert {one.device for one in made.tries} >= {"", first}
    assert f"--device {first}" in made.sentence and found.plan.stock is not None
    tuned = tuned_plan(placer, ASKED)
    assert tuned is not None and tuned.plan.to_json() == found.plan.to_json()
    with placer.llama(tuned.plan) as llama:
        assert llama.device == "Emulated0"


@pytest.mark.thorough  # half a minute; stock on one card alone is tested below
def test_stocks_placement_over_all_cards_is_a_plan_where_it_is_the_fastest(
    models: Path, planned: Path, cache: Path
) -> None:
    race = replace(racing(SLOWER), stock=lambda name: 2.0 if "--device" in name else 1.0)
    _, found, made = raced(race, models, planned, cache)
    assert made.rival == 0 and found.plan.policy == "fit" and len(found.plan.memory.devices) == 2
    assert found.plan.predicted is not None and "using llama.cpp's placement" in made.sentence
    asked = {"path": found.plan.model_path, "plan": found.plan.to_json()}
    held = run_in_child("e2e.several_devices_cases", asked, env={"PYTHONPATH": str(ROOT / "tests")}, timeout_s=300.0)
    assert set(held) == {"Emulated0", "Emulated1"}


def test_a_result_belongs_to_all_devices_and_the_memory_of_each(models: Path) -> None:
    path = large(models)

    def key(vram: str, **options: object) -> Key:
        return result_key(Placer.load(path, **{**OPTIONS, **options}, vram=vram), 256)

    first, second = TWO.split(",emulated:gtx1650")[0], "emulated:gtx1650,vram=1GiB,scale=1,values=real"
    both = key("14MiB,16MiB")
    assert key("14MiB,16MiB") == both and len(both.others) == 1
    others = [key("14MiB,9MiB"), key("9MiB,16MiB"), key("14MiB", device=first), key("16MiB", device=second),
              key("16MiB,14MiB", device=f"{second},{first}")]  # fmt: skip
    assert len({result_path(one) for one in (both, *others)}) == 6
    assert others[2].others == () and "others" not in to_json(others[2])
    assert others[2].machine == both.machine and others[3].machine == both.others[0][0]


#
# reports
#


def test_a_report_shows_the_cards_beside_each_other(models: Path) -> None:
    placer = opened(large(models), vram="9MiB,10MiB")
    plan = placer.plan(workload=all_logits(placer, 64))
    report = report_over(placer, plan, plan.workload)
    first, second = report.devices
    assert [one.device for one in report.devices] == [str(member.device) for member in placer.members]
    assert (first.memory, second.memory) == plan.memory.devices
    assert (first.layers[1] - first.layers[0], second.layers[1] - second.layers[0]) == plan.device_layers(
        placer.operators, placer.model.n_layer
    )
    assert first.layers[1] == second.layers[0] and second.layers[1] == placer.model.n_layer + 1
    for row in report.operators:
        layer = placer.model.n_layer if row.layer is None else row.layer
        number = int(layer >= second.layers[0])
        same = report.devices[number].rows[row.name]
        assert (row.t_gpu_s, row.t_transfer_s) == (same.t_gpu_s, same.t_transfer_s)
        assert report.places[row.name] == ("CPU" if row.backend == "CPU" else f"{row.backend} {number}")
    assert [row.rank for row in report.operators] == list(range(1, len(placer.operators) + 1))
    assert {"stock --fit@0", "stock --fit@1", "all CPU"} <= {one.name for one in report.baselines}
    text = "\n".join(map(plain, report_tables(report)))
    assert "Times by device" in text and "0: emulated:rtx3060-12" in text and "GPU 1" in text
    document = report_document(report)
    assert [one["layers"] for one in document["devices"]] == [list(first.layers), list(second.layers)]
    assert document["devices"][1]["memory"]["weights_gpu"] == plan.memory.devices[1].weights_gpu
    page = affinity_html(report)
    assert "Devices side by side" in page and page.count('class="bar"') == 3, "memory of both, and weights"
    assert f"{first.layers[0]} · 0" in page and f"{second.layers[0]} · 1" in page
    served = placement_html(Served(placer.model, placer.operators, plan, "as this test says"))
    assert served.count('class="bar"') == 3 and f"{second.layers[0]} · 1" in served


def test_a_card_that_a_plan_leaves_out_is_in_its_report(models: Path) -> None:
    placer = opened(large(models), vram="64MiB,6MiB")
    plan = placer.plan(n_prompt=64, n_gen=64, n_ctx=256)
    first, second = report_over(placer, plan, plan.workload).devices
    assert plan.device == first.device and first.memory == plan.memory
    assert second.memory is None and second.layers == (0, 0) and len(second.rows) == len(placer.operators)
