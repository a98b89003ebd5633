"""How many CPU threads to use where cores are of several speeds: as many as decode fastest, measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oallama.core.errors import BridgeError, ProfileError
from oallama.device.card import Host
from oallama.device.cpu import default_threads, thread_counts


def usual_threads(rates: Callable[[int], Host], counts: Sequence[int] | None = None) -> int:
    """Return the count of threads with the most weight bytes/s in decode, the least of equal ones, among those worth
    trying. A single count is not measured. rates: measures the CPU with so many threads, and remembers it
    (emulate.this_host); counts: tests. Where they cannot be measured it is one thread for every physical core."""
    tried = thread_counts() if counts is None else counts
    if len(tried) < 2:
        return tried[0] if tried else default_threads()
    try:
        decoded = {count: rates(count).bytes_per_s for count in sorted(tried)}
    except (BridgeError, ProfileError):
        return max(tried)
    return max(decoded, key=lambda count: decoded[count])  # the first of equal ones
