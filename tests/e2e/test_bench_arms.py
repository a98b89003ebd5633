"""`oallama bench` with real processes: what arms load is read back, stock arms are stock, files are llama-bench's.

Little is said of speeds: the machine that runs the tests may be busy.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from devices import REAL
from e2e.described_card import slow_cpu_fast_card
from e2e.forced import ffn, forced
from gguf_factory import write_llama_shape
from processes import COMMAND, PATIENCE_S, here, must_end, until
from seeds import ALL
from stock import needs_programs, program
from stock_plans import MODEL

from ggml_bridge.library import LIB_PATH_VARIABLE, find_plugin
from oallama.bench.arms import STOCK_BEST, STOCK_NCMOE, ArmMaker
from oallama.bench.prepare import shared_setting
from oallama.bench.process import ArmProcess
from oallama.bench.records import ArmSpec, BenchTest, LoadReport, Setting
from oallama.bench.server_arm import server_plan
from oallama.bench.verify import configuration, problems
from oallama.core.errors import DeviceError, DoesNotFit, ModelFileError, UsageError
from oallama.core.types import Attention, Operator, StockOptions
from oallama.device.load_params import LoadSettings
from oallama.device.opening import list_devices
from oallama.model.gguf_reader import read_gguf
from oallama.model.operators import operators
from oallama.placer import Placer
from oallama.placer.stock import stock_plan
from oallama.run.fit import fit_under
from oallama.run.stock import Cap, StockPlacement, expected_on_device, expert_overrides

LLAMA_BENCH_FIELDS = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type",
    "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll", "type_k",
    "type_v", "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices",
    "tensor_split", "tensor_buft_overrides", "load_mode", "lazy_mode", "embeddings", "no_op_offload", "no_host",
    "repack", "fit_target", "fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns",
    "avg_ts", "stddev_ts",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_alloc_loader")

WORKER = "rpc-worker:1"
N_LAYER = 3
PP, TG, DEEP = BenchTest(16, 0), BenchTest(0, 4), BenchTest(8, 4, 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama_shape(tmp_path_factory.mktemp("bench") / "model.gguf", N_LAYER, 256, 512, 4, 2, 300)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "moe.gguf"
    return write_llama_shape(path, 2, 256, 256, 4, 2, 300, n_expert=4)


@pytest.fixture(scope="module")
def ops(model: Path) -> tuple[Operator, ...]:
    return tuple(operators(read_gguf(model)))


def setting(model: Path, device: str = "none", **changes: Any) -> Setting:
    return Setting(LoadSettings(str(model), device, n_ctx=256, n_threads=1)).changed(**changes)


def names(ops: tuple[Operator, ...]) -> list[str]:
    return [operator.name for operator in ops]


def running(spec: ArmSpec) -> closing[ArmProcess]:
    return closing(ArmProcess(spec))


def read_back(setting: Setting, placement: StockPlacement, ops: tuple[Operator, ...]) -> LoadReport:
    """Load a stock arm and return its report."""
    with running(ArmSpec("stock", setting, placement)) as arm:
        return arm.load(names(ops))


@pytest.mark.parametrize(
    "placement",
    [
        StockPlacement(0),
        StockPlacement(2),
        StockPlacement(-1),
        StockPlacement(99, ((r"blk\.1\.ffn_(up|down)", "CPU"), ("attn_k", "CPU"))),
    ],
    ids=["none", "two", "all", "overrides"],
)
def test_stock_llama_cpp_puts_weights_where_its_options_say(
    placement: StockPlacement, model: Path, ops: tuple[Operator, ...]
) -> None:
    report = read_back(setting(model, WORKER), placement, ops)
    assert report.shares == expected_on_device(ops, N_LAYER, placement)
    on_device = sum(o.bytes for o in ops if report.shares[o.name])
    # norms of the layers there, and the embeddings' copy that an output brings, come on top
    assert report.buffers.get("device", (0, 0, 0))[0] >= on_device
    assert report.device == "RPC0"


def test_what_is_read_back_is_what_the_context_has(model: Path, ops: tuple[Operator, ...]) -> None:
    asked = setting(model, n_batch=128, n_ubatch=64, attention=Attention("on", "q8_0"))
    report = read_back(asked, StockPlacement(0), ops)
    assert (report.n_batch, report.n_ubatch, report.n_threads) == (128, 64, 1)
    assert report.flash_attn and report.device_bytes == 0
    assert set(report.layouts) == set(report.shares)
    assert not read_back(asked.changed(attention=Attention("off")), StockPlacement(0), ops).flash_attn


def test_samples_come_for_every_test_and_depth(model: Path) -> None:
    with running(ArmSpec("stock", setting(model), StockPlacement(0))) as arm:
        arm.load([])
        arm.warm_up([PP, TG, DEEP])
        first, second = arm.measure([PP, TG, DEEP]), arm.measure([DEEP, PP])
        until(lambda: arm.measure([TG])[TG].n_runs > 1)  # a few milliseconds are not timed alone
    assert first[PP].prompt_s > 0 == first[PP].gen_s
    assert first[TG].gen_s > 0 == first[TG].prompt_s
    assert min(first[DEEP].prompt_s, first[DEEP].gen_s, second[DEEP].seconds) > 0


@pytest.mark.parametrize("has_vocabulary", [True, False])
def test_tokens_may_be_those_of_a_text(has_vocabulary: bool, model: Path) -> None:
    path = MODEL if has_vocabulary else model
    with running(ArmSpec("stock", replace(setting(path), of_text=True), StockPlacement(0))) as arm:
        arm.load([])
        assert arm.measure([DEEP])[DEEP].gen_s > 0


def test_a_stock_arm_loads_no_plugin_whatever_the_environment_says(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_BACKEND_PATH", str(find_plugin()))
    with running(ArmSpec("stock", setting(model), StockPlacement(0))) as arm:
        assert arm.load([]).plugins == ()
        assert "ggml-oallama" not in Path(f"/proc/{arm.pid}/maps").read_text()
        assert "GGML_BACKEND_PATH" not in Path(f"/proc/{arm.pid}/environ").read_text()


def test_an_arm_on_the_cpu_alone_finds_llama_cpp_by_itself(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may have found it, and then says where it is to its children; the command line does not."""
    monkeypatch.delenv(LIB_PATH_VARIABLE, raising=False)
    with running(ArmSpec("stock", setting(model).changed(device="none"), StockPlacement(0))) as arm:
        assert arm.load([]).plugins == ()


def test_every_arm_is_idle_out_of_turn(model: Path) -> None:
    spec = ArmSpec("stock-ngl", setting(model, WORKER), StockPlacement(99))
    with running(spec) as one, running(spec) as two:
        for arm in (one, two):
            arm.load([])
            arm.warm_up([PP])
        before = two.cpu_seconds()
        one.measure([PP, TG])
        assert two.cpu_seconds() - before <= 0.02 and one.cpu_seconds() > 0
    must_end(one.pid, two.pid)


def test_an_arm_whose_process_dies_is_a_device_error(model: Path) -> None:
    with running(ArmSpec("stock", setting(model), StockPlacement(0))) as arm:
        arm.load([])
        os.kill(arm.pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"process of arm stock was killed by SIGKILL"):
            arm.measure([PP])


def test_what_llama_cpp_refuses_keeps_its_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelFileError, match=r"arm stock: cannot load"):
        read_back(setting(bad), StockPlacement(0), ())


#
# llama.cpp's own --fit, and searches
#


def test_fit_is_llama_cpps_own_and_keeps_to_the_cap(model: Path, ops: tuple[Operator, ...]) -> None:
    on_worker = setting(model, WORKER)
    everything, steps = fit_under(Cap(1 << 30), ops, on_worker.load)
    assert everything.n_gpu_layers < 0 and len(steps) == 1  # llama.cpp's way to say: all of them
    full = read_back(on_worker, everything, ops).device_bytes
    some, _ = fit_under(Cap(full - 1), ops, on_worker.load)
    assert 0 <= some.n_gpu_layers <= N_LAYER
    one_more = StockPlacement(some.n_gpu_layers + 1)
    assert read_back(on_worker, some, ops).device_bytes < full <= read_back(on_worker, one_more, ops).device_bytes + 1


def test_fit_spills_experts_first(moe: Path) -> None:
    ops, on_worker = tuple(operators(read_gguf(moe))), setting(moe, WORKER)
    full = read_back(on_worker, StockPlacement(99), ops).device_bytes
    placement, _ = fit_under(Cap(full - 1), ops, on_worker.load)
    report = read_back(on_worker, placement, ops)
    assert report.shares == expected_on_device(ops, 2, placement) and report.device_bytes < full
    host = [name for name, share in report.shares.items() if not share]
    assert host and all("ffn" in name for name in host)


def with_profile(model: Path, **options: Any) -> Placer:
    return Placer.load(model, device=WORKER, threads=1, profile=slow_cpu_fast_card(model, 1e9), **options)


def maker_of(placer: Placer, *tests: BenchTest) -> ArmMaker:
    return ArmMaker(placer, shared_setting(placer, tests), tests)


def test_the_context_holds_all_requests(model: Path) -> None:
    placer, tests = Placer.load(model, device="none", threads=1), (BenchTest(0, 48),)
    assert [shared_setting(placer, tests, n_parallel=n).load.n_ctx for n in (1, 5, 8)] == [256, 256, 512]
    with pytest.raises(UsageError, match="400 tokens of the longest prompt, generation and depth of 8 requests"):
        shared_setting(Placer.load(model, device="none", n_ctx=384), tests, n_parallel=8)


def test_the_best_ncmoe_keeps_to_the_cap(moe: Path) -> None:
    operators = Placer.load(moe, device="none").operators
    experts = sum(o.bytes for o in operators if o.role.endswith("_exps"))
    total = sum(o.bytes for o in operators)
    placer = with_profile(moe, gpu_weights=1 - experts / 2 / total)  # one of two layers' experts
    arm = maker_of(placer, PP, TG).make(STOCK_NCMOE)
    assert arm.stock is not None and arm.stock.options.n_cpu_moe == 1 and not arm.search
    report = read_back(arm.setting, arm.stock, placer.operators)
    assert not problems(arm, report, placer.operators, 2)
    with pytest.raises(DoesNotFit, match="arm stock-ncmoe"):
        maker_of(with_profile(moe, gpu_weights=0.001), PP).make(STOCK_NCMOE)


def test_the_best_of_stock_is_the_fastest_of_what_was_measured(moe: Path) -> None:
    placer = with_profile(moe, gpu_weights=0.6)
    arm = maker_of(placer, PP, TG).make(STOCK_BEST)
    assert arm.stock is not None and 2 <= len(arm.search) <= 4
    seconds = {step["value"]: step["seconds"] for step in arm.search}
    assert min(seconds.values()) > 0 and seconds[arm.stock.flags] == min(seconds.values())
    assert f"stock-best is {arm.stock.flags}, the fastest of {len(arm.search)}" in arm.notes[0]
    assert not problems(arm, read_back(arm.setting, arm.stock, placer.operators), placer.operators, 2)


def test_no_host_keeps_host_weights_in_the_layouts_of_the_cpu(model: Path, ops: tuple[Operator, ...]) -> None:
    """Beside a device with pinned memory, where stock llama.cpp else keeps them plain, in its mapping of the file."""
    card = setting(model, "emulated:vram=1GiB,scale=1,values=real").changed(stock=StockOptions(no_host=True))
    full = read_back(card, StockPlacement(-1), ops).device_bytes
    placement, _ = fit_under(Cap(full - 1), ops, card.load)
    assert placement.options.no_host and placement.n_gpu_layers <= N_LAYER
    report = read_back(card, placement, ops)
    assert not problems(ArmSpec("stock-no-host", card, placement), report, ops, N_LAYER)
    plain = read_back(card, replace(placement, options=StockOptions()), ops)
    assert report.shares == plain.shares and report.layouts and configuration(report) != configuration(plain)
    assert set(plain.layouts.values()) == {"CPU_Mapped"} and "CPU_Mapped" not in report.layouts.values()


CARD = "emulated:vram=1GiB,scale=1,values=real"


def cached(n_bytes: int, n_cpu_moe: int = 2) -> StockPlacement:
    options = StockOptions(moe_cache_bytes=n_bytes, n_cpu_moe=n_cpu_moe)
    return StockPlacement(99, expert_overrides(n_cpu_moe), options)


def test_an_expert_cache_is_held_on_the_device_beside_experts_in_pinned_memory(moe: Path) -> None:
    ops, card = tuple(operators(read_gguf(moe))), setting(moe, CARD)
    plain, report = (read_back(card, placement, ops) for placement in (cached(0), cached(1 << 20)))
    assert 0 < report.device_bytes - plain.device_bytes <= 1 << 20
    on_host = {name: where for name, where in report.layouts.items() if "exps" in name}
    assert on_host and set(on_host.values()) == {"Emulated0_Host"}, "the file is not mapped"
    assert not problems(ArmSpec("stock-moe-cache", card, cached(1 << 20)), report, ops, 2)
    with running(ArmSpec("stock-moe-cache", card, cached(1 << 20))) as arm:
        arm.load(names(ops))
        arm.warm_up([PP, TG])
        assert arm.measure([TG])[TG].gen_s > 0


def test_a_cache_that_llama_cpp_switches_off_is_an_error_of_the_arm(moe: Path) -> None:
    ops, card = tuple(operators(read_gguf(moe))), setting(moe, CARD)
    with pytest.raises(DeviceError, match=r"disabled the expert cache of 1 MiB: .*is disabled"):
        read_back(card, cached(1 << 20, n_cpu_moe=0), ops)
    with pytest.raises((DeviceError, ModelFileError), match="too small"):
        read_back(card, cached(1000), ops)


def test_a_plan_with_an_expert_cache_is_loaded_as_the_stock_arm_is_and_takes_what_was_planned(moe: Path) -> None:
    profile = slow_cpu_fast_card(moe, 1e9)
    placer = Placer.load(moe, device=CARD, threads=1, profile=profile, n_ctx=256)
    asked = shared_setting(placer, (PP, TG))
    plan = stock_plan(placer, placer.workload(16, 4), cached(1 << 20), name="stock")
    assert plan.stock == cached(1 << 20).options and plan.policy == "stock"
    with running(ArmMaker(placer, asked, (PP,), {}).of_plan("auto", plan)) as arm:
        ours, stock = arm.load(names(placer.operators)), read_back(asked, cached(1 << 20), placer.operators)
    assert configuration(ours) == configuration(stock) and not ours.warnings
    planned = plan.memory.weights_gpu + plan.memory.kv + plan.memory.compute
    assert ours.device_bytes == pytest.approx(planned, abs=1 << 16)


#
# the whole command
#


def test_stock_and_plan_are_compared_and_the_same_is_told_from_another(model: Path, tmp_path: Path) -> None:
    plan, other = tmp_path / "mine.json", tmp_path / "other.json"
    placer = Placer.load(model, device="none", threads=1)
    made = placer.plan("cpu", workload=placer.workload(16, 4), measure=False)
    made.save(plan)
    replace(made, attention=Attention("off")).save(other)
    asked = ("--arms", f"stock-cpu,cpu,{plan},{other}", "-p", 0, "-n", 0, "-pg", "8,4", "-r", 6, "--json")
    rows = json.loads(here("bench", model, "--device", "none", "--threads", 1, *asked).stdout)
    stock, cpu, mine, other_row = rows
    assert [row["arm"] for row in rows] == ["stock-cpu", "cpu", "mine", "other"]
    for row in rows:
        assert len(row["samples_ns"]) == 6 and row["device_bytes"] == 0
        assert set(row["placement"]["host"]) == set(names(placer.operators))
    assert stock["ratio_to_first"] == 1.0
    assert all("same configuration" in row["ratio_refused"] for row in (cpu, mine))
    assert any("same configuration" in warning for warning in mine["warnings"])
    low, high = other_row["ratio_ci95"]
    assert low <= other_row["ratio_to_first"] <= high and not other_row["flash_attn_used"]


def test_devices_of_the_plug_in_are_no_cpus(model: Path) -> None:
    case = forced(model, REAL, ffn(0.5))
    maker = ArmMaker(case.placer, shared_setting(case.placer, (PP,)), (PP,))
    with running(maker.of_plan("mine", case.plan)) as arm:
        facts = arm.load(names(case.placer.operators)).facts
    assert facts["cpu_info"] == next(info.description for info in list_devices() if info.name == "CPU")


def test_a_worker_cap_and_fit_from_the_command_line(model: Path) -> None:
    asked = ("--gpu-weights", "50%", "--arms", "stock-fit,stock-cpu", "-p", 8, "-n", 0, "-r", 6, "--json")
    fit, cpu = json.loads(here("bench", model, "--device", WORKER, "--threads", 1, *asked).stdout)
    assert fit["devices"] == "RPC0" and 0 < fit["operator_bytes_on_device"] <= fit["cap_operator_bytes"]
    assert (cpu["devices"], cpu["device_bytes"], cpu["operator_bytes_on_device"]) == ("none", 0, 0)
    assert cpu["ratio_to_first"] > 0


@pytest.mark.thorough
def test_arms_may_be_loaded_anew(model: Path) -> None:
    asked = ("--device", "none", "-t", 1, "--arms", "stock-cpu,cpu", "-p", 8, "-n", 0, "-r", 2, "-o", "json")
    done = here("bench", model, *asked, "--reload")
    assert [row["settings"]["resident"] for row in json.loads(done.stdout)] == [False] * 2


def test_ctrl_c_leaves_a_valid_partial_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    asked = ("--device", "none", "--threads", 1, "--arms", "stock-cpu,cpu", "-p", 16, "-n", 0, "-r", 1000, "-o", file)
    command = [*COMMAND, *map(str, ("bench", model, *asked))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(file.is_file)
        children = [child.pid for child in psutil.Process(process.pid).children()]
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE_S)[1]
    assert (process.returncode, said.splitlines()[-1]) == (130, "oallama: interrupted")
    rows = json.loads(file.read_text())
    assert [row["arm"] for row in rows] == ["stock-cpu", "cpu"]
    must_end(*children)
    assert rows[0]["interrupted"] and 2 <= len(rows[0]["samples_ns"]) < 1000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arms", "stock-fit,auto"], "stock-fit needs a device"),
        (["--arms", "stock-fast"], "unknown arm 'stock-fast'"),
        (["--arms", "auto,nonsense"], "unknown arm 'nonsense'"),
        (["--arms", "cpu,cpu"], "not a list of different arms"),
        (["-p", "0", "-n", "0"], "nothing to time"),
        (["-p", "x"], "is not a whole number from 0"),
        (["-pg", "0,0"], "not a prompt and a generation"),
        (["-c", "16", "-p", "64"], "-c 16 cannot hold"),
        (["-o", "result.txt"], "neither a format"),
        (["--arms", "missing.json"], "cannot read the plan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_compared_is_refused_in_one_line(arguments: list[str], says: str, model: Path) -> None:
    done = here("bench", model, "--device", "none", *arguments, code=2)
    assert says in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_plans_are_made_for_the_depth_of_the_tests_and_predict_each_of_them(model: Path) -> None:
    profile = slow_cpu_fast_card(model, 1e9)
    placer = Placer.load(model, device=WORKER, profile=profile, gpu_weights=0.3, threads=1)
    tests = (BenchTest(16, 4), BenchTest(16, 4, 400), PP, TG)
    arm = ArmMaker(placer, shared_setting(placer, tests), tests).make("layers")
    assert arm.plan is not None and arm.plan.predicted is not None
    workload = arm.plan.workload
    assert (workload.n_prompt, workload.n_gen, workload.n_past) == (16, 4, 400)
    shallow, deep, prompt, token = (arm.predicted[test.label] for test in tests)
    assert deep["ttft_s"] > shallow["ttft_s"] > 0 and deep["tpot_s"] > shallow["tpot_s"] > 0
    assert deep == pytest.approx(asdict(arm.plan.predicted)), "what it was made for"
    assert prompt["ttft_s"] == pytest.approx(shallow["ttft_s"]) and prompt["tpot_s"] == 0
    assert token["ttft_s"] == 0 < token["total_s"] == pytest.approx(4 * token["tpot_s"])


def test_a_plan_for_another_kv_cache_than_that_of_the_arms_is_noted(model: Path) -> None:
    placer, other = (
        Placer.load(model, device="none", threads=1, flash_attn="on", type_k=type_k) for type_k in ("f16", "q8_0")
    )
    plan, its_own = (each.plan("cpu", n_prompt=16, n_gen=4, measure=False) for each in (other, placer))
    maker = ArmMaker(placer, shared_setting(placer, (PP,)), (PP,))
    note = "planned for a KV cache of q8_0 and f16, but all arms run with -ctk f16 -ctv f16"
    spec = maker.of_plan("other", plan)
    assert note in spec.notes and note not in maker.of_plan("its own", its_own).notes
    in_server = server_plan(placer, spec)
    assert in_server.attention == Attention("on"), "so do arms in llama-server"
    assert in_server.workload.n_ctx == spec.setting.load.n_ctx != plan.workload.n_ctx


def test_where_tuning_says_stock_the_very_configuration_of_the_stock_arm_is_loaded(moe: Path) -> None:
    """So that it counts as 1.0 by identity: every weight, buffer and parameter read back is the same."""
    placer = Placer.load(moe, device=WORKER, threads=1, profile=slow_cpu_fast_card(moe, 1e9))
    asked = setting(moe, WORKER, n_ubatch=128)

    def reports(placement: StockPlacement) -> tuple[LoadReport, LoadReport]:
        plan = stock_plan(placer, placer.workload(16, 4, asked.load.n_ctx, asked.load.n_ubatch), placement)
        assert plan.stock == placement.options
        with running(ArmMaker(placer, asked, (PP,), {}).of_plan("auto", plan)) as arm:
            return read_back(asked, placement, placer.operators), arm.load(names(placer.operators))

    everything, ours = reports(StockPlacement(-1))
    assert configuration(everything) == configuration(ours)
    spilled, _ = fit_under(Cap(everything.device_bytes - 1), placer.operators, asked.load)
    assert spilled.overrides
    for placement in (spilled, *((StockPlacement(0), StockPlacement(1)) if ALL else ())):
        stock, ours = reports(placement)
        assert configuration(stock) == configuration(ours) != configuration(everything)
        assert ours.n_ubatch == 128


@needs_programs
def test_the_fields_are_those_of_the_pinned_llama_bench(model: Path) -> None:
    command = [program("llama-bench"), "-m", str(model), "-p", "8", "-n", "0", "-r", "1", "-t", "1", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (theirs,) = json.loads(done.stdout)
    (ours, _) = json.loads(
        here("bench", model, "--device", "none", "-t", 1, "--arms", "stock-cpu,cpu", "-p", 8, "-n", 0, "-r", 2,
                "-o", "json").stdout
    )  # fmt: skip
    assert list(theirs) == [*LLAMA_BENCH_FIELDS, "samples_ns", "samples_ts"]
    assert {name: type(value) for name, value in theirs.items()} == {name: type(ours[name]) for name in theirs}
    same = set(theirs) - {
        *("build_commit", "build_number", "test_time", "n_gpu_layers", "devices"),
        *(name for name in theirs if name.endswith(("_ns", "_ts"))),
    }
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}


def test_a_matrix_is_measured_and_not_measured_again(model: Path, tmp_path: Path) -> None:
    matrix, result = tmp_path / "two.toml", tmp_path / "two.json"
    lines = ['arms = ["stock-cpu", "cpu"]', 'device = "none"', "threads = 1", "repetitions = 2", "n-prompt = [8, 16]"]
    matrix.write_text("\n".join([*lines, "n-gen = 0", "[[setting]]", f'model = "{model}"']) + "\n", encoding="utf-8")
    done = here("bench", "--matrix", matrix, "-o", result)
    unwrapped = " ".join(done.stdout.split())
    assert "cpu: 1.00 to 1.00 times as fast as the fastest stock arm" in unwrapped and "pp16" not in done.stderr
    found, written = json.loads(result.read_text(encoding="utf-8")), result.stat().st_mtime_ns
    assert [[row["n_prompt"] for row in cell["rows"]] for cell in found["cells"]] == [[8, 8], [16, 16]]
    assert result.with_suffix(".svg").read_text(encoding="utf-8").endswith("</svg>\n")
    assert json.loads(here("bench", "--matrix", matrix, "-o", result, "--json").stdout) == found
    assert result.stat().st_mtime_ns == written
