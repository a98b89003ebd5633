"""Memory that stays after many loads and frees of an engine: a process is asked again and again what it holds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure.measure import Measure, MeasureStep, add_soak, soak_steps
from measure.slope import pooled_slope

Sample = dict[str, Any]

SAME = ("mapped_models", "descriptors", "threads", "tasks", "children", "device_bytes", "pinned_bytes", "split_bytes")
"""What must be after the last load as it was after the first."""


def _steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
    return soak_steps(options, options.loads, "process", _load)


def _load(path: str, options: argparse.Namespace, seed: int) -> list[Sample]:
    script = str(Path(__file__).with_name("soak_child.py"))
    command = [sys.executable, script, path, options.device, str(options.each), str(options.every), str(seed),
               str(round(60 * options.minutes))]  # fmt: skip
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # else each new thread's arena keeps what was freed in it
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        samples = []
        for line in process.stdout:
            samples.append(json.loads(line))
            print(f"\r{samples[-1]['loads']} loads of {options.each}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if process.returncode:
        raise SystemExit(f"measure: soak-loads: a process ended with {process.returncode}")
    return samples


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    series = [data for _, data in found]

    def cells(samples: Sequence[Sequence[Sample]], key: str) -> str:
        x = [[sample["loads"] for sample in one] for one in samples]
        gradient, half = pooled_slope([(a, [s[key] for s in one]) for a, one in zip(x, samples, strict=True)])
        return f"{gradient:+.0f} ± {half:.0f}"

    rows: list[Sequence[object]] = []
    for name, one in [*((name, [data]) for name, data in found), ("all", series)]:
        changed = [key for key in SAME if any(data[-1][key] != data[0][key] for data in one)]
        rows.append((
            name, sum(data[-1]["loads"] for data in one), sum(data[-1]["tokens"] for data in one),
            cells(one, "allocated"), cells(one, "anonymous"), ", ".join(changed) or "nothing",
            sum(data[-1]["device_bytes"] + data[-1]["pinned_bytes"] + data[-1]["split_bytes"] for data in one),
        ))  # fmt: skip
    return rows


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_soak(parser, "emulated:vram=1GiB,scale=1,values=real", "loads", 1000, 250)
    parser.add_argument("--every", type=int, default=6, help="loads between samples (default: 6)")


MEASURE = Measure(
    "what a process holds after many loads and frees of an engine: whole layers, slices and streams in turns",
    _add_options, _steps,
    ("process", "loads", "tokens", "malloc (bytes a load)", "resident (bytes a load)", "changed", "device bytes left"),
    _rows,
)  # fmt: skip
