"""The report of `oallama list`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oallama.core.units import format_bytes
from oallama.report.table import Table, table
from oallama.report.text import printable
from oallama.stores.stored import DescribedModel, Fault


def models_document(models: Iterable[DescribedModel], faults: Iterable[Fault]) -> dict[str, Any]:
    """`oallama list --json`."""
    return {
        "models": [
            {
                "name": found.model.name,
                "store": found.model.store,
                "bytes": found.n_bytes,
                "quantisation": found.quantisation,
                "path": str(found.model.path),
                "files": [str(file) for file in found.model.files],
            }
            for found in models
        ],
        "unusable": [{"name": fault.name, "why": fault.why} for fault in faults],
    }


def models_table(models: Iterable[DescribedModel]) -> Table:
    rows = [
        (
            printable(found.model.name),
            found.model.store,
            format_bytes(found.n_bytes),
            found.quantisation,
            printable(str(found.model.path), 1000),
        )
        for found in models
    ]
    return table("", "name |downloaded by |>size |quantisation |path", rows)
