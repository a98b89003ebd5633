"""Records as the JSON documents of the contract: dicts of plain values, keys with their units, nothing formatted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from oallama.core.types import Affinity, AffinityReport, DeviceInfo, MemoryLedger, ModelInfo, Operator, Predicted


def model_document(model: ModelInfo) -> dict[str, Any]:
    """`model` of `inspect` and `affinity-report`."""
    return {
        "path": model.path,
        "arch": model.arch,
        "name": model.name,
        "n_layer": model.n_layer,
        "n_embd": model.n_embd,
        "n_ff": model.n_ff,
        "n_head": model.n_head,
        "n_head_kv": model.n_head_kv,
        "n_expert": model.n_expert,
        "n_expert_used": model.n_expert_used,
        "n_vocab": model.n_vocab,
        "n_ctx_train": model.n_ctx_train,
        "file_bytes": model.file_bytes,
        "fingerprint": model.fingerprint,
    }


def inspect_document(model: ModelInfo, operators: Iterable[Operator]) -> dict[str, Any]:
    """`oallama inspect --json`; operators in graph order, as given."""
    return {
        "model": model_document(model),
        "operators": [
            {
                "name": o.name,
                "layer": o.layer,
                "role": o.role,
                "op": o.op,
                "type": o.type,
                "shape": list(o.shape),
                "bytes": o.bytes,
                "active_fraction": o.active_fraction,
            }
            for o in operators
        ],
    }


def device_document(device: DeviceInfo) -> dict[str, Any]:
    """One entry of `devices` in `oallama devices --json`."""
    return {
        "name": device.name,
        "description": device.description,
        "backend": device.backend,
        "type": device.type,
        "memory_total": device.memory_total,
        "memory_free": device.memory_free,
        "async": device.asynchronous,
        "host_buffer": device.host_buffer,
        "events": device.events,
    }


AFFINITY_KEYS = (
    "name",
    "layer",
    "role",
    "type",
    "shape",
    "bytes",
    "t_cpu_s",
    "t_gpu_s",
    "t_transfer_s",
    "benefit_s_per_byte",
    "affinity",
    "rank",
    "backend",
)
"""Keys of one operator in `affinity-report`, in the contract's order; the columns of its CSV."""


def affinity_document(row: Affinity) -> dict[str, Any]:
    """One operator of `affinity-report`."""
    document = {key: getattr(row, key) for key in AFFINITY_KEYS}
    document["shape"] = list(row.shape)
    return document


def memory_document(memory: MemoryLedger) -> dict[str, Any]:
    """The ledger, bytes (and `fill`, a share)."""
    keys = ("capacity", "fill", "limit", "weights_gpu", "weights_host", "kv", "compute", "staging", "spare")
    return {key: getattr(memory, key) for key in keys}


def predicted_document(predicted: Predicted) -> dict[str, float]:
    """Predicted times, seconds."""
    return {"ttft_s": predicted.ttft_s, "tpot_s": predicted.tpot_s, "total_s": predicted.total_s}


def report_document(report: AffinityReport) -> dict[str, Any]:
    """`oallama affinity-report --format json`; operators in rank order."""
    return {
        "model": model_document(report.model),
        "device": report.device,
        "phase": report.phase,
        "iterations": report.iterations,
        "converged": report.converged,
        "operators": [affinity_document(row) for row in report.operators],
        "memory": memory_document(report.memory),
        "predicted": predicted_document(report.predicted),
        "notes": list(report.notes),
    }


def affinity_csv_rows(rows: Sequence[Affinity]) -> list[list[object]]:
    """Cells of the CSV, one row per operator; a shape is `KxNxE`, a missing layer is empty."""
    return [
        [
            "x".join(map(str, value)) if key == "shape" else "" if value is None else value
            for key, value in ((key, getattr(row, key)) for key in AFFINITY_KEYS)
        ]
        for row in rows
    ]
