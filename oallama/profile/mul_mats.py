"""Measures the mul-mats that a profile lacks, in every layout and on the device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial

from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT
from oallama.profile.cases import PLAIN_LAYOUT, Case, CaseKey, Signature, bytes_read, case_of, flops, key_of, kind
from oallama.profile.merge import has_device, missing_cases
from oallama.profile.session import Fragment, Session, Task, TimerLike
from oallama.profile.timing import Timing
from oallama.profile.wanted import COMPUTE_BOUND_TOKENS, PASS_FLOPS, cases_at, in_order, too_slow

GUESSED_FLOPS = 2e11  # a second, for the progress bar
LONG_PASS_FLOPS = PASS_FLOPS / 2
LONG_PASS_CAP = 2.0  # time cap of cases with long passes, in caps of the others
CHANGED = 0.15  # how much the first case may differ when it is measured again


@dataclass(slots=True)
class MulMats:
    """Tasks for the mul-mats of a session. `known` grows as they run: seconds of what is measured."""

    session: Session
    broken_layouts: frozenset[str] = frozenset()  # not to be touched
    known: dict[CaseKey, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known.update((key_of(case), case.seconds) for case in self.session.profile.cases)

    def tasks(self) -> list[Task]:
        """One for each case that is missing, cheap ones first; the very first one is measured again at the end."""
        cases = in_order(missing_cases(self.session.profile, self._candidates()))
        tasks = [self._task(case) for case in cases]
        anchor = self._anchor(cases)
        if cases and anchor is not None:
            tasks.append(self.session.task("the first case again", 1, CPU_DEVICE, partial(self._check_anchor, anchor)))
        return tasks

    def layouts(self) -> list[str]:
        """CPU layouts that may be used."""
        return [layout for layout in self.session.bridge.cpu_layouts() if layout not in self.broken_layouts]

    def _candidates(self) -> list[Case]:
        session = self.session
        cases = [
            case
            for layout in self.layouts()
            for case in cases_at(session.want, CPU_DEVICE, layout)
            if layout == PLAIN_LAYOUT or self._layout_supports(case)
        ]
        if has_device(session.profile):
            cases += cases_at(session.want, session.profile.device, DEVICE_LAYOUT)
        return cases

    def _layout_supports(self, case: Case) -> bool:
        signature = case.signature
        return self.session.bridge.layout_supports(case.layout, signature.type, *signature.shape, _routed(signature))

    def _task(self, case: Case) -> Task:
        weight = self.session.policy.time_cap_s + 6 * flops(case.signature, case.n_tokens) / GUESSED_FLOPS
        run = partial(self._measure, case)
        return Task(_label(case), weight, case.device, case.layout, run, kind(case.signature))

    def _measure(self, case: Case) -> Fragment:
        """Time one case, or say why not."""
        from ggml_bridge import OutOfMemory, Unsupported

        reason = too_slow(case, self.known)
        if reason is None:
            try:
                timing = self._timed(case)
            except (OutOfMemory, Unsupported) as error:
                reason = str(error)
            else:
                self.known[case.key] = timing.seconds
                return {"cases": [asdict(case.measured(timing.samples, timing.seconds))]}
        return {"skipped": [asdict(case.skipped(reason))]}

    def _timed(self, case: Case) -> Timing:
        from ggml_bridge import OutOfMemory

        policy = self.session.policy
        mul_mats_in_pass = case.working_set_bytes / bytes_read(case.signature, case.n_tokens)
        if mul_mats_in_pass * flops(case.signature, case.n_tokens) > LONG_PASS_FLOPS:
            # making the timer ran two passes, which is warm enough
            policy = replace(
                policy,
                time_cap_s=LONG_PASS_CAP * policy.time_cap_s,
                min_repeats=min(3, policy.min_repeats),
                warmup_runs=0,
            )
        try:
            return self.session.timed(self._timer(case, case.working_set_bytes), policy)
        except OutOfMemory:
            return self.session.timed(self._timer(case, 0), policy)  # a single copy of the weight

    def _timer(self, case: Case, working_set_bytes: int) -> TimerLike:
        signature = case.signature
        k, n, e = signature.shape
        return self.session.bridge.mul_mat(
            self.session.ggml_name(case.device),
            None if case.layout == DEVICE_LAYOUT else case.layout,
            signature.type,
            k,
            n,
            e,
            _routed(signature),
            case.n_tokens,
            working_set_bytes,
            self.session.n_threads,
        )

    def _anchor(self, cases: list[Case]) -> Case | None:
        """The CPU case that was, or will be, measured first."""
        for stored in self.session.profile.cases:
            if stored.device == CPU_DEVICE and stored.n_tokens < COMPUTE_BOUND_TOKENS:
                return None if stored.layout in self.broken_layouts else case_of(stored)
        return next((case for case in cases if case.device == CPU_DEVICE), None)

    def _check_anchor(self, case: Case) -> Fragment:
        """Measure a case once more: is the machine as fast as it was then?"""
        before = self.known.get(case.key)
        if before is None:  # it was left out
            return {}
        change = self._timed(case).seconds / before - 1
        if abs(change) <= CHANGED:
            return {}
        how = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}"
        return {
            "warnings": [
                f"the machine was {how} at the end of the profile than at its beginning ({_label(case)}); "
                "close other programs and use --refresh to measure all of it again"
            ]
        }


def _routed(signature: Signature) -> int:
    """n_expert_used as ggml_bridge takes it: 0 for MUL_MAT."""
    return signature.n_expert_used if signature.op == "MUL_MAT_ID" else 0


def _label(case: Case) -> str:
    shape = "x".join(map(str, case.signature.shape))
    layout = "" if case.layout in (DEVICE_LAYOUT, case.device) else f" {case.layout}"
    return f"{case.device}{layout} {case.signature.type} {shape} at {case.n_tokens} tokens"
