"""Cache of verdicts in files, one for each key; a file that cannot be used counts as none."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from oallama.bench.records import BenchTest, Sample, StockPlacement
from oallama.core.codec import from_json, parse_json
from oallama.core.files import write_whole
from oallama.gate.key import Key, distance
from oallama.gate.pairs import MOST_PAIRS, Pairs
from oallama.gate.plans import NAMES
from oallama.gate.verdict import VERSION, Verdict, verdict_from_json
from oallama.profile.store import cache_folder

MOST_BLOCKS = 4 * MOST_PAIRS
"""Of one candidate in one test in a file: two looks have MOST_PAIRS pairs, and a block has two."""


@dataclass(frozen=True, slots=True)
class KeptVerdict:
    """A verdict, stock's placement beside it, and the pairs that were measured; files from before have none."""

    verdict: Verdict
    stock: StockPlacement
    pairs: tuple[Pairs, ...] = ()


def verdict_path(key: Key) -> Path:
    text = json.dumps(dict(key), sort_keys=True, separators=(",", ":"))
    return cache_folder() / f"gate-v{VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_kept(key: Key) -> KeptVerdict | None:
    """What was found; None where there is nothing, or nothing that can be used."""
    kept = _read(verdict_path(key))
    return kept if kept is not None and kept.verdict.key == key else None


def nearest_kept(key: Key) -> KeptVerdict | None:
    """Of the settled verdicts for other lengths of prompt and generation the nearest one, of these the last."""
    known = [
        (apart, kept)
        for path in sorted(cache_folder().glob(f"gate-v{VERSION}-*.json"))
        if (kept := _read(path)) is not None
        and kept.verdict.settled
        and (apart := distance(key, kept.verdict.key)) is not None
    ]
    least = min((apart for apart, _ in known), default=0)
    return max((kept for apart, kept in known if apart == least), key=lambda k: k.verdict.measured_at, default=None)


def write_kept(kept: KeptVerdict) -> None:
    """Remember it, whole or not at all; where the folder cannot be written, the next run measures again."""
    path = verdict_path(kept.verdict.key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(kept), indent=1), private=True)


def _read(path: Path) -> KeptVerdict | None:
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
        verdict = verdict_from_json(document["verdict"])
        placement = from_json(StockPlacement, document["stock"], "the placement")
        pairs = tuple(from_json(Pairs, each, "the pairs") for each in document.get("pairs", ()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not _is_sound(verdict) or not all(_is_whole(each) for each in pairs):
        return None
    return KeptVerdict(verdict, placement, pairs)


def _is_sound(verdict: Verdict) -> bool:
    """Whether what won is a policy of today, and its ratios are intervals."""
    ratios = [each.ratio for each in verdict.trials if each.ratio is not None]
    return verdict.winner in (None, *NAMES) and all(0 < ratio.low <= ratio.value <= ratio.high for ratio in ratios)


def _is_whole(pairs: Pairs) -> bool:
    """Whether each block has both arms' samples, of times that can be compared, and there are no more than measured."""
    test, blocks = pairs.series.test, [block.samples for block in pairs.series.kept]
    return (
        min(test.n_prompt, test.n_gen) >= 0
        and len(blocks) <= MOST_BLOCKS
        and all(len(block) == 2 and len(block[0]) == len(block[1]) == 2 for block in blocks)
        and all(_is_timed(sample, test) for block in blocks for arm in block for sample in arm)
    )


def _is_timed(sample: Sample, test: BenchTest) -> bool:
    """Whether every part of the test took a time that a clock can tell."""
    parts = [(test.n_prompt, sample.prompt_s), (test.n_gen, sample.gen_s)]
    return test.n_tokens > 0 and all(1e-9 < seconds < 1e9 for n, seconds in parts if n)
