"""A machine by its rates: a card, a host, and what a fresh process pays once. They were fitted to some of its runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from experiments.inputs import InputError

from oallama.core.codec import CodecError, Positive, from_json
from oallama.device.card import Card, Host


@dataclass(frozen=True)
class Machine:
    """What every prediction is made from."""

    host: Host
    card: Card
    first_prompt_s: Positive = 0.0  # until a new process's kernels for large batches are loaded
    notes: dict[str, Any] = field(default_factory=dict)  # to which runs it was fitted: `contexts`, `every`


def read_machine(path: Path) -> Machine:
    """Raises InputError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(host := found.get("host"), dict):
            by_type = host.get("flops_by_type", {})
            found["host"] = {**host, "flops_by_type": [list(rate) for rate in dict(by_type).items()]}
        machine = from_json(Machine, found, "the machine")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (CodecError, ValueError, TypeError) as error:
        raise InputError(f"{path} is no machine: {error}") from None
    for part in (machine.host, machine.card):
        for name, value in _rates(part):
            if value is not None and not value > 0:
                raise InputError(f"{path}: {name} is {value!r}, not above 0")
    return machine


def _rates(part: Host | Card) -> list[tuple[str, float | None]]:
    values: Mapping[str, Any] = {each.name: getattr(part, each.name) for each in fields(part)}
    return [(name, value) for name, value in values.items() if name.endswith("_s")]
