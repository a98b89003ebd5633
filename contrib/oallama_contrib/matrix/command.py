"""`oallama bench --matrix FILE.toml`: many comparisons, each in its own process, saved one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from oallama.cli.output import check_result, deliver, emit_json, is_terminal, log, show
from oallama.core.errors import UsageError
from oallama.core.files import lock_file
from oallama.run.die_with_parent import ending_with_parent
from oallama_contrib.matrix.cells import Cell, Outcome, ResultFile, measured_tests, read_matrix

BESIDE = ("matrix", "output", "as_json", "progress")
"""Parameters of `oallama bench` allowed with --matrix."""


def matrix(context: click.Context, file: str, values: Mapping[str, Any]) -> None:
    """--matrix: measure the cells of a file that the result file lacks, and show all. values: of the command's other
    options. Raises UsageError, also for options that the file sets, and KeyboardInterrupt if interrupted; exits with 1
    if a cell failed."""
    given_options = [
        parameter.opts[0] for parameter in context.command.params
        if parameter.name not in BESIDE
        and context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    ]  # fmt: skip
    if given_options:
        raise UsageError(f"{file} defines the tests; omit {', '.join(given_options)}")
    form, output = values["output"]
    if output is not None and form != "json":
        raise UsageError("a matrix result is JSON; name a .json file with -o")
    path = Path(file)
    about, cells = read_matrix(path, flags_of(context.command))
    for cell in cells:
        _check(context.command, path, cell)

    def refuse_second() -> None:  # each would leave out what the other has measured
        raise UsageError(f"another process is measuring {file}; wait until it ends")

    with path.open("rb") as locked:
        lock_file(locked, refuse_second)
        target = Path(output or f"{path.stem}.json")
        _run(about or path.stem, cells, target, values["as_json"], values["progress"])


def _run(about: str, cells: Sequence[Cell], target: Path, as_json: bool, progress: bool | None) -> None:
    check_result(str(target))
    result = ResultFile(target, about, cells)
    shows_progress = is_terminal(sys.stderr) if progress is None else progress
    try:
        for number, cell in enumerate(cells, start=1):
            if not result.is_done(cell):
                if shows_progress:
                    log(f"[{number}/{len(cells)}] {cell.name}")
                result.put(outcome := measured(cell))
                if shows_progress:
                    log(f"    {outcome.error or f'{outcome.seconds:.0f} s'}")
    finally:
        _tell(result, cells, as_json)
    if any(outcome.error for outcome in result.outcomes):
        raise SystemExit(1)


def flags_of(command: click.Command) -> dict[str, str]:
    """The keys of a setting: options by their longest spelling, without its dashes."""
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in BESIDE]
    spelled = [flag for option in options for flag in (max(option.opts, key=len), *option.secondary_opts)]
    return {flag.lstrip("-"): flag for flag in spelled}


def _check(command: click.Command, matrix: Path, cell: Cell) -> None:
    """Raises UsageError for options that `oallama bench` would refuse."""
    try:
        command.make_context("bench", list(cell.command), resilient_parsing=False)
    except click.UsageError as error:
        raise UsageError(f"{matrix}: {error.format_message().rstrip('.')}, in `{' '.join(cell.command)}`") from None


def measured(cell: Cell) -> Outcome:
    """Run the cell in a process of its own, which ends with this one. A KeyboardInterrupt ends it."""
    start = time.monotonic()
    command = [sys.executable, "-m", "oallama", "bench", *cell.command, "--json", "--no-progress"]
    words, environment = ending_with_parent(command, os.environ)
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", env=environment
    )
    if done.returncode in (130, 143):
        raise KeyboardInterrupt
    seconds = round(time.monotonic() - start, 1)
    if done.returncode == 0:
        return Outcome(cell.command, seconds, tuple(json.loads(done.stdout)))
    messages = [line for line in done.stderr.splitlines() if line.startswith("oallama: ")]
    error = messages[-1].removeprefix("oallama: ") if messages else f"ended with status {done.returncode}"
    return Outcome(cell.command, seconds, error=error)


def _tell(result: ResultFile, cells: Sequence[Cell], as_json: bool) -> None:
    """Print the table, or the result as JSON, and write the picture."""
    from oallama_contrib.matrix.report import matrix_chart, matrix_table

    outcomes = result.outcomes
    if as_json:
        emit_json(result.document())
    if not outcomes:
        return
    rows = measured_tests(cells, outcomes)
    names = {cell.command: cell.name for cell in cells}
    failed = [f"not measured: {names[outcome.command]}: {outcome.error}" for outcome in outcomes if outcome.error]
    n_missing = len(cells) - len(outcomes)
    if not as_json:
        show(
            [matrix_table(result.about, rows, [*failed, *([f"{n_missing} are not measured yet"] if n_missing else [])])]
        )
    if rows:
        deliver(matrix_chart(result.about, rows), str(result.path.with_suffix(".svg")))
