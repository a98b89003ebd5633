"""llama-servers that are kept from one command or Placer of a test file to the next that would start one alike."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from oallama.plan.export import PLAN_VARIABLE
from oallama.run.address import Address
from oallama.run.engine import Engine
from oallama.run.process import Launch

Key = tuple[Any, ...]


def key_of(launch: Callable[[Address, Path], Launch]) -> Key:
    """What one start of llama-server has that another may not have: its model, options, environment and plan."""
    with tempfile.TemporaryDirectory() as name:
        found = launch(Address("127.0.0.1", 1, None), Path(name))
        plan = found.environment.get(PLAN_VARIABLE)
        text = Path(plan).read_text(encoding="utf-8") if plan else ""
        told = {
            variable: value.replace(name, "") for variable, value in found.environment.items()
            if variable.startswith(("OALLAMA", "GGML")) and variable != "OALLAMA_CACHE_DIR"
        }  # fmt: skip
        words = [word.replace(name, "") for word in found.command]
    model = Path(words[words.index("-m") + 1]).stat()
    return (tuple(words), tuple(sorted(told.items())), text, model.st_ino, model.st_mtime_ns)


@contextmanager
def kept() -> Iterator[None]:
    """Have a running llama-server answer for the next one that would be started alike. What counts experts gets one of
    its own: it tells them when it ends."""
    engines: dict[Key, Engine] = {}

    class Kept(Engine):
        def __init__(self, *given: Any, **named: Any) -> None:
            bound = signature(Engine).bind(*given, **named)
            bound.apply_defaults()
            asked = bound.arguments
            self.is_kept = asked["on_expert_counts"] is None
            key = key_of(asked["launch"])
            there = engines.get(key)
            if there is not None and not there._process.has_ended:
                self.__dict__.update(there.__dict__)
                self.plan, self.warnings, self._is_closed = asked["plan"], tuple(asked["warnings"]), False
                self.memory = self._adopt(asked["needs"], self._at_load)
                return
            super().__init__(*given, **named)
            if self.is_kept:
                engines[key] = self

        def close(self) -> None:
            if self.is_kept:
                self._is_closed = True
            else:
                super().close()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("oallama.placer.engine.Engine", Kept)
        try:
            yield
        finally:
            for engine in engines.values():
                Engine.close(engine)
