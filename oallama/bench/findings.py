"""What went on while arms were measured that the reader of the numbers should know. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.bench.records import ArmResult, Sample, Series
from oallama.bench.schedule import MAX_DRIFT, unsteady
from oallama.bench.stats import trend
from oallama.core.units import format_seconds

BUSY_IDLE = 0.05  # CPUs' worth of time that an arm may use while it is not its turn
TREND_P, TREND_CHANGE = 0.01, 0.05


def worst(samples: Sequence[Sample], name: str) -> str:
    return format_seconds(max(getattr(sample, name) or 0.0 for sample in samples))


def findings(arms: Sequence[ArmResult], series: Sequence[Series]) -> list[str]:
    """Sentences; empty where all went well."""
    found = []
    for made in series:
        label = made.test.label
        if bad := unsteady(made):
            found.append(
                f"{label}: the machine changed by more than {MAX_DRIFT:.0%} within {bad} of {len(made.kept)} blocks "
                "that are compared; measure again when it is quiet, or raise -r"
            )
        elif changed := sum(not block.fault for block in made.discarded):
            found.append(f"{label}: {changed} blocks were measured again because the machine changed")
        if faults := [block.fault for block in made.discarded if block.fault]:
            found.append(f"{label}: {len(faults)} blocks were discarded: {faults[-1]}")
        if made.kept:
            slow = trend([sample.seconds for sample in made.samples(0)])
            if slow.p_value < TREND_P and abs(slow.change) > TREND_CHANGE:
                how = "slower" if slow.change > 0 else "faster"
                found.append(
                    f"{label}: the machine got {abs(slow.change):.0%} {how} meanwhile; ratios hold, rates do not"
                )
        late = [s for block in made.kept for pair in block.samples for s in pair if s.late_share is not None]
        if late:
            found.append(
                f"{label}: emulated device: late by {worst(late, 'late_median_s')} in the median and by "
                f"{worst(late, 'late_p99_s')} at the 99th percentile of its copies and graphs in the worst turn, "
                f"{max(s.late_share or 0.0 for s in late):.2%} of the time; {sum(s.n_overruns or 0 for s in late)} "
                "overruns"
            )
    found += [
        f"arm {arm.spec.name} used {arm.idle_cpu_share:.0%} of a CPU while others were measured"
        for arm in arms
        if arm.idle_cpu_share > BUSY_IDLE
    ]
    found += [
        f"arms {arm.same_as} and {arm.spec.name} turned out to be the same configuration; what they differ by is noise"
        for arm in arms
        if arm.same_as
    ]
    return found
