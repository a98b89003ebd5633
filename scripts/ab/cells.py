"""Running cells: each is a process of its own, its result a file; what is there already is not measured again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ab.matrix import Cell, Model

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its rows, or why there are none; seconds that it took when it was measured."""

    cell: Cell
    rows: tuple[dict[str, Any], ...] = ()
    error: str = ""
    seconds: float = 0.0


class Store:
    """The folder of a matrix: models that were made, one record a cell."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder = folder
        self._models = models

    def model_path(self, model: Model) -> Path:
        """Where the model is, or will be made."""
        if model.path:
            return Path(model.path) if Path(model.path).is_absolute() else ROOT / model.path
        layers = f"-{model.layers}l" if model.layers else ""
        return self._models / f"{model.like}{layers}-{model.type.lower()}.gguf"

    def make_model(self, model: Model) -> None:
        """Write a synthetic model that is missing; whole or not at all. Raises RuntimeError."""
        path = self.model_path(model)
        if path.is_file():
            return
        if not model.like:
            raise RuntimeError(f"there is no model file {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        command = [sys.executable, str(ROOT / "scripts" / "make_model.py"), "--like", model.like, "--type", model.type]
        command += ["--layers", str(model.layers)] if model.layers else []
        done = subprocess.run([*command, "-o", str(draft)], capture_output=True, text=True)
        if done.returncode != 0:
            draft.unlink(missing_ok=True)
            raise RuntimeError(_last_line(done.stderr))
        draft.replace(path)

    def command(self, cell: Cell) -> list[str]:
        """The cell's command line, without its output."""
        return ["bench", str(self.model_path(cell.model)), *cell.arguments]

    def profile_command(self, cell: Cell) -> list[str]:
        """The command that times the machine for the cell's plans; nothing where there is no device."""
        return ["profile", str(self.model_path(cell.model)), *cell.profile] if cell.profile else []

    def profile(self, cell: Cell, refresh: bool) -> str:
        """Time the machine for the cell's plans, or find that done; why not, or "". Ctrl-C is raised."""
        try:
            self.make_model(cell.model)
        except RuntimeError as error:
            return str(error)
        command = [sys.executable, "-m", "oallama", *self.profile_command(cell), *(["--refresh"] if refresh else [])]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        said = _said(process)
        return _last_line(said) if process.returncode else ""

    def known(self, cell: Cell) -> Outcome | None:
        """What was measured before by the same command and was not cut short; None where there is nothing."""
        try:
            record = json.loads(self._record(cell).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if record.get("command") != self.command(cell) or record.get("model") != self._model_key(cell):
            return None
        return Outcome(cell, tuple(record["rows"]), "", record["seconds"])

    def measure(self, cell: Cell) -> Outcome:
        """Run the cell and keep its result. Ctrl-C ends the cell and is raised."""
        try:
            self.make_model(cell.model)
        except RuntimeError as error:
            return Outcome(cell, error=str(error))
        start = time.monotonic()
        self._record(cell).parent.mkdir(parents=True, exist_ok=True)
        result = self._record(cell).with_suffix(".rows.json")
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "oallama", *self.command(cell), "-o", str(result)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        said = _said(process)
        if process.returncode != 0:
            return Outcome(cell, error=_last_line(said))
        rows = json.loads(result.read_text(encoding="utf-8"))
        outcome = Outcome(cell, tuple(rows), "", time.monotonic() - start)
        self._save(outcome)
        result.unlink()
        return outcome

    def _save(self, outcome: Outcome) -> None:
        cell = outcome.cell
        record = {
            "command": self.command(cell), "model": self._model_key(cell), "seconds": outcome.seconds,
            "rows": outcome.rows,
        }  # fmt: skip
        draft = self._record(cell).with_suffix(".draft")
        draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        draft.replace(self._record(cell))

    def _record(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.id}.json"

    def _model_key(self, cell: Cell) -> list[int]:
        try:
            stat = self.model_path(cell.model).stat()
        except OSError:
            return []
        return [stat.st_size, int(stat.st_mtime)]


def _said(process: subprocess.Popen[str]) -> str:
    """Its stderr, when it has ended. Ctrl-C, which the terminal sends to it too, is raised."""
    try:
        said = process.communicate()[1]
    except KeyboardInterrupt:
        process.communicate()  # it ends its arms
        raise
    if process.returncode == 130:
        raise KeyboardInterrupt
    return said


def _last_line(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("oallama: ") if lines else "it said nothing"
