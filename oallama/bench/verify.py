"""Checks of a comparison, by the read-back: arms that differ from their specification, equal arms, and disturbances.
Pure.

Published comparisons made all of these mistakes: an arm that was not what its name says, a layer count off by one, two
equal arms.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from oallama.bench.records import ArmResult, ArmSpec, LoadReport, Series
from oallama.bench.schedule import MAX_DRIFT, unsteady
from oallama.core.types import Operator
from oallama.core.units import format_bytes
from oallama.plan.split import device_share
from oallama.report.text import plural
from oallama.run.stock import Cap, bytes_at, expected_on_device

TOLERANCE = 0.01  # of a cap, and of an operator's share on the device
BUSY_IDLE = 0.05  # CPUs' worth of time that an arm may use while it is not its turn


def problems(spec: ArmSpec, report: LoadReport, operators: Sequence[Operator], n_layer: int) -> tuple[str, ...]:
    """Sentences on how the arm differs from its specification or exceeds the cap; empty if valid."""
    return (
        *_backend_problems(spec, report),
        *_placement_problems(spec, report, operators, n_layer),
        *_cap_problems(report, operators, spec.setting.cap),
    )


def configuration(report: LoadReport) -> Hashable:
    """A key that is equal for arms with the same weights, buffers and parameters, beside those that all arms share."""
    return (
        tuple(sorted(report.shares.items())),
        tuple(sorted(report.layouts.items())),
        tuple(sorted(report.buffers.items())),
        (report.n_batch, report.n_ubatch, report.n_threads, report.flash_attn),
        report.facts.get("gpu_info") if report.device_bytes else "",  # of several devices, which
    )


def same_as(reports: Sequence[tuple[str, LoadReport]]) -> dict[str, str]:
    """Arm -> the first earlier arm with the same configuration; without arms that differ from all earlier ones."""
    first: dict[Hashable, str] = {}
    earlier_arm: dict[str, str] = {}
    for name, report in reports:
        earlier = first.setdefault(configuration(report), name)
        if earlier != name:
            earlier_arm[name] = earlier
    return earlier_arm


def findings(arms: Sequence[ArmResult], series: Sequence[Series]) -> list[str]:
    """Warnings, as sentences; empty if there are none."""
    warnings = []
    for measured in series:
        label = measured.test.label
        if bad := unsteady(measured):
            warnings.append(
                f"{label}: the machine's speed changed by more than {MAX_DRIFT:.0%} within {bad} of "
                f"{len(measured.kept)} rounds; run again when it is quiet, or raise -r"
            )
        elif changed := sum(not round_.fault for round_ in measured.discarded):
            warnings.append(f"{label}: {_repeated(changed, 'round')} because the machine's speed changed")
        if faults := [round_.fault for round_ in measured.discarded if round_.fault]:
            warnings.append(f"{label}: {plural(len(faults), 'round')} discarded: {faults[-1]}")
        if again := sum(sum(map(bool, round_.replaced)) for round_ in measured.kept):
            warnings.append(f"{label}: {_repeated(again, 'disturbed sample')}")
        late = [s for round_ in measured.kept for pair in round_.samples for s in pair if s.late_share is not None]
        if late:
            warnings.append(
                f"{label}: emulated device: late {max(s.late_share or 0.0 for s in late):.2%} of the time in the "
                f"worst turn; {sum(s.n_overruns or 0 for s in late)} overruns"
            )
    warnings += [
        f"arm {arm.spec.name} used {arm.idle_cpu_share:.0%} of a CPU while others were measured"
        for arm in arms
        if arm.idle_cpu_share > BUSY_IDLE
    ]
    warnings += [
        f"arms {arm.same_as} and {arm.spec.name} are the same configuration; any difference is noise"
        for arm in arms
        if arm.same_as
    ]
    return warnings


def _repeated(count: int, what: str) -> str:
    return f"{plural(count, what)} {'was' if count == 1 else 'were'} repeated"


def _backend_problems(spec: ArmSpec, report: LoadReport) -> list[str]:
    if spec.stock is not None and report.plugins:
        return [f"it is a stock arm but has {', '.join(report.plugins)} in ggml's registry"]
    if spec.setting.load.device == "none" and report.device_bytes:
        return [f"it should use no device but holds {format_bytes(report.device_bytes)} on one"]
    return []


def _placement_problems(spec: ArmSpec, report: LoadReport, operators: Sequence[Operator], n_layer: int) -> list[str]:
    unseen = [operator.name for operator in operators if operator.name not in report.shares]
    if unseen:
        return [f"could not read back where {_some(unseen)} lies"]
    expected = expected_shares(spec, operators, n_layer)
    wrong = [name for name, share in expected.items() if abs(report.shares[name] - share) > TOLERANCE]
    if not wrong:
        return []
    name = wrong[0]
    return [
        f"{_some(wrong)} is not placed as specified: {expected[name]:.0%} of {name} should be on the device, "
        f"but {report.shares[name]:.0%} is"
    ]


def expected_shares(spec: ArmSpec, operators: Sequence[Operator], n_layer: int) -> dict[str, float]:
    """Operator -> the specified share of its weight on the device."""
    if spec.stock is not None:
        if spec.setting.load.device == "none":
            return {operator.name: 0.0 for operator in operators}
        return {**expected_on_device(operators, n_layer, spec.stock)}
    assert spec.plan is not None
    return {operator.name: device_share(operator, row) for operator, row in spec.plan.pairs(operators)}


def _cap_problems(report: LoadReport, operators: Sequence[Operator], cap: Cap) -> list[str]:
    sentences = []
    if cap.device_bytes is not None and report.device_bytes > cap.device_bytes * (1 + TOLERANCE):
        sentences.append(
            f"it holds {format_bytes(report.device_bytes)} on {report.device} but only "
            f"{format_bytes(cap.device_bytes)} may be used"
        )
    for name, n_bytes in zip(report.device.split(","), cap.of_each, strict=False):
        used = sum(report.buffers.get(f"device {name}", ()))
        if used > n_bytes * (1 + TOLERANCE):
            sentences.append(f"it holds {format_bytes(used)} on {name} but only {format_bytes(n_bytes)} may be used")
    if cap.operator_bytes is not None:
        used = bytes_at(operators, report.shares)
        if used > cap.operator_bytes * (1 + TOLERANCE):
            sentences.append(
                f"it has {format_bytes(used)} of weights on {report.device} but --gpu-weights allows "
                f"{format_bytes(cap.operator_bytes)}"
            )
    return sentences


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
