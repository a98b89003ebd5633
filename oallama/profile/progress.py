"""Progress of a measurement: a line, and on a terminal a bar."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from oallama.core.ticking import ticking

WORTH_SAYING_S = 3.0
TICK_S = 0.5


class Progress:
    """Shows the current measurement and the remaining time. Writes nothing to stdout."""

    def __init__(self, wanted: bool) -> None:
        """wanted: show a bar, if stderr is a terminal, and print notes."""
        self._notes = wanted
        self._shown = wanted and sys.stderr.isatty()
        self._bar: Any = None
        self._left = 0.0
        self._told = False
        self._ticks = contextlib.ExitStack()

    def say(self, note: str) -> None:
        """A line on stderr, above the bar."""
        if not self._notes:
            return
        if self._bar is not None:
            self._bar.write(note, file=sys.stderr)
        else:
            print(note, file=sys.stderr)

    def expect(self, weight: float) -> None:
        """Set the work to do, in guessed seconds, which is said once; a second call, after a crash, replaces what was
        left."""
        if not self._told and weight >= WORTH_SAYING_S:
            self.say(f"timing this machine (once): about {weight:.0f} s")
        self._told = True
        if not self._shown:
            return
        if self._bar is None:
            from tqdm import tqdm

            layout = "timing {percentage:3.0f}%|{bar:20}| {elapsed}, about {remaining} left: {desc}"
            self._bar = tqdm(total=weight, file=sys.stderr, bar_format=layout, leave=False)
            self._ticks.enter_context(ticking(TICK_S, self._bar.refresh))
        else:
            self._bar.total += weight - self._left
        self._left = weight

    def start(self, label: str) -> None:
        if self._bar is not None:
            self._bar.set_description_str(label)

    def finish(self, weight: float) -> None:
        self._left -= weight
        if self._bar is not None:
            self._bar.update(weight)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._ticks.close()
        if self._bar is not None:
            self._bar.close()
