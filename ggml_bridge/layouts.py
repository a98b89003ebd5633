"""Faults of the CPU's layouts: kinds of mul-mats that a build of llama.cpp gets wrong in one layout, which is right for
others. The self-test finds them; set-up writes them beside llama.cpp's libraries, whose faults they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FAULTS_FILE = "oallama-layout-faults.json"
KINDS = ("MUL_MAT", "3-D MUL_MAT", "MUL_MAT_ID")
"""By one matrix, by several matrices at once (MLA's attn_k_b and attn_v_b), by experts."""


def mul_mat_kind(n_matrices: int, n_expert_used: int) -> str:
    """The kind of a mul-mat by a weight of so many matrices. n_expert_used: 0 for MUL_MAT."""
    return KINDS[2] if n_expert_used else KINDS[1] if n_matrices > 1 else KINDS[0]


def fault_name(layout: str, kind: str) -> str:
    return f"{layout} {kind}"


def faults_of_kinds(results: Mapping[str, str]) -> dict[str, str]:
    """Those of the self-test's results that cost a layout one kind alone, by fault_name."""
    return {name: fault for name, fault in results.items() if fault != "ok" and name.partition(" ")[2] in KINDS}


def layout_faults(folder: Path) -> dict[str, str]:
    """What set-up found of the libraries in a folder, by fault_name: what is wrong. A file that cannot be read counts
    as none."""
    try:
        found = json.loads((folder / FAULTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(fault) for name, fault in found.items()} if isinstance(found, dict) else {}
