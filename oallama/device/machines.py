"""Machines described by their rates, for simulation: presets, and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oallama.core.codec import CodecError, from_json, parse_json
from oallama.core.errors import UsageError
from oallama.core.files import read_text
from oallama.device.card import Card, Host
from oallama.device.cards import CARDS, USUAL_PC, preset


@dataclass(frozen=True, slots=True)
class Machine:
    """A CPU and a card. sources: (figure, its source)."""

    name: str
    description: str
    host: Host
    card: Card
    sources: tuple[tuple[str, str], ...]


def _pc(name: str, description: str, card: str) -> Machine:
    sources = (("CPU", USUAL_PC.source), ("GPU and link", "as in `what-if` (docs/what-if.md)"))
    return Machine(name, f"a usual PC: 8 cores of Zen 4, {description}", USUAL_PC, CARDS[card], sources)


_ALL = (_pc("pc-12gb", "RTX 3060 12 GB", "rtx3060-12"), _pc("pc-24gb", "RTX 4090 24 GB", "rtx4090"))

MACHINES: dict[str, Machine] = {machine.name: machine for machine in _ALL}
"""Machines by name."""


def machine_of(text: str) -> Machine:
    """Return a preset by name, in any case, or the machine of a .json file: `name`, `host` (the fields of Host), `card`
    (the name of a `what-if` card, or the fields of Card), and optionally `description` and `sources` (figure: source).
    Raises UsageError with the presets."""
    if text.lower().endswith(".json"):
        return _read(Path(text))
    machine = MACHINES.get(text.strip().lower())
    if machine is None:
        raise UsageError(f"unknown machine {text!r}; choose from {', '.join(MACHINES)}, or give a .json file")
    return machine


def _read(path: Path) -> Machine:
    try:
        document = parse_json(read_text(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or not {"name", "host", "card"} <= document.keys():
        raise UsageError(f"{path} is not a valid machine: it needs name, host and card (docs/what-if.md)")
    try:
        host = from_json(Host, document["host"], "host")
        named = document["card"]
        card = preset(named) if isinstance(named, str) else from_json(Card, named, "card")
    except CodecError as error:
        raise UsageError(f"{path}: {error}") from None
    name, sources = str(document["name"]), document.get("sources", {"all": str(path), "CPU": host.source})
    if not isinstance(sources, dict) or not all(isinstance(source, str) for source in sources.values()):
        raise UsageError(f"{path}: sources must be an object of strings")
    return Machine(name, str(document.get("description", name)), host, card, tuple(sources.items()))
