"""Tuning: what it measures, what it keeps, and what the next run makes of that.

Plans, stock's --fit and what arms read back are real; how long a turn takes is what a test says (races.py).
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from e2e.races import FASTER, LOAD, SLOWER, Measured, racing

from oallama.cli.chat.command import chat_workload
from oallama.cli.placement_options import PlacementOptions
from oallama.cli.policy import PolicyOptions
from oallama.cli.run import plan_answer
from oallama.cli.tuning import tuning_gain
from oallama.core.codec import to_json
from oallama.core.options import Options
from oallama.core.profile import Profile
from oallama.core.types import Predicted, Workload
from oallama.placer import Placer
from oallama.placer.drafter import DraftModel
from oallama.placer.tuned import in_tuned_context, result_key, tuned_plan
from oallama.plan.plan import Plan
from oallama.profile.store import FOLDER_VARIABLE
from oallama.report.text import policy_on
from oallama.tune.run import LEAST_TIME_LIMIT_S, TuneOutcome, tune, unsettled
from oallama.tuned.classes import WorkloadClass, class_of
from oallama.tuned.result import ClassResult
from oallama.tuned.store import read_result, result_path, write_result

pytestmark = pytest.mark.usefixtures("no_alloc_loader")

SHARE = 0.5  # of the weights may lie on the device
QUESTION, PAGE = WorkloadClass("question", False), WorkloadClass("page", False)


@pytest.fixture(scope="module")
def placer(two_layers: Path, worker_profile: Profile) -> Placer:
    """That makes each plan once: planning is repeatable."""
    placer = Placer.load(two_layers, device="rpc-worker:1", profile=worker_profile, gpu_weights=SHARE, threads=1)
    placer.plan = functools.cache(placer.plan)  # type: ignore[method-assign]
    return placer


@pytest.fixture(scope="module")
def planned(placer: Placer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the result of a tuning that has measured nothing yet."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER_VARIABLE, str(folder))
        found = of_question(tune(placer, LOAD, most_s=0.0))
    assert not found.settled and found.races and [one.speed for one in found.tries] == [None] * len(found.tries)
    return folder


def of_question(found: TuneOutcome) -> ClassResult:
    """What was measured for the class of LOAD."""
    made = found.result.of(class_of(LOAD))
    assert made is not None
    return made


@pytest.fixture(autouse=True)
def cache(planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return Path(shutil.copytree(planned, tmp_path / "cache"))


def test_the_best_prediction_is_tested_and_used_where_it_wins(placer: Placer) -> None:
    race = racing(FASTER)
    found = race.tune(placer)
    made, first = of_question(found), of_question(found).races[0]
    assert made.won == first and found.plan.policy == first.policy and not found.remembered
    assert {name for name in race.turns if not name.startswith("stock ")} == {first.policy}
    assert len(first.pairs) == 4, "two blocks tell 1.5 from 1"
    assert first.ratio is not None and first.ratio.value == pytest.approx(1.5)
    assert (first.prompts, first.tokens) == (pytest.approx(1.5), pytest.approx(1.5))
    assert found.plan.predicted is not None and found.plan.fingerprint == first.plan


def test_where_no_plan_is_faster_stocks_placement_is_used(placer: Placer) -> None:
    found, stock = racing(SLOWER).tune(placer), placer.plan("fit", workload=LOAD, measure=False)
    made = of_question(found)
    assert made.settled and made.won is None and made.tries[0].placement.fit_target_mib >= 0
    assert found.plan.operators == stock.operators and stock.predicted is None and found.plan.stock == stock.stock
    assert "using llama.cpp's placement" in made.sentence
    assert all(len(race.pairs) == 2 or race.refused for race in made.races), "one block tells a late first word"


def test_a_plan_that_is_late_with_its_first_word_is_not_used_unless_it_may(
    placer: Placer, two_layers: Path, worker_profile: Profile
) -> None:
    late = racing(0.1, late=15.0)
    made = of_question(late.tune(placer))
    assert made.won is None and made.races[0].is_late and len(made.races[0].pairs) == 2, "one block tells"
    asked = {"device": "rpc-worker:1", "gpu_weights": SHARE, "threads": 1, "late_first_word": True}
    other = late.tune(Placer.load(two_layers, profile=worker_profile, **asked))
    assert of_question(other).won is not None, "over prompt and answer it is faster"


def test_a_plan_that_is_late_for_long_prompts_of_its_class_is_not_measured(
    placer: Placer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, priced = class_of(LOAD).workload(LOAD.n_ctx, LOAD.n_ubatch), placer.price

    def price(plan: Plan, workload: Workload) -> Predicted:
        predicted = priced(plan, workload)
        return replace(predicted, ttft_s=predicted.ttft_s * (100 if workload.n_prompt > usual.n_prompt else 1))

    monkeypatch.setattr(placer, "price", price)
    assert not of_question(racing(FASTER).tune(placer, refresh=True)).races


def test_a_plan_that_does_not_do_what_it_says_is_refused(placer: Placer) -> None:
    made = of_question(racing(FASTER, problem="it ran elsewhere").tune(placer))
    assert "it ran elsewhere" in made.races[0].refused and made.won is None


def test_a_result_is_remembered_until_it_is_asked_for_anew(placer: Placer) -> None:
    assert tuned_plan(placer, LOAD) is None
    first, later = racing(FASTER).tune(placer), racing(SLOWER)
    again = later.tune(placer)
    assert (again.remembered, again.plan, again.result) == (True, first.plan, first.result) and not later.turns
    known = tuned_plan(placer, LOAD)
    assert known is not None and known.plan == first.plan and known.result == of_question(first)
    assert of_question(later.tune(placer, refresh=True)).won is None and later.turns
    assert of_question(racing(FASTER).tune(placer)).won is None, "the newer one counts"


def test_the_plan_that_won_is_what_later_prompts_of_its_class_load_to_the_byte(
    placer: Placer, two_layers: Path, worker_profile: Profile
) -> None:
    won = racing(FASTER).tune(placer).plan
    fresh = Placer.load(two_layers, device="rpc-worker:1", profile=worker_profile, gpu_weights=SHARE, threads=1)
    for n_prompt, n_gen in ((1, 1), (128, 300), (77, 0)):
        found = tuned_plan(fresh, Workload(n_prompt, n_gen, LOAD.n_ctx))
        assert found is not None and found.plan.to_json() == won.to_json()


@pytest.mark.parametrize(("steps", "counts"), [(-1, True), (-2, False), (1, False)])
def test_a_plan_for_a_step_less_of_free_memory_is_used(placer: Placer, steps: int, counts: bool) -> None:
    found = racing(FASTER).tune(placer)
    result_path(found.result.key).unlink()
    assert tuned_plan(placer, LOAD) is None
    write_result(replace(found.result, key=replace(found.result.key, memory=found.result.key.memory + steps)))
    known = tuned_plan(placer, LOAD)
    assert (known is not None and known.plan == found.plan) == counts


def test_run_chat_and_serve_use_the_plan_that_won_for_their_class_to_the_byte(
    placer: Placer, two_layers: Path, worker_profile: Profile
) -> None:
    found = racing(FASTER).tune(placer, classes=(QUESTION, PAGE)).result
    options = Options(device="rpc-worker:1", gpu_weights=SHARE, threads=1, n_ctx=LOAD.n_ctx)
    asked = PlacementOptions(None, PolicyOptions(), options, worker_profile, True, "never")  # type: ignore[arg-type]
    answers: Any = SimpleNamespace(chat=False, system=None)
    with click.Context(click.Command("run")):
        for n_words, kind in ((5, QUESTION), (50, QUESTION), (150, PAGE)):
            planned, _ = plan_answer(asked, answers, str(two_layers), n_words * "word ", 16)
            assert planned.plan.to_json() == found.plan(found[kind].plan).to_json() and not planned.is_untuned
        on = asked.placer(str(two_layers))
        for workload, kind in ((chat_workload(on), QUESTION), (on.workload(512, 128), PAGE)):
            plan, is_unknown = asked.expecting(4).made_plan(on, workload)
            assert plan.to_json() == found.plan(found[kind].plan).to_json()
            assert is_unknown == (workload.n_past > 0), "after a history the nearest class counts"
            if is_unknown:
                told = tuning_gain(on, workload, plan)
                placed = policy_on(plan.policy, plan.device)
                assert told.startswith(f"using the plan for short questions, {placed}; to tune for ")


def test_the_nearest_class_serves_those_that_nothing_was_measured_for(placer: Placer) -> None:
    won = racing(FASTER).tune(placer)
    page = tuned_plan(placer, replace(LOAD, n_prompt=500))
    assert page is not None and page.plan == won.plan and (page.asked, page.result.of) == (PAGE, QUESTION)
    assert page.sentence.endswith("(no result for pages yet)")
    assert tuned_plan(placer, replace(LOAD, n_prompt=500, n_past=1)) is None, "two steps away"


def test_several_classes_are_measured_at_once_with_few_plans(placer: Placer) -> None:
    race = racing(FASTER)
    found = race.tune(placer, classes=(QUESTION, PAGE))
    made = [found.result.of(kind) for kind in (QUESTION, PAGE)]
    assert all(each is not None and each.won for each in made)
    plans = {each.plan for each in made if each is not None}
    assert all(Plan.from_json(dict(found.result.plans[name])).fingerprint == name for name in plans)
    assert found.plan.fingerprint in plans


def test_pairs_add_up_from_run_to_run_and_each_run_gets_further(placer: Placer) -> None:
    race = racing(FASTER, slowness=20.0)
    found = race.tune(placer, time_limit_s=100.0)
    made = of_question(found)
    assert (made.settled, made.won) == (False, None) and found.tuned is None
    assert found.plan.operators == placer.plan("fit", workload=LOAD, measure=False).operators
    assert tuned_plan(placer, LOAD) is None and unsettled(placer, LOAD) == (made, found.left_s)
    last = race.tune(placer, time_limit_s=1000.0)
    assert len(made.races[0].pairs) == 2, "one block, whatever the budget"
    assert len(of_question(last).races[0].pairs) == 4 and of_question(last).won
    assert last.result.seconds == pytest.approx(race.now - 1000.0), "of both runs"
    assert found.left_s >= LEAST_TIME_LIMIT_S and unsettled(placer, LOAD) is None


def test_what_was_in_vain_is_given_twice_the_time(placer: Placer) -> None:
    race = racing(FASTER, slowness=500.0)
    found = [of_question(race.tune(placer)) for _ in range(5)]
    n_pairs = [len(each.races[0].pairs) for each in found]
    assert n_pairs[0] == 0 and n_pairs == sorted(n_pairs) and n_pairs[-1] == 4 and found[-1].settled
    assert race.given_s[0] < race.given_s[1]


def test_stock_is_offered_as_many_drafts_and_what_wins_is_of_that_drafter(
    two_layers: Path, worker_profile: Profile
) -> None:
    """The model drafts for itself. Stock's fastest has four drafts; a plan with drafts of ours is faster still."""
    options: dict[str, Any] = {"device": "rpc-worker:1", "profile": worker_profile, "threads": 1}
    placer = Placer.load(two_layers, gpu_weights=SHARE, late_first_word=True, **options)
    plain = result_key(placer, LOAD.n_ctx)
    drafter = DraftModel(placer, str(two_layers))
    drafter.placer = Placer.load(two_layers, **options)  # measured already
    placer.drafter = drafter
    found = of_question(racing(0.8**4 / 1.5).tune(placer))
    assert result_key(placer, LOAD.n_ctx) != plain
    assert {one.n_draft for one in found.tries} >= {0, 4} and found.tries[0].n_draft == 0
    assert found.tries[found.rival].n_draft == 4 and "--spec-draft-n-max 4" in found.stock
    rival = read_result(result_key(placer, LOAD.n_ctx))
    assert rival is not None
    draft = rival.plan(found.stock_plan).draft
    assert draft is not None and (draft.n_draft, draft.model_path) == (4, str(two_layers))
    assert found.won is not None
    tuned = tuned_plan(placer, LOAD)
    assert tuned is not None and tuned.plan.fingerprint == found.won.plan
    placer.drafter = None
    assert tuned_plan(placer, LOAD) is None, "nothing was measured without drafts"


def test_what_would_take_too_long_is_not_measured_but_told(placer: Placer) -> None:
    race = racing(FASTER)
    found = race.tune(placer, most_s=1.0)
    assert race.turns == [] and of_question(found).open and found.left_s >= LEAST_TIME_LIMIT_S
    assert of_question(race.tune(placer, most_s=found.left_s)).won


def test_ctrl_c_keeps_the_pairs_that_are_complete(placer: Placer) -> None:
    own: list[int] = []

    def seconds(turn: int) -> float:
        own.append(turn)
        if len(own) > 2:  # in the second block
            raise KeyboardInterrupt
        return FASTER

    with pytest.raises(KeyboardInterrupt):
        Measured(seconds).tune(placer)
    kept = unsettled(placer, LOAD)
    assert kept is not None and len(kept[0].races[0].pairs) == 2


def test_two_runs_at_once_give_one_result(placer: Placer) -> None:
    race, other = racing(FASTER), []

    def waits(doing: str, **_: Any) -> None:
        if doing == "plan" and not other:  # meanwhile another run measures
            other.append(racing(FASTER).tune(placer))

    found = race.tune(placer, progress=waits)
    assert (found.remembered, found.result, race.turns) == (True, other[0].result, [])


def test_a_file_that_cannot_be_used_is_as_good_as_none(placer: Placer, cache: Path) -> None:
    key = racing(FASTER).tune(placer).result.key
    path = result_path(key)
    sound = json.loads(path.read_text())
    assert read_result(key) is not None
    (made,) = sound["classes"]
    race = made["races"][0]
    pair = [{"prompt_s": 1.0, "token_s": 1.0}] * 2
    for change in (
        {"key": {**sound["key"], "threads": 9}},
        {"classes": [{**made, "races": [{**race, "pairs": [[{**pair[0], "prompt_s": 0.0}, pair[1]]]}]}]},
        {"plans": {}}, {"classes": 5}, {"classes": [{**made, "rival": 99}]}, {"classes": [{**made, "n_gen": 0}]},
    ):  # fmt: skip
        path.write_text(json.dumps({**sound, **change}))
        assert read_result(key) is None, change
    path.write_text("{")
    assert read_result(key) is None
    changed = {name: {**plan, "version": 99} for name, plan in sound["plans"].items()}
    path.write_text(json.dumps({**sound, "plans": changed}))
    assert tuned_plan(placer, LOAD) is None


def test_another_setting_is_another_result(two_layers: Path, worker_profile: Profile) -> None:
    def path(profile: Profile = worker_profile, n_ctx: int = 1024, **changes: Any) -> Path:
        asked = {"device": "rpc-worker:1", "gpu_weights": SHARE, "threads": 1, **changes}
        return result_path(result_key(Placer.load(two_layers, profile=profile, **asked), n_ctx))

    paths = [
        path(), path(threads=2), path(gpu_weights=0.4), path(flash_attn="on"), path(type_k="q8_0"), path(n_ctx=2048),
        path(n_ubatch=512), path(n_batch=1024), path(replace(worker_profile, launch_s=1e-3)), path(device="none"),
        path(late_first_word=True),
    ]  # fmt: skip
    assert len(set(paths)) == len(paths) and path() == paths[0]


def test_long_prompts_share_a_context(placer: Placer, two_layers: Path) -> None:
    sizes = [in_tuned_context(placer, placer.workload(n, 100)).n_ctx for n in (1, 900, 5000, 9000)]
    assert sizes == [1024, 1024, 8192, 16384] or sizes[:2] == [placer.workload(1, 0).n_ctx] * 2
    asked = Placer.load(two_layers, device="none", n_ctx=600)
    assert in_tuned_context(asked, asked.workload(5, 5)).n_ctx == 600


def test_the_file_says_what_it_holds_for(placer: Placer) -> None:
    found = racing(FASTER).tune(placer)
    document = json.loads(json.dumps(found.result.document))
    assert document["key"] == to_json(found.result.key)
    (made,) = document["classes"]
    assert made["winner"] == found.plan.policy and made["plan"] == found.plan.fingerprint and made["settled"]
    assert made["class"] == {"length": "question", "history": False} and made["races"][0]["standing"] == "won"
