"""Tallies of the experts that one generation uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oallama.core.routing import Tally, Traffic

if TYPE_CHECKING:
    from ggml_bridge.llama_context import RoutingRecorder


class RoutingMeter:
    """Tallies what a recorder hears during one generation.

    n_prompt_batches: micro-batches the prompt goes in by; `beat` is called after each and after each token's decode.
    Make it where the recorder's context computes, and stop it at the end.
    """

    def __init__(self, recorder: RoutingRecorder, n_prompt_batches: int, n_expert: int) -> None:
        self._recorder, self._n_prompt_batches, self._n_expert = recorder, n_prompt_batches, n_expert
        self._n_beats = 0
        self._prompt: dict[int, Tally] = {}
        self._decode: dict[int, Tally] = {}
        recorder.take()  # of a generation that was broken off
        recorder.listen(True)

    def beat(self) -> None:
        import numpy as np

        self._n_beats += 1
        tallies = self._prompt if self._n_beats <= self._n_prompt_batches else self._decode
        for layer, ids in self._recorder.take():
            uses = np.bincount(ids.ravel(), minlength=self._n_expert).tolist()
            known = tallies.get(layer, Tally(0, (0,) * self._n_expert))
            more = tuple(old + new for old, new in zip(known.uses, uses, strict=True))
            tallies[layer] = Tally(known.n_tokens + len(ids), more)

    def stop(self) -> Traffic:
        """End recording and return the tallies."""
        self._recorder.listen(False)
        return Traffic(self._decode, self._prompt)
