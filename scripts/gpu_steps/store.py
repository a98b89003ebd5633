"""What came of the steps: one JSON file, written anew after every step, and a copy of it where results are fetched."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

SCHEMA = 1
NAME = "results.json"


class StoreError(Exception):
    """The results cannot be used: one sentence."""


class Store:
    """The results of one device at one scale, in `work`, copied to each of `copies`. Raises StoreError where they are
    of something else, or another process is at them; only_look: for reading, which may always be done."""

    def __init__(self, work: Path, copies: tuple[Path, ...], device: str, scale: str, only_look: bool = False) -> None:
        self.path = work / NAME
        self.copies = copies
        self.record: dict[str, Any] = {"schema": SCHEMA, "device": device, "scale": scale, "calls": [], "steps": {}}
        work.mkdir(parents=True, exist_ok=True)
        self._held = None if only_look else self._hold(work)
        if self.path.is_file():
            self._adopt(self.path)

    @staticmethod
    def _hold(work: Path) -> IO[str]:
        """Until the file is closed, or this process ends in whatever way."""
        file = (work / ".running").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise StoreError(
                f"another gpu_run is at work in {work}: wait for it, or name another folder in --work"
            ) from None
        return file

    def adopt(self, path: Path) -> None:
        """Go on from the results of another machine, unless there are some here. Raises StoreError."""
        if not self.steps:
            self._adopt(path)

    def _adopt(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read ({error}): remove it to begin anew") from None
        same = [found.get(key) == self.record[key] for key in ("schema", "device", "scale")]
        if not all(same):
            raise StoreError(
                f"{path} is of device {found.get('device')}, scale {found.get('scale')}: name another folder in --work"
            )
        self.record = found

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.record["steps"]
        return found

    def begin_call(self, call: dict[str, Any]) -> None:
        self.record["calls"].append(call)
        self.save()

    def put(self, step: str, **values: Any) -> None:
        """Note what is known of a step, beside what was, and write it."""
        self.steps[step] = {**self.steps.get(step, {}), **values}
        self.save()

    def save(self) -> None:
        text = json.dumps(self.record, indent=1) + "\n"
        for path in (self.path, *(folder / NAME for folder in self.copies)):
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
