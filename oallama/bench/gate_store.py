"""Verdicts of the gate in files, one for each key; a file that is no use is as good as none."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oallama.bench.gate import VERSION, GateKey, Verdict, verdict_from_json, verdict_to_json
from oallama.bench.gate_plans import NAMES
from oallama.bench.records import StockPlacement
from oallama.profile.store import cache_folder


def verdict_path(key: GateKey) -> Path:
    return cache_folder() / f"gate-v{VERSION}-{key.digest}.json"


def read_verdict(key: GateKey) -> tuple[Verdict, StockPlacement] | None:
    """What was found, and stock's placement beside it; None where there is nothing, or nothing that can be used."""
    try:
        document = json.loads(verdict_path(key).read_text(encoding="utf-8"))
        verdict, stock = verdict_from_json(document["verdict"]), document["stock"]
        placement = StockPlacement(**{**stock, "overrides": tuple((p, w) for p, w in stock["overrides"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if verdict.winner is not None and verdict.winner not in NAMES:
        return None
    return verdict, placement


def write_verdict(verdict: Verdict, stock: StockPlacement) -> None:
    """Remember it, whole or not at all; where the folder cannot be written, the next run measures again."""
    path = verdict_path(verdict.key)
    document: dict[str, Any] = {"verdict": verdict_to_json(verdict), "stock": asdict(stock)}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
