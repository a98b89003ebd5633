"""The command line on the default model: every command, its JSON, its exit codes, its manners.

The profile is described: measuring has tests of its own. Fields of plan, affinity-report, what-if and simulate:
tests/golden/test_json_reports.py.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from e2e.described_card import profile_file, slow_cpu_worker
from gguf_factory import write_llama_shape
from processes import COMMAND, ROOT, here

from oallama.plan.plan import Plan
from oallama.stores.default_model import FILE

pytestmark = pytest.mark.usefixtures("no_alloc_loader", "kept_engines")

MODEL = ROOT / "models" / FILE
TESTBED = ROOT / "docs" / "benchmarks" / "testbeds" / "scheinfer-c.json"
WORKER = ("--device", "rpc-worker:1")


def document(*arguments, **options):
    """The single JSON document of a command line."""
    return json.loads(here(*arguments, **options).stdout)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """A file of the profile of a worker."""
    return profile_file(slow_cpu_worker(MODEL), tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def half(profile):
    """Options of what may place half of the weights on a worker."""
    return (*WORKER, "--gpu-weights", "50%", "--profile", profile)


@pytest.fixture(scope="module")
def plan_file(profile, tmp_path_factory):
    """Three whole layers on the worker: what OATO puts there follows from timings, and may be nothing."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    here("plan", MODEL, *WORKER, "--profile", profile, "-ngl", "3", "-p", "64", "-n", "32", "-o", path)
    return path


@pytest.fixture(scope="module")
def cpu_plan(profile, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "cpu.json"
    here("plan", MODEL, *WORKER, "--profile", profile, "--policy", "cpu", "-o", path)
    return path


#
# what is here
#


def test_a_plan_for_requests_in_flight_prices_their_step(profile):
    found = json.loads(here("plan", MODEL, *WORKER, "--profile", profile, "--expect-parallel", "4", "--json").stdout)
    assert found["workload"]["step"]["n_parallel"] == 4
    one = json.loads(here("plan", MODEL, *WORKER, "--profile", profile, "--json").stdout)
    assert "step" not in one["workload"] and one["predicted"]["tpot_s"] < found["predicted"]["tpot_s"]
    for command in ("run", "chat", "serve"):
        said = here(command, MODEL, "--plan", "x.json", "--expect-parallel", "2", code=2).stderr
        assert "--plan cannot be combined with --policy" in said


def test_devices():
    found = document("devices", "--json")
    assert set(found) == {"devices", "cpu", "ggml_version", "llama_cpp_python"}
    assert set(found["cpu"]) == {"name", "physical_cores", "logical_cores", "threads", "features"}
    (cpu,) = (device for device in found["devices"] if device["name"] == "CPU")
    assert set(cpu) == {
        *("name", "description", "backend", "type", "memory_total", "memory_free", "async", "host_buffer", "events")
    }
    assert cpu["memory_total"] > 0
    assert re.search(r"^CPU +CPU", here("devices").stdout, re.MULTILINE)


def test_inspect():
    found = document("inspect", MODEL, "--json")
    assert (found["model"]["arch"], found["model"]["file_bytes"]) == ("llama", MODEL.stat().st_size)
    assert len(found["operators"]) == 7 * found["model"]["n_layer"] + 1
    first, last = found["operators"][0], found["operators"][-1]
    assert set(first) == {"name", "layer", "role", "op", "type", "shape", "bytes", "active_fraction", "cut"}
    assert (first["layer"], first["op"], len(first["shape"])) == (0, "MUL_MAT", 3)
    assert (last["role"], last["layer"]) == ("output", None)
    lines = here("inspect", "-m", MODEL).stdout.splitlines()
    assert lines[0].startswith("oallama stories: llama, ")
    assert sum(line.startswith("ffn_down ") for line in lines) == 1
    assert here("inspect", MODEL, "--all").stdout.count("ffn_down.weight") == found["model"]["n_layer"]


def test_profile_is_measured_once_and_then_remembered(tmp_path):
    model = write_llama_shape(tmp_path / "tiny.gguf", 1, 256, 256, 2, 2, 300)
    asked = ("profile", model, "--device", "none", "-t", 1, "--tokens", 1)
    profile = document(*asked, "--json", cache=tmp_path)
    assert {"version", "fingerprint", "cases", "link", "contention", "launch_s", "warnings"} <= profile.keys()
    assert {case["device"] for case in profile["cases"]} == {"CPU"}
    assert {*("device", "layout", "type", "shape", "n_tokens", "seconds", "samples", "gb_per_s", "gflops")} <= profile[
        "cases"
    ][0].keys()
    assert document(*asked, "--json", cache=tmp_path) == profile  # with the very samples
    assert "CPU" in here(*asked, cache=tmp_path).stdout


def test_setup_names_the_folder_of_llama_cpps_programs():
    assert Path(here("setup", "--programs").stdout.strip()).is_dir()


def test_doctor_finds_nothing_wrong_or_says_what_to_do(tmp_path):
    sound = document("doctor", "--json")
    assert sound["ok"] is True and all(check["ok"] and check["detail"] for check in sound["checks"])
    of_llama_cpp = {"libraries", "devices", "layouts", "run on the CPU", "split backend", "split run"}
    assert {check["name"] for check in sound["checks"]} == {"python", "cache", *of_llama_cpp}
    (tmp_path / "file").write_text("")
    wrong = {**os.environ, "OALLAMA_CACHE_DIR": str(tmp_path / "file"), "LLAMA_CPP_LIB_PATH": str(tmp_path)}
    done = subprocess.run([*COMMAND, "doctor", "--json"], capture_output=True, text=True, cwd=ROOT, env=wrong)
    failed = {check["name"]: check for check in json.loads(done.stdout)["checks"] if not check["ok"]}
    assert done.returncode == 1 and set(failed) == {"cache", *of_llama_cpp}
    assert all(check["detail"] and check["remedy"] for check in failed.values())
    assert "LLAMA_CPP_LIB_PATH" in failed["libraries"]["detail"]


#
# plans and predictions
#


def test_plan_is_a_summary_or_json_or_a_file(half, tmp_path):
    arguments = ("plan", MODEL, *half, "--policy", "oato", "-p", "64", "-n", "32", "-d", "512")
    plan = document(*arguments, "--json")
    said = here(*arguments).stdout
    assert said.startswith("oato on ") and "Predicted: " in said and max(map(len, said.splitlines())) <= 80
    assert here(*arguments, "-o", tmp_path / "plan.json").stdout == ""
    both = here(*arguments, "-o", tmp_path / "plan.json", "--json")
    assert json.loads(both.stdout) == plan and "oato on " in both.stderr
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")) == plan
    workload = plan["workload"]
    assert (plan["policy"], workload["n_prompt"], workload["n_gen"], workload["n_past"]) == ("oato", 64, 32, 512)
    assert all((o["gg"], o["cg"], o["cc"]) in ((1, 0, 0), (0, 0, 1)) for o in plan["operators"])
    assert "cannot hold 512 earlier" in here(*arguments, "-c", 512, code=2).stderr


def test_ngl_takes_whole_layers_from_the_end(plan_file, profile):
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    assert (plan["policy"], plan["n_gpu_layers"]) == ("layers", 3)
    on_device = {o["name"] for o in plan["operators"] if o["gg"] == 1}
    assert "output.weight" in on_device
    assert {name.split(".")[1] for name in on_device if name.startswith("blk.")} == {"4", "5"}
    needed = here("plan", MODEL, *WORKER, "--profile", profile, "-ngl", "3", "--vram", "1MiB", code=1).stderr
    assert re.search(r"-ngl 3 needs .* on .* but only .* may be used; lower -ngl", needed)


def test_affinity_report_in_every_format(half, tmp_path):
    asked, file, page = ("affinity-report", MODEL, *half, "--policy", "oato"), tmp_path / "r.json", tmp_path / "r.html"
    operators = document(*asked, "--json", "-o", file)["operators"]
    on_device = sum(o["bytes"] for o in operators if o["backend"] == "GPU")
    assert 0 < on_device <= 0.5 * sum(o["bytes"] for o in operators)
    assert json.loads(file.read_text(encoding="utf-8"))["operators"] == operators
    assert here(*asked, "-o", page).stdout == ""
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_if_predicts_cards_that_are_not_here(profile, tmp_path):
    asked = ("what-if", MODEL, "--profile", profile, "--gpu", "rtx3060,h100", "--vram-fill", "0.03%", "-p", 64)
    small, large = document(*asked, "--json")["rows"]
    assert (small["gpu"], large["gpu"]) == ("rtx3060-12", "h100")
    assert large["fits_whole"] and large["policy"] == "fit" and large["gain"] == 1
    assert not small["fits_whole"] and small["gain"] >= 1 and small["device_bytes"] <= 0.0003 * small["vram"]
    assert "not measured" in " ".join(here(*asked).stdout.split())
    here("what-if", tmp_path / "no.gguf", code=2)


def test_what_if_of_a_machine_that_was_never_timed_takes_seconds(tmp_path):
    (row,) = document("what-if", "llama-3.2-1b", "--gpu", "h100", "--json", cache=tmp_path)["rows"]
    assert row["fits_whole"]
    assert list(tmp_path.rglob("cpu-rates-*.json")) and not list(tmp_path.rglob("profile-*")), "two rates are enough"


def test_simulate_shows_a_plan_on_machines_that_are_not_here(half, tmp_path):
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    on = ("--machine", TESTBED, "-p", 64, "-n", 16)
    made = document("simulate", MODEL, *on, "--policy", "hetegen", "--vram", "136MiB", "--json")
    assert made["simulated"] is True and made["policy"] == "hetegen" and made["machine"]["name"]
    here("plan", MODEL, *half, "-o", plan)
    again = document("simulate", plan, *on, "--json")
    assert "nothing was run" in here("simulate", plan, *on, "-o", trace).stdout
    assert json.loads(trace.read_text(encoding="utf-8")) == again
    longer = document("simulate", plan, "--machine", TESTBED, "-p", 512, "-n", 16, "--json")
    deep = document("simulate", plan, *on, "-d", 512, "--json")
    assert 0 < again["ttft_s"] < min(longer["ttft_s"], deep["ttft_s"]) and again["tpot_s"] < deep["tpot_s"]
    assert "after 512" in here("simulate", plan, *on, "-d", 512).stdout
    assert "nothing was run" in here("simulate", MODEL, plan, *on).stdout
    assert "give a model, a plan" in here("simulate", *on, code=2).stderr


def test_a_plan_that_does_not_go_with_what_is_asked_is_refused(plan_file, tmp_path):
    """Of another model, lacking an operator, empty, absent, or with an option that it decides."""
    plan, file = json.loads(plan_file.read_text(encoding="utf-8")), tmp_path / "plan.json"
    changes = {
        "make a new plan": {"model": {**plan["model"], "fingerprint": "0" * 64}},
        f"does not place operator {plan['operators'][3]['name']}": {"operators": plan["operators"][:3]},
        "plan.json": {"version": 99},
    }
    for said, change in changes.items():
        file.write_text(json.dumps({**plan, **change}), encoding="utf-8")
        assert said in here("run", "hi", "--plan", file, *WORKER, code=2).stderr
        here("simulate", MODEL, file, "--machine", TESTBED, code=2)
    assert here("run", "hi", "--plan", tmp_path / "none.json", code=2).stderr.count("\n") == 1
    for command in ("chat", "serve"):
        assert "it has no use with --plan" in here(command, MODEL, "--plan", plan_file, "-d", 512, code=2).stderr


def test_unusable_input_is_exit_code_2_and_one_line(tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(20))
    assert "bad.gguf" in here("inspect", bad, code=2).stderr
    assert "nowhere" in here("run", "hi", "--device", "nowhere", code=2, cache=tmp_path).stderr
    assert "--device" in here("tune", MODEL, "--device", "none", code=2).stderr


def test_export_gives_a_line_for_stock_llama_cpp(cpu_plan, plan_file, tmp_path):
    line = here("export", cpu_plan, "--to", "llama-server").stdout
    assert shlex.split(line)[:3] == ["llama-server", "-m", str(MODEL)]
    here("export", cpu_plan, "--to", "llama-server", "-o", tmp_path / "line")
    assert (tmp_path / "line").read_text(encoding="utf-8") == line
    assert "splits no operator" in here("export", cpu_plan, "--to", "plugin", code=2).stderr
    assert "--rpc 127.0.0.1:" in here("export", plan_file, "--to", "llama-cli").stdout


#
# answers
#


def test_run_generates_on_the_worker_what_the_plan_says(plan_file):
    arguments = ("run", "Once upon a time", "-n", "24", "--seed", "3", "--plan", plan_file, *WORKER)
    made = document(*arguments, "--json")
    assert set(made) >= {
        *("text", "tokens", "n_prompt", "n_gen", "ttft_s", "tpot_s", "policy", "device", "memory", "plan_fingerprint")
    }
    assert (made["policy"], made["n_gen"]) == ("layers", len(made["tokens"]))
    assert re.fullmatch(r"RPC\d+", made["device"]) and made["memory"]["device_bytes"] > 0
    assert made["plan_fingerprint"] == Plan.load(plan_file).fingerprint, "not of the plan as llama-server gets it"
    assert here(*arguments).stdout == made["text"] + "\n"


@pytest.mark.usefixtures("stub_server")
def test_the_first_run_answers_with_stocks_placement_and_in_a_pipe_measures_nothing(tmp_path):
    first = ("run", MODEL, "Once upon a time", "-n", "8", "--temp", "0", "--json", *WORKER, "--gpu-weights", "50%")
    ran = here(*first, cache=tmp_path)
    made = json.loads(ran.stdout)
    assert made["policy"] == "fit" and made["n_gen"] == len(made["tokens"]) and "measuring" not in ran.stderr
    assert not list(tmp_path.glob("profile-*"))


def test_tune_says_what_it_found(two_layers, worker_profile, tmp_path):
    profile = profile_file(worker_profile, tmp_path)
    asked = (two_layers, "-t", 1, *WORKER, "--gpu-weights", "50%", "--profile", profile)
    told = document("tune", *asked, "-p", 4, "--time", 1, "--json", "--late-first-word", cache=tmp_path)
    (made,) = told["classes"]
    assert made["class"] == {"length": "question", "history": False} and made["stock"] == "llama.cpp's placement"
    assert made["said"].startswith("short questions: ") and told["key"]["late_first_word"]
    (tmp_path / "file").touch()
    nowhere = tmp_path / "file" / "cache"
    said = here("tune", *asked, "-p", 4, "--time", 1, cache=nowhere).stderr
    assert f"warning: the result cannot be saved, as {nowhere} is not writable" in said


def test_the_prompt_may_come_from_a_pipe_and_the_model_may_be_left_out(cpu_plan):
    common = ("-n", "8", "--temp", "0", "--plan", cpu_plan)
    piped = here("run", *common, input="Once upon a time\n").stdout
    assert piped == here("run", MODEL, "-p", "Once upon a time", *common).stdout
    assert piped == here("run", MODEL, "upon a time", *common, input="Once").stdout
    assert len(piped) > 1


def test_an_answer_ends_with_the_model_the_context_a_limit_a_text_or_a_schema(cpu_plan, tmp_path):
    common = ("Once upon a time", "--temp", "1", "--seed", "0", "--plan", cpu_plan, "--json")
    story = document("run", *common)
    assert 128 < story["n_gen"] < 512 - story["n_prompt"] and story["end"] == "model"
    assert document("run", *common, "-n", "2")["end"] == "limit"
    long = document("run", *common, "--grammar", 'root ::= [a-z ]+ "\\x07"')  # which nobody ends
    assert long["n_prompt"] + long["n_gen"] == 512
    assert long["end"] == "context"
    assert document("run", *common, "--stop", " ")["n_gen"] < 5
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"end": {"enum": ["good", "bad"]}}, "required": ["end"]}')
    assert json.loads(document("run", *common, "-jf", schema)["text"])["end"] in ("good", "bad")


@pytest.mark.usefixtures("stub_server")
def test_what_limits_a_device_is_not_ignored_silently():
    common = ("run", "hi", "-n", "1", "--policy", "cpu", "-dev", "CPU")
    said = here(*common, "--vram", "6GiB", "--gpu-weights", "50%").stderr
    assert "note: --vram and --gpu-weights have no effect without a device" in said
    assert "no effect" not in here(*common).stderr
    layers = here("run", "hi", "-n", "1", "-ngl", "99", "-dev", "none")
    assert layers.returncode == 0 and "note: -ngl has no effect without a device" in layers.stderr


@pytest.mark.usefixtures("stub_server")
def test_a_reader_that_has_enough_is_no_failure(plan_file):
    command = [*COMMAND, "run", "Once upon a time", "-n", "400", "--plan", str(plan_file), *WORKER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=60)) == (b"", 0)
