"""The reports of `oallama inspect`, `devices` and `list`: a model's hyperparameters and operators, ggml's devices,
downloaded models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from oallama.core.types import DeviceInfo, ModelInfo, Operator
from oallama.core.units import format_bytes
from oallama.cost.blocks import can_split
from oallama.model.cut import cut_extent, cut_step
from oallama.report.table import Table, in_lines, table
from oallama.report.text import model_title, percent, plural, printable, ranges_text, shape_text
from oallama.stores.stored import DescribedModel, Fault

_MODEL_KEYS = (
    *("path", "arch", "name", "n_layer", "n_embd", "n_ff", "n_head", "n_head_kv", "n_expert", "n_expert_used"),
    *("n_vocab", "n_ctx_train", "file_bytes", "fingerprint"),
)
_OPERATOR_KEYS = ("name", "layer", "role", "op", "type", "shape", "bytes", "active_fraction")


def model_document(model: ModelInfo) -> dict[str, Any]:
    """`model` of the JSON of `inspect` and `affinity-report`."""
    return {key: getattr(model, key) for key in _MODEL_KEYS}


def inspect_document(model: ModelInfo, operators: Iterable[Operator]) -> dict[str, Any]:
    """`oallama inspect --json`; operators in graph order, as given."""
    rows = [{**{key: getattr(o, key) for key in _OPERATOR_KEYS}, "cut": _cut(o)} for o in operators]
    return {"model": model_document(model), "operators": rows}


def _cut(operator: Operator) -> dict[str, int] | None:
    """Elements along the axis that a cut runs over, and the multiple that cuts keep; None if none is possible."""
    return {"extent": cut_extent(operator), "step": cut_step(operator)} if can_split(operator) else None


def model_lines(model: ModelInfo) -> tuple[str, ...]:
    experts = f", {model.n_expert_used} of {model.n_expert} experts per token" if model.n_expert else ""
    return (
        *in_lines(
            f"{model_title(model)}: {printable(model.arch)}, {plural(model.n_layer, 'layer')}, "
            f"{format_bytes(model.file_bytes)}"
        ),
        *in_lines(
            f"embedding {model.n_embd}, feed-forward {model.n_ff}, heads {model.n_head} ({model.n_head_kv} KV){experts}"
        ),
        f"vocabulary {model.n_vocab}, trained context {model.n_ctx_train}",
        f"file {printable(model.path, 400)}",
    )


def operator_table(operators: Sequence[Operator], every_row: bool = False) -> Table:
    """Operators in graph order, or grouped by role, type and shape (in the order in which they first appear)."""
    total = sum(o.bytes for o in operators)
    footer = (f"{plural(len(operators), 'operator')}, {format_bytes(total)} of weights.",)
    if every_row:
        rows = [
            (printable(o.name), o.op, printable(o.type), shape_text(o.shape), format_bytes(o.bytes), _active(o))
            for o in operators
        ]
        return table("", "operator |op |type |>shape |>bytes |>active", rows, footer)
    groups: dict[tuple[object, ...], list[Operator]] = {}
    for o in operators:
        groups.setdefault((o.role, o.op, o.type, o.shape, o.active_fraction), []).append(o)
    grouped = [
        (
            printable(group[0].role),
            ranges_text(o.layer for o in group if o.layer is not None) or "-",
            str(len(group)),
            group[0].op,
            printable(group[0].type),
            shape_text(group[0].shape),
            format_bytes(sum(o.bytes for o in group)),
            percent(sum(o.bytes for o in group), total),
            _active(group[0]),
        )
        for group in groups.values()
    ]
    return table("", "role |layers |>count |op |type |>shape |>bytes |>share |>active", grouped, footer)


def _active(operator: Operator) -> str:
    return "1" if operator.active_fraction == 1 else f"{operator.active_fraction:.4g}"


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
    headings = "name |type |backend |>memory |>free |async |host buffer |events |description"
    return table("", headings, rows, footer)


def models_document(models: Iterable[DescribedModel], faults: Iterable[Fault]) -> dict[str, Any]:
    """`oallama list --json`."""
    return {
        "models": [
            {
                "name": described.model.name,
                "store": described.model.store,
                "bytes": described.n_bytes,
                "quantisation": described.quantisation,
                "path": str(described.model.path),
                "files": [str(file) for file in described.model.files],
            }
            for described in models
        ],
        "unusable": [{"name": fault.name, "why": fault.why} for fault in faults],
    }


def models_table(models: Iterable[DescribedModel]) -> Table:
    rows = [
        (
            printable(described.model.name),
            described.model.store,
            format_bytes(described.n_bytes),
            described.quantisation,
            printable(str(described.model.path), 1000),
        )
        for described in models
    ]
    return table("", "name |downloaded by |>size |quantisation |path", rows)
