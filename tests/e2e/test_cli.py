"""The command line on the default model: every command, its JSON, its exit codes, its manners.

A process is started where one is the point: for signals, pipes and terminals. The profile is described: measuring has
tests of its own.
"""

import csv
import io
import json
import os
import pty
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from e2e.described_card import slow_cpu_worker
from gguf_factory import write_llama_shape
from processes import COMMAND, here, oallama

from oallama.profile.store import profile_to_json
from oallama.stores.default_model import FILE

pytestmark = pytest.mark.usefixtures("prober")

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / FILE
TESTBED = ROOT / "scripts" / "reproduce" / "testbeds" / "scheinfer-c.json"
WORKER = ("--device", "rpc-worker:1")


def document(*arguments, **options):
    """The single JSON document of a command line."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(here(*arguments, **options).stdout, parse_constant=refuse)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """A file of the profile of a worker."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(json.dumps(profile_to_json(slow_cpu_worker(MODEL))), encoding="utf-8")
    return path


@pytest.fixture
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


def test_devices():
    found = document("devices", "--json")
    assert set(found) == {"devices", "cpu", "ggml_version", "llama_cpp_python"}
    assert set(found["cpu"]) == {"name", "physical_cores", "logical_cores", "threads", "features"}
    cpu = next(device for device in found["devices"] if device["name"] == "CPU")
    assert set(cpu) == {
        *("name", "description", "backend", "type", "memory_total", "memory_free", "async", "host_buffer", "events")
    }
    assert cpu["memory_total"] > 0
    assert re.search(r"^CPU +CPU", here("devices").stdout, re.MULTILINE)


def test_inspect():
    found = document("inspect", MODEL, "--json")
    assert found["model"]["arch"] == "llama"
    assert found["model"]["file_bytes"] == MODEL.stat().st_size
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
    case = profile["cases"][0]
    assert {
        *("device", "layout", "type", "shape", "n_tokens", "seconds", "samples", "gb_per_s", "gflops")
    } <= case.keys()
    assert {case["device"] for case in profile["cases"]} == {"CPU"}
    assert document(*asked, "--json", cache=tmp_path) == profile  # with the very samples
    assert "CPU" in here(*asked, cache=tmp_path).stdout


def test_what_if_predicts_cards_that_are_not_here(profile, tmp_path):
    chart = tmp_path / "cards.svg"
    options = ("--profile", profile, "--gpu", "rtx3060,h100", "--vram-fill", "0.03%", "-p", 64, "-n", 16)
    answer = document("what-if", MODEL, *options, "--chart", chart, "--json")
    assert answer["emulated"] is True
    small, large = answer["rows"]
    assert (small["gpu"], large["gpu"]) == ("rtx3060-12", "h100")
    assert large["fits_whole"] and large["policy"] == "fit" and large["gain"] == 1
    assert not small["fits_whole"] and small["gain"] >= 1
    assert all(row[key] > 0 for row in (small, large, answer["cpu"]) for key in ("ttft_s", "tpot_s"))
    assert small["device_bytes"] <= 0.0003 * small["vram"]
    assert chart.read_text(encoding="utf-8").endswith("</svg>\n")
    assert "not measured" in here("what-if", MODEL, *options).stdout
    here("what-if", tmp_path / "no.gguf", code=2)


def test_simulate_shows_a_plan_on_machines_that_are_not_here(half, tmp_path):
    plan, chart = tmp_path / "plan.json", tmp_path / "streams.svg"
    on = ("--machine", TESTBED, "-p", 64, "-n", 16)
    made = document("simulate", MODEL, *on, "--policy", "hetegen", "--vram", "136MiB", "--json", "--chart", chart)
    assert made["simulated"] is True and made["policy"] == "hetegen" and made["machine"]["name"]
    assert chart.read_text(encoding="utf-8").endswith("</svg>\n")
    assert {span["stream"] for span in made["token"]["spans"]} <= {"cpu", "gpu", "in", "out"}
    here("plan", MODEL, *half, "-o", plan)
    again = document("simulate", plan, *on, "--json")
    spans = tmp_path / "spans.json"
    assert "nothing was run" in here("simulate", plan, *on, "-o", spans).stdout
    assert json.loads(spans.read_text(encoding="utf-8")) == again
    assert "name one model" in here("simulate", *on, code=2).stderr
    assert again["tpot_s"] > 0 and again["workload"]["n_prompt"] == 64
    longer = document("simulate", plan, "--machine", TESTBED, "-p", 512, "-n", 16, "--json")
    assert 0 < again["ttft_s"] < longer["ttft_s"]
    deep = document("simulate", plan, *on, "-d", 512, "--json")
    assert deep["workload"]["n_past"] == 512 and deep["tpot_s"] > again["tpot_s"] and deep["ttft_s"] > again["ttft_s"]
    assert "behind 512" in here("simulate", plan, *on, "-d", 512).stdout
    assert document("plan", MODEL, *half, "-d", 512)["workload"]["n_past"] == 512
    for command in ("chat", "serve"):
        assert "leave one of them out" in here(command, MODEL, "--plan", plan, "-d", 512, code=2).stderr
    assert "cannot hold 512 earlier" in here("plan", MODEL, *half, "-d", 512, "-c", 512, code=2).stderr
    assert "nothing was run" in here("simulate", MODEL, plan, *on).stdout
    changed = json.loads(plan.read_text(encoding="utf-8"))
    changed["model"]["fingerprint"] = "0" * 64
    plan.write_text(json.dumps(changed), encoding="utf-8")
    assert "made for" in here("simulate", MODEL, plan, *on, code=2).stderr


def test_affinity_report_in_every_format(half, tmp_path):
    asked, file, page = ("affinity-report", MODEL, *half, "--policy", "oato"), tmp_path / "r.csv", tmp_path / "r.html"
    report = document(*asked, "--json", "-o", file)
    assert {"model", "device", "phase", "iterations", "converged", "operators", "memory"} <= report.keys()
    operators = report["operators"]
    assert [operator["rank"] for operator in operators] == list(range(1, len(operators) + 1))
    assert {0.0, 1.0} <= {operator["affinity"] for operator in operators}
    memory = report["memory"]
    parts = sum(memory[key] for key in ("weights_gpu", "kv", "compute", "staging", "spare"))
    assert parts == memory["limit"] <= memory["capacity"] * memory["fill"]
    on_device = sum(o["bytes"] for o in operators if o["backend"] == "GPU")
    assert on_device <= 0.5 * sum(o["bytes"] for o in operators)
    rows = list(csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))))
    assert [row["name"] for row in rows] == [operator["name"] for operator in operators]

    assert here(*asked, "-o", page).stdout == ""
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_plan_goes_to_stdout_or_to_a_file(half, tmp_path):
    arguments = ("plan", MODEL, *half, "--policy", "oato", "-p", "64", "-n", "32")
    plan = document(*arguments)
    assert here(*arguments, "-o", tmp_path / "plan.json").stdout == ""
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")) == plan
    assert set(plan) >= {
        *("version", "model", "machine", "device", "policy", "workload", "operators"),
        *("token_assignment", "n_gpu_layers", "memory", "predicted"),
    }
    assert (plan["policy"], plan["workload"]["n_prompt"], plan["workload"]["n_gen"]) == ("oato", 64, 32)
    assert all((o["gg"], o["cg"], o["cc"]) in ((1, 0, 0), (0, 0, 1)) for o in plan["operators"])


def test_ngl_takes_whole_layers_from_the_end(plan_file, profile):
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    assert (plan["policy"], plan["n_gpu_layers"]) == ("layers", 3)
    on_device = {o["name"] for o in plan["operators"] if o["gg"] == 1}
    assert "output.weight" in on_device
    assert {name.split(".")[1] for name in on_device if name.startswith("blk.")} == {"4", "5"}
    needed = here("plan", MODEL, *WORKER, "--profile", profile, "-ngl", "3", "--vram", "1MiB", code=1).stderr
    assert re.search(r"-ngl 3 needs .* on .* but only .* may be used; lower -ngl", needed)


def test_run_generates_on_the_worker_what_the_plan_says(plan_file):
    arguments = ("run", "Once upon a time", "-n", "24", "--seed", "3", "--plan", plan_file)
    made = document(*arguments, "--json")
    assert set(made) >= {
        *("text", "tokens", "n_prompt", "n_gen", "ttft_s", "tpot_s", "policy", "device", "memory", "plan_fingerprint")
    }
    assert (made["policy"], made["n_gen"]) == ("layers", len(made["tokens"]))
    assert re.fullmatch(r"RPC\d+", made["device"])
    assert made["memory"]["device_bytes"] > 0
    assert oallama(*arguments).stdout == made["text"] + "\n"


def test_the_first_run_answers_with_stocks_placement_and_in_a_pipe_measures_nothing(tmp_path):
    first = ("run", MODEL, "Once upon a time", "-n", "8", "--temp", "0", *WORKER, "--gpu-weights", "50%")
    ran = here(*first, cache=tmp_path)
    assert ran.stdout != "" and "measuring" not in ran.stderr
    assert not list(tmp_path.glob("profile-*"))


def test_tune_says_what_it_found(two_layers, worker_profile, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile_to_json(worker_profile)), encoding="utf-8")
    asked = (two_layers, "-t", 1, *WORKER, "--gpu-weights", "50%", "--profile", file)
    told = document("tune", *asked, "-p", 4, "-n", 8, "--time", 1, "--json", cache=tmp_path)
    assert told["stock"] == "stock-fit" and told["said"]
    assert "--device" in here("tune", two_layers, "--device", "none", code=2).stderr


def test_the_prompt_may_come_from_a_pipe_and_the_model_may_be_left_out(cpu_plan):
    common = ("-n", "8", "--temp", "0", "--plan", cpu_plan)
    piped = here("run", *common, input="Once upon a time\n").stdout
    assert piped == here("run", MODEL, "-p", "Once upon a time", *common).stdout
    assert len(piped) > 1


def test_an_answer_without_a_limit_ends_with_the_model_or_the_context(cpu_plan):
    common = ("Once upon a time", "--temp", "1", "--plan", cpu_plan, "--json")
    story = document("run", *common)
    assert 128 < story["n_gen"] < 4096 - story["n_prompt"]
    assert story["end"] == "model"
    assert document("run", *common, "-n", "2")["end"] == "limit"
    short = document("run", *common, "-c", "256", "--grammar", 'root ::= [a-z ]+ "\\x07"')  # which nobody ends
    assert short["n_prompt"] + short["n_gen"] == 257  # the last token needs no room
    assert short["end"] == "context"
    assert document("run", *common, "--stop", " ")["n_gen"] < 5


def test_an_answer_keeps_to_a_json_schema_of_a_file(cpu_plan, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "properties": {"end": {"enum": ["good", "bad"]}}, "required": ["end"]}')
    made = document("run", "Once", "--temp", "0", "--plan", cpu_plan, "-jf", file, "--json")
    assert json.loads(made["text"])["end"] in ("good", "bad")


def test_setup_names_the_folder_of_llama_cpps_programs():
    assert Path(here("setup", "--programs").stdout.strip()).is_dir()


def test_what_limits_a_device_is_not_ignored_silently(cpu_plan, tmp_path):
    common = ("run", "hi", "-n", "1", "--policy", "cpu", "-dev", "CPU")
    said = here(*common, "--vram", "6GiB", "--gpu-weights", "50%").stderr
    assert "note: --vram and --gpu-weights limit a device, and there is none" in said
    assert "limit a device" not in here(*common).stderr


def test_export_gives_a_line_for_stock_llama_cpp(cpu_plan, tmp_path):
    line = here("export", cpu_plan, "--to", "llama-server").stdout
    assert shlex.split(line)[:3] == ["llama-server", "-m", str(MODEL)]
    here("export", cpu_plan, "--to", "llama-server", "-o", tmp_path / "line")
    assert (tmp_path / "line").read_text(encoding="utf-8") == line
    assert "splits no operator" in here("export", cpu_plan, "--to", "plugin", code=2).stderr


def test_export_refuses_a_worker_that_nobody_else_can_reach(plan_file):
    assert "rpc-server" in here("export", plan_file, "--to", "llama-cli", code=2).stderr


def test_unusable_input_is_exit_code_2_and_one_line(tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(20))
    assert "bad.gguf" in here("inspect", bad, code=2).stderr
    plan = tmp_path / "plan.json"
    plan.write_text("{}", encoding="utf-8")
    assert "plan.json" in here("run", "hi", "--plan", plan, code=2).stderr
    assert here("run", "hi", "--plan", tmp_path / "none.json", code=2).stderr.count("\n") == 1
    assert "nowhere" in here("run", "hi", "--device", "nowhere", code=2, cache=tmp_path).stderr


def test_a_plan_of_another_model_is_refused(plan_file, tmp_path):
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    plan["model"]["fingerprint"] = "0" * 64
    other = tmp_path / "other.json"
    other.write_text(json.dumps(plan), encoding="utf-8")
    assert "make a new plan" in here("run", "hi", "--plan", other, code=2).stderr


def test_a_plan_without_an_operator_or_with_another_one_is_refused(cpu_plan, tmp_path):
    plan = json.loads(cpu_plan.read_text(encoding="utf-8"))
    name, file = plan["operators"][3]["name"], tmp_path / "plan.json"
    file.write_text(json.dumps({**plan, "operators": plan["operators"][:3]}), encoding="utf-8")
    assert f"no place for operator {name}" in here("run", "hi", "--plan", file, code=2).stderr
    plan["operators"][3]["name"] = "another"
    file.write_text(json.dumps(plan), encoding="utf-8")
    assert f"no place for operator {name}" in here("run", "hi", "--plan", file, code=2).stderr


def start(*arguments, **options):
    return subprocess.Popen([*COMMAND, *map(str, arguments)], cwd=ROOT, stdin=subprocess.DEVNULL, **options)


def test_a_reader_that_has_enough_is_no_failure(plan_file):
    arguments = ("run", "Once upon a time", "-n", "400", "--plan", plan_file)
    with start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert said == b""


def on_terminal(*arguments, **env):
    """What a person sees: stdout and stderr on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", **env}
    with start(*arguments, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # Linux says so when the other end closes
                break
            if not chunk:
                break
            seen += chunk
    os.close(ours)
    assert process.returncode == 0
    return seen.decode()


def test_on_a_terminal_there_are_colours_unless_no_color_is_set(half):
    command = ("affinity-report", MODEL, *half, "--policy", "oato", "--fill", "full")
    assert "\x1b[32m\x1b[1mGPU" in on_terminal(*command, NO_COLOR="")
    plain = on_terminal(*command, NO_COLOR="1")
    assert "GPU" in plain
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", plain)


def test_on_a_terminal_a_line_of_figures_follows_the_text(plan_file):
    seen = on_terminal("run", "Once upon a time", "-n", "8", "--plan", plan_file)
    last = seen.strip().splitlines()[-1]
    assert re.search(r"\+ 8 tokens · TTFT .* · TPOT .* tokens/s · layers on RPC0 · \d+%/\d+% CPU/GPU$", last)


def test_doctor_finds_nothing_wrong():
    found = document("doctor", "--json")
    assert found["ok"] is True
    names = [check["name"] for check in found["checks"]]
    assert names == [
        "python",
        "packages",
        "libraries",
        "devices",
        "layouts",
        "run on the CPU",
        "split backend",
        "split run",
        "cache",
    ]
    assert all(check["ok"] and check["detail"] for check in found["checks"])


def test_doctor_says_what_to_do_about_each_failure(tmp_path):
    (tmp_path / "file").write_text("")
    wrong = {**os.environ, "OALLAMA_CACHE_DIR": str(tmp_path / "file"), "LLAMA_CPP_LIB_PATH": str(tmp_path)}
    done = subprocess.run(
        [*COMMAND, "doctor", "--json"], capture_output=True, text=True, cwd=ROOT, env=wrong, timeout=250
    )
    assert done.returncode == 1
    found = json.loads(done.stdout)
    failed = {check["name"]: check for check in found["checks"] if not check["ok"]}
    runs = {"run on the CPU", "split run"}
    assert {"libraries", "devices", "layouts", "split backend", "cache", *runs} == set(failed)
    assert all(check["detail"] and check["remedy"] for check in failed.values())
    assert "LLAMA_CPP_LIB_PATH" in failed["libraries"]["detail"]
