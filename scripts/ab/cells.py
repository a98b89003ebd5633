"""Running cells: each is a process of its own; what is measured already is not measured again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.child import ROOT, Ended, oallama
from experiments.models import Models
from experiments.results import Results, StepFailed

from ab.matrix import Cell, Matrix, MatrixModel


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its rows, or why there are none; seconds that it took when it was measured."""

    cell: Cell
    rows: tuple[dict[str, Any], ...] = ()
    error: str = ""
    seconds: float = 0.0


class Cells:
    """The cells of a matrix, their results in `folder`, synthetic models in `models`. Raises InputError."""

    def __init__(self, matrix: Matrix, folder: Path, models: Path, read_only: bool = False) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        self.models = Models(models, self.log)
        self.results = Results(
            folder / "results.json", {"matrix": matrix.name}, (), read_only, "ab", "name another folder in --out"
        )

    def model_path(self, model: MatrixModel) -> Path:
        """Where the model is, or will be made. (An absolute path stays what it is.)"""
        return ROOT / model.file if isinstance(model.file, str) else self.models.path(model.file)

    def make_model(self, model: MatrixModel) -> str:
        """Write a synthetic model that is missing. Returns "", or why there is none."""
        if not isinstance(model.file, str):
            return self.models.make(model.file)
        path = self.model_path(model)
        return "" if path.is_file() else f"there is no model file {path}"

    def command(self, cell: Cell) -> list[str]:
        """The cell's command line, without its output."""
        return ["bench", str(self.model_path(cell.model)), *cell.arguments]

    def profile_command(self, cell: Cell) -> list[str]:
        """The command that times the machine for the cell's plans; nothing where there is no device."""
        return ["profile", str(self.model_path(cell.model)), *cell.profile] if cell.profile else []

    def profile(self, cell: Cell, refresh: bool) -> str:
        """Time the machine for the cell's plans, or find that done; why not, or "". Ctrl-C is raised."""
        if fault := self.make_model(cell.model):
            return fault
        ended = self._run(*self.profile_command(cell), *(["--refresh"] if refresh else []))
        return ended.why if ended.status else ""

    def known(self, cell: Cell) -> Outcome | None:
        """What was measured before by the same command and was not cut short; None where there is nothing."""
        found = self.results.done(cell.id, command=self.command(cell), model=self._model_key(cell))
        return Outcome(cell, tuple(found["data"]), "", found["seconds"]) if found else None

    def measure(self, cell: Cell) -> Outcome:
        """Run the cell and keep its result. Ctrl-C ends the cell and is raised."""
        if fault := self.make_model(cell.model):
            return Outcome(cell, error=fault)
        noted = {"command": self.command(cell), "model": self._model_key(cell)}
        found = self.results.measured(cell.id, lambda: self._bench(cell), **noted)
        return Outcome(cell, tuple(found["data"]), found["error"], found["seconds"])

    def _bench(self, cell: Cell) -> Any:
        """Its rows. Raises StepFailed."""
        rows = self.folder / f"{cell.id}.rows.json"
        rows.unlink(missing_ok=True)
        ended = self._run(*self.command(cell), "-o", rows)
        if ended.status != 0:
            raise StepFailed(ended.why, [])
        found = json.loads(rows.read_text(encoding="utf-8"))
        rows.unlink()
        return found

    def _run(self, *arguments: object) -> Ended:
        ended = oallama(*arguments, limit_s=None, log=self.log)
        if ended.status == 130:
            raise KeyboardInterrupt
        return ended

    def _model_key(self, cell: Cell) -> list[int]:
        try:
            stat = self.model_path(cell.model).stat()
        except OSError:
            return []
        return [stat.st_size, int(stat.st_mtime)]
