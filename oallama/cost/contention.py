"""DRAM that the CPU's kernels and the link share: B_cc + B_cg <= B_dram (anchors 2.2)."""

from __future__ import annotations

from oallama.core.types import Contention

GB = 1e9


def contended(of: Contention, cpu_bytes_per_s: float, link_bytes_per_s: float) -> tuple[float, float]:
    """What is left of the two speeds while both read, as factors in 0..1, given what each would read alone.

    Both at full speed get what was measured together. A side that reads less (a CPU with many tokens for each byte)
    costs nobody anything while the sum stays below the measured one; beyond, both give way in the proportion measured,
    until the sum is the measured one again: it is never more. A measurement that found a side faster together than
    alone is taken as no loss of that side.
    """
    cpu_alone, link_alone = of.cpu_alone_gb_per_s * GB, of.link_alone_gb_per_s * GB
    cpu_least = min(of.cpu_with_link_gb_per_s * GB, cpu_alone)
    link_least = min(of.link_with_cpu_gb_per_s * GB, link_alone)
    cpu, link, most = cpu_bytes_per_s, link_bytes_per_s, cpu_least + link_least
    if min(cpu_least, link_least, cpu, link) <= 0 or cpu + link <= most:
        return 1.0, 1.0
    cpu_loss, link_loss = 1 - cpu_least / cpu_alone, 1 - link_least / link_alone  # at most
    to_lose = cpu * cpu_loss + link * link_loss
    give_way = min(1.0, (cpu + link - most) / to_lose) if to_lose > 0 else 0.0
    cpu_factor, link_factor = 1 - cpu_loss * give_way, 1 - link_loss * give_way
    still = cpu * cpu_factor + link * link_factor  # above, where the two alone read faster than when it was measured
    limit = min(1.0, most / still)
    return cpu_factor * limit, link_factor * limit
