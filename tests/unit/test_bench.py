"""Comparisons with arms that are no processes: whose turn it is, what is measured again, what is not believed, and what
is written of it."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import some_plan

from oallama.bench.ab import SEARCH_GEN, Bench, measure_briefly, run_bench
from oallama.bench.arms import ArmMaker
from oallama.bench.process import ArmProcess, Deadline
from oallama.bench.records import ArmSpec, BenchTest, LoadReport, Sample, Setting
from oallama.bench.rows import formatted, rows
from oallama.bench.schedule import MAX_DRIFT
from oallama.bench.verify import problems, same_as
from oallama.cli.bench import ResultOptions
from oallama.core.errors import DeviceError, OutOfTime, UsageError
from oallama.core.types import Operator, OperatorPlacement, StockOptions, Workload
from oallama.device.load_params import LoadSettings
from oallama.run.fit import shrink_until_fits
from oallama.run.stock import Cap, StockPlacement, expected_on_device, expert_overrides, operator_bytes_on_device

N_LAYER = 2
OPERATORS = (
    *(
        Operator(f"blk.{layer}.{role}.weight", layer, role, "MUL_MAT", "Q4_0", (256, 256, 1), 1000, 1.0)
        for layer in range(N_LAYER)
        for role in ("attn_q", "ffn_down")
    ),
    Operator("output.weight", None, "output", "MUL_MAT", "Q8_0", (256, 512, 1), 3000, 1.0),
)
NAMES = tuple(operator.name for operator in OPERATORS)
LAST_LAYER = ("blk.1.attn_q.weight", "blk.1.ffn_down.weight", "output.weight")
DOWN = "blk.0.ffn_down.weight"
SETTING = Setting(LoadSettings("model.gguf", device="rpc-worker:1", n_ctx=256, n_threads=1))
PP, TG, PG = BenchTest(64, 0), BenchTest(0, 16), BenchTest(64, 16, 128)
FACTS = {
    "build_commit": "0c1e570", "build_number": 1, "cpu_info": "a CPU", "gpu_info": "rpc-worker:1", "backends": "RPC",
    "model_type": "llama ?B Q4_0", "model_size": 2311168, "model_n_params": 3738880, "flash_attn": -1,
}  # fmt: skip


def report(*on_device, **changes):
    """What an arm reads back that has these operators on the device."""
    shares = {name: float(name in on_device) for name in NAMES}
    made = LoadReport(
        device="RPC0" if on_device else "none",
        device_bytes=sum(o.bytes for o in OPERATORS if o.name in on_device),
        host_bytes=10_000,
        shares=shares,
        layouts={name: "CPU_REPACK" for name, share in shares.items() if not share},
        buffers={"CPU": (10_000, 0, 0)},
        n_batch=2048,
        n_ubatch=512,
        n_threads=1,
        flash_attn=True,
        plugins=(),
        facts=FACTS,
    )
    return replace(made, **changes)


def stock(name, n_gpu_layers, cap=Cap(), **changes):  # noqa: B008 - frozen
    setting = replace(SETTING if n_gpu_layers else SETTING.changed(device="none"), cap=cap)
    return ArmSpec(name, setting, StockPlacement(n_gpu_layers), **changes)


def planned(shares, n_ubatch=512):
    rows = [OperatorPlacement(n, gg=shares.get(n, 0.0), cg=0.0, cc=1 - shares.get(n, 0.0)) for n in NAMES]
    return ArmSpec("oato", SETTING, plan=some_plan(rows, workload=Workload(64, 16, 256, n_ubatch)))


CPU, NGL, THIRD = stock("stock-cpu", 0), stock("stock-ngl", 99), stock("third", 2)
REPORTS = {"stock-cpu": report(), "stock-ngl": report(*NAMES), "third": report(*LAST_LAYER)}


@dataclass
class World:
    """What arms without processes share. turn: (arm, turn of all arms) -> the seconds it takes, or its sample. load:
    arm -> what it reads back. cpu_s: (arm, turn) -> its processor time. said: what was asked of whom."""

    turn: Callable[[str, int], float | Sample]
    load: Callable[[str], LoadReport] = REPORTS.__getitem__
    cpu_s: Callable[[str, int], float] = lambda name, turn: 0.0
    said: list[tuple[str, str]] = field(default_factory=list)

    def start(self, spec, deadline):
        return Arm(self, spec.name, deadline)

    def asked(self, wanted):
        """Whom this was asked of, in order."""
        return [who for what, who in self.said if what == wanted]


@dataclass
class Arm:
    """In place of an ArmProcess."""

    world: World
    name: str
    deadline: Deadline | None

    def load(self, operators):
        self.world.said.append(("load", self.name))
        self.report = self.world.load(self.name)
        return self.report

    def warm_up(self, tests):
        self.world.said.append(("warm_up", self.name))
        return self.report.device_bytes, self.report.host_bytes

    def measure(self, tests):
        turn = len(self.world.asked("measure"))
        self.world.said.append(("measure", self.name))
        made = self.world.turn(self.name, turn)
        if self.deadline is not None:
            self.deadline.check()
        if isinstance(made, Sample):
            return dict.fromkeys(tests, made)
        return {t: Sample(made * t.n_prompt / t.n_tokens, made * t.n_gen / t.n_tokens) for t in tests}

    def cpu_seconds(self):
        return self.world.cpu_s(self.name, len(self.world.asked("measure")))

    def close(self):
        self.world.said.append(("close", self.name))


def compare(world, arms=(CPU, NGL), tests=(PP,), n_rounds=2, room=1 << 40, on_partial=lambda result: None, **options):
    bench = Bench(arms, tests, OPERATORS, N_LAYER, n_rounds, **options)
    return run_bench(bench, on_partial=on_partial, start=world.start, available_memory=lambda: room)


def taking(*seconds):
    """A world whose turns take so long, one after the other."""
    return World(lambda name, turn: seconds[turn])


# ---- turns


def test_arms_stay_loaded_and_take_turns():
    world = World(lambda name, turn: {"stock-cpu": 1.0, "stock-ngl": 0.5}[name])
    result = compare(world)
    assert world.said == [
        ("load", "stock-cpu"), ("load", "stock-ngl"), ("warm_up", "stock-cpu"), ("warm_up", "stock-ngl"),
        *(("measure", name) for name in ["stock-cpu", "stock-ngl", "stock-ngl", "stock-cpu"] * 2),
        ("close", "stock-cpu"), ("close", "stock-ngl"),
    ]  # fmt: skip
    (series,) = result.series
    assert [s.seconds for s in series.samples(1)] == [0.5] * 4
    assert result.resident and not result.interrupted
    assert (result.warnings, [arm.problems for arm in result.arms]) == ((), [(), ()])


@pytest.mark.parametrize("why", ["asked for", "do not fit into memory together", "do not fit together (no room)"])
def test_arms_that_do_not_fit_together_are_loaded_for_each_turn(why):
    world, refusals = taking(*[1.0] * 4), [DeviceError("no room")] if "(no room)" in why else []

    def load(name):
        if name == "stock-ngl" and refusals:
            raise refusals.pop()
        return REPORTS[name]

    world.load = load
    room = 1000 if "memory" in why else 1 << 40
    result = compare(world, n_rounds=1, room=room, resident=False if why == "asked for" else None)
    assert not result.resident
    assert [why in warning for warning in result.warnings] == ([] if why == "asked for" else [True])
    alive = set()
    for what, who in world.said:
        if what == "load":
            alive.add(who)
        elif what == "close":
            alive.discard(who)
        assert len(alive) <= 1 or refusals == []
    measured = world.asked("measure")
    assert measured == ["stock-cpu", "stock-ngl", "stock-ngl", "stock-cpu"]
    assert world.asked("warm_up") == measured, "a model that was just loaded is warmed up first"


def test_ctrl_c_leaves_the_complete_blocks():
    def turn(name, turn):
        if turn == 5:
            raise KeyboardInterrupt
        return 1.0

    world, partial = World(turn), []
    result = compare(world, on_partial=partial.append)
    assert result.interrupted and ("close", "stock-cpu") in world.said
    assert [len(each.series[0].kept) for each in (*partial, result)] == [1, 1]


def test_a_deadline_leaves_the_complete_blocks_and_ends_every_process():
    now = [0.0]

    def turn(name, turn):  # blocks of 3 s
        now[0] += 1.0 if name == "stock-cpu" else 0.5
        return 1.0

    world = World(turn)
    result = compare(world, n_rounds=9, deadline=Deadline(4.2, lambda: now[0]))
    assert not result.interrupted
    assert [len(series.kept) for series in result.series] == [1]
    assert now == [4.5], "the turn under way is the last"
    assert world.said[-2:] == [("close", "stock-cpu"), ("close", "stock-ngl")]


def test_a_process_that_does_not_answer_in_time_is_out_of_time():
    arm = ArmProcess(CPU, Deadline(0.0, lambda: 0.0))
    try:
        with pytest.raises(OutOfTime, match="arm stock-cpu"):
            arm.load(())
    finally:
        arm.close()


def test_an_arm_that_computes_out_of_turn_is_named():
    world = World(lambda name, turn: 1.0, cpu_s=lambda name, turn: float(turn) if name == "stock-ngl" else 0.0)
    result = compare(world)
    assert result.arms[1].idle_cpu_share > 100  # turns take no time here
    assert any("arm stock-ngl used" in warning for warning in result.warnings)


# ---- what is measured again


def test_a_drifted_block_is_discarded_and_measured_again():
    slower = (1.0,) * 4 + (1.0, 1.0, 1.5, 1.5) + (1.0,) * 4  # both arms, in the second block
    result = compare(taking(*slower))
    (made,) = result.series
    assert [round_.drift for round_ in made.discarded] == [pytest.approx(0.5)]
    assert [s.seconds for s in made.samples(0)] == [1.0] * 4
    assert result.warnings[0] == "pp64: 1 round was repeated because the machine's speed changed"


def test_on_a_machine_that_never_calms_down_the_calmest_blocks_are_taken_and_told():
    times = [v for drift in (0.5, 0.2, 0.9, 0.3) for v in (1.0, 1.0 + drift)]
    result = compare(taking(*times), (CPU,))
    (made,) = result.series
    assert [round(round_.drift, 6) for round_ in made.kept] == [0.2, 0.3] and len(made.discarded) == 2
    assert "changed by more than 10% within 2 of 2 rounds" in result.warnings[0]


@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.floats(0.5, 2.0), min_size=64, max_size=64))
def test_there_are_always_as_many_blocks_as_asked_for(n_arms, n_rounds, times):
    (made,) = compare(taking(*times), (CPU, NGL, THIRD)[:n_arms], n_rounds=n_rounds).series
    assert len(made.kept) == n_rounds
    assert len(made.kept) + len(made.discarded) <= 2 * n_rounds
    kept_by_need = [round_ for round_ in made.kept if round_.drift > MAX_DRIFT]
    assert all(round_.drift >= worst.drift for round_ in made.discarded for worst in kept_by_need)


def late_in(*turns):
    """A world whose samples have a fault in these turns, counted from 0."""
    late = Sample(1.0, 0.0, fault="the device was late", late_share=0.25, n_overruns=3)
    return World(lambda name, turn: late if turn in turns else Sample(1.0, 0.0))


def test_a_block_with_a_fault_is_measured_again_and_never_kept():
    result = compare(late_in(1, 4, 6, 8, 10), (CPU,), n_rounds=3)
    (made,) = result.series
    assert len(made.kept) == 1
    assert [round_.fault for round_ in made.discarded] == ["the device was late"] * 5
    assert result.warnings == ("pp64: 5 rounds discarded: the device was late",)
    with pytest.raises(DeviceError, match="the device was late, in every round; close them"):
        compare(late_in(*range(20)), (CPU,), n_rounds=3)


def test_an_arm_with_a_fault_is_measured_again_at_the_end_of_its_block():
    world = late_in(4, 6)  # 0 1 2 2 1* 0, 1* 1, 1 1
    result = compare(world, (CPU, NGL, THIRD), n_rounds=1)
    assert world.asked("measure") == [arm.name for arm in (CPU, NGL, THIRD, THIRD, NGL, CPU, NGL, NGL, NGL, NGL)]
    (made,) = result.series
    (round_,) = made.kept
    assert not round_.fault and not made.discarded and [len(pair) for pair in round_.samples] == [2, 2, 2]
    assert [bool(sample.fault) for sample in made.unused(1)] == [False, True, True, False]
    assert made.unused(0) == made.unused(2) == []
    assert result.warnings == ("pp64: 1 disturbed sample was repeated",)


def test_how_well_an_emulated_device_kept_time_is_told():
    world = World(lambda name, turn: Sample(1.0, 0.0, late_share=0.001 * turn, n_overruns=turn))
    (told,) = compare(world, (CPU,), n_rounds=1).warnings
    assert told == "pp64: emulated device: late 0.10% of the time in the worst turn; 1 overruns"


def test_a_test_that_is_done_is_not_measured_again():
    world, tests = World(lambda name, turn: 1.0), (PP, TG)
    done = compare(world, tests=tests, n_rounds=3, done=lambda series: series.test == PP).series
    assert [len(made.kept) for made in done] == [1, 3]
    assert world.asked("measure") == [CPU.name, NGL.name, NGL.name, CPU.name] * 3
    assert [len(made.kept) for made in compare(world, n_rounds=3, done=lambda series: True).series] == [1]


# ---- options of stock that are tried


def measuring(world):
    def measure(bench, progress, on_partial):
        return run_bench(bench, on_partial=on_partial, start=world.start)

    return measure


def test_options_are_tried_for_few_tokens_and_the_faster_sample_counts():
    long = BenchTest(64, 4 * SEARCH_GEN)
    samples, fault = measure_briefly(CPU, (long,), OPERATORS, N_LAYER, measure=measuring(taking(1.0, 0.96)))
    assert fault == "" and samples[long].prompt_s == pytest.approx(0.96 * 64 / 80)
    assert samples[long].gen_s == pytest.approx(4 * 0.96 * 16 / 80), "scaled to the answer that was asked for"


def test_options_that_fail_or_do_something_else_have_a_fault():
    def cannot(name):
        raise DeviceError("no room")

    assert measure_briefly(CPU, (PP,), OPERATORS, N_LAYER, measure=measuring(World(lambda *_: 1.0, cannot))) == (
        {},
        "no room",
    )
    elsewhere = World(lambda *_: 1.0, lambda name: report(*NAMES))
    samples, fault = measure_briefly(LAST, (PP,), OPERATORS, N_LAYER, measure=measuring(elsewhere))
    assert not samples and "is not placed as specified" in fault
    with pytest.raises(OutOfTime):
        late = Deadline(0.5, lambda: 1.0)
        measure_briefly(CPU, (PP,), OPERATORS, N_LAYER, deadline=late, measure=measuring(taking(1.0, 1.0)))


# ---- arms that are not what they say

HALF = planned({DOWN: 0.5})
SPLIT = report(shares={**report().shares, DOWN: 0.5})
LAST, ON_LAST = stock("stock-ngl", 2), report(*LAST_LAYER)


@pytest.mark.parametrize(
    ("spec", "read_back", "problem"),
    [
        (LAST, ON_LAST, ""), (CPU, report(), ""), (NGL, report(*NAMES), ""), (HALF, SPLIT, ""),
        (planned({LAST_LAYER[0]: 1.0}), report(LAST_LAYER[0]), ""),
        (LAST, report("output.weight"), "blk.1.attn_q.weight and 1 more is not placed as specified: 100%"),
        (LAST, replace(ON_LAST, plugins=("OALLAMA",)), "stock arm but has OALLAMA"),
        (CPU, report(device_bytes=4096), "it should use no device but holds 4 KiB on one"),
        (CPU, report(shares={}), "could not read back"),
        (HALF, report(shares={**report().shares, DOWN: 0.25}), f"50% of {DOWN} should be on the device, but 25% is"),
        (planned(dict.fromkeys(LAST_LAYER, 1.0)), report(*LAST_LAYER[:2]), "output.weight is not placed as specified"),
        (stock("capped", 2, Cap(5000)), ON_LAST, ""), (stock("capped", 2, Cap(None, 5000)), ON_LAST, ""),
        (stock("capped", 2, Cap(4960, 4960)), ON_LAST, ""),  # within a hundredth
        (stock("capped", 2, Cap(4900)), ON_LAST, "on RPC0 but only 4.79 KiB may be used"),
        (stock("capped", 2, Cap(None, 4900)), ON_LAST, "of weights on RPC0 but --gpu-weights allows 4.79 KiB"),
    ],
)  # fmt: skip
def test_an_arm_that_did_not_do_what_it_says_is_noticed(spec, read_back, problem):
    found = problems(spec, read_back, OPERATORS, N_LAYER)
    assert len(found) == bool(problem) and problem in "".join(found)


def test_arms_that_are_the_same_are_found_whatever_they_are_called():
    a = report(*LAST_LAYER)
    b = replace(a, facts={"gpu_info": a.facts.get("gpu_info")})
    other = replace(a, facts={"gpu_info": "another of several cards"})
    assert same_as([("stock-ngl", a), ("auto", b), ("stock-fit@1", other), ("stock-cpu", report())]) == {
        "auto": "stock-ngl"
    }
    for change in (
        {"flash_attn": False}, {"n_threads": 2}, {"n_ubatch": 64}, {"buffers": {"CPU": (1, 2, 3)}},
        {"layouts": dict.fromkeys(NAMES, "CPU")}, {"shares": {**report().shares, "output.weight": 0.5}},
    ):  # fmt: skip
        assert same_as([("a", report()), ("b", report(**change))]) == {}, change


def test_overrides_go_before_layers_and_ncmoe_keeps_experts_of_the_first_layers():
    placement = StockPlacement(99, ((r"blk\.0\.ffn_down", "CPU"),))
    on_device = expected_on_device(OPERATORS, N_LAYER, placement)
    assert [name for name, is_there in on_device.items() if not is_there] == [DOWN]
    assert expected_on_device(OPERATORS, N_LAYER, StockPlacement(-1)) == dict.fromkeys(NAMES, True)
    assert operator_bytes_on_device(OPERATORS, N_LAYER, placement) == 6000
    experts = [
        Operator(f"blk.{layer}.{role}.weight", layer, role, "MUL_MAT_ID", "Q4_0", (32, 32, 4), 100, 0.5)
        for layer in (0, 1, 10)
        for role in ("ffn_up_exps", "ffn_gate_inp", "ffn_down_chexps", "ffn_up_shexp")
    ]
    options = StockOptions(n_cpu_moe=1)
    on_device = expected_on_device(experts, 11, StockPlacement(99, expert_overrides(1), options))
    on_host = [name for name, is_there in on_device.items() if not is_there]
    assert on_host == ["blk.0.ffn_up_exps.weight", "blk.0.ffn_down_chexps.weight"]


# ---- which arms there are, and the best of stock's


@pytest.fixture
def maker(monkeypatch):
    """With a --fit that needs no llama.cpp."""
    monkeypatch.setattr(
        ArmMaker, "_fit", lambda self, name, options=None: ArmSpec(name, self.setting, StockPlacement(-1))
    )
    return ArmMaker(SimpleNamespace(has_device=True), SETTING)


@pytest.mark.parametrize("name", ["stock-fit", "stock-cpu"])
def test_a_stock_arm_may_be_had_with_another_micro_batch(name, maker):
    plain, other, large = (maker.make(name + suffix) for suffix in ("", "-ub1024", "-ub4096"))
    assert (other.name, other.stock) == (f"{name}-ub1024", plain.stock)
    assert other.setting == plain.setting.changed(n_ubatch=1024)
    assert large.setting == plain.setting.changed(n_ubatch=4096, n_batch=4096), "llama.cpp would lower it to -b"
    for wrong in (f"{name}-ub0", f"{name}-ub", "auto-ub1024", "stock-other-ub1024"):
        with pytest.raises(UsageError, match="unknown arm"):
            maker.make(wrong)


def test_a_plan_with_a_larger_micro_batch_brings_stock_with_the_same(maker):
    """So that a gain by the micro-batch alone is not taken for one of the placement."""

    def brought(*specs):
        return [spec.name for spec in maker.at_the_plans_ubatch(specs)]

    fit = maker.make("stock-fit")
    assert brought(fit, planned({}, 1024), planned({}, 2048)) == ["stock-fit-ub1024", "stock-fit-ub2048"]
    assert brought(fit, planned({}, 512), planned({}, 256)) == []
    assert brought(fit, maker.make("stock-fit-ub1024"), planned({}, 1024)) == []
    assert brought(maker.make("stock-cpu"), planned({}, 1024)) == [], "there is no --fit to compare with"
    assert brought(fit, planned({}, 4096)) == [], "no arm gets there with -b 2048"


@pytest.mark.parametrize(("limit", "n_gpu_layers"), [(7000, 3), (6999, 2), (5000, 2), (4999, 1), (3000, 1), (2999, 0)])
def test_fit_is_offered_less_until_its_weights_keep_to_the_cap(limit, n_gpu_layers):
    def layers_that_fit(offered):
        """A --fit: output 3000, then 2000 a layer, and 500 of compute buffers."""
        return StockPlacement(max(n for n in range(N_LAYER + 2) if not n or 500 + 1000 + 2000 * n <= offered))

    placement, steps = shrink_until_fits(layers_that_fit, Cap(None, limit), 1 << 30, OPERATORS, N_LAYER)
    assert placement.n_gpu_layers == n_gpu_layers
    assert operator_bytes_on_device(OPERATORS, N_LAYER, placement) <= limit
    assert steps[0].offered_bytes == 1 << 30 and len(steps) <= 8  # each is a no_alloc load
    _, steps = shrink_until_fits(layers_that_fit, Cap(5500), 10_000, OPERATORS, N_LAYER)
    assert [(step.offered_bytes, step.n_gpu_layers) for step in steps] == [(5500, 2)], "no cap on weights, one call"


# ---- what is written of it

SLOW, FAST = [1.2, 1.21, 1.19, 1.2, 1.22, 1.18], [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]


def measured(*tests, arms=(CPU, NGL), n_rounds=3, **reports):
    """A comparison in which the first arm is slow and the second fast. reports: of arms that differ."""
    seconds = {arm.name: iter(times) for arm, times in zip(arms, (SLOW, FAST), strict=True)}
    read_back = {CPU.name: REPORTS[CPU.name], arms[1].name: REPORTS[NGL.name], **reports}
    return compare(World(lambda name, turn: next(seconds[name]), read_back.__getitem__), arms, tests, n_rounds)


def test_prompt_and_generation_of_a_pair_have_ratios_of_their_own():
    (first, second) = rows(measured(PG))
    assert first["ttft_s"] == pytest.approx(1.2 * 64 / 80, rel=1e-3)
    assert second["tpot_s"] == pytest.approx(1.0 * 16 / 80 / 16, rel=1e-3)
    assert second["ttft_ratio_to_first"] == pytest.approx(1.2, rel=1e-3)
    assert second["tpot_ratio_to_first"] == pytest.approx(1.2, rel=1e-3)
    (_, prompt_only) = rows(measured(PP))
    assert (prompt_only["tpot_s"], prompt_only["tpot_ratio_to_first"]) == (None, None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arms": (CPU, stock("again", 0)), "again": report()}, "the same configuration as stock-cpu"),
        ({"stock-ngl": report()}, "stock-ngl did not run as specified: blk.0.attn_q.weight and 4 more"),
        ({"stock-cpu": report(*NAMES)}, "stock-cpu did not run as specified"),
        ({"n_rounds": 2}, "4 samples of each arm are too few"),
    ],
)
def test_a_ratio_that_would_mislead_is_refused(changes, says):
    made = rows(measured(PP, TG, **changes))
    assert (made[1]["ratio_to_first"], made[1]["ratio_ci95"]) == (None, None)
    assert says in made[1]["ratio_refused"]
    assert made[1]["avg_ts"] > 0, "what was measured is still told"
    shown = formatted(made, "md")
    assert f": {made[1]['ratio_refused']}." in " ".join(shown.split())
    assert all(len(line) <= 80 or line.startswith("|") for line in shown.splitlines()), "no terminal breaks a word"


def test_json_is_a_list_as_llama_bench_writes_it_and_knows_no_nan():
    whole = rows(measured(PP, TG))
    whole[0]["avg_ts"] = math.inf
    parsed = json.loads(formatted(whole, "json"), parse_constant=lambda constant: pytest.fail(constant))
    assert parsed[0]["avg_ts"] is None
    assert parsed[1]["samples_ns"] == whole[1]["samples_ns"]


def test_markdown_is_for_people():
    search = ({"flag": "-ngl", "value": 99, "seconds": 0.5},)
    arms = (stock("stock-cpu", 0, Cap(1 << 20, 1 << 19)), stock("stock-ngl", 99, Cap(1 << 20, 1 << 19), search=search))
    result = replace(measured(PG, arms=arms), warnings=("it was | noisy\nhere",), interrupted=True)
    text = formatted(rows(result), "md")
    settings, made = text.split("\n\n")[:2]
    header, rule, *table = made.splitlines()
    assert settings.startswith("llama") and ", threads " in settings, "what all arms have in common"
    assert header.count("|") == rule.count("|") == len(table[0].split(" | ")) + 1 and len(table) == 2
    assert "| stock-cpu | pp64+tg16 @ d128 |" in table[0] and "1.200 (1.1" in table[1]
    for sentence in (
        "stock-ngl: searched -ngl: 99 500.0 ms.", "Cap on the device: 1.0 MiB for every arm.",
        "Cap on weights on the device: 0.50 MiB for every arm.", "Interrupted: ", "it was \\| noisy",
    ):  # fmt: skip
        assert sentence in text
    assert formatted([], "md") == "nothing was measured\n"


def test_json_goes_to_stdout_whatever_a_file_gets(capsys, tmp_path):
    result, file = measured(PP), tmp_path / "result.json"
    asked = ResultOptions(("json", str(file)), True)
    asked.save(result)
    asked.tell(result)
    assert [row["arm"] for row in json.loads(capsys.readouterr().out)] == ["stock-cpu", "stock-ngl"]
    assert [row["arm"] for row in json.loads(file.read_text())] == ["stock-cpu", "stock-ngl"]
    replace(asked, as_json=False).tell(result)
    assert capsys.readouterr().out == ""
