"""The copy queue: how long a small copy to the device takes while weights are streamed there on another stream. What is
streamed is queued at once: as one copy, or in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple
from functools import partial
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
SETTINGS = {"large_bytes": 32 * MIB, "piece_bytes": [256 * KIB, MIB, 4 * MIB], "small_bytes": [8 * KIB, 16 * KIB],
            "samples": 41}  # fmt: skip
"""A block's streamed weights, pieces of them, and what a token's activations are."""


def rows(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """For each size of the small copy: alone, behind the whole large copy, behind its pieces. A sample is [seconds
    until the large copy was queued, of the small copy, from then until the large one was done]. From pinned memory,
    where the device has any. late: of an emulated device, for what share of the time it was. settings: device, and
    those of SETTINGS."""
    from oallama.device.emulated_link import Watch
    from oallama.device.load_params import load_bridge
    from oallama.device.native_log import native_log
    from oallama.device.opening import open_device
    from oallama.device.spec import parse_device
    from oallama.profile.emulate import resolved

    spec, _ = resolved(parse_device(settings["device"]).timed, None)
    large, n = settings["large_bytes"], settings["samples"]
    with native_log(), open_device(spec) as device:
        bridge, name = load_bridge(), device.name
        pinned, watch = bool(bridge.host_buft(name)), Watch(spec.emulated is not None)
        for small in settings["small_bytes"]:
            for queued, piece in ((0, 0), (large, large), *((large, piece) for piece in settings["piece_bytes"])):
                found, kept = watch.measured(partial(bridge.copy_beside, name, pinned, queued, piece, small, n))
                yield {"what": "small copy", "pinned": pinned, "large_bytes": queued, "piece_bytes": piece,
                       "small_bytes": small, "late": kept and kept.late_share,
                       "samples": [list(astuple(sample)) for sample in found]}  # fmt: skip
