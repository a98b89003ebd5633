"""The gate at work: plan by every policy, measure the best two against stock for some seconds, remember the verdict."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from oallama import __version__
from oallama.bench.ab import Bench, Progress, quiet, run_bench
from oallama.bench.arms import STOCK_CPU, STOCK_FIT, ArmMaker
from oallama.bench.prepare import memory_cap, setting_of
from oallama.bench.records import ArmSpec, BenchResult, BenchTest
from oallama.bench.rows import refusal
from oallama.gate.plans import all_plans, candidate, leaves_flash_off, plan_by, stock_plan
from oallama.gate.store import read_verdict, write_verdict
from oallama.gate.verdict import (
    Key,
    Trial,
    Verdict,
    choose,
    decide,
    holds,
    length_class,
    sentence,
    size_class,
    together,
    trial,
    undecided,
)

if TYPE_CHECKING:
    from oallama.core.types import Profile, Workload
    from oallama.cost.passes import Pass
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

TURN_S = 1.0  # a turn's prompt, and its generation, are as long as the prediction says this takes
LEAST_PROMPT, MOST_GEN, LEAST_GEN = 32, 16, 4
N_BLOCKS = 3  # the fewest that give an interval
LARGE_CTX = 8192  # contexts from here on are measured at a second depth
DEPTH_S = 10.0  # which is as deep as the prediction says this takes to fill
LEAST_DEPTH = 1024

TIMED = ("cases", "rest", "link", "boundary", "contention", "launch_s", "launch_issue_s", "sharing", "copy_wait")
"""Of a profile's JSON."""

Measure = Callable[[Bench, Progress], BenchResult]


@dataclass(frozen=True, slots=True)
class Gated:
    """What the gate lets through, and why."""

    plan: Plan
    verdict: Verdict
    remembered: bool  # the verdict was measured before


def gated_plan(
    placer: Placer,
    load: Workload,
    progress: Progress = quiet,
    measure: Measure = run_bench,
    refresh: bool = False,
    cpus: tuple[int, ...] = (),
    attention_passes: Sequence[Pass] | None = None,
) -> Gated:
    """The plan that is faster than stock llama.cpp beyond noise, or stock's own placement as a plan.

    cpus: what the measured processes are pinned to. refresh: measure although a verdict is remembered.
    attention_passes: as in Placer.plan. Takes some seconds, or one plan where the verdict is remembered. Needs a
    device. Raises DoesNotFit where stock-fit does not fit, and what planning and measuring raise.
    """
    setting = setting_of(placer, load.n_ctx, load.n_ubatch, cpus=cpus)
    cap = memory_cap(placer, setting)
    free = cap.device_bytes or 0
    key = gate_key(placer, load)
    known = None if refresh else read_verdict(key)
    if known is not None and holds(known[0], free):
        verdict, placement = known
        plan = (
            plan_by(placer, load, attention_passes, verdict.winner)
            if verdict.winner
            else stock_plan(placer, load, placement)
        )
        return Gated(plan, verdict, True)
    start = time.monotonic()
    plans = all_plans(placer, load, attention_passes)
    chosen = choose([candidate(policy, plan) for policy, plan in plans.items()])
    maker = ArmMaker(placer, setting, cap, progress=progress)
    stock = maker.make(STOCK_CPU if placer.device.is_pair else STOCK_FIT)
    tests = gate_tests(load, plans[chosen[0].policy] if chosen else None)
    arms = (stock, *(maker.of_plan(each.policy, plans[each.policy]) for each in chosen if each.policy != stock.name))

    def measured(arms: tuple[ArmSpec, ...]) -> BenchResult:
        result = measure(Bench(arms, tests, placer.operators, placer.model.n_layer, N_BLOCKS, cap=cap), progress)
        if result.interrupted:
            raise KeyboardInterrupt
        return result

    first = measured(arms)
    trials = _trials([first], load)
    if doubtful := undecided(trials):
        again = measured((stock, *(arm for arm in arms if arm.name in doubtful)))
        trials = [*(each for each in trials if each.policy not in doubtful), *_trials([again, first], load)]
    measured_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    verdict = decide(key, stock.name, trials, free, measured_at, time.monotonic() - start)
    assert stock.stock is not None
    write_verdict(verdict, stock.stock)
    plan = plans[verdict.winner] if verdict.winner else stock_plan(placer, load, stock.stock)
    return Gated(plan, verdict, False)


def gate_key(placer: Placer, load: Workload) -> Key:
    """What a verdict for this model, device and workload holds for. Counts of tokens that are alike share a class."""
    from oallama.profile.machine import fingerprint_key

    options = placer.options
    return {
        "model": placer.model.fingerprint,
        "machine": fingerprint_key(placer.machine),  # that of the profile unless it came from a file
        "profile": timings_digest(placer.profile()),  # other times make other plans
        "oallama": __version__,
        "n_threads": placer.threads,
        "depth_class": size_class(load.n_ctx),
        "prompt_class": length_class(load.n_prompt),
        "gen_class": length_class(load.n_gen),
        "n_ubatch": load.n_ubatch,
        "ubatch_is_fixed": options.n_ubatch is not None,  # else plans may have a larger one, up to n_batch
        "n_batch": options.n_batch,
        **asdict(placer.attention),
        **{name: getattr(options, name) for name in ("vram", "vram_fill", "gpu_weights")},
    }


def timings_digest(profile: Profile) -> str:
    """16 hex digits of all that was timed, and of nothing else."""
    from oallama.profile.store import profile_to_json

    record = profile_to_json(profile)
    timed = {name: record.get(name) for name in TIMED}
    return hashlib.sha256(json.dumps(timed, sort_keys=True).encode()).hexdigest()[:16]


def gate_tests(load: Workload, plan: Plan | None) -> tuple[BenchTest, ...]:
    """The user's prompt and generation, shortened to what the plan's prediction says takes TURN_S each, the prompt to
    the plan's micro-batch at most; and the same at a depth where the context is large. A plan that leaves flash
    attention off for the depth of the workload is measured near that depth. plan None or without a prediction: the
    shortest."""
    predicted = plan.predicted if plan is not None else None
    per_prompt_token = predicted.ttft_s / load.n_prompt if predicted else TURN_S
    tpot = predicted.tpot_s if predicted else TURN_S

    def within(seconds: float, each: float) -> int:
        return int(seconds / each) if each > 0 else 1 << 30

    n_ubatch = load.n_ubatch if plan is None else plan.workload.n_ubatch
    n_prompt = min(load.n_prompt, n_ubatch, max(LEAST_PROMPT, within(TURN_S, per_prompt_token)))
    n_gen = min(max(load.n_gen, 1), MOST_GEN, max(LEAST_GEN, within(TURN_S, tpot)))
    off = plan is not None and leaves_flash_off(plan)
    left_out = load.n_prompt - n_prompt + (load.n_gen - n_gen) // 2
    tests = [BenchTest(n_prompt, n_gen, min(max(left_out, 0), within(DEPTH_S, per_prompt_token)) if off else 0)]
    if load.n_ctx >= LARGE_CTX:
        depth = min(load.n_ctx // 2, load.n_ctx - n_prompt - n_gen, within(DEPTH_S, per_prompt_token))
        if depth >= max(LEAST_DEPTH, 2 * tests[0].n_depth):
            tests.append(BenchTest(n_prompt, n_gen, depth))
    return tuple(tests)


def _trials(results: Sequence[BenchResult], load: Workload) -> list[Trial]:
    """Of the candidates of the first result; measured again in the others, all pairs count together."""
    first = results[0]
    found = []
    for position, made in enumerate(first.series):
        for index, arm in enumerate(first.arms[1:], 1):
            name = arm.spec.name
            parts, refused = [(made, index)], refusal(first.arms, index, len(made.samples(index)))
            for other in results[1:]:
                there = [each.spec.name for each in other.arms].index(name)
                parts.append((other.series[position], there))
                refused = refused or refusal(other.arms, there, len(other.series[position].samples(there)))
            found.append(trial(name, together(parts), 1, load.n_prompt, max(load.n_gen, 1), refused))
    return found


def gated_arm(maker: ArmMaker, refresh: bool = False) -> ArmSpec:
    """The arm `auto`: what the gate lets through, with its verdict for the reader."""
    gated = gated_plan(
        maker.placer,
        maker.workload,
        maker.progress,
        refresh=refresh,
        cpus=maker.setting.cpus,
        attention_passes=maker.attention_passes,
    )
    spec, text = maker.of_plan("auto", gated.plan), sentence(gated.verdict).removeprefix("oallama: ")
    how = f"remembered, took {gated.verdict.seconds:.1f} s" if gated.remembered else f"in {gated.verdict.seconds:.1f} s"
    document = {**asdict(gated.verdict), "said": text, "remembered": gated.remembered}
    return replace(spec, notes=(*spec.notes, f"gate, {how}: {text}"), gate=document)
