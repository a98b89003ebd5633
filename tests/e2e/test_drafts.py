"""Drafts change no answer, are counted, and are made by models of the same vocabulary alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from e2e.described_card import beside_fast_card
from e2e.forced import ffn, forced, movable
from gguf_factory import write_gguf
from make_model import main
from processes import ROOT, here

from oallama.bench.arms import ArmMaker
from oallama.bench.prepare import shared_setting
from oallama.bench.records import BenchTest
from oallama.bench.server_arm import server_plan
from oallama.cli.speculation import StepOptions
from oallama.core.errors import DraftDoesNotFit, UsageError
from oallama.core.types import NGRAM, DecodeStep, Draft, Operator, Workload
from oallama.placer import Placer
from oallama.placer.drafter import DraftModel, MtpDrafter, placer_beside, planned_with_drafts
from oallama.plan.plan import Plan
from oallama.planner.verify import with_draft_block
from oallama.profile.acceptance import read_acceptance
from oallama.run.plugin_report import ask_report
from oallama.stores.default_model import FILE

pytestmark = pytest.mark.usefixtures("kept_engines")

STORIES = ROOT / "models" / FILE
GREEDY = {"temperature": 0.0, "max_tokens": 24}


def beside_ffn(operator: Operator) -> bool:
    return operator.role.startswith(("attn", "ssm", "output"))


@pytest.mark.parametrize("device", ["none", "emulated:rtx3060-12"])
def test_answers_with_drafts_are_those_without(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the card, which computes what the CPU does."""
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path))
    with forced(STORIES, n_ctx=512).engine() as engine:
        expected = engine.generate("Once upon a time", **GREEDY)
        assert engine.drafts() is None
    case = forced(STORIES, device, n_ctx=512, **({} if device == "none" else {"whole": movable}))
    draft = Draft("draft-simple", 3, str(STORIES), on_device=device != "none")
    with case.placer.engine(replace(case.plan, draft=draft)) as engine:
        found = engine.generate("Once upon a time", **GREEDY)
        seen = engine.drafts()
    assert found.text == expected.text and found.tokens == expected.tokens
    assert seen is not None and seen.n_steps > 4 and len(seen.accepted) == 3
    assert all(seen.n_steps - 1 <= n <= seen.n_steps for n in seen.accepted), "all, but where the answer ends"
    placer = case.placer
    placer.keep_drafts(replace(case.plan, draft=draft), seen)
    placer.keep_drafts(replace(case.plan, draft=draft), seen)
    kept = read_acceptance(placer.model.fingerprint, placer.model.fingerprint)
    assert (kept.n_steps, kept.accepted) == (2 * seen.n_steps, tuple(2 * n for n in seen.accepted))


@pytest.mark.parametrize("device", [pytest.param("none", marks=pytest.mark.thorough), "emulated:rtx3060-12"])
def test_a_models_own_drafts_change_no_answer_and_take_what_is_planned(device: str, tmp_path: Path) -> None:
    """Beside blocks that are split on the device, where llama.cpp makes a second instance of the split back end."""
    path = write_gguf(tmp_path / "mtp.gguf", "qwen35", n_layer=3, n_vocab=512, n_ctx=512, residual=0.02)
    step, asked = DecodeStep(1, 2, 1.0, mtp=True), {} if device == "none" else {"share": ffn(0.5), "whole": beside_ffn}
    with forced(path, device, **asked).engine() as engine:
        expected = engine.generate([5, 6, 7, 8], **GREEDY)
    case = forced(path, device, step=step, **asked)
    with case.placer.engine(replace(case.plan, draft=Draft("draft-mtp", 2))) as engine:
        found, seen = engine.generate([5, 6, 7, 8], **GREEDY), engine.drafts()
        report = ask_report(engine._folder, engine.pid, 10.0)
        if report is not None:
            assert report.emulated is not None
            assert report.emulated.device_bytes == engine.memory.device_bytes, "as the no_alloc load said"
    assert found.tokens == expected.tokens
    assert seen is not None and seen.n_steps > 4 and seen.accepted[0] > 0


def test_a_models_own_block_is_on_the_device_first(tmp_path: Path) -> None:
    """Its weights, its context and snapshots of recurrent state are part of the plan's memory."""
    path = write_gguf(tmp_path / "mtp.gguf", "qwen35", n_layer=3, n_vocab=512, n_ctx=512)
    case = forced(path, "emulated:rtx3060-12", ffn(0.5))
    placer, plain = case.placer, case.plan.workload
    drafter, accepted = MtpDrafter(placer), (0.9, 0.8)
    drafter.placer._profile = beside_fast_card(drafter.placer, 1e9)
    on_device, on_cpu = (drafter.step(plain, accepted, placer.attention, x) for x in (True, False))
    assert (
        on_device.mtp
        and on_device.shares_output
        and on_device.n_tokens == 3
        and on_device.accepted == pytest.approx(1.7)
    )
    assert 0 < on_cpu.draft_s != on_device.draft_s > 0
    workload = replace(plain, step=on_device)
    problem: Any = SimpleNamespace(graph=placer.graph)  # all that it looks at
    before = placer.placed(case.plan)
    placement = with_draft_block(problem, workload, before)
    assert before.first_device_layer == 4 and placement.first_device_layer == 2, "slices alone; and the block"
    assert with_draft_block(problem, plain, before) == before
    plan = replace(case.plan, workload=workload, n_gpu_layers=2)
    draft = drafter.draft(plan, accepted)
    assert draft.on_device and draft.device_bytes > 1_500_000, "its weights alone are more"
    of_four = replace(workload, step=replace(on_device, n_slots=4))
    one, four = (placer.no_alloc_loads.sides(each, placement, placer.attention) for each in (workload, of_four))
    assert four[0] - one[0] > 3 * 3 * 65536, "each slot has a state of its own, and two snapshots of it"


def test_make_model_writes_a_model_with_such_a_block_that_llama_cpp_runs(tmp_path: Path) -> None:
    path = tmp_path / "mtp.gguf"
    main(["--like", "mtp-mini", "--type", "Q4_0", "-o", str(path)])
    placer = Placer.load(path, device="none", n_ctx=256)
    with placer.llama(placer.plan("cpu", 3, 3, measure=False), logits_all=True) as llama:
        llama.eval([1, 2, 3])
        assert np.isfinite(llama.scores[2]).all()
    block = MtpDrafter(placer).placer
    assert block.model.n_layer == 1 and {operator.layer for operator in block.operators} == {0, None}


def test_a_model_without_such_a_block_or_with_several_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no block that predicts further tokens \(MTP\)"):
        Placer.load(STORIES, device="none").plan("cpu", mtp=True)
    two = write_gguf(tmp_path / "two.gguf", "qwen35", n_layer=4, metadata={"qwen35.nextn_predict_layers": 2})
    with pytest.raises(UsageError, match=r"2 blocks that predict further tokens \(MTP\); one is supported; leave"):
        Placer.load(two, device="none").plan("cpu", mtp=True)
    with pytest.raises(UsageError, match="--spec mtp cannot be combined with --model-draft"):
        StepOptions("mtp", str(STORIES))


def test_text_that_repeats_is_drafted_without_a_model() -> None:
    case = forced(STORIES, n_ctx=512)
    prompt = "Ruth had a white key. " * 12
    with case.engine() as engine:
        expected = engine.generate(prompt, **GREEDY)
    with case.placer.engine(replace(case.plan, draft=NGRAM)) as engine:
        found = engine.generate(prompt, **GREEDY)
    assert found.text == expected.text


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf", "llama", weight_type="F16")
    placer = Placer.load(STORIES, device="none")
    with pytest.raises(UsageError, match="another vocabulary"):
        placer.plan("cpu", draft_model=str(other))
    with pytest.raises(UsageError, match="--spec ngram cannot be combined with --model-draft"):
        StepOptions("ngram", str(other))


@pytest.mark.thorough  # it profiles two models, a minute; unit/test_drafts_planned.py has the choice
def test_the_number_of_drafts_is_about_as_good_as_any() -> None:
    """Each number is planned for by itself. The memory that a draft model needs is kept free."""
    placer = Placer.load(ROOT / "models" / "oallama-stories-f16.gguf", device="emulated:rtx3060-12", vram="40MiB")
    workload, drafter = placer.workload(64, 64), DraftModel(placer, str(STORIES))

    def planned(on: Placer, workload: Workload) -> Plan:
        return on.plan("layers", workload=workload)

    plain = planned(placer, workload)
    beside = placer_beside(placer, drafter.needs(workload, placer.attention)[1], plain.memory.limit)
    for accepted in ((0.1, 0.01), (1.0, 1.0)):
        found = planned_with_drafts(placer, drafter, workload, planned, accepted)
        steps = [drafter.step(workload, accepted[:n], placer.attention, True) for n in (1, 2)]
        plans = [plain, *(planned(beside, replace(workload, step=step)) for step in steps)]
        totals = [plan.predicted.total_s for plan in plans]
        assert found.predicted.total_s <= 1.03 * min(totals)
        n_draft = 0 if found.draft is None else found.draft.n_draft
        assert totals[n_draft] == pytest.approx(found.predicted.total_s, rel=0.01)
        if found.draft is not None:
            held = found.memory
            used = held.weights_gpu + held.kv + held.compute + held.staging + found.draft.device_bytes
            assert used <= plain.memory.limit


def test_a_draft_model_that_does_not_fit_is_wrong_usage() -> None:
    placer = Placer.load(STORIES, device="none")
    with pytest.raises(
        DraftDoesNotFit, match=r"the draft model needs 2 GiB on none but only 1 GiB may be used; use a sm"
    ):
        placer_beside(placer, 2 << 30, 1 << 30)
    assert DraftDoesNotFit.exit_code == 2


def test_llama_server_is_timed_on_a_device_that_keeps_time() -> None:
    """As every arm is, also under options of stock llama.cpp, and though the device was not asked to."""
    placer, tests = Placer.load(STORIES, device="emulated:rtx3060-12,scale=1", threads=1), (BenchTest(8, 4),)
    spec = ArmMaker(placer, shared_setting(placer, tests), tests).make("stock-fit")
    plan = server_plan(placer, spec)
    assert plan.device == spec.setting.load.device and plan.device.endswith("values=drawn")


@pytest.mark.usefixtures("stub_server")
def test_a_run_that_is_not_tuned_says_that_it_makes_no_drafts() -> None:
    """And refuses a draft model that could make none."""
    asked = ("run", STORIES, "Once", "-n", 2, "-md", STORIES, "--device", "rpc-worker")
    assert "note: drafts start once `oallama tune` has measured" in here(*asked).stderr
    assert "the draft model needs" in here(*asked, "--vram", "1MiB", code=2).stderr


@pytest.mark.usefixtures("stub_server")
@pytest.mark.parametrize("device", ["none", "rpc-worker"])
def test_a_run_with_drafts_of_repeated_text_measures_nothing(tmp_path: Path, device: str) -> None:
    """On a device as on the CPU alone: tuning does not compare such plans, so stock llama.cpp's placement answers."""
    here("run", STORIES, "Once", "-n", 2, "--spec", "ngram", "--device", device, cache=tmp_path)
    assert not list(tmp_path.glob("profile-*"))
