"""A store that grows, seen from one model: what it still lacks, what of it the model needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from oallama.core.types import CPU_DEVICE, Profile, ProfileCase, RestCase, RestShape, SkippedCase
from oallama.profile.cases import Case, Wanted, key_of, required, too_slow
from oallama.profile.quality import sample_warnings
from oallama.profile.store import VERSION, profile_from_json, profile_to_json

NO_DEVICE = "none"

_T = TypeVar("_T", ProfileCase, RestCase, SkippedCase)


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
    for fragment in fragments:
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
        warnings=tuple(dict.fromkeys(whole.warnings)),
    )


def _last_of_each(records: tuple[_T, ...]) -> tuple[_T, ...]:
    return tuple({_identity(record): record for record in records}.values())


def _identity(record: ProfileCase | RestCase | SkippedCase) -> object:
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


def missing_rest(profile: Profile, want: Wanted, devices: Sequence[str]) -> list[tuple[str, int, int]]:
    """(device, n_tokens, n_kv) of the rest cases that are not measured."""
    known = {rest_key(rest.device, rest.n_tokens, rest.n_kv, rest.shape) for rest in profile.rest}
    return [
        (device, n_tokens, n_kv)
        for device in devices
        for n_tokens, n_kv in want.rest
        if rest_key(device, n_tokens, n_kv, want.rest_shape) not in known
    ]


def missing_link(profile: Profile) -> bool:
    """Whether the link to the device is still to be measured."""
    return not (profile.link and profile.boundary and profile.contention and profile.launch_s > 0)


def is_complete(profile: Profile, want: Wanted, has_device: bool) -> bool:
    """Whether the profile can serve the model as it is.

    A stored profile has every layout of a case or none (an interrupted measurement stays in the journal), so that the
    plain layout tells for all of them.
    """
    if has_device and (profile.device == CPU_DEVICE or missing_link(profile)):
        return False
    device = profile.device if has_device else None
    places = [CPU_DEVICE] + ([device] if device else [])
    return not missing_cases(profile, required(want, device)) and not missing_rest(profile, want, places)


def select(profile: Profile, want: Wanted) -> Profile:
    """The part of a store that the model needs, with the warnings that concern it, in a fixed order."""
    signatures = {(s.op, s.type, s.shape, s.n_expert_used, size) for s, _, size in want.signatures}

    def concerns(case: ProfileCase | SkippedCase) -> bool:
        return (case.op, case.type, case.shape, case.n_expert_used, case.working_set_bytes) in signatures

    cases = tuple(sorted(filter(concerns, profile.cases), key=_case_order))
    rest = tuple(
        sorted(
            (rest for rest in profile.rest if rest.shape == want.rest_shape),
            key=lambda rest: (rest.device, rest.n_tokens, rest.n_kv),
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


def slow_reason(profile: Profile, case: Case) -> str | None:
    """Why a case need not be measured, from what the profile already knows (see cases.too_slow)."""
    return too_slow(case, {key_of(known): known.seconds for known in profile.cases})
