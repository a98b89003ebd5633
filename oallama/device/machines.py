"""Whole machines by their rates, to simulate on: the papers' testbeds, usual desktops, and files that describe others.

What a paper prints of its machine is taken from there; what it does not print is estimated, and `sources` says how. The
latencies of all cards are those of cards.py, as they are llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from oallama.core.codec import CodecError, from_json, parse_json
from oallama.core.errors import UsageError
from oallama.core.units import GIB
from oallama.device.card import Card, Host
from oallama.device.cards import CARDS, USUAL_PC, preset


@dataclass(frozen=True, slots=True)
class Machine:
    """A CPU and one card. sources: (figure, where it is from)."""

    name: str
    description: str
    host: Host
    card: Card
    sources: tuple[tuple[str, str], ...]


_GEN4_X16, _GEN4_X8, _GEN3_X16 = 25e9, 12.5e9, 12.5e9
_LINK_SOURCE = "what copies reach over {}, as of the cards of `what-if` (PCIe 4 x16: 24.9 to 25.2 GB/s, FreeToken #232)"

_INT4_BYTES = 0.5  # of a weight, without scales
_TABLE_I = (
    "ScheInfer (arXiv 2411.15715), Table I, INT4: 0.5 bytes over β = {} s for each weight; its lines are those of one "
    "token"
)

# Peaks as NVIDIA and Intel state them: bytes/s of memory, dense INT8 and FP16 tensor operations with FP32 sums a second
_RTX3090_INT8, _RTX3060_BYTES = 284e12, 360e9
_INT8_SHARE = CARDS["rtx3090"].flops_per_s / _RTX3090_INT8
_FLOAT_SHARE = 0.83
_ARITHMETIC = (
    f"estimated: the RTX 3090's share of its INT8 peak ({_INT8_SHARE:.0%}) and {_FLOAT_SHARE:.0%} of the FP16 peak, "
    "as of other cards of `what-if`: {}"
)

_ZEN4_FLOPS = USUAL_PC.flops_per_s / (8 * 5.0)  # of a core and GHz
_CORES = "estimated from cores × base clock, with what a core of the usual PC does at 5 GHz: {}"
_SAME_SHARE = 0.5 / 5.4e-12 / 204.8e9
_DRAM = f"estimated: {_SAME_SHARE:.0%} of the peak of {{}}, the share that Table I of ScheInfer gives a Xeon 8358"


def _estimated(name: str, description: str, memory_gib: int, bytes_per_s: float, int8: float, fp16: float,
               pinned: float) -> Card:  # fmt: skip
    """A card without published runs. int8, fp16: its peaks."""
    return replace(
        CARDS["rtx3090"],
        name=name,
        description=description,
        memory_bytes=memory_gib * GIB,
        bytes_per_s=bytes_per_s,
        flops_per_s=_INT8_SHARE * int8,
        flops_float_per_s=_FLOAT_SHARE * fp16,
        pinned_bytes_per_s=pinned,
        pageable_bytes_per_s=1 / (1 / pinned + _pageable_s()),
    )


def _pageable_s() -> float:
    """Of a byte, that the driver's copy to pinned memory takes."""
    card = CARDS["rtx3090"]
    return 1 / card.pageable_bytes_per_s - 1 / card.pinned_bytes_per_s


def _host(name: str, bytes_per_s: float, core_ghz: float, source: str, avx512: bool = True) -> Host:
    """core_ghz: cores × GHz. Without AVX-512 a core is taken for half as fast."""
    return Host(name, bytes_per_s, core_ghz * _ZEN4_FLOPS * (1.0 if avx512 else 0.5), source)


def _testbed(letter: str, description: str, host: Host, card: Card, *sources: tuple[str, str]) -> Machine:
    return Machine(f"scheinfer-{letter}", f"ScheInfer's testbed {letter.upper()}: {description}", host, card, sources)


_CPU_BYTES, _CPU_FLOPS, _GPU_BYTES, _GPU_FLOPS, _LINK = (
    "CPU, bytes/s", "CPU, flop/s", "GPU, bytes/s", "GPU, flop/s", "link",
)  # fmt: skip
_PRESET = (("GPU and link", "as the card is in `what-if` (docs/what-if.md)"),)

_ALL = (
    _testbed(
        "a", "RTX A6000, Xeon Platinum 8358, PCIe 4 x16",
        _host("Xeon Platinum 8358, 32 cores", _INT4_BYTES / 5.4e-12, 32 * 2.6, _TABLE_I.format("5.4e-12")),
        _estimated("rtxa6000", "NVIDIA RTX A6000 48 GB", 48, _INT4_BYTES / 8.1e-13, 309.7e12, 154.8e12, _GEN4_X16),
        (_CPU_BYTES, _TABLE_I.format("5.4e-12")), (_CPU_FLOPS, _CORES.format("32 × 2.6 GHz")),
        (_GPU_BYTES, _TABLE_I.format("8.1e-13")),
        (_GPU_FLOPS, _ARITHMETIC.format("309.7 and 154.8 T/s")),
        (_LINK, _LINK_SOURCE.format("PCIe 4 x16") + "; Table I's β would be more than the bus can do"),
    ),
    _testbed(
        "b", "RTX 3090, EPYC 7742, PCIe 4 x16",
        _host("EPYC 7742, 64 cores", _INT4_BYTES / 6.5e-12, 64 * 2.25, _TABLE_I.format("6.5e-12"), avx512=False),
        replace(CARDS["rtx3090"], bytes_per_s=_INT4_BYTES / 6.5e-13),
        (_CPU_BYTES, _TABLE_I.format("6.5e-12")),
        (_CPU_FLOPS, _CORES.format("64 × 2.25 GHz, half of it without AVX-512")),
        (_GPU_BYTES, _TABLE_I.format("6.5e-13")), (_GPU_FLOPS, "as the card is in `what-if`"),
        (_LINK, _LINK_SOURCE.format("PCIe 4 x16") + "; Table I's β would be more than the bus can do"),
    ),
    _testbed(
        "c", "RTX 2080 Ti, Xeon Gold 6230, PCIe 3 x16",
        _host("Xeon Gold 6230, 20 cores", _INT4_BYTES / 8.4e-12, 20 * 2.1, _TABLE_I.format("8.4e-12")),
        _estimated("rtx2080ti", "NVIDIA GeForce RTX 2080 Ti 11 GB", 11, _INT4_BYTES / 9.2e-13, 215.2e12, 53.8e12,
                   _GEN3_X16),
        (_CPU_BYTES, _TABLE_I.format("8.4e-12")), (_CPU_FLOPS, _CORES.format("20 × 2.1 GHz")),
        (_GPU_BYTES, _TABLE_I.format("9.2e-13")),
        (_GPU_FLOPS, _ARITHMETIC.format("215.2 and 53.8 T/s")),
        (_LINK, _LINK_SOURCE.format("PCIe 3 x16, half of it") + "; Table I's β would be more than the bus can do"),
    ),
    Machine(
        "hetegen", "HeteGen's: NVIDIA A10, 16 cores of a Xeon at 2.30 GHz",
        _host("Xeon at 2.30 GHz, 16 cores", _SAME_SHARE * 204.8e9, 16 * 2.3, _DRAM.format("8 channels DDR4-3200")),
        _estimated("a10", "NVIDIA A10 24 GB", 24, 0.5 / 8.1e-13 / 768e9 * 600e9, 250e12, 125e12, 30e9),
        ((_CPU_BYTES, _DRAM.format("eight channels of DDR4-3200; the paper names neither the model nor its memory")),
         (_CPU_FLOPS, _CORES.format("16 × 2.3 GHz; the paper uses at most 16 cores")),
         (_GPU_BYTES, "estimated: the share of its peak (600 GB/s) that Table I of ScheInfer gives an RTX A6000"),
         (_GPU_FLOPS, _ARITHMETIC.format("250 and 125 T/s")),
         (_LINK, "HeteGen (MLSys 2024), Table 1: 30 GB/s")),
    ),
    Machine(
        "oato", "OATO's: RTX 4090, Xeon Silver 4314",
        _host("Xeon Silver 4314, 16 cores", _SAME_SHARE * 170.7e9, 16 * 2.4, _DRAM.format("8 channels DDR4-2667")),
        CARDS["rtx4090"],
        ((_CPU_BYTES, _DRAM.format("eight channels of DDR4-2667")), (_CPU_FLOPS, _CORES.format("16 × 2.4 GHz")),
         ("GPU and link", "as the card is in `what-if`; the paper (J. NUDT 47(6), 2025) says PCIe 5 x16, but card and "
          "CPU have PCIe 4")),
    ),
    Machine(
        "atsinfer-3060", "ATSInfer's smaller one: RTX 3060 6 GB (a laptop's)", USUAL_PC,
        replace(CARDS["rtx3060-12"], name="rtx3060-6", description="NVIDIA GeForce RTX 3060 Laptop 6 GB",
                memory_bytes=6 * GIB, bytes_per_s=CARDS["rtx3060-12"].bytes_per_s / _RTX3060_BYTES * 336e9,
                pinned_bytes_per_s=_GEN4_X8, pageable_bytes_per_s=1 / (1 / _GEN4_X8 + _pageable_s())),
        (("CPU", f"not looked up: the usual PC's. {USUAL_PC.source}"),
         (_GPU_BYTES, "estimated: the RTX 3060 12 GB's share of its peak, of 336 GB/s"),
         (_GPU_FLOPS, "estimated: as the RTX 3060 12 GB's"), (_LINK, _LINK_SOURCE.format("PCIe 4 x8, half of it"))),
    ),
    Machine(
        "atsinfer-4090", "ATSInfer's larger one: RTX 4090", USUAL_PC, CARDS["rtx4090"],
        (("CPU", f"not looked up: the usual PC's. {USUAL_PC.source}"), *_PRESET),
    ),
    Machine("pc-12gb", "a usual PC: 8 cores of Zen 4, RTX 3060 12 GB", USUAL_PC, CARDS["rtx3060-12"],
            (("CPU", USUAL_PC.source), *_PRESET)),
    Machine("pc-24gb", "a usual PC: 8 cores of Zen 4, RTX 4090 24 GB", USUAL_PC, CARDS["rtx4090"],
            (("CPU", USUAL_PC.source), *_PRESET)),
)  # fmt: skip

MACHINES: dict[str, Machine] = {machine.name: machine for machine in _ALL}
"""By name."""

MAX_FILE_BYTES = 1 << 20


def machine_of(text: str) -> Machine:
    """A preset by name, in any case, or a file (.json): `name`, `host` (the fields of Host), `card` (a card of
    `what-if` by name, or the fields of Card) and, where wanted, `description`. Raises UsageError naming the presets."""
    if text.lower().endswith(".json"):
        return _read(Path(text))
    found = MACHINES.get(text.strip().lower())
    if found is None:
        raise UsageError(
            f"there is no machine {text!r}; choose one of {', '.join(MACHINES)}, or name a .json file that describes it"
        )
    return found


def _read(path: Path) -> Machine:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is too large for a machine; see docs/simulate.md for what it may have")
        document = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or not {"name", "host", "card"} <= document.keys():
        raise UsageError(f"{path} is no machine: it needs name, host and card (docs/simulate.md)")
    try:
        host = from_json(Host, document["host"], "host")
        named = document["card"]
        card = preset(named) if isinstance(named, str) else from_json(Card, named, "card")
    except CodecError as error:
        raise UsageError(f"{path}: {error}") from None
    _check(path, "host", host)
    _check(path, "card", card)
    name = str(document["name"])
    return Machine(name, str(document.get("description", name)), host, card, (("all", str(path)), ("CPU", host.source)))


def _check(path: Path, part: str, record: Any) -> None:
    """Rates and sizes are above 0, latencies not below it."""
    values = [(field.name, getattr(record, field.name)) for field in fields(record)]
    values += [(f"flops_by_type {name!r}", rate) for name, rate in getattr(record, "flops_by_type", ())]
    for name, value in values:
        if isinstance(value, int | float):
            latency = name.endswith("_s") and not name.endswith("_per_s")
            if not (value >= 0 if latency else value > 0) or value == float("inf"):
                raise UsageError(f"{path}: {part}.{name} is {value:g}, but a number above 0 is needed")
