"""JSON of plan, affinity-report, what-if and simulate for large models that are headers alone: fields and invariants.

Profiles are recorded or described, and read with --profile; nothing is measured, no weight is there.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from processes import here
from seeds import ALL

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import plan_corpus  # noqa: E402
from make_model import write_shape  # noqa: E402
from model_shapes import KNOWN  # noqa: E402

from oallama.profile.store import profile_to_json  # noqa: E402

pytestmark = pytest.mark.usefixtures("prober")

LEDGER = {"capacity", "fill", "limit", "weights_gpu", "weights_host", "kv", "compute", "staging", "spare"}
DEVICE = "emulated:rtx3060-12,scale=8"
"""Given the scale, nothing is measured."""

LOAD = ("-p", 128, "-n", 32, "-c", 1024)


@dataclass(frozen=True)
class Large:
    """A file of headers and a profile for it. device: whose memory is planned with; nothing is computed on it."""

    name: str
    file: Path
    profile: Path
    vram: str
    policy: str
    n_operators: int

    @property
    def placed(self) -> tuple[object, ...]:
        return (self.file, "--device", DEVICE, "--profile", self.profile, "--vram", self.vram, *LOAD)


MODELS = {  # shape: (machine of the corpus, --vram, policy, operators of a layer)
    "llama3-8b": ("emulated-rtx3060", "3GiB", "split", 7),
    **({"qwen3-30b-a3b": ("pc+rtx3060-12", "4GiB", "scheinfer", 8)} if ALL else {}),
}


@pytest.fixture(scope="module", params=MODELS)
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Large:
    name = request.param
    machine, vram, policy, of_layer = MODELS[name]
    folder = tmp_path_factory.mktemp(name)
    file = write_shape(folder / f"{name}.gguf", KNOWN[name], "Q4_0", empty=True)
    profile = folder / "profile.json"
    document = profile_to_json(plan_corpus.profile_of(machine, name))
    for case in (*document["cases"], *document["rest"]):
        case["samples"] = case["samples"] or [case["seconds"]]  # those that are described have none
    profile.write_text(json.dumps(document), encoding="utf-8")
    return Large(name, file, profile, vram, policy, of_layer * KNOWN[name].n_layer + 1)


def document(*arguments: object) -> dict[str, Any]:
    """The one JSON document on stdout, without NaN and infinities."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    answer: dict[str, Any] = json.loads(here(*arguments).stdout, parse_constant=refuse)
    return answer


def check_ledger(memory: dict[str, Any]) -> None:
    assert memory.keys() >= LEDGER
    assert all(isinstance(memory[name], int) for name in LEDGER - {"fill"})
    used = sum(
        memory[name] for name in memory.keys() - {"capacity", "fill", "limit", "weights_host", "spare", "runtime"}
    )
    assert memory["limit"] == int(memory["fill"] * memory["capacity"])
    assert memory["spare"] == memory["limit"] - used >= 0


def check_times(times: dict[str, Any], n_gen: int) -> None:
    assert all(times[name] > 0 for name in ("ttft_s", "tpot_s", "total_s"))
    assert times["total_s"] == pytest.approx(times["ttft_s"] + n_gen * times["tpot_s"])


@pytest.fixture(scope="module")
def plan(large: Large) -> dict[str, Any]:
    return document("plan", *large.placed, "--policy", large.policy, "--json")


def test_plan(large: Large, plan: dict[str, Any]) -> None:
    assert {"version", "model", "machine", "device", "policy", "workload", "operators", "token_assignment",
            "n_gpu_layers", "memory", "predicted"} <= plan.keys()  # fmt: skip
    assert plan["policy"] == large.policy and plan["device"].startswith(DEVICE)  # and the core that it takes
    assert {"n_prompt": 128, "n_gen": 32, "n_ctx": 1024}.items() <= plan["workload"].items()
    assert len(plan["operators"]) == len({p["name"] for p in plan["operators"]}) == large.n_operators
    for place in plan["operators"]:
        assert math.isclose(place["gg"] + place["cg"] + place["cc"], 1, abs_tol=1e-9), place
        assert min(place["gg"], place["cg"], place["cc"]) >= 0
    assert any(place["gg"] for place in plan["operators"])
    check_ledger(plan["memory"])
    check_times(plan["predicted"], 32)
    operators = document("inspect", large.file, "--json")["operators"]
    assert [o["name"] for o in operators] == [place["name"] for place in plan["operators"]]
    on_device = sum(o["bytes"] * place["gg"] for o, place in zip(operators, plan["operators"], strict=True))
    assert on_device <= plan["memory"]["weights_gpu"] * (1 + 1e-9) <= on_device + 2**30  # norms, of output parts
    both = plan["memory"]["weights_gpu"] + plan["memory"]["weights_host"]
    assert both >= sum(o["bytes"] for o in operators)
    table = plan["token_assignment"]
    assert all(0 <= entry["n_g"] <= entry["n_tokens"] for entry in table)
    assert all(less["n_tokens"] < more["n_tokens"] for less, more in pairwise(table))


def test_affinity_report(large: Large) -> None:
    report = document("affinity-report", *large.placed, "--json")
    assert {"model", "device", "phase", "iterations", "converged", "operators", "memory"} <= report.keys()
    rows = report["operators"]
    assert {"name", "layer", "role", "type", "shape", "bytes", "t_cpu_s", "t_gpu_s", "t_transfer_s",
            "benefit_s_per_byte", "affinity", "rank", "backend"} <= rows[0].keys()  # fmt: skip
    assert sorted(row["rank"] for row in rows) == list(range(1, large.n_operators + 1))
    assert all(0 <= row["affinity"] <= 1 for row in rows if row["affinity"] is not None)
    ranked = [row["affinity"] for row in sorted(rows, key=lambda row: row["rank"]) if row["affinity"] is not None]
    assert ranked == sorted(ranked, reverse=True) and (ranked[0], ranked[-1]) == (1, 0)
    for row in rows:
        if row["t_gpu_s"] is not None:
            saved = row["t_cpu_s"] - row["t_gpu_s"] - row["t_transfer_s"]
            assert row["benefit_s_per_byte"] == pytest.approx(saved / row["bytes"], rel=1e-6, abs=1e-18)
    check_ledger(report["memory"])
    on_device = sum(row["bytes"] for row in rows if row["backend"] == "GPU")
    assert on_device <= report["memory"]["weights_gpu"]


def test_what_if(large: Large) -> None:
    cards = ("rtx3060-12", "rtx5090", "h100")
    answer = document("what-if", large.file, "--profile", large.profile, "--gpu", ",".join(cards), *LOAD, "--json")
    assert answer["emulated"] is True
    rows = answer["rows"]
    assert [row["gpu"] for row in rows] == list(cards)
    for row in rows:
        assert {"gpu", "vram", "policy", "ttft_s", "tpot_s", "stock_ttft_s", "stock_tpot_s"} <= row.keys()
        assert all(row[name] > 0 for name in ("vram", "ttft_s", "tpot_s", "stock_ttft_s", "stock_tpot_s"))
        ours, stock = (row[f"{who}ttft_s"] + 32 * row[f"{who}tpot_s"] for who in ("", "stock_"))
        assert row["gain"] == pytest.approx(stock / ours) and row["gain"] >= 1
        assert max(row["device_bytes"], row["stock_device_bytes"]) <= 0.9 * row["vram"]
        all_layers = row["stock_n_gpu_layers"] == KNOWN[large.name].n_layer + 1
        assert row["fits_whole"] == all_layers or "a3b" in large.name  # whose experts may be left out of a layer
    assert rows[-1]["fits_whole"]


def test_simulate(large: Large, plan: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan), encoding="utf-8")
    on_device = ("--device", DEVICE, "--profile", large.profile)
    made = document("simulate", large.file, file, *on_device, "--json")
    assert made["simulated"] is True and made["policy"] == large.policy
    check_times(made, 32)
    assert made["ttft_s"] == pytest.approx(plan["predicted"]["ttft_s"], rel=0.02)
    assert made["tpot_s"] == pytest.approx(plan["predicted"]["tpot_s"], rel=0.02)
    assert (made["prompt"]["seconds"], made["token"]["seconds"]) == (made["ttft_s"], made["tpot_s"])
    check_phases(made)
    elsewhere = document("simulate", large.file, file, "--machine", "pc-24gb", "--json")
    check_times(elsewhere, 32)
    check_phases(elsewhere)


def check_phases(made: dict[str, Any]) -> None:
    for phase in (made["prompt"], made["token"]):
        assert phase["spans"]
        streams: dict[str, list[dict[str, Any]]] = {}
        for span in phase["spans"]:
            streams.setdefault(span["stream"], []).append(span)
        assert streams.keys() <= {"cpu", "gpu", "in", "out"}
        for spans in streams.values():
            assert all(0 <= span["start_s"] < span["end_s"] for span in spans)
            assert all(span["end_s"] <= phase["seconds"] * (1 + 1e-9) for span in spans)
            for before, behind in pairwise(spans):  # in order, none over another
                assert behind["start_s"] >= before["end_s"] - 1e-12
        assert all(0 <= share <= 1 for share in phase["busy"].values())
        parts = sum(part["spans"] for part in phase["parts"])
        assert parts == len(phase["spans"])
