"""Timing accuracy of an emulated device here: copies and mul-mats against its own model, and its lateness.

`copy`: as a stream of copies takes it, without its caller's part. `overlap`: how much of a copy on one stream a result
of another stream waits for; nothing of it, on a card with an engine for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

from measure.measure import Measure, MeasureStep
from oallama.core.units import KIB, MIB, format_bytes
from oallama.device.emulated import DEVICE_NAME, Emulated, card_of
from oallama.device.emulated_link import Watch
from oallama.device.load_params import load_bridge
from oallama.device.opening import open_device
from oallama.device.spec import parse_device
from oallama.profile.emulate import resolved

SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB)
PRODUCTS = (("Q4_0", 4096, 14336, 1), ("Q4_0", 4096, 14336, 32), ("Q4_0", 4096, 14336, 512), ("F16", 4096, 4096, 1),
            ("F16", 4096, 4096, 512), ("Q6_K", 4096, 4096, 8))  # fmt: skip


def _steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
    yield MeasureStep(options.device, "", partial(_measure, options.device, options.repeats))


def _measure(device: str, repeats: int) -> dict[str, Any]:
    spec, _ = resolved(parse_device(device).timed, None)
    assert spec.emulated is not None
    card, bridge = card_of(spec.emulated), load_bridge()
    with open_device(spec):
        watch = Watch(is_emulated=True)
        watch.start()
        rows = [*copies(bridge, card, repeats), *products(bridge, repeats)]
        overlap = bridge.copy_wait(DEVICE_NAME, True, 16 * MIB)
        kept = watch.stop()
    assert kept is not None
    return {
        "device": str(spec),
        "device_in_words": in_words(spec.emulated),
        "rows": rows,
        "worst_error": max(abs(row["error"]) for row in rows),
        "overlap": overlap,
        "kept_time": {"elapsed_s": kept.elapsed_s, "late_share": kept.late_share, **kept.stats},
        "card": asdict(card),
    }


def in_words(spec: Emulated) -> str:
    """What was decided, for people."""
    if spec.is_file:
        what = spec.source
    else:
        card = card_of(spec)
        what = (
            f"{card.description}, emulated with {format_bytes(card.memory_bytes)}: memory {card.bytes_per_s / 1e9:.3g} "
            f"GB/s, {card.flops_per_s / 1e12:.3g} TFLOP/s, link {card.pinned_bytes_per_s / 1e9:.3g} GB/s"
        )
    by_bytes, by_flops = spec.scale or (1.0, 1.0)
    slower = f"its bytes/s are divided by {by_bytes:.3g} and its flop/s by {by_flops:.3g}, as the CPU here is slower"
    return f"{what}; {slower}"


def copies(bridge: Any, card: Any, repeats: int) -> Iterator[dict[str, Any]]:
    for n_bytes in SIZES:
        for pinned in (True, False):
            rate = card.pinned_bytes_per_s if pinned else card.pageable_bytes_per_s
            # a small copy that is not pinned is first kept by the driver, and then sent as a pinned one
            kept = 0.0 if pinned or n_bytes > 64 * KIB else n_bytes / rate
            sent = n_bytes / (card.pinned_bytes_per_s if kept else rate)
            for direction in ("h2d", "d2h"):
                if direction == "h2d":
                    held = 0.0 if pinned or kept else card.copy_issue_s  # its caller asks for nothing meanwhile
                    modelled = held + kept + sent + card.copy_s
                else:
                    modelled = n_bytes / rate + card.copy_s + card.copy_issue_s + card.synchronize_s
                with bridge.transfer(DEVICE_NAME, direction, pinned, n_bytes) as timer:
                    timer.run(3)
                    yield row(f"copy {direction} {'pinned' if pinned else 'pageable'} {n_bytes // KIB} KiB", modelled,
                              timer.run(repeats))  # fmt: skip


def products(bridge: Any, repeats: int) -> Iterator[dict[str, Any]]:
    for type_name, k, n, n_tokens in PRODUCTS:
        modelled = bridge.emulated().mul_mat_seconds(bridge.type_info(type_name).number, k, n, 1, 0, n_tokens)
        with bridge.mul_mat(DEVICE_NAME, None, type_name, k, n, n_tokens=n_tokens) as timer:
            timer.run(3)
            yield row(f"mul-mat {type_name} {k}x{n}, {n_tokens} tokens", modelled, timer.run(repeats))


def row(what: str, modelled_s: float, samples: list[float]) -> dict[str, Any]:
    seconds = median(samples)
    return {"what": what, "modelled_s": modelled_s, "seconds": seconds, "error": seconds / modelled_s - 1,
            "samples": samples}  # fmt: skip


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for _, data in found:
        kept = data["kept_time"]
        rows += [(r["what"], f"{r['modelled_s'] * 1e6:.1f}", f"{r['seconds'] * 1e6:.1f}", f"{r['error']:.2%}")
                 for r in data["rows"]]  # fmt: skip
        rows += [
            ("of a copy under way a result of another stream waits for", "", "", f"{data['overlap']:.1%}"),
            (f"lateness of {kept['n_ends']} ends, median", "", f"{kept['late_median_s'] * 1e6:.2f}", ""),
            ("lateness, 99th percentile", "", f"{kept['late_p99_s'] * 1e6:.2f}", f"{kept['late_share']:.3%}"),
            ("overruns", "", kept["n_overruns"], ""),
        ]
    return rows


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="emulated:rtx3060-12", help="an emulated card of the presets")
    parser.add_argument("--repeats", type=int, default=31, help="runs of each, of which the median is taken")


MEASURE = Measure(
    "how well an emulated device keeps time here, against its own model. Close other programs: whatever else runs on "
    "the device's core is seen here.", _add_options, _steps, ("what", "modelled µs", "measured µs", "error"), _rows,
)  # fmt: skip
