"""A profile that grows model by model: adding measurements, listing those that a model lacks, and selecting those that
it needs. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from oallama.core.codec import to_json
from oallama.core.profile import (
    Case,
    Contention,
    NonMatmulCase,
    NonMatmulShape,
    Profile,
    ProfileCase,
    SkippedCase,
    Worker,
)
from oallama.core.types import CPU_DEVICE
from oallama.profile.busy import doubt
from oallama.profile.store import VERSION, profile_from_json
from oallama.profile.timing import Finding, assess
from oallama.profile.wanted import (
    Wanted,
    case_label,
    contention_tokens,
    non_matmul_label,
    non_matmul_shapes,
    non_matmul_skipped,
    required,
)

LINKS = ("h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h", "issue_pinned", "issue_pageable")
PARTS = ("boundary", "copy_wait", "launch_issue_s")
PAIRS: tuple[tuple[Worker, Worker], ...] = (("cpu", "device"), ("cpu", "link"), ("device", "link"))

_T = TypeVar("_T", ProfileCase, NonMatmulCase, SkippedCase, Contention)


def empty(fingerprint: dict[str, Any]) -> Profile:
    """An empty profile."""
    return Profile(
        VERSION, fingerprint, CPU_DEVICE, cases=(), rest=(), link={}, boundary=None, launch_s=0.0, warnings=()
    )


def merged(profile: Profile, fragments: Iterable[dict[str, Any]]) -> Profile:
    """The profile with fragments in its JSON format added: lists are extended, objects updated, values replaced.

    A later measurement of the same case replaces the earlier one. Raises ProfileError if a fragment does not fit the
    format.
    """
    document = to_json(profile)
    for fragment in json.loads(json.dumps(list(fragments))):  # tuples become lists
        for name, value in fragment.items():
            known = document.get(name)
            if isinstance(known, list) and isinstance(value, list):
                known += value
            elif isinstance(known, dict) and isinstance(value, dict) and name in ("link", "fingerprint"):
                known.update(value)
            else:
                document[name] = value
    whole = profile_from_json(document)
    return replace(
        whole,
        cases=_last_of_each(whole.cases),
        rest=_last_of_each(whole.rest),
        skipped=_last_of_each(whole.skipped),
        sharing=_last_of_each(whole.sharing),
        warnings=tuple(dict.fromkeys(whole.warnings)),
    )


def _last_of_each(records: tuple[_T, ...]) -> tuple[_T, ...]:
    return tuple({record.key: record for record in records}.values())


#
# what is missing
#


def missing_cases(profile: Profile, candidates: Sequence[Case]) -> list[Case]:
    """The candidates that are neither measured nor skipped."""
    known = {case.key for case in (*profile.cases, *profile.skipped)}
    return [case for case in candidates if case not in known]


def missing_non_matmul(profile: Profile, want: Wanted, device: str) -> list[tuple[int, int, NonMatmulShape]]:
    """(n_tokens, n_kv, shape) of the device's non-matmul cases that are neither measured nor left out on purpose."""
    known = {rest.key for rest in profile.rest}
    left_out = {case.key for case in profile.skipped}
    return [
        (*at, shape)
        for at in want.rest
        for shape in non_matmul_shapes(want.non_matmul_shape)
        if (device, *at, shape) not in known and non_matmul_skipped(device, *at, shape, "").key not in left_out
    ]


def missing_link(profile: Profile) -> list[str]:
    """Parts of the link to the device that are still to be measured: names of `link`, PARTS and `launch_s`."""
    missing = [name for name in LINKS if name not in profile.link]
    if not profile.launch_s > 0:
        missing.append("launch_s")
    return missing + [name for name in PARTS if getattr(profile, name) is None]


def missing_contention(profile: Profile, want: Wanted) -> list[tuple[Worker, Worker, int]]:
    """(first, second, n_tokens) of PAIRS that are still to be measured together."""
    if not has_device(profile):
        return []
    known = {contention.key for contention in profile.sharing}
    return [
        (*pair, n_tokens) for n_tokens in contention_tokens(want) for pair in PAIRS if (*pair, n_tokens) not in known
    ]


def _lacks_contention(profile: Profile, want: Wanted) -> bool:
    """Whether it can be measured: at a batch size with timings of every mul-mat."""
    plain = {mul_mat for mul_mat, _, _ in want.mul_mats if mul_mat.shape[2] == 1}
    timed = {(case.device, case.n_tokens) for case in profile.cases if case.mul_mat in plain}
    devices = {"cpu": CPU_DEVICE, "device": profile.device}
    return any(
        all((devices[worker], n_tokens) in timed for worker in pair if worker in devices)
        for *pair, n_tokens in missing_contention(profile, want)
    )


def has_device(profile: Profile) -> bool:
    """Whether the profile includes a device."""
    return profile.device != CPU_DEVICE


def is_complete(profile: Profile, want: Wanted) -> bool:
    """Whether the profile has everything for the model.

    The plain layout of a case is measured last (in_order), so once it is present, all layouts are.
    """
    if "device_name" not in profile.fingerprint:  # nothing was ever measured
        return False
    device = profile.device if has_device(profile) else None
    if device and (missing_link(profile) or _lacks_contention(profile, want)):
        return False
    places = [CPU_DEVICE, *([device] if device else [])]
    return not missing_cases(profile, required(want, device)) and not any(
        missing_non_matmul(profile, want, place) for place in places
    )


#
# what one model needs
#


def select(profile: Profile, want: Wanted) -> Profile:
    """The part of a profile that the model needs, with the warnings that concern it, in a fixed order.

    Leaves out CPU layouts that have crashed, so that no plan uses them.
    """
    wanted = set(want.mul_mats)
    shapes = non_matmul_shapes(want.non_matmul_shape)

    def concerns(case: ProfileCase | SkippedCase) -> bool:
        return (case.mul_mat, case.n_tokens, case.working_set_bytes) in wanted

    cases = tuple(
        sorted((c for c in profile.cases if concerns(c) and c.layout not in profile.broken_layouts), key=_case_order)
    )
    rest = tuple(
        sorted(
            (
                rest
                for rest in profile.rest
                if rest.device in (CPU_DEVICE, profile.device)
                and (rest.n_tokens, rest.n_kv) in want.rest
                and rest.shape in shapes
            ),
            key=lambda rest: (rest.device, rest.n_tokens, rest.n_kv, rest.shape.flash_attn),
        )
    )
    return replace(
        profile,
        cases=cases,
        rest=rest,
        skipped=tuple(sorted(filter(concerns, profile.skipped), key=_case_order)),
        warnings=(*profile.warnings, *sample_warnings([*cases, *rest]), *filter(None, [doubt(profile)])),
    )


def _case_order(case: ProfileCase | SkippedCase) -> tuple[Any, ...]:
    m = case.mul_mat
    return (case.device, case.layout, m.op, m.type, m.shape, m.n_expert_used, case.n_tokens)


_DOUBTS = {
    "unsettled": ("did not settle in time", "close other programs and measure again with --refresh"),
    "drift": ("drifted during measurement", "let the machine cool down or plug it in, then use --refresh"),
    "outliers": ("had far outliers", "close other programs and measure again with --refresh"),
}
"""Kind of finding -> the fault of the cases, and the remedy."""


def sample_warnings(cases: Sequence[ProfileCase | NonMatmulCase]) -> tuple[str, ...]:
    """A sentence for each kind of fault in the samples, with the number of cases and the worst case."""
    findings: dict[str, list[tuple[Finding, ProfileCase | NonMatmulCase]]] = {}
    for case in cases:
        for finding in assess(case.samples):
            findings.setdefault(finding.kind, []).append((finding, case))
    sentences = []
    for kind, (what, remedy) in _DOUBTS.items():
        if kind in findings:
            finding, case = max(findings[kind], key=lambda pair: abs(pair[0].amount))
            label = non_matmul_label(*case.key) if isinstance(case, NonMatmulCase) else case_label(case)
            amount = f"±{finding.amount:.0%}" if kind == "unsettled" else f"{finding.amount:+.0%}"
            sentences.append(f"{len(findings[kind])} of {len(cases)} cases {what} (worst: {label}, {amount}); {remedy}")
    return tuple(sentences)
