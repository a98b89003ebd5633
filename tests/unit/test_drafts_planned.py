"""How many drafts a plan has, by what a step of several tokens costs: experts that tokens share or do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from worlds import HOST, World, model_info, weights_of

from oallama.core.types import Attention, DecodeStep, Draft, MulMat, Workload
from oallama.cost.experts import ExpertCoverage, experts_alike, of_step, share_of_step
from oallama.cost.kernels import Kernels
from oallama.placer import Placer
from oallama.placer.drafter import planned_with_drafts
from oallama.plan.plan import Plan
from oallama.profile.acceptance import NO_ACCEPTANCE, Acceptance
from oallama.report.operators import step_text

ACCEPTED = (0.5, 0.25)
TOKENS = (1, 2, 3, 4, 5, 8, 32, 512)
QWEN3_30B = model_info(
    n_layer=4, n_embd=2048, n_ff=768, n_head=32, n_head_kv=4, n_embd_head_k=128, n_embd_head_v=128, n_expert=128,
    n_expert_used=8, n_vocab=8192,
)  # fmt: skip
DENSE = replace(QWEN3_30B, n_ff=12288, n_expert=0, n_expert_used=0)


class Cheap:
    """Drafts of a millisecond each."""

    most_drafts, flags, name, identity = 2, ("-md", "cheap"), "a cheap drafter", "cheap"

    @property
    def acceptance(self) -> Acceptance:
        return NO_ACCEPTANCE

    def reserves(self, workload: Workload, attention: Attention) -> int:
        return 0

    def step(
        self, workload: Workload, accepted: Sequence[float], attention: Attention, block_on_device: bool
    ) -> DecodeStep:
        return DecodeStep(1, len(accepted), sum(accepted), 1e-3 * len(accepted))

    def draft(self, plan: Plan, accepted: Sequence[float]) -> Draft:
        return Draft("draft-simple", len(accepted), "cheap.gguf", accepted=tuple(accepted))


@pytest.mark.parametrize(("model", "drafts"), [(DENSE, 2), (QWEN3_30B, None)], ids=["dense", "experts on the CPU"])
def test_drafts_that_make_the_cpu_read_more_experts_than_they_save_are_not_made(model, drafts) -> None:
    """Each draft has it read 60 % more experts for half a token more; a dense model's weights it reads once."""
    world = World(model=model, host=HOST, tokens=TOKENS, share=0.05, workload=Workload(64, 128, 512))

    def planned(placer: Placer, workload: Workload) -> Plan:
        return placer.plan("cpu", workload=workload)

    found = planned_with_drafts(world.placer(), Cheap(), world.workload, planned, ACCEPTED)
    assert (found.draft and found.draft.n_draft) == drafts
    if drafts is None:
        assert found.notes[-1] == "no drafts: they are predicted to cost more than they save"
        assert found.workload.step == DecodeStep()


def test_an_output_that_drafts_is_priced_where_it_is_and_lies_on_the_device_first() -> None:
    """Three runs of the output a step, for two drafts and for three tokens, are worth more for each byte than one of a
    layer for three tokens; a plan without drafts has layers in its place."""
    output = weights_of(DENSE)[-1]
    step = DecodeStep(1, 2, 1.0, 1e-3, shares_output=True)

    def world(shares_output: bool) -> World:
        asked = Workload(64, 128, 512, step=replace(step, shares_output=shares_output))
        return World(model=DENSE, host=HOST, tokens=TOKENS, room=64 << 20, workload=asked)

    kernels = Kernels(world(True).profile)
    plans = {shares: world(shares).plan("oato") for shares in (True, False)}
    assert plans[True].operators[-1].gg == 1 and plans[False].operators[-1].gg == 0
    for plan in plans.values():
        kernel = kernels.on_device(output) if plan.operators[-1].gg else next(iter(kernels.on_host(output).values()))
        with_it, without = (world(shares).simulate(plan, world(shares).workload).predicted for shares in (True, False))
        drafted_s = (with_it.tpot_s - without.tpot_s) * step.n_yielded
        assert kernel is not None and drafted_s == pytest.approx(step.n_draft * sum(kernel.at(1)))


@pytest.mark.parametrize(
    ("n_expert", "n_used", "seen"),
    [(32, 4, {2: 6.2, 4: 9.3, 8: 12.8}), (128, 6, {2: 9.7, 4: 15.6, 8: 23.6})],
    ids=["gpt-oss-20b", "Qwen3-30B-A3B"],
)
def test_consecutive_tokens_use_as_many_experts_as_traces_say(n_expert, n_used, seen) -> None:
    what = MulMat("MUL_MAT_ID", "Q4_0", (64, 64, n_expert), n_used)
    for n_tokens, n in seen.items():
        assert n_expert * share_of_step(what, DecodeStep(1, n_tokens - 1)) == pytest.approx(n, rel=0.05)
    of_two = share_of_step(what, DecodeStep(2, 1))
    assert share_of_step(what, DecodeStep(1, 3)) < of_two < what.share_read(4), "two requests share less than one"
    assert share_of_step(what, DecodeStep(4)) == pytest.approx(what.share_read(4))
    assert share_of_step(what, DecodeStep(1, 1), (1.0, 0.0, 0.0)) < share_of_step(what, DecodeStep(1, 1)), "recorded"


def test_a_step_is_timed_for_the_experts_that_its_tokens_use() -> None:
    world = World(model=QWEN3_30B, tokens=TOKENS)
    down = next(operator for operator in world.operators if operator.role == "ffn_down_exps")
    step = DecodeStep(1, 3)
    drawn, consecutive, apart = (
        next(iter(Kernels(world.profile, each).on_host(down).values())) for each in (DecodeStep(), step, DecodeStep(4))
    )
    one_s, four_s = drawn.at(1), sum(drawn.at(4))
    assert consecutive.at(1) == one_s and consecutive.at(8) == drawn.at(8)
    assert sum(one_s) < sum(consecutive.at(4)) < 0.8 * four_s
    assert sum(apart.at(4)) == pytest.approx(four_s), "tokens of several requests are as those that were timed"


@pytest.mark.parametrize(
    ("step", "draft", "said"),
    [
        (DecodeStep(), None, ""),
        (DecodeStep(4), None, "A decode step computes 4 tokens of 4 requests."),
        (
            DecodeStep(1, 2, 1.375),
            Draft("draft-simple", 2, "small.gguf", True, 3 << 20),
            "A decode step computes 3 tokens, and is expected to add 2.38 to each answer; the draft model takes 3 MiB "
            "of the device's memory.",
        ),
    ],
)
def test_a_report_says_what_a_step_computes_yields_and_takes(step, draft, said) -> None:
    assert step_text(step, draft) == said


def test_a_step_of_hot_experts_is_decode() -> None:
    use, mul_mat = (
        ExpertCoverage((0, 1), (0.0, 0.9, 1.0), (0.0, 0.6, 1.0)),
        MulMat("MUL_MAT_ID", "Q4_0", (64, 64, 32), 4),
    )
    assert [use.coverage(1, n) for n in (1, 2, 3)] == [0.9, 0.6, 0.6]
    stepped = of_step(use, mul_mat, DecodeStep(1, 1))
    assert [stepped.coverage(1, n) for n in (1, 2, 3)] == [0.9, 0.9, 0.6]
    alike = experts_alike(32)
    missed, missed_by_step = (
        use.misses_by_rows(mul_mat, 16, 2)[0][0] for use in (alike, of_step(alike, mul_mat, DecodeStep(1, 1)))
    )
    assert missed_by_step == pytest.approx(0.83 * missed)
    assert of_step(use, mul_mat, DecodeStep()) == use
