"""Verdicts of the gate in files, one for each key; a file that is no use is as good as none."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oallama.bench.records import StockPlacement
from oallama.core.codec import from_json
from oallama.core.files import write_whole
from oallama.gate.plans import NAMES
from oallama.gate.verdict import VERSION, Key, Verdict, verdict_from_json
from oallama.profile.store import cache_folder


def verdict_path(key: Key) -> Path:
    text = json.dumps(dict(key), sort_keys=True, separators=(",", ":"))
    return cache_folder() / f"gate-v{VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_verdict(key: Key) -> tuple[Verdict, StockPlacement] | None:
    """What was found, and stock's placement beside it; None where there is nothing, or nothing that can be used."""
    try:
        document = json.loads(verdict_path(key).read_text(encoding="utf-8"))
        verdict, stock = verdict_from_json(document["verdict"]), document["stock"]
        placement = from_json(StockPlacement, stock, "the placement")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if verdict.key != key or verdict.winner not in (None, *NAMES):
        return None
    return verdict, placement


def write_verdict(verdict: Verdict, stock: StockPlacement) -> None:
    """Remember it, whole or not at all; where the folder cannot be written, the next run measures again."""
    path = verdict_path(verdict.key)
    document: dict[str, Any] = {"verdict": asdict(verdict), "stock": asdict(stock)}
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(document, indent=1))
