"""Measure a matrix and report it; what is measured already is kept, so that it can be stopped and started again.

    python scripts/ab scripts/ab/rpc-worker.toml                # all cells, then the report
    python scripts/ab scripts/ab/oato-paper.toml --list         # what would be measured, and what is there
    python scripts/ab scripts/ab/rpc-worker.toml --only 1b      # cells whose name has that in it
    python scripts/ab scripts/ab/rpc-worker.toml --report-only  # from what is there
    python scripts/ab scripts/ab/rpc-worker.toml --only pp256 --report-only --chart times.svg   # these cells as bars
    python scripts/ab scripts/ab/matrix.toml --refresh-profiles # time the machine anew before the cells still to do
    python scripts/ab scripts/ab/oato-paper.toml --device emulated:rtx4090   # on another device than the file's
    python scripts/ab scripts/ab/emulated-policies.toml --simulate plans.json    # what its policies are predicted to do

Results, models that were made and the report (report.md, report.html, report.json) go to build/ab/NAME.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.child import ROOT
from experiments.command import guarded, parser_of, write_document
from experiments.inputs import InputError

from ab.cells import Cells, Outcome
from ab.matrix import Cell, Matrix, read_matrix


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 some cells failed, 2 wrong usage, 130 interrupted."""
    parser = parser_of("ab", __doc__)
    parser.add_argument("matrix", type=Path, metavar="MATRIX.toml")
    parser.add_argument("--device", metavar="NAME", help="measure on this device, whatever the file says")
    parser.add_argument("--out", type=Path, help="another folder than build/ab/NAME")
    parser.add_argument("--models", type=Path, help="where synthetic models are kept (default: build/ab/models)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only cells that have TEXT in their name"
    )
    parser.add_argument("--list", action="store_true", help="list the cells and measure nothing")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="the cells' times as bars, besides the report")
    parser.add_argument(
        "--simulate", type=Path, metavar="FILE.json", help="measure nothing, write what each policy is predicted to do"
    )
    parser.add_argument("--profile", metavar="FILE", help="of --simulate: predict from this one, not from the cache's")
    parser.add_argument("--report-only", action="store_true", help="measure nothing, report what is there")
    parser.add_argument(
        "--refresh-profiles", action="store_true", help="time the machine anew for the models whose cells are to do"
    )
    options = parser.parse_args(arguments)
    return guarded("ab", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    """Raises InputError."""
    matrix = read_matrix(options.matrix, options.device)
    folder = options.out or ROOT / "build" / "ab" / matrix.name
    models = options.models or ROOT / "build" / "ab" / "models"
    looks = options.list or options.report_only or options.simulate is not None
    store = Cells(matrix, folder, models, read_only=looks)
    wanted = [cell for cell in matrix.cells if all(text in cell.id for text in options.only)]
    if not wanted:
        raise InputError(f"no cell has {' and '.join(options.only)} in its name; --list shows them")
    if options.list:
        for cell in wanted:
            print(f"{'done' if store.known(cell) else 'to do':6}{cell.id}: oallama {' '.join(store.command(cell))}")
        return 0
    if options.simulate is not None:
        return write_simulated(matrix, store, wanted, options.profile, options.simulate)
    outcomes: dict[str, Outcome] = {}
    try:
        if not options.report_only:
            _profile(store, [cell for cell in wanted if store.known(cell) is None], options.refresh_profiles)
        for index, cell in enumerate(wanted):
            outcomes[cell.id] = _outcome(store, cell, index, len(wanted), options.report_only)
    finally:
        write_report(matrix, _all(matrix, store, outcomes), folder)
        if options.chart is not None:
            write_chart(folder, [cell.id for cell in wanted], options.chart)
    return int(any(outcome.error for outcome in outcomes.values()))


def _profile(store: Cells, cells: Sequence[Cell], refresh: bool) -> None:
    """Have the machine timed before the cells, so that no cell's time has that in it. What goes wrong here will in the
    cell as well, which says so."""
    for cell in {tuple(store.profile_command(cell)): cell for cell in cells if cell.profile}.values():
        start = time.monotonic()
        fault = store.profile(cell, refresh)
        print(
            f"profile of {cell.model.name} on {cell.device}: {fault or f'{time.monotonic() - start:.0f} s'}",
            file=sys.stderr,
        )


def _outcome(store: Cells, cell: Cell, index: int, n_cells: int, report_only: bool) -> Outcome:
    known = store.known(cell)
    if known is not None or report_only:
        return known or Outcome(cell)
    print(f"[{index + 1}/{n_cells}] {cell.id}", file=sys.stderr)
    outcome = store.measure(cell)
    print(f"    {outcome.error or f'{outcome.seconds:.0f} s'}", file=sys.stderr)
    return outcome


def _all(matrix: Matrix, store: Cells, outcomes: dict[str, Outcome]) -> list[Outcome]:
    """Every cell of the matrix: just measured, known from before, or empty."""
    return [outcomes.get(cell.id) or store.known(cell) or Outcome(cell) for cell in matrix.cells]


def write_report(matrix: Matrix, outcomes: Sequence[Outcome], folder: Path) -> None:
    from ab.report import html_page, markdown, record

    document = record(matrix, outcomes, machine(outcomes))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("report.json", json.dumps(document, indent=1) + "\n"),
        ("report.md", markdown(document)),
        ("report.html", html_page(document)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
        print(os.path.relpath(folder / name))


def write_simulated(matrix: Matrix, store: Cells, cells: Sequence[Cell], profile: str | None, file: Path) -> int:
    """Cell after cell; what the file has of other cells stays. Returns the exit status."""
    from ab.simulated import simulated

    for cell in cells:
        print(f"simulate {cell.id}", file=sys.stderr)
        if fault := store.make_model(cell.model):
            print(f"ab: {fault}", file=sys.stderr)
            return 1
        found = simulated(store, cell, profile)
        known = json.loads(file.read_text(encoding="utf-8"))["cells"] if file.is_file() else []
        by_id = {each["id"]: each for each in (*known, found)}
        in_order = [by_id[each.id] for each in matrix.cells if each.id in by_id]
        document = {"name": matrix.name, "about": matrix.about, "cells": in_order}
        write_document(document, file)
    print(os.path.relpath(file))
    return 0


def write_chart(folder: Path, ids: Sequence[str], file: Path) -> None:
    from ab.chart import chart

    document = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(chart(document, ids).svg(), encoding="utf-8")
    print(os.path.relpath(file))


def machine(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What measured: from the rows, and of the system."""
    rows = [row for outcome in outcomes for row in outcome.rows]
    facts = {key: next((row[key] for row in rows if row[key]), "") for key in ("cpu_info", "gpu_info", "build_commit")}
    return {
        "CPU": facts["cpu_info"],
        "device": facts["gpu_info"],
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "llama.cpp": facts["build_commit"],
    }
