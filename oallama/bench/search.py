"""The search for stock llama.cpp's best -ngl or -ncmoe under a memory cap, by short measurements."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oallama.bench.ab import ProgressCallback
from oallama.bench.process import ArmProcess
from oallama.bench.records import ArmSpec, BenchTest, Setting
from oallama.core.errors import DoesNotFit, UsageError
from oallama.model.memory import probe_memory
from oallama.placer import Placer
from oallama.run.stock import StockPlacement, expert_overrides, operator_bytes_on_device

SEARCH_GEN = 16  # generated tokens while searching; their time is scaled to the test's
SEARCH_TURNS = 2  # of which the faster counts
COARSE = 4  # intervals of the first pass


@dataclass(frozen=True, slots=True)
class StockSearch:
    """Searches for one model and device. Both arms raise DoesNotFit where nothing keeps to the cap."""

    placer: Placer
    setting: Setting
    tests: tuple[BenchTest, ...]
    progress: ProgressCallback

    def best_layers(self, name: str) -> ArmSpec:
        n_layer = self.placer.model.n_layer
        most = largest_that_fits(0, n_layer + 1, lambda n: self._fits(StockPlacement(n)))
        if most is None:
            raise self._no_room(name, StockPlacement(0))
        return self._searched(name, "-ngl", 0, most, StockPlacement)

    def best_expert_layers(self, name: str) -> ArmSpec:
        """The arm with the best -ncmoe. Raises UsageError for a model without experts."""
        model = self.placer.model
        if not model.n_expert:
            raise UsageError(f"{name} is for models with experts, and this one has none; use stock-ngl")

        def placement(n: int) -> StockPlacement:
            return StockPlacement(model.n_layer + 1, expert_overrides(n), n)

        most = largest_that_fits(0, model.n_layer, lambda on_device: self._fits(placement(model.n_layer - on_device)))
        if most is None:
            raise self._no_room(name, placement(model.n_layer))
        return self._searched(name, "-ncmoe", model.n_layer - most, model.n_layer, placement)

    def _searched(self, name: str, flag: str, low: int, high: int, placement: Any) -> ArmSpec:
        def seconds(value: int) -> float:
            self.progress(f"search {flag}: {value}")
            return time_of(ArmSpec(f"{flag} {value}", self.setting, placement(value)), self.tests)

        best, measured = best_value(low, high, seconds)
        steps = tuple({"flag": flag, "value": value, "seconds": measured[value]} for value in sorted(measured))
        note = f"best {flag} is {best} of {low}..{high}, which fit the cap"
        return ArmSpec(name, self.setting, placement(best), search=steps, notes=(note,))

    def _fits(self, placement: StockPlacement) -> bool:
        """Whether a load keeps to the cap, by llama.cpp's own dry load."""
        cap, placer = self.setting.cap, self.placer
        if cap.operator_bytes is not None:
            used = operator_bytes_on_device(placer.operators, placer.model.n_layer, placement)
            if used > cap.operator_bytes:
                return False
        return cap.device_bytes is None or self._device_bytes(placement) <= cap.device_bytes

    def _device_bytes(self, placement: StockPlacement) -> int:
        taken = probe_memory(placement.load(self.setting.load))
        return sum(taken.on_device(part) for part in ("model", "context", "compute"))

    def _no_room(self, name: str, placement: StockPlacement) -> DoesNotFit:
        setting = self.setting
        assert setting.cap.device_bytes is not None
        return DoesNotFit(self._device_bytes(placement), setting.cap.device_bytes, setting.load.device, f"arm {name}")


def time_of(spec: ArmSpec, tests: Sequence[BenchTest]) -> float:
    """Seconds of one pass over the tests, from a short measurement of its own."""
    short = {test: replace(test, n_gen=min(test.n_gen, SEARCH_GEN)) for test in tests}
    unique = tuple(dict.fromkeys(short.values()))
    arm = ArmProcess(spec)
    try:
        arm.load(())
        arm.warm_up([replace(test, n_prompt=min(test.n_prompt, 8)) for test in unique])
        turns = [arm.measure(unique) for _ in range(SEARCH_TURNS)]
        longer = [(tried, test.n_gen / tried.n_gen if tried.n_gen else 1.0) for test, tried in short.items()]
        return min(sum(turn[tried].prompt_s + turn[tried].gen_s * n for tried, n in longer) for turn in turns)
    except KeyboardInterrupt:
        arm.kill()
        raise
    finally:
        arm.close()


def largest_that_fits(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest value in low..high that fits, given that what fits does so for every smaller value too; None where
    not even `low` does."""
    n_fit = bisect_left(range(low, high + 1), True, key=lambda value: not fits(value))
    return low + n_fit - 1 if n_fit else None


def best_value(low: int, high: int, seconds: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """The value in low..high with the least seconds, and all that were measured.

    A grid of COARSE intervals first, then both neighbours of the best at half the distance, down to the next ones:
    some 5 + 2 log2((high - low) / 4) measurements.
    """
    measured: dict[int, float] = {}

    def look(value: int) -> None:
        if low <= value <= high and value not in measured:
            measured[value] = seconds(value)

    step = max((high - low) // COARSE, 1)
    for value in range(low, high + 1, step):
        look(value)
    look(high)
    while True:
        best = min(measured, key=lambda value: (measured[value], value))
        for neighbour in (best - step, best + step):
            look(neighbour)
        moved = min(measured, key=lambda value: (measured[value], value)) != best
        if step == 1 and not moved:
            return best, measured
        if not moved:
            step = max(step // 2, 1)
