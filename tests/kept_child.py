"""A process that makes no_alloc loads, kept from one command or Placer of a test file to the next."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from ggml_bridge import child
from oallama.model.memory import MODULE

_TOLD = ("GGML", "LLAMA", "OALLAMA", "OMP")  # what changes a no_alloc load, where the environment does


@contextmanager
def kept() -> Iterator[None]:
    """Have idle processes answer the next no_alloc loads, where the environment is as it was when they were started."""
    idle: dict[tuple[tuple[str, str], ...], list[child.Child]] = {}
    plain = child.Child

    def key() -> tuple[tuple[str, str], ...]:
        told = ((name, value) for name, value in os.environ.items() if name.startswith(_TOLD))
        return tuple(sorted((name, value) for name, value in told if name != "OALLAMA_CACHE_DIR"))

    class Kept(plain):  # type: ignore[misc, valid-type]
        asked = False

        def answer(self, *details: Any, **options: Any) -> child.Message:
            self.asked = True
            answer: child.Message = super().answer(*details, **options)
            self.asked = False  # else it has failed, and nothing is known of it
            return answer

        def end(self, first: signal.Signals | None = None) -> None:
            if first is None and not self.asked and self._process.poll() is None:
                idle.setdefault(key(), []).append(self)
            else:
                super().end(first)

    def make(module: str, env: Mapping[str, str | None] | None = None) -> child.Child:
        if module != MODULE or env:
            return plain(module, env)
        there = idle.get(key())
        return there.pop() if there else Kept(module)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(child, "Child", make)
        try:
            yield
        finally:
            for each in idle.values():
                for one in each:
                    plain.end(one)
