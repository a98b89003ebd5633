"""One sliced block among others like it, round after round: the seconds of a round in closed form.

The solver prices some ten thousand cuts for a plan, too many to run each through timeline.py. A block that copies once
a round (ours do, the paper's copy once a mul-mat) has few ways to be held up: by its own work, by the link, or by a
slot that is not free yet. Without contention the longest of these is exactly the cycle of the recursion (the greatest
mean of a max-plus system). With contention it follows where in the round CPU and link overlap; exact where copies keep
to their layer, and tests hold it close to the recursion where they run ahead. Streams that take more from each other
(turns.py) are left to the recursion, which for a device with one queue settles in the second round.
"""

from __future__ import annotations

from oallama.core.types import Contention
from oallama.cost.beside import both_seconds
from oallama.cost.contention import contended
from oallama.cost.timeline import BlockTimes, Prefetch, cycle_seconds

TURNS_ROUNDS = 30


def steady_seconds(block: BlockTimes, prefetch: Prefetch, contention: Contention | None) -> float:
    """What cycle_seconds([block], prefetch, contention) says."""
    copies = [step for step in block.steps if step.copy_s > 0]
    if block.in_turns and (copies or any(step.launch_s for step in block.steps[1:])):
        return cycle_seconds([block], prefetch, contention, TURNS_ROUNDS)
    around_s = block.gap_s + block.send_s + block.join_s
    if not copies and all(step.launch_s == 0 for step in block.steps[1:]):
        launch_s = sum(step.launch_s for step in block.steps[:1])
        if block.in_turns:
            return around_s + both_seconds(block.cpu_s, launch_s, sum(s.gpu_s for s in block.steps), block.beside)
        gpu_s = launch_s + sum(s.gpu_s for s in block.steps[:1]) + sum(s.gpu_s for s in block.steps[1:])
        return around_s + max(block.cpu_s, gpu_s)
    if len(copies) != 1 or block.steps[-1] is not copies[0] or any(step.launch_s for step in block.steps[1:]):
        return cycle_seconds([block], prefetch, contention)
    cpu_share, link_share = 1.0, 1.0
    if contention is not None and block.cpu_s > 0:
        cpu_share, link_share = contended(contention, block.cpu_bytes / block.cpu_s, block.copy_bytes_per_s)
    if prefetch.ahead == "layer" or block.routed:
        return around_s + _in_layer(block, cpu_share, link_share)
    if prefetch.n_slots is None:
        return cycle_seconds([block], prefetch, contention)
    return _ahead(block, around_s, prefetch.n_slots, cpu_share, link_share)


def _in_layer(block: BlockTimes, cpu_share: float, link_share: float) -> float:
    """From the inputs to the join: the copy begins when its launch is done."""
    launched, copy_s, cpu_s = block.steps[0].launch_s, block.steps[-1].copy_s, block.cpu_s
    resident_s = sum(step.gpu_s for step in block.steps[:-1])
    if cpu_s <= launched:
        cpu_end, arrived = cpu_s, launched + copy_s
    else:
        arrived = launched + copy_s / link_share
        cpu_end = cpu_s + copy_s / link_share * (1 - cpu_share)
        if arrived > cpu_end:  # the CPU is done first
            cpu_end = launched + (cpu_s - launched) / cpu_share
            arrived = cpu_end + copy_s - (cpu_end - launched) * link_share
    gpu_end = max(launched + resident_s, arrived) + block.steps[-1].gpu_s
    return max(cpu_end, gpu_end)


def _ahead(block: BlockTimes, around_s: float, n_slots: int, cpu_share: float, link_share: float) -> float:
    """Of a round. The CPU works for cpu_wall_s of it, and beside the link for `overlap_s` of that."""
    copy_s, streamed_s, cpu_s = block.steps[-1].copy_s, block.steps[-1].gpu_s, block.cpu_s
    gpu_end = block.steps[0].launch_s + sum(step.gpu_s for step in block.steps)  # from the inputs, weights being there
    if cpu_share == 1.0 and link_share == 1.0:
        return max(around_s + max(cpu_s, gpu_end), copy_s, (copy_s + streamed_s) / n_slots)
    cpu_lost, link_lost = 1 - cpu_share, 1 - link_share
    # a slot is free from gpu_end on: the link then works beside the rest of the CPU's work, ...
    after = max(0.0, cpu_s - gpu_end) / cpu_share  # as long as that then takes
    if copy_s <= after * link_share:
        overlap_s = copy_s / link_share
    else:
        left_s = copy_s - after * link_share - around_s  # ... then alone until the next inputs are there, ...
        before = min(max(0.0, left_s) / link_share, min(cpu_s, gpu_end) / cpu_share)  # ... then beside it again
        overlap_s = after + before
    cpu_wall_s = cpu_s + overlap_s * cpu_lost
    round_s = around_s + max(cpu_wall_s, gpu_end)
    if copy_s + overlap_s * link_lost <= round_s:
        return max(round_s, (copy_s + overlap_s * link_lost + streamed_s) / n_slots)
    cpu_wall_s = cpu_s / cpu_share  # the link is never idle
    copying_s = copy_s + cpu_wall_s * link_lost
    return max(around_s + max(cpu_wall_s, gpu_end), copying_s, (copying_s + streamed_s) / n_slots)
