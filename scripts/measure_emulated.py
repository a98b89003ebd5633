"""How well an emulated device keeps time here: copies and mul-mats against its own model, and how late it tells them.

    scripts/measure_emulated.py                          # an RTX 3060 at this machine's scale, as a table
    scripts/measure_emulated.py --json -o precision.json

Every line is the median of --repeats runs. `copy`: as a stream of copies takes it, without its caller's part.
`overlap`: how much of a copy on one stream a result of another stream waits for; nothing of it, on a card with an
engine for each. Close other programs: whatever else runs on the device's core is seen here.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oallama.core.errors import OallamaError
from oallama.device.emulated import DEVICE_NAME, card_of, in_words
from oallama.device.emulated_link import Watch
from oallama.device.load_params import load_bridge
from oallama.device.opening import open_device
from oallama.device.spec import parse_device
from oallama.profile.emulate import resolved

KIB, MIB = 2**10, 2**20
SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB)
PRODUCTS = (("Q4_0", 4096, 14336, 1), ("Q4_0", 4096, 14336, 32), ("Q4_0", 4096, 14336, 512), ("F16", 4096, 4096, 1),
            ("F16", 4096, 4096, 512), ("Q6_K", 4096, 4096, 8))  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="emulated:rtx3060-12", help="an emulated card of the presets")
    parser.add_argument("--repeats", type=int, default=31, help="runs of each (default: 31)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-o", "--output", type=Path, help="write JSON here as well")
    options = parser.parse_args(arguments)
    try:
        document = measure(options.device, options.repeats)
    except OallamaError as error:
        print(f"measure_emulated: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    text = json.dumps(document, indent=1) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text if options.json else table(document), end="")
    return 0


def measure(device: str, repeats: int) -> dict[str, Any]:
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
        "machine": f"{platform.processor() or platform.machine()}, {platform.platform()}",
        "repeats": repeats,
        "rows": rows,
        "worst_error": max(abs(row["error"]) for row in rows),
        "overlap": overlap,
        "kept_time": {"elapsed_s": kept.elapsed_s, "late_share": kept.late_share, **kept.stats},
        "card": asdict(card),
    }


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


def table(document: dict[str, Any]) -> str:
    lines = [document["device_in_words"], "", f"{'what':38} {'modelled µs':>12} {'measured µs':>12} {'error':>8}"]
    for r in document["rows"]:
        lines.append(f"{r['what']:38} {r['modelled_s'] * 1e6:12.1f} {r['seconds'] * 1e6:12.1f} {r['error']:8.2%}")
    kept = document["kept_time"]
    lines += [
        "",
        f"of a copy under way a result of another stream waits for {document['overlap']:.1%}",
        f"{kept['n_ends']} ends, late by {kept['late_median_s'] * 1e6:.2f} µs in the median, "
        f"{kept['late_p99_s'] * 1e6:.2f} µs at the 99th percentile, {kept['late_share']:.3%} of the time; "
        f"{kept['n_overruns']} overruns",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
