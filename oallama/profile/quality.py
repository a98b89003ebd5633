"""What is doubtful about a profile, in sentences that end with what to do. Pure: from the stored samples alone."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.types import ProfileCase, RestCase
from oallama.profile.timing import Finding, assess

_WORDS = {
    "unsettled": ("had not settled when their time was up", "close other programs and measure again with --refresh"),
    "drift": ("drifted while they were measured", "let the machine cool down or plug it in, then use --refresh"),
    "outliers": ("had far outliers", "close other programs and measure again with --refresh"),
}


def describe(case: ProfileCase | RestCase) -> str:
    """A case in a few words."""
    if isinstance(case, RestCase):
        without = ", no flash attention" if case.shape is not None and not case.shape.flash_attn else ""
        return f"{case.device} rest of a layer at {case.n_tokens} tokens, KV {case.n_kv}{without}"
    shape = "x".join(map(str, case.shape))
    layout = "" if case.layout in (case.device, "device") else f" {case.layout}"
    return f"{case.device}{layout} {case.type} {shape} at {case.n_tokens} tokens"


def sample_warnings(cases: Sequence[ProfileCase | RestCase]) -> tuple[str, ...]:
    """One sentence for each kind of finding, with how many cases have it and the worst of them."""
    found: dict[str, list[tuple[Finding, ProfileCase | RestCase]]] = {}
    for case in cases:
        for finding in assess(case.samples):
            found.setdefault(finding.kind, []).append((finding, case))
    return tuple(_sentence(kind, found[kind], len(cases)) for kind in _WORDS if kind in found)


def _sentence(kind: str, found: list[tuple[Finding, ProfileCase | RestCase]], n_cases: int) -> str:
    what, remedy = _WORDS[kind]
    finding, case = max(found, key=lambda pair: abs(pair[0].amount))
    amount = f"±{finding.amount:.0%}" if kind == "unsettled" else f"{finding.amount:+.0%}"
    return f"{len(found)} of {n_cases} cases {what} (worst: {describe(case)}, {amount}); {remedy}"
