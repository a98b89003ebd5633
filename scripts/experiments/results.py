"""The results of an experiment: one JSON file with a record for each step, written anew after every step, and a copy of
it where results are fetched. An experiment that was stopped goes on from it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from experiments.inputs import InputError

SCHEMA = 1
NAME = "results.json"
DONE, FAILED, CUT = "done", "failed", "cut"
"""States of a step. CUT: it ran out of time, or was interrupted."""


class StepFailed(Exception):
    """The step found nothing: one sentence. `data`: what it has all the same; late: it ran out of time."""

    def __init__(self, message: str, data: Any = None, late: bool = False) -> None:
        super().__init__(message)
        self.data = data
        self.late = late


class Results:
    """The file `path`, copied to each of `copies`. identity: keys and values that tell this experiment from others.
    read_only: for looking, which may always be done. program, elsewhere: for messages, who writes here and how it is
    told to write to another file.

    Raises InputError where the file is of another experiment, or another process is at it.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        copies: tuple[Path, ...] = (),
        read_only: bool = False,
        program: str = "gpu_run",
        elsewhere: str = "name another folder in --work",
    ) -> None:
        self.path = path
        self.copies = copies
        self.identity = {"schema": SCHEMA, **identity}
        self.program = program
        self.elsewhere = elsewhere
        self.record: dict[str, Any] = {**self.identity, "calls": [], "steps": {}}
        self._lock = None if read_only else self._hold()
        if path.is_file():
            self._read(path)

    def _hold(self) -> IO[str]:
        """A lock until the file is closed, or this process ends in whatever way."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.with_name(f".{self.path.name}.lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InputError(
                f"another {self.program} is at work in {self.path.parent}: wait for it, or {self.elsewhere}"
            ) from None
        return file

    def adopt(self, path: Path) -> None:
        """Go on from the results of another machine, unless there are some here. Raises InputError."""
        if not self.steps:
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}): remove it to begin anew") from None
        if not isinstance(found, dict) or any(found.get(key) != value for key, value in self.identity.items()):
            identity = ", ".join(f"{key} {found.get(key)}" for key in self.identity if key != "schema")
            raise InputError(f"{path} is of {identity}: {self.elsewhere}")
        self.record = found

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """What is known of each step, by its name."""
        found: dict[str, dict[str, Any]] = self.record["steps"]
        return found

    def done(self, step: str, **same: Any) -> dict[str, Any] | None:
        """The record of a step that is done, by the same command or whatever else `same` names; else None."""
        found = self.steps.get(step, {})
        matches = found.get("state") == DONE and all(found.get(key) == value for key, value in same.items())
        return found if matches else None

    def begin_call(self, call: dict[str, Any]) -> None:
        """Note that the experiment begins, or goes on."""
        self.record["calls"].append(call)
        self.save()

    def put(self, step: str, **values: Any) -> None:
        """Note what is known of a step, beside what was, and write it."""
        self.steps[step] = {**self.steps.get(step, {}), **values}
        self.save()

    def measured(self, step: str, run: Callable[[], Any], **noted: Any) -> dict[str, Any]:
        """The record of a step that is run now: what it returned, its seconds, what `noted` says, or why it failed."""
        self.put(step, state=CUT, seconds=0.0, **noted)  # were this the end
        start = time.monotonic()
        values: dict[str, Any] = {"state": DONE, "error": ""}
        try:
            values["data"] = run()
        except StepFailed as error:
            values = {"state": CUT if error.late else FAILED, "error": str(error)}
            if error.data is not None:
                values["data"] = error.data
        self.put(step, seconds=round(time.monotonic() - start, 2), **values)
        return self.steps[step]

    def save(self) -> None:
        """Write file and copies, each whole or not at all."""
        text = json.dumps(self.record, indent=1) + "\n"
        for path in (self.path, *(folder / self.path.name for folder in self.copies)):
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
