"""The gate as `oallama run` shows it: a bar while it measures, then its verdict in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oallama.cli.bench_progress import bench_progress
from oallama.cli.options import given
from oallama.cli.output import talk

if TYPE_CHECKING:
    from oallama.placer import Placer
    from oallama.plan.plan import Plan


def gated(
    placer: Placer, n_prompt: int, n_gen: int, n_ctx: int | None, n_ubatch: int | None, refresh: bool = False
) -> Plan:
    """The plan that the gate lets through, with its verdict told in a line."""
    from oallama.bench.gate import sentence
    from oallama.bench.gate_run import gated_plan

    with bench_progress(None) as shown:
        found = gated_plan(placer, n_prompt, n_gen, n_ctx, **given(n_ubatch=n_ubatch), progress=shown, refresh=refresh)
    talk(sentence(found.verdict))
    return found.plan
