"""Streamed slices on this machine: t_fin of blocks, and when host, device and link were busy.

t_fin of a block is from the launch of its device part to the end of its join.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

from measure.measure import Measure, MeasureStep, add_common
from measure.slice_bench import SliceBench, busy, one_pass, phases_of, t_fin
from oallama.device.spec import parse_cpus
from oallama.place.cuts import n_g_at

PHASES = ("prompt", "decode")


#
# random cuts
#


def _random_steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
    """Cuts of every FFN alike. Each of options.passes through all cuts has a profile of its own, so that prediction and
    measurement see the same hours of the machine."""
    bench = SliceBench(options)
    draw = random.Random(options.seed)
    cuts = []
    for _ in range(options.n_cuts):
        gg = draw.uniform(0.0, 0.6)
        cg = draw.uniform(0.0, 0.6 * (1 - gg)) * draw.choice((0, 1, 1))
        cuts.append((gg, cg, round(draw.choice((0, 0, draw.uniform(0.05, 0.8))) * options.n_prompt)))
    for number in range(options.passes):
        for index, cut in enumerate(cuts):
            new_profile = number > 0 and index == 0
            yield MeasureStep(
                f"pass {number}, cut {index}", options.files[0], partial(_random, bench, cut, new_profile)
            )


def _random(bench: SliceBench, cut: tuple[float, float, int], new_profile: bool) -> dict[str, Any]:
    """t_fin of a block in a prompt, n_g of its tokens on the device, and in decode: predicted, and of every layer and
    run."""
    if new_profile:
        bench.refresh()
    gg, cg, n_g = cut
    plan = bench.sliced(gg, cg, n_g)
    spans = bench.traced(plan, watched="caller")
    return {"r_gg": gg, "r_cg": cg, "n_g": n_g, **{
        phase: {"predicted_s": bench.predicted_t_fin(plan, n_tokens),
                "samples_s": [t_fin(steps) for steps in phases_of(spans, n_tokens).values()]}
        for phase, n_tokens in zip(PHASES, (bench.load.n_prompt, 1), strict=True)
    }}  # fmt: skip


def cuts_of(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each cut with the medians over all passes, as predicted and as measured, and the error."""
    passes: dict[tuple[float, float, int], list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        passes[row["r_gg"], row["r_cg"], row["n_g"]].append(row)
    made = []
    for (gg, cg, n_g), rows in passes.items():
        cut: dict[str, Any] = {"r_gg": gg, "r_cg": cg, "n_g": n_g}
        for phase in PHASES:
            predicted = median(row[phase]["predicted_s"] for row in rows)
            measured = median(median(row[phase]["samples_s"]) for row in rows)
            cut[phase] = {"predicted_s": predicted, "measured_s": measured, "error": predicted / measured - 1}
        made.append(cut)
    return made


def median_error(cuts: Sequence[dict[str, Any]], phase: str) -> float:
    return float(median(abs(cut[phase]["error"]) for cut in cuts))


def _random_rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    cuts = cuts_of([row for _, row in found])
    rows: list[Sequence[object]] = []
    for cut in cuts:
        times = [f"{1e3 * cut[phase][key]:.2f}" for phase in PHASES for key in ("measured_s", "predicted_s")]
        rows.append((f"{cut['r_gg']:.2f}", f"{cut['r_cg']:.2f}", cut["n_g"], *times))
    errors = [cell for phase in PHASES for cell in ("", f"{median_error(cuts, phase):.1%}")]
    return [*rows, ("median error", "", "", *errors)]


#
# streams
#


def _stream_steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
    yield MeasureStep("streams", options.files[0], lambda: _streams(SliceBench(options)))


def _streams(bench: SliceBench) -> dict[str, Any]:
    """The steps of one prompt and of one token after the first few, beside the predicted timeline, for r_GG, r_CG and
    n_g as given; the share of the time that link and device were busy."""
    options = bench.options
    n_prompt = options.n_prompt
    plan = bench.sliced(options.gg, options.cg, round(options.n_g * n_prompt))
    spans = bench.traced(plan)
    found: dict[str, Any] = {"r_gg": options.gg, "r_cg": options.cg, "n_g": n_g_at(plan.token_assignment, n_prompt)}
    for phase, n_tokens in zip(PHASES, (n_prompt, 1), strict=True):
        steps = one_pass(spans, n_tokens)
        begin, end = min(s.begin_s for s in steps), max(s.end_s for s in steps)
        predicted = bench.slicer.timeline(plan, n_tokens, 2)
        half = predicted.block_ends_s[len(plan.layers) - 1]
        found[phase] = {
            "seconds": end - begin,
            "link_busy": busy(steps, ("copy",)) / (end - begin),
            "device_busy": busy(steps, ("resident", "streamed")) / (end - begin),
            "measured": [[s.step, s.name, s.begin_s - begin, s.end_s - begin, s.bytes] for s in steps],
            "predicted_seconds": predicted.end_s - half,
            "predicted": [[s.stream, s.block, s.start_s - half, s.end_s - half] for s in predicted.spans
                          if s.end_s > half],
        }  # fmt: skip
    return found


def _stream_rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    return [
        (phase, f"{1e3 * data[phase]['seconds']:.1f}", f"{1e3 * data[phase]['predicted_seconds']:.1f}",
         f"{data[phase]['link_busy']:.0%}", f"{data[phase]['device_busy']:.0%}")
        for _, data in found for phase in PHASES
    ]  # fmt: skip


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_common(parser, n_prompt=128, n_gen=8, rounds=2)
    parser.add_argument("--cpus", type=parse_cpus, default=(), help="of the engine, such as 0: off a worker's core")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--prefetch", choices=("ahead", "layer"), default="ahead")


def _add_random_options(parser: argparse.ArgumentParser) -> None:
    _add_options(parser)
    parser.add_argument("--n", type=int, default=20, dest="n_cuts", help="random cuts")
    parser.add_argument("--passes", type=int, default=1, help="through all cuts")
    parser.add_argument("--seed", type=int, default=1)


def _add_stream_options(parser: argparse.ArgumentParser) -> None:
    _add_options(parser)
    parser.add_argument("--gg", type=float, default=0.25, help="r_GG")
    parser.add_argument("--cg", type=float, default=0.1, help="r_CG")
    parser.add_argument("--n-g", type=float, default=0.25, help="n_g, as a share of the prompt")


MEASURES = {
    "slices": Measure(
        "predicted against measured t_fin of random (r_GG, r_CG, n_g)", _add_random_options, _random_steps,
        ("r_GG", "r_CG", "n_g", "prompt ms", "predicted", "decode ms", "predicted"), _random_rows,
    ),
    "streams": Measure(
        "when host, device and link were busy: one prompt, one token", _add_stream_options, _stream_steps,
        ("phase", "ms", "predicted", "link busy", "device busy"), _stream_rows,
    ),
}  # fmt: skip
