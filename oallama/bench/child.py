"""An arm's process: `python -m oallama.bench.child`, started by process.py. Loads one model and times it on request.

Between requests it waits in a read and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ggml_bridge.child import child_main
from oallama.bench.loaded import LoadedModel, load_planned, load_stock
from oallama.bench.readback import load_report
from oallama.bench.records import ArmSpec, BenchTest, Sample, Setting
from oallama.bench.timing import ContextTimer, bench_tokens, text_tokens
from oallama.core.codec import from_json
from oallama.core.errors import UsageError
from oallama.device.emulated_link import Watch
from oallama.device.spec import parse_device

Message = dict[str, Any]


class LoadedArm:
    """A loaded model and a timer on it, made by the first request."""

    _loaded: LoadedModel
    _timer: ContextTimer
    _watch: Watch

    def answer(self, do: str, **request: Any) -> Message:
        """The result of one request: load, warm_up or measure."""
        requests: dict[str, Callable[..., Message]] = {
            "load": self.load, "warm_up": self.warm_up, "measure": self.measure
        }  # fmt: skip
        return requests[do](**request)

    def load(self, spec: Message, operators: list[str]) -> Message:
        """Load and read back."""
        arm = from_json(ArmSpec, spec, "the arm")
        self._loaded = load_planned(arm) if arm.stock is None else load_stock(arm.setting.load, arm.stock)
        report = load_report(self._loaded, operators)
        self._timer = _timer(self._loaded, arm.setting)
        self._watch = Watch(parse_device(arm.setting.load.device).is_emulated)
        return asdict(report)

    def warm_up(self, tests: list[Message]) -> Message:
        """Run every test once, not timed; returns the bytes held afterwards."""
        for test in tests:
            self._timer.warm_up(BenchTest(**test))
        device_bytes, host_bytes = self._loaded.held_bytes()
        return {"device_bytes": device_bytes, "host_bytes": host_bytes}

    def measure(self, tests: list[Message]) -> Message:
        return {"samples": [asdict(self._sample(BenchTest(**test))) for test in tests]}

    def _sample(self, test: BenchTest) -> Sample:
        sample, kept = self._watch.measured(lambda: self._timer.sample(test))
        return sample.beside(kept)


def _timer(loaded: LoadedModel, setting: Setting) -> ContextTimer:
    from llama_cpp import llama_cpp as api

    vocab = api.llama_model_get_vocab(loaded.model)
    bos = int(api.llama_vocab_bos(vocab)) if api.llama_vocab_get_add_bos(vocab) else None
    n_ctx = setting.load.n_ctx
    tokens = bench_tokens(n_ctx, int(api.llama_vocab_n_tokens(vocab)), bos)
    if setting.of_text:
        with suppress(UsageError):  # the model has no vocabulary
            tokens = text_tokens(n_ctx, vocab, bos)
    return ContextTimer(loaded.context, int(loaded.params.n_batch), tokens)


if __name__ == "__main__":
    arm = LoadedArm()
    child_main(lambda request, _progress: arm.answer(**request))
