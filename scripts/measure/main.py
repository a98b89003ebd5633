"""Measure what no command of the product measures. Raw samples are kept as JSON; what is kept is not measured again.

    python scripts/measure divergence models/*.gguf --device rpc-worker -o divergence.json
    python scripts/measure placements m1b-q4_0.gguf --placements 10 -r 3      # results: build/measure/placements.json
    python scripts/measure plot placements docs/benchmarks/predict.json       # draws docs/pictures/predicted.svg

`python scripts/measure NAME --help` says what is measured and how. What `oallama bench` can
compare is compared there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.child import ROOT
from experiments.command import guarded, parser_of
from experiments.machine import describe
from experiments.pages import table
from experiments.results import Results

from measure import (
    divergence,
    emulated,
    placements,
    plots,
    slices,
    soak_loads,
    soak_tokens,
    templates,
)
from measure.measure import Measure, MeasureStep

MEASURES: Mapping[str, Measure] = {
    "divergence": divergence.MEASURE,
    "emulated": emulated.MEASURE,
    "placements": placements.MEASURE,
    "soak-loads": soak_loads.MEASURE,
    "soak-tokens": soak_tokens.MEASURE,
    "templates": templates.MEASURE,
    **slices.MEASURES,
}
DOCS = ROOT / "docs"
NO_SETTINGS = ("name", "output", "files")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 wrong usage or input, 130 interrupted; others as the errors of oallama have."""
    options = _parser().parse_args(arguments)
    if options.name == "plot":
        return guarded("measure", lambda: plots.draw(options.what, options.file, options.folder))
    return guarded("measure", lambda: run(MEASURES[options.name], options))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("measure", __doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, measure in MEASURES.items():
        command = commands.add_parser(name, help=measure.about.splitlines()[0], description=measure.about)
        measure.add_options(command)
        command.add_argument("-o", "--output", type=Path, help=f"results (default: build/measure/{name}.json)")
    plot = commands.add_parser("plot", help="draw the pictures of results")
    plot.add_argument("what", choices=list(plots.PICTURES))
    plot.add_argument("file", type=Path, metavar="RESULTS.json")
    plot.add_argument("-o", "--folder", type=Path, default=DOCS / "pictures", help="(default: docs/pictures)")
    return parser


def run(measure: Measure, options: argparse.Namespace) -> int:
    """Measure the steps that are not done, and print the table of all."""
    path = options.output or ROOT / "build" / "measure" / f"{options.name}.json"
    settings = {key: str(value) for key, value in vars(options).items() if key not in NO_SETTINGS}
    settings["files"] = ", ".join(Path(file).name for file in getattr(options, "files", []))
    identity = {"what": options.name, "settings": settings}
    results = Results(path, identity, program="measure", elsewhere="name another file in -o")
    threads = getattr(options, "threads", [1])
    results.record["machine"] = describe(threads[0], getattr(options, "device", "none"))
    results.begin_call({"began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
    rows = []
    for step in measure.steps(options):
        rows.append((step.id, _measured(results, step)))
    print("\n".join(table(measure.columns, measure.rows(rows))), end="")
    return 0


def _measured(results: Results, step: MeasureStep) -> Any:
    stat = Path(step.file).stat() if step.file else None
    model = [stat.st_size, int(stat.st_mtime)] if stat else []
    if known := results.done(step.id, model=model):
        return known["data"]
    print(f"measure: {step.id}", file=sys.stderr, flush=True)
    return results.measured(step.id, step.run, model=model)["data"]
