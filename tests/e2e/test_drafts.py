"""Drafts change no answer, are counted, and are made by models of the same vocabulary alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from e2e.forced import forced, movable
from gguf_factory import write_gguf
from processes import ROOT

from oallama.cli.speculation import StepOptions
from oallama.core.errors import UsageError
from oallama.core.types import NGRAM, Draft, Workload
from oallama.placer import Placer
from oallama.placer.drafter import Drafter, placer_beside, planned_with_drafts
from oallama.plan.plan import Plan
from oallama.profile.acceptance import read_acceptance
from oallama.stores.default_model import FILE

STORIES = ROOT / "models" / FILE
GREEDY = {"temperature": 0.0, "max_tokens": 24}


@pytest.mark.parametrize("device", ["none", "emulated:rtx3060-12"])
def test_answers_with_drafts_are_those_without(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path))
    case = forced(STORIES, device, n_ctx=256, **({} if device == "none" else {"whole": movable}))
    with case.engine() as engine:
        expected = engine.generate("Once upon a time", **GREEDY)
        assert engine.drafts() is None
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
    with pytest.raises(UsageError, match="--spec ngram needs no draft model"):
        StepOptions("ngram", str(other))


def test_the_number_of_drafts_is_about_as_good_as_any() -> None:
    """Each number is planned for by itself. The memory that a draft model needs is kept free."""
    placer = Placer.load(ROOT / "models" / "oallama-stories-f16.gguf", device="emulated:rtx3060-12", vram="40MiB")
    workload, drafter = placer.workload(64, 64), Drafter(placer, str(STORIES))

    def planned(on: Placer, workload: Workload) -> Plan:
        return on.plan("layers", workload=workload)

    plain = planned(placer, workload)
    beside = placer_beside(placer, drafter.needs(workload, placer.attention)[1], plain.memory.limit)
    for accepted in ((0.1, 0.01), (1.0, 1.0)):
        found = planned_with_drafts(placer, drafter, workload, planned, accepted)
        steps = [drafter.step(workload, placer.attention, accepted[:n]) for n in (1, 2)]
        plans = [plain, *(planned(beside, replace(workload, step=step)) for step in steps)]
        totals = [plan.predicted.total_s for plan in plans]
        assert found.predicted.total_s <= 1.03 * min(totals)
        n_draft = 0 if found.draft is None else found.draft.n_draft
        assert totals[n_draft] == pytest.approx(found.predicted.total_s, rel=0.01)
        if found.draft is not None:
            held = found.memory
            used = held.weights_gpu + held.kv + held.compute + held.staging + found.draft.device_bytes
            assert used <= plain.memory.limit
