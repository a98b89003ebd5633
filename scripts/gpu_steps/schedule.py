"""Scheduling of steps: the next one, and whether it still fits. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.results import CUT, DONE, FAILED

from gpu_steps.steps import GpuStep

RESERVE_S = 8.0  # to end what runs, and to write
MAX_TRIES = 2
RETRIED_AT_ONCE = "ab"


@dataclass(frozen=True)
class NextStep:
    """The next step and its deadline in seconds from now; None: nothing is left, or nothing that is left fits."""

    step: GpuStep | None
    limit_s: float = 0.0
    waiting: tuple[str, ...] = ()  # steps that are left for another call
    skipped: tuple[str, ...] = ()  # steps that have no point: what they need failed


def choose(
    steps: Sequence[GpuStep],
    results: Mapping[str, Mapping[str, Any]],
    remaining_s: float,
    model_seconds: Mapping[str, float],
    failed_now: Collection[str] = (),
) -> NextStep:
    """The first step that is not done, has not failed for good, and is expected to end within `remaining_s`.

    results: by step's id, with `state`, `seconds`, `tries`. model_seconds: what writing each missing model takes.
    failed_now: what failed in this call; only a comparison, whose second try is another, is tried again at once.
    A step that was cut short, or takes longer than what is left, does not stop those after it.
    """
    pace = pace_of(steps, results)
    names = {step.id for step in steps}  # what is needed and not among them was left out on purpose
    waiting, skipped = [], []
    for step in steps:
        result = results.get(step.id, {})
        state = result.get("state")
        if step.id in failed_now and step.kind != RETRIED_AT_ONCE:
            waiting.append(step.id)
            continue
        if state == DONE or (state in (FAILED, CUT) and result.get("tries", 1) >= MAX_TRIES):
            continue
        needs = [results.get(need, {}).get("state") for need in step.needs if need in names]
        if FAILED in needs:
            skipped.append(step.id)
            continue
        if any(state != DONE for state in needs):
            waiting.append(step.id)
            continue
        expected = expected_seconds(step, result, pace) + sum(
            model_seconds.get(model.name, 0.0) for model in step.models
        )
        if expected <= remaining_s - RESERVE_S:
            return NextStep(step, remaining_s - RESERVE_S, tuple(waiting), tuple(skipped))
        waiting.append(step.id)
    return NextStep(None, 0.0, tuple(waiting), tuple(skipped))


def pace_of(steps: Sequence[GpuStep], results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Kind of step -> how many times the estimate its steps took here, on average; only where some are done."""
    found: dict[str, list[tuple[float, float]]] = {}
    for step in steps:
        result = results.get(step.id, {})
        if result.get("state") == DONE:
            found.setdefault(step.kind, []).append((float(result["seconds"]), step.seconds))
    return {kind: sum(took for took, _ in rows) / sum(guess for _, guess in rows) for kind, rows in found.items()}


def expected_seconds(step: GpuStep, result: Mapping[str, Any], pace: Mapping[str, float]) -> float:
    """What a step will take: the estimate, as far off as others of its kind were; after a try that was cut short, more
    than that try had."""
    expected = step.seconds * pace.get(step.kind, 1.0)
    return max(expected, 1.2 * float(result["seconds"])) if result.get("state") == CUT else expected
