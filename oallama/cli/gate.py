"""The gate as `oallama run` shows it: a bar while it measures, then its verdict in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oallama.cli.bench_progress import bench_progress
from oallama.cli.output import talk

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.placer import Placer
    from oallama.plan.plan import Plan


def gated(placer: Placer, load: Workload, refresh: bool = False) -> Plan:
    """The plan that the gate lets through, with its verdict told in a line."""
    from oallama.gate.run import gated_plan
    from oallama.gate.verdict import sentence

    with bench_progress(None) as shown:
        found = gated_plan(placer, load, progress=shown, refresh=refresh)
    talk(sentence(found.verdict))
    return found.plan
