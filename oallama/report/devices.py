"""The report of `oallama devices`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from oallama.core.types import DeviceInfo
from oallama.core.units import format_bytes
from oallama.report.table import Table, table
from oallama.report.text import printable


def device_document(device: DeviceInfo) -> dict[str, Any]:
    """One entry of `devices` in `oallama devices --json`."""
    return {"async" if key == "asynchronous" else key: value for key, value in asdict(device).items()}


def devices_table(devices: Iterable[DeviceInfo], footer: Sequence[str] = ()) -> Table:
    """ggml's devices, one a row; sentences about the rest of the machine below."""
    rows = [
        (
            printable(d.name),
            d.type,
            d.backend,
            format_bytes(d.memory_total),
            format_bytes(d.memory_free),
            *("yes" if flag else "no" for flag in (d.asynchronous, d.host_buffer, d.events)),
            printable(d.description, 60),
        )
        for d in devices
    ]
    return table("", "name |type |backend |>memory |>free |async |host buffer |events |description", rows, footer)
