"""Answers as they come: an iterator over pieces of text, which has the record of the answer at its end."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator

from oallama.core.errors import UsageError
from oallama.run.generate import Generation
from oallama.run.turns import CLOSED


class Stream(Iterator[str]):
    """Pieces of text, whole characters each. generation: the record of the answer once the last piece was read, else
    None. Raises UsageError where the engine is closed before the end."""

    def __init__(self, pieces: Generator[str, None, Generation]) -> None:
        self._pieces = pieces
        self._ended_by_engine = False
        self.generation: Generation | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.generation = self.generation or end.value
        if self._ended_by_engine:
            raise UsageError(CLOSED)
        raise StopIteration(self.generation)

    def rest(self) -> Generation:
        """Read to the end."""
        for _ in self:
            pass
        if self.generation is None:
            raise UsageError("this stream was closed before its end, so there is no record of its answer")
        return self.generation

    def close(self) -> None:
        """End the answer here; the engine may be used again."""
        self._pieces.close()

    def end_unread(self) -> None:
        """End it as the engine is closed, where its reader is away between two pieces."""
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_SUSPENDED:
            self._ended_by_engine = True
            self._pieces.close()
