"""JSON of plan, affinity-report, what-if and simulate for large models that are headers alone: fields and invariants.

Profiles are recorded or described, and read with --profile; nothing is measured, no weight is there.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import here
from seeds import ALL

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import plan_corpus  # noqa: E402
from make_model import write_shape  # noqa: E402
from model_shapes import KNOWN  # noqa: E402

from oallama.core.codec import to_json  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_alloc_loader")

DEVICE = "emulated:rtx3060-12,scale=8"
"""Given the scale, nothing is measured."""

LOAD = ("-p", 128, "-n", 32, "-c", 1024)
MODELS = {  # shape: (machine of the corpus, --vram, policy, operators of a layer)
    "llama3-8b": ("emulated-rtx3060", "3GiB", "split", 7),
    **({"qwen3-30b-a3b": ("pc+rtx3060-12", "4GiB", "scheinfer", 8)} if ALL else {}),
}


@pytest.fixture(scope="module", params=MODELS)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A file of headers, a profile for it, and its plan."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    machine, vram, policy, of_layer = MODELS[name]
    n_layer, file = KNOWN[name].n_layer, write_shape(folder / "m.gguf", KNOWN[name], "Q4_0", empty=True)
    made = to_json(plan_corpus.profile_of(machine, name))
    for case in (*made["cases"], *made["rest"]):
        case["samples"] = case["samples"] or [case["seconds"]]  # those that are described have none
    profile, plan = folder / "profile.json", folder / "plan.json"
    profile.write_text(json.dumps(made), encoding="utf-8")
    placed = (file, "--device", DEVICE, "--profile", profile, "--vram", vram, *LOAD)
    plan.write_text(json.dumps(document("plan", *placed, "--policy", policy, "--json")), encoding="utf-8")
    return SimpleNamespace(
        name=name, file=file, profile=profile, plan=plan, placed=placed, policy=policy, n_layer=n_layer,
        n_operators=of_layer * n_layer + 1,
    )  # fmt: skip


def document(*arguments: object) -> dict[str, Any]:
    """The one JSON document on stdout, without NaN and infinities."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    answer: dict[str, Any] = json.loads(here(*arguments).stdout, parse_constant=refuse)
    return answer


def check_breakdown(memory: dict[str, Any]) -> None:
    apart = {"capacity", "fill", "limit", "weights_host", "spare", "runtime"}
    assert memory.keys() >= apart - {"runtime"} | {"weights_gpu", "kv", "compute", "staging"}
    assert all(isinstance(memory[name], int) for name in memory.keys() - {"fill"})
    assert memory["limit"] == int(memory["fill"] * memory["capacity"])
    assert memory["spare"] == memory["limit"] - sum(memory[name] for name in memory.keys() - apart) >= 0


def check_times(times: dict[str, Any], n_gen: int) -> None:
    assert all(times[name] > 0 for name in ("ttft_s", "tpot_s", "total_s"))
    assert times["total_s"] == pytest.approx(times["ttft_s"] + n_gen * times["tpot_s"])


def test_plan(large: SimpleNamespace) -> None:
    plan = json.loads(large.plan.read_text())
    assert {"version", "model", "machine", "device", "policy", "workload", "operators", "token_assignment",
            "n_gpu_layers", "memory", "predicted"} <= plan.keys()  # fmt: skip
    assert plan["policy"] == large.policy and plan["device"].startswith(DEVICE)  # and the core that it takes
    assert {"n_prompt": 128, "n_gen": 32, "n_ctx": 1024}.items() <= plan["workload"].items()
    assert len(plan["operators"]) == len({p["name"] for p in plan["operators"]}) == large.n_operators
    for place in plan["operators"]:
        assert math.isclose(place["gg"] + place["cg"] + place["cc"], 1, abs_tol=1e-9), place
        assert min(place["gg"], place["cg"], place["cc"]) >= 0
    assert any(place["gg"] for place in plan["operators"])
    check_breakdown(plan["memory"])
    check_times(plan["predicted"], 32)
    operators = document("inspect", large.file, "--json")["operators"]
    assert [o["name"] for o in operators] == [place["name"] for place in plan["operators"]]
    on_device = sum(o["bytes"] * place["gg"] for o, place in zip(operators, plan["operators"], strict=True))
    assert on_device <= plan["memory"]["weights_gpu"] * (1 + 1e-9) <= on_device + 2**30  # norms, of output parts
    both = plan["memory"]["weights_gpu"] + plan["memory"]["weights_host"]
    assert both >= sum(o["bytes"] for o in operators)
    assert all(0 <= entry["n_g"] <= entry["n_tokens"] for entry in plan["token_assignment"])
    assert all(less["n_tokens"] < more["n_tokens"] for less, more in pairwise(plan["token_assignment"]))


def test_affinity_report(large: SimpleNamespace) -> None:
    report = document("affinity-report", *large.placed, "--json")
    assert {"model", "device", "phase", "iterations", "converged", "operators", "memory"} <= report.keys()
    rows = sorted(report["operators"], key=lambda row: row["rank"])
    assert {"name", "layer", "role", "type", "shape", "bytes", "t_cpu_s", "t_gpu_s", "t_transfer_s",
            "benefit_s_per_byte", "affinity", "rank", "backend"} <= rows[0].keys()  # fmt: skip
    assert [row["rank"] for row in rows] == list(range(1, large.n_operators + 1))
    ranked = [row["affinity"] for row in rows if row["affinity"] is not None]
    assert ranked == sorted(ranked, reverse=True) and (ranked[0], ranked[-1]) == (1, 0)
    for row in rows:
        if row["t_gpu_s"] is not None:
            saved = row["t_cpu_s"] - row["t_gpu_s"] - row["t_transfer_s"]
            assert row["saved_s"] == saved
            assert row["benefit_s_per_byte"] == pytest.approx(saved / row["bytes"], rel=1e-6, abs=1e-18)
    check_breakdown(report["memory"])
    assert sum(row["bytes"] for row in rows if row["backend"] == "GPU") <= report["memory"]["weights_gpu"]


def test_what_if(large: SimpleNamespace) -> None:
    cards = ("rtx3060-12", "rtx5090", "h100")
    answer = document("what-if", large.file, "--profile", large.profile, "--gpu", ",".join(cards), *LOAD, "--json")
    assert answer["emulated"] is True
    rows = answer["rows"]
    assert [row["gpu"] for row in rows] == list(cards)
    for row in rows:
        assert row["policy"] and row["vram"] > 0
        ours, stock = (row[f"{who}ttft_s"] + 32 * row[f"{who}tpot_s"] for who in ("", "stock_"))
        assert row["gain"] == pytest.approx(stock / ours) and row["gain"] >= 1
        assert max(row["device_bytes"], row["stock_device_bytes"]) <= 0.9 * row["vram"]
        all_layers = row["stock_n_gpu_layers"] == large.n_layer + 1
        assert row["fits_whole"] == all_layers or "a3b" in large.name  # whose experts may be left out of a layer
    assert rows[-1]["fits_whole"]


def test_simulate(large: SimpleNamespace) -> None:
    predicted = json.loads(large.plan.read_text())["predicted"]
    on = ("simulate", large.file, large.plan, "--json")
    made = document(*on, "--device", DEVICE, "--profile", large.profile)
    assert made["simulated"] is True and made["policy"] == large.policy
    assert [made[name] for name in ("ttft_s", "tpot_s")] == pytest.approx(
        [predicted[name] for name in ("ttft_s", "tpot_s")], rel=0.02
    )
    assert (made["prompt"]["seconds"], made["token"]["seconds"]) == (made["ttft_s"], made["tpot_s"])
    for answer in (made, document(*on, "--machine", "pc-24gb")):
        check_times(answer, 32)
        check_trace(answer)


def check_trace(answer: dict[str, Any]) -> None:
    """Of each process and thread, spans in order, none over another."""
    for process, phase in ((1, answer["prompt"]), (2, answer["token"])):
        events = [event for event in answer["traceEvents"] if event["ph"] == "X" and event["pid"] == process]
        assert events and {event["tid"] for event in events} <= {1, 2, 3, 4}
        for _, of_stream in groupby(events, lambda event: event["tid"]):
            spans = [(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in of_stream]
            assert all(0 <= start < end <= phase["seconds"] * (1 + 1e-9) for start, end in spans)
            assert all(after[0] >= before[1] - 1e-12 for before, after in pairwise(spans))
