"""A machine by its rates: a card, a host, and what a fresh process pays once; as JSON, and as numbers to be fitted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from experiments.command import write_document
from experiments.inputs import InputError

from oallama.device.card import Card, Host


@dataclass(frozen=True)
class FittedMachine:
    """What every prediction is made from."""

    host: Host
    card: Card
    first_prompt_s: float = 0.0  # until a new process's kernels for large batches are loaded
    notes: dict[str, Any] = field(default_factory=dict)  # how it was found


FITTED = (
    "host.bytes_per_s",
    "host.flops_attention_per_s",
    "host.flops_by_type.Q6_K",
    "card.bytes_per_s",
    "card.flops_per_s",
    "card.flops_float_per_s",
    "card.kernel_s",
    "card.pageable_bytes_per_s",
    "first_prompt_s",
)
"""The rates that runs of stock llama.cpp tell. The others are constants of START: nothing in such runs depends on the
pinned link, and the small latencies cannot be told from card.kernel_s and card.copy_s."""

START = FittedMachine(
    host=Host("host", bytes_per_s=60e9, flops_per_s=1e12, source="fitted", flops_attention_per_s=50e9,
              flops_by_type=(("Q6_K", 100e9),), kernel_s=5e-6),
    card=Card(
        name="card", description="fitted to runs of stock llama.cpp", memory_bytes=32 * 2**30, bytes_per_s=800e9,
        flops_per_s=50e12, flops_float_per_s=80e12, kernel_s=3e-6, launch_s=5e-6, launch_node_s=1e-6, copy_s=10e-6,
        copy_issue_s=2e-6, synchronize_s=5e-6, pinned_bytes_per_s=25e9, pageable_bytes_per_s=10e9,
    ),
    first_prompt_s=0.03,
)  # fmt: skip
"""Of no machine: where the fit begins."""


def rates(machine: FittedMachine) -> dict[str, float]:
    """Its fitted rates by name."""
    record = _record(machine)
    return {name: _part(record, name)[_last(name)] for name in FITTED}


def with_rates(machine: FittedMachine, values: Mapping[str, float]) -> FittedMachine:
    """The same with other rates."""
    record = _record(machine)
    for name, value in values.items():
        _part(record, name)[_last(name)] = value
    return _machine(record)


def _part(record: dict[str, Any], name: str) -> dict[str, Any]:
    """The part of a record in which the rate of that name is."""
    for key in name.split(".")[:-1]:
        record = record[key]
    return record


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _record(machine: FittedMachine) -> dict[str, Any]:
    record = asdict(machine)
    record["host"]["flops_by_type"] = dict(machine.host.flops_by_type)
    return record


def _machine(record: Mapping[str, Any]) -> FittedMachine:
    host = {**record["host"], "flops_by_type": tuple(sorted(record["host"]["flops_by_type"].items()))}
    return FittedMachine(Host(**host), Card(**record["card"]), record["first_prompt_s"], record.get("notes", {}))


def write_machine(machine: FittedMachine, path: Path) -> None:
    write_document(_record(machine), path)


def read_machine(path: Path) -> FittedMachine:
    """Raises InputError."""
    try:
        made = _machine(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is no machine: make one with `scripts/real_card fit`") from None
    for part in (made.host, made.card):
        for each in fields(part):
            value = getattr(part, each.name)
            if each.name.endswith("_s") and value is not None and not (isinstance(value, int | float) and value > 0):
                raise InputError(f"{path}: {each.name} is {value!r}, not above 0")
    return made
