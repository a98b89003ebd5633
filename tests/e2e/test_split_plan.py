"""`--policy split` from the command line: plan, verify with a real load, run."""

import json

import pytest
from processes import here

from oallama.model.cut import cut_extent, cut_granularity
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.plan.split import slice_counts
from oallama.profile.store import profile_to_json

pytestmark = pytest.mark.usefixtures("prober")

WORKER = ("--device", "rpc-worker:1")


@pytest.fixture(scope="module")
def model(two_layers):
    return two_layers


@pytest.fixture(scope="module")
def profile(worker_profile, tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "slow.json"
    path.write_text(json.dumps(profile_to_json(worker_profile)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def planned(model, profile, tmp_path_factory):
    """What the command printed, and where the plan is."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    common = ("plan", model, "--policy", "split", *WORKER, "--threads", "1", "--profile", profile)
    done = here(*common, "-p", "16", "-n", "16", "--gpu-weights", "40%", "-o", path)
    return done, path


def test_the_plan_has_exact_fractions_and_a_ledger_that_adds_up(model, planned):
    plan = Plan.load(planned[1])
    placer = Placer.load(model, device="none")
    plan.check(placer.model, placer.operators)
    assert (plan.policy, plan.device) == ("split", "rpc-worker:1")
    slices = 0
    for operator, placement in zip(placer.operators, plan.operators, strict=True):
        cc, cg, gg = slice_counts(operator, placement)
        assert cg == 0
        if 0 < placement.gg < 1:
            assert cc % cut_granularity(operator) == 0
            assert placement.layout is not None
            slices += operator.bytes * gg // cut_extent(operator)
    memory = plan.memory
    assert slices > 0
    whole = sum(o.bytes for o, p in zip(placer.operators, plan.operators, strict=True) if p.gg == 1)
    assert memory.weights_gpu >= slices + whole
    assert memory.weights_gpu + memory.kv + memory.compute + memory.staging + memory.spare == memory.limit
    assert memory.spare >= 0
    assert memory.staging > 0
    assert plan.predicted.total_s > 0
    for layer in range(placer.model.n_layer):
        cuts = {
            placement.gg
            for operator, placement in zip(placer.operators, plan.operators, strict=True)
            if operator.layer == layer and operator.role.startswith("ffn_") and 0 < placement.gg < 1
        }
        assert len(cuts) <= 1, "gate, up and down are cut alike"


def test_the_command_says_how_many_are_split(planned):
    done, path = planned
    assert done.stdout == ""
    document = json.loads(path.read_text(encoding="utf-8"))
    n_split = sum(0 < row["gg"] < 1 for row in document["operators"])
    assert f"{n_split} divided between it and the CPU" in done.stderr


def test_auto_finds_the_split_too(model, profile, planned):
    common = ("plan", model, *WORKER, "--threads", "1", "--profile", profile, "-p", "16", "-n", "16")
    plan = json.loads(here(*common, "--gpu-weights", "40%", "--json").stdout)
    split = json.loads(planned[1].read_text(encoding="utf-8"))
    assert plan["predicted"]["total_s"] <= split["predicted"]["total_s"] * (1 + 1e-9)
    assert plan["policy"] in ("split", "scheinfer"), "which is split with streaming"


def test_the_plan_runs(model, planned):
    common = ("run", model, "-p", "hello", "-n", "4", "--seed", "1", "--temp", "0", "--json")
    made = json.loads(here(*common, "--plan", planned[1], *WORKER).stdout)
    assert (made["policy"], made["n_gen"]) == ("split", len(made["tokens"]))
    assert made["memory"]["device_bytes"] > 0
