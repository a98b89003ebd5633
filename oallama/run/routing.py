"""Recording of the experts that one generation uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oallama.profile.routing import Traffic

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ggml_bridge.llama_context import RoutingRecorder

Runs = dict[int, list["npt.NDArray[np.int32]"]]


class RoutingMeter:
    """Records the prompt of one generation, and every n-th of the tokens decoded after it.

    n_prompt_batches: micro-batches the prompt goes in by; `beat` is called after each and after each token's decode.
    Make it where the recorder's context computes, and stop it at the end.
    """

    def __init__(self, recorder: RoutingRecorder, n_prompt_batches: int, every: int) -> None:
        self._recorder, self._n_prompt_batches, self._every = recorder, n_prompt_batches, every
        self._n_beats = 0
        self._prompt: Runs = {}
        self._decode: Runs = {}
        recorder.take()  # of a generation that was broken off
        recorder.listen(True)

    def beat(self) -> None:
        self._n_beats += 1
        taken = self._prompt if self._n_beats <= self._n_prompt_batches else self._decode
        for layer, ids in self._recorder.take():
            taken.setdefault(layer, []).append(ids)
        self._recorder.listen(max(self._n_beats - self._n_prompt_batches, 0) % self._every == 0)

    def stop(self) -> Traffic:
        """What was recorded: one run a phase and layer, or where decoded tokens were left out, one for each token."""
        self._recorder.listen(False)
        decode = _joined(self._decode) if self._every == 1 else self._decode
        return Traffic(decode, _joined(self._prompt))


def _joined(runs: Runs) -> Runs:
    import numpy as np

    return {layer: [np.concatenate(parts)] for layer, parts in runs.items()}
