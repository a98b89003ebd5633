"""A store that grows, seen from one model: what it still lacks, what of it the model needs. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from oallama.core.types import CPU_DEVICE, Profile, ProfileCase, RestCase, RestShape, Sharing, SkippedCase, Worker
from oallama.profile.cases import Case, key_of
from oallama.profile.quality import sample_warnings
from oallama.profile.store import VERSION, profile_from_json, profile_to_json
from oallama.profile.wanted import Wanted, required, rest_skipped, rest_ways, sharing_tokens

LINKS = ("h2d_pinned", "h2d_pageable", "d2h", "issue_pinned", "issue_pageable")
PARTS = ("boundary", "contention", "copy_wait", "launch_issue_s")
CPU_PAIR = "cpu-pair"
PAIRS: tuple[tuple[Worker, Worker], ...] = (("cpu", "device"), ("cpu", "link"), ("device", "link"))

_T = TypeVar("_T", ProfileCase, RestCase, SkippedCase, Sharing)


def empty(fingerprint: dict[str, Any]) -> Profile:
    """A profile in which nothing is measured yet."""
    return Profile(
        version=VERSION,
        fingerprint=fingerprint,
        device=CPU_DEVICE,
        cases=(),
        rest=(),
        link={},
        boundary=None,
        contention=None,
        launch_s=0.0,
        warnings=(),
    )


def merged(profile: Profile, fragments: Iterable[dict[str, Any]]) -> Profile:
    """The profile with fragments of the same JSON format added: lists grow, objects are updated, values replaced.

    Of two cases with one key the later one stays. Raises ProfileError where a fragment does not fit the format.
    """
    record = profile_to_json(profile)
    for fragment in json.loads(json.dumps(list(fragments))):  # tuples become lists
        for name, value in fragment.items():
            if isinstance(record.get(name), list) and isinstance(value, list):
                record[name] += value
            elif isinstance(record.get(name), dict) and isinstance(value, dict) and name in ("link", "fingerprint"):
                record[name].update(value)
            else:
                record[name] = value
    whole = profile_from_json(record)
    return replace(
        whole,
        cases=_last_of_each(whole.cases),
        rest=_last_of_each(whole.rest),
        skipped=_last_of_each(whole.skipped),
        sharing=_last_of_each(whole.sharing),
        warnings=tuple(dict.fromkeys(whole.warnings)),
    )


def _last_of_each(records: tuple[_T, ...]) -> tuple[_T, ...]:
    return tuple({_identity(record): record for record in records}.values())


def _identity(record: ProfileCase | RestCase | SkippedCase | Sharing) -> object:
    if isinstance(record, Sharing):
        return (record.first, record.second, record.n_tokens)
    if isinstance(record, RestCase):
        return rest_key(record.device, record.n_tokens, record.n_kv, record.shape)
    return key_of(record)


def rest_key(device: str, n_tokens: int, n_kv: int, shape: RestShape | None) -> object:
    """What identifies a rest case in a store."""
    return (device, n_tokens, n_kv, shape)


def missing_cases(profile: Profile, candidates: Sequence[Case]) -> list[Case]:
    """The candidates that are neither measured nor left out on purpose."""
    known = {key_of(case) for case in profile.cases} | {key_of(case) for case in profile.skipped}
    return [case for case in candidates if case.key not in known]


def missing_rest(profile: Profile, want: Wanted, device: str) -> list[tuple[int, int, RestShape]]:
    """(n_tokens, n_kv, shape) of the device's rest cases that are neither measured nor left out on purpose."""
    known = {rest_key(rest.device, rest.n_tokens, rest.n_kv, rest.shape) for rest in profile.rest}
    left_out = {key_of(case) for case in profile.skipped}
    return [
        (n_tokens, n_kv, shape)
        for n_tokens, n_kv in want.rest
        for shape in rest_ways(want.rest_shape)
        if rest_key(device, n_tokens, n_kv, shape) not in known
        and key_of(rest_skipped(device, n_tokens, n_kv, shape, "")) not in left_out
    ]


def missing_link(profile: Profile) -> list[str]:
    """Parts of the link to the device that are still to be measured: names of `link`, PARTS and `launch_s`. The two
    halves of a pair of CPU backends share their memory: no boundary, no contention, no sharing."""
    missing = [name for name in LINKS if name not in profile.link]
    if not profile.launch_s > 0:
        missing.append("launch_s")
    if profile.device != CPU_PAIR:
        missing += [name for name in PARTS if getattr(profile, name) is None]
    return missing


def missing_sharing(profile: Profile, want: Wanted) -> list[tuple[Worker, Worker, int]]:
    """(first, second, n_tokens) of PAIRS that are still to be measured together."""
    if not has_device(profile) or profile.device == CPU_PAIR:
        return []
    known = {_identity(sharing) for sharing in profile.sharing}
    return [(*pair, n_tokens) for n_tokens in sharing_tokens(want) for pair in PAIRS if (*pair, n_tokens) not in known]


def _lacks_sharing(profile: Profile, want: Wanted) -> bool:
    """Whether something of it could be measured: at a batch size at which the device was timed."""
    plain = {(signature.type, signature.shape) for signature, _, _ in want.mul_mats if signature.shape[2] == 1}
    timed = {
        case.n_tokens for case in profile.cases if case.device == profile.device and (case.type, case.shape) in plain
    }
    return any(n_tokens in timed for *_, n_tokens in missing_sharing(profile, want))


def has_device(profile: Profile) -> bool:
    """Whether the profile is of a device beside the CPU."""
    return profile.device != CPU_DEVICE


def is_complete(profile: Profile, want: Wanted) -> bool:
    """Whether the profile can serve the model as it is.

    A stored profile has every layout of a case or none (an interrupted measurement stays in the journal), so that the
    plain layout tells for all of them.
    """
    if "device_name" not in profile.fingerprint:  # nothing was ever measured
        return False
    device = profile.device if has_device(profile) else None
    if device and (missing_link(profile) or _lacks_sharing(profile, want)):
        return False
    places = [CPU_DEVICE] + ([device] if device else [])
    return not missing_cases(profile, required(want, device)) and not any(
        missing_rest(profile, want, place) for place in places
    )


def select(profile: Profile, want: Wanted) -> Profile:
    """The part of a store that the model needs, with the warnings that concern it, in a fixed order.

    Of a CPU layout that has crashed nothing is passed on, or a plan might use it.
    """
    mul_mats = {(s.op, s.type, s.shape, s.n_expert_used, n, size) for s, n, size in want.mul_mats}

    rest_cases = {
        rest_key(device, *at, shape)
        for device in (CPU_DEVICE, profile.device)
        for at in want.rest
        for shape in rest_ways(want.rest_shape)
    }

    def concerns(case: ProfileCase | SkippedCase) -> bool:
        what = (case.op, case.type, case.shape, case.n_expert_used, case.n_tokens, case.working_set_bytes)
        return what in mul_mats

    broken = profile.fingerprint.get("broken_layouts") or ()
    cases = tuple(sorted((c for c in profile.cases if concerns(c) and c.layout not in broken), key=_case_order))
    rest = tuple(
        sorted(
            (rest for rest in profile.rest if _identity(rest) in rest_cases),
            key=lambda rest: (rest.device, rest.n_tokens, rest.n_kv, rest.shape is not None and rest.shape.flash_attn),
        )
    )
    return replace(
        profile,
        cases=cases,
        rest=rest,
        skipped=tuple(sorted(filter(concerns, profile.skipped), key=_case_order)),
        warnings=profile.warnings + sample_warnings([*cases, *rest]),
    )


def _case_order(case: ProfileCase | SkippedCase) -> tuple[Any, ...]:
    return (case.device, case.layout, case.op, case.type, case.shape, case.n_expert_used, case.n_tokens)
