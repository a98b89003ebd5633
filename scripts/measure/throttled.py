"""Re-planning on a CPU that became slower than it was planned for, as heat makes it: tokens/s without, with, and of a
plan that knows.

The CPU stays as it is; the profile that is planned with says that it is so many times as fast."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from experiments.generation import prompt_of

from measure.measure import Measure, MeasureStep, add_common, name_of
from measure.replan import token_seconds
from oallama import Placer
from oallama.core.profile import Profile
from oallama.core.types import CPU_DEVICE
from oallama.core.units import format_bytes


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, "emulated:rtx3060-12", n_gen=144, rounds=3)
    parser.add_argument("--vram", help="of the device, as oallama's --vram")
    parser.add_argument("--slower", type=float, default=2.0, help="times that the CPU takes of what is planned [2]")
    parser.add_argument("--policy", default="scheinfer")


def with_faster_cpu(profile: Profile, times: float) -> Profile:
    """The profile of a machine whose CPU takes so many times less for all that it computes."""
    return replace(
        profile,
        cases=tuple(_faster(case, times) for case in profile.cases),
        rest=tuple(_faster(case, times) for case in profile.rest),
    )


def _faster(case: Any, times: float) -> Any:
    if case.device != CPU_DEVICE:
        return case
    return replace(case, seconds=case.seconds / times, samples=tuple(seconds / times for seconds in case.samples))


def _steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
    for path in options.files:
        yield MeasureStep(name_of(path), path, partial(_measure, path, options))


def _measure(path: str, options: argparse.Namespace) -> dict[str, Any]:
    load = partial(Placer.load, path, device=options.device, vram=options.vram, threads=options.threads[0])
    now = load()
    before = load(profile=with_faster_cpu(now.profile(), options.slower))
    lengths = {"n_prompt": options.n_prompt, "n_gen": options.n_gen}
    old, new = (placer.plan(options.policy, **lengths) for placer in (before, now))
    kept = before.kept_cuts(old)
    if kept is None or not kept.moves:
        raise SystemExit(f"{path}: the plan slices nothing of which other cuts could be kept")
    arms = {"without": (before, old, None), "with": (before, old, kept), "new plan": (now, new, None)}
    rounds = []
    for _ in range(options.rounds):
        made = {}
        for arm, (placer, plan, replan) in arms.items():
            with placer.engine(plan, progress=False, replan=replan) as engine:
                prompt = prompt_of(options.n_prompt, placer.model.n_vocab)
                made[arm] = {
                    "seconds": token_seconds(engine, prompt, options.n_gen),
                    "replanned": list(engine.replanned),
                }
        rounds.append(made)
    return {
        "device": str(now.device),
        "threads": now.threads,
        "slower": options.slower,
        "twice_bytes": kept.twice_bytes,
        "staging_bytes": kept.staging_bytes,
        "notes": list(kept.notes),
        "rounds": rounds,
    }


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for name, data in found:
        for arm in data["rounds"][0]:
            times = [s for one in data["rounds"] for s in one[arm]["seconds"][len(one[arm]["seconds"]) // 2 :]]
            changes = sum(len(one[arm]["replanned"]) for one in data["rounds"]) / len(data["rounds"])
            kept = format_bytes(data["twice_bytes"]) if arm == "with" else ""
            rows.append((name, arm, f"{1 / median(times):.1f}", f"{changes:.1f}", kept))
    return rows


MEASURE = Measure(
    "re-planning on a CPU that is slower than what was planned for. Close other programs. Needs a device, such as the "
    "emulated one.", _add_options, _steps,
    ("model", "re-planning", "tokens/s of the second half", "changes a round", "kept twice"), _rows,
)  # fmt: skip
