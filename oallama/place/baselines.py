"""Was a plan worth it? What stock llama.cpp's --fit and the CPU alone are predicted to take for the same workload, and
what no placement takes less than.

Pure but for the problem's probe, which is asked what the policies asked it before.
"""

from __future__ import annotations

from dataclasses import replace

from oallama.core.affinity import Baseline
from oallama.core.types import CPU_DEVICE, MemoryLedger, Predicted, Workload
from oallama.place.bound import physical_bound
from oallama.place.budget import usable
from oallama.place.placed import cpu
from oallama.place.policies.stock import priced_stock_fit, stock_memory
from oallama.place.price import price
from oallama.place.problem import Problem, capacity_of, costs_of

STOCK, CPU_ALONE, BOUND = "stock --fit", "all CPU", "physical bound"


def baselines(
    problem: Problem, load: Workload, held: MemoryLedger, alone: Predicted | None = None
) -> tuple[Baseline, ...]:
    """Times that a plan is held against. No stock where llama.cpp itself has no device.

    problem, load: with stock's way of attention and its micro-batch, so that all plans of a model, a device and a
    workload are held against the same times. held: by the plan; where that leaves the device alone the bound may use
    all of it. alone: times of the CPU; None: by this problem.
    """
    alone = alone or _cpu_alone(problem, load)
    if problem.profile.device != CPU_DEVICE and not held.limit:
        held = replace(held, limit=usable(capacity_of(problem, load), problem.vram_fill, problem.runtime_bytes))
    others = (Baseline(CPU_ALONE, alone), Baseline(BOUND, physical_bound(problem, load, held)))
    if problem.profile.device == CPU_DEVICE or problem.slices_only:
        return others
    memory = stock_memory(problem, load)
    empty = memory.room(problem.graph.n_layer) < 0  # its buffers do not fit
    return (Baseline(STOCK, alone if empty else priced_stock_fit(problem, load, memory)[2]), *others)


def _cpu_alone(problem: Problem, load: Workload) -> Predicted:
    costs = costs_of(problem, load, "mixed", llama_uses_device=False)
    return price(problem, load, cpu(costs))
