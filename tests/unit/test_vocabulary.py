"""One name a thing, one thing a name: words that are gone from identifiers stay away, and no two modules have a class
of the same name. The glossary in docs/how-it-works.md has the words that are used."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("oallama", "contrib", "ggml_bridge") for path in sorted((ROOT / folder).rglob("*.py"))]

GONE = {
    **dict.fromkeys(("ledger", "ledgers"), "memory breakdown"),
    **dict.fromkeys(("crossing", "crossings"), "device copy"),
    **dict.fromkeys(("prober", "probed"), "no_alloc load"),
    **dict.fromkeys(("verdict", "verdicts"), "result"),
    **dict.fromkeys(("menu", "menus"), "options"),
    **dict.fromkeys(("surroundings",), "context"),
    **dict.fromkeys(("traffic", "tally", "tallies"), "expert counts"),
    **dict.fromkeys(("talk",), "log"),
    **dict.fromkeys(("autotune", "autotuning"), "tune"),
}
"""Words that no identifier has, and what is said in their place."""

GONE_NAMES = {
    "Around": "BlockContext", "BlockOptions": "BlockChoices", "Candidate": "VerifiedPlan",
    "CorrectedBudget": "CorrectedMemory", "Course": "PhaseTimeline", "DeviceSplits": "DeviceSlices",
    "ExpertUse": "ExpertCoverage", "Gated": "TuneOutcome", "Lines": "LinearCost", "MemoryBudget": "PolicyInputs",
    "MtpBlock": "MtpDrafter", "Probe": "NoAllocLoad", "Race": "ABTest", "RangePart": "DevicePart",
    "RestCase": "NonMatmulCase", "Room": "PolicyInputs", "RunPlan": "PlanInUse", "Sharing": "Contention",
    "SlicePlan": "Slicing", "StockTry": "StockTrial", "b_of": "benefit", "begins_phase": "begins_segment",
    "decision": "verified", "gap_s": "inter_block_s", "load_offered": "load_extension", "n_exchanges": "n_turns",
    "nothing_there": "operators_on_cpu", "refresh_gate": "retune",
}  # fmt: skip
"""Whole identifiers that are gone."""


ARCHIVED = ("reproduction.md",)
"""Pages made of results as they were written when they were measured."""


def words_of(identifier: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", identifier)]


def identifiers(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


@pytest.mark.parametrize("package", ["oallama", "contrib", "ggml_bridge"])
def test_words_that_are_gone_stay_away(package: str) -> None:
    found = {name for path in SOURCES if path.is_relative_to(ROOT / package) for name in identifiers(path)}
    assert {name: GONE[word] for name in found for word in words_of(name) if word in GONE} == {}
    assert {name: GONE_NAMES[name] for name in found & GONE_NAMES.keys()} == {}


def test_pages_use_the_same_words() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]
    gone = re.compile(
        r"\b(?:ledgers?|verdicts?|dry loads?|prob(?:ed|es?|er|ing)|split backends?|plug-ins?)\b", re.IGNORECASE
    )
    found = {page.name: gone.findall(page.read_text(encoding="utf-8")) for page in pages if page.name not in ARCHIVED}
    assert {name: words for name, words in found.items() if words} == {}


def test_a_workload_is_called_workload() -> None:
    wrong = {"load": "Workload", "placed": "Placement"}
    for path in SOURCES:
        arguments = (
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.arg)
        )
        named = {(arg.arg, ast.unparse(arg.annotation)) for arg in arguments if arg.annotation is not None}
        assert named & wrong.items() == set(), path


def test_one_class_a_name() -> None:
    """But for BridgeError, which is one of ours above the bridge and one beneath it."""
    modules = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1 and name != "BridgeError"} == {}
