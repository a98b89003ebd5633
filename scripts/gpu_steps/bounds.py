"""What no placement can beat, from bytes and measured rates. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.models import BITS, Shape


@dataclass(frozen=True)
class Rates:
    """Of the CPU and of the device, each alone, as the profile measured them: bytes of weights a second in decode, and
    floating-point operations a second at the largest batch."""

    cpu_bytes: float
    device_bytes: float
    cpu_flops: float
    device_flops: float


def rates_of(profile: Mapping[str, Any]) -> Rates | None:
    """The best that any large mul-mat reached; None where one side was not measured. Experts are left out: their rates
    count routed tokens."""
    cases = [case for case in profile["cases"] if case["shape"][2] == 1]
    found = []
    for here in (True, False):
        of = [case for case in cases if (case["device"] == "CPU") == here]
        few = [case for case in of if case["n_tokens"] == 1]
        if not few:
            return None
        found.append((1e9 * _best(few, "gb_per_s"), 1e9 * _best(of, "gflops")))
    (cpu_bytes, cpu_flops), (device_bytes, device_flops) = found
    return Rates(cpu_bytes, device_bytes, cpu_flops, device_flops)


def _best(cases: Iterable[Mapping[str, Any]], key: str) -> float:
    """Over the larger half of the matrices: a small one may lie in a cache."""
    ordered = sorted(cases, key=lambda case: case["shape"][0] * case["shape"][1])
    return max(float(case[key]) for case in ordered[len(ordered) // 2 :])


def tpot_bounds(shape: Shape, rates: Rates, share: float) -> tuple[float, float]:
    """Seconds a token takes at least, with `share` of the weights on the device: (one side after the other, as whole
    operators run; both at once, as slices can). Attention, launches, copies and joins take nothing."""
    n_bytes = shape.active_values * BITS[shape.type] / 8
    serial = share * n_bytes / rates.device_bytes + (1 - share) * n_bytes / rates.cpu_bytes
    even = rates.device_bytes / (rates.device_bytes + rates.cpu_bytes)
    there = min(share, even)
    return serial, max(there * n_bytes / rates.device_bytes, (1 - there) * n_bytes / rates.cpu_bytes)


def ttft_bound(shape: Shape, rates: Rates, n_prompt: int) -> float:
    """Seconds a prompt takes at least: all multiplications at the rates of both sides together, weights wherever they
    are needed."""
    return 2 * shape.active_values * n_prompt / (rates.cpu_flops + rates.device_flops)
