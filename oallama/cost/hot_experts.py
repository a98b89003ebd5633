"""Durations of the tasks of a block of which the device has some experts whole, the most used ones."""

from __future__ import annotations

from dataclasses import replace

from oallama.cost.block_cost import BlockCost
from oallama.cost.blocks import F32
from oallama.cost.experts import cold_experts_read, experts_alike, miss_odds
from oallama.cost.slice_rates import SliceRates, both_sides
from oallama.cost.streams import BlockTimes, Step, alone_seconds


def hot_times(of: BlockCost, rates: SliceRates, n_hot: int, n_tokens: int, n_outputs: int = 1) -> BlockTimes:
    """The tasks of a block of which the device has so many experts whole, without the gap before it.

    Of each token the device computes as many rows as may be hits, whether they are or not. The CPU computes misses, one
    row each: of one token it reads their experts; of a prompt it reads those that are missed at all, or multiplies,
    whichever takes longer. How many miss differs from token to token, and the later side decides, which takes longer
    than the average number of misses would.
    """
    rows = n_outputs if of.outputs_only else n_tokens
    if rows <= 0:
        return BlockTimes(0.0, 0.0, 0.0, (), 0.0)
    use, link, n_expert = of.use or experts_alike(of.n_expert), rates.transfer, of.n_expert
    block, own = of.block, of.hot(n_hot)
    n_used = of.gemms[0].mul_mat.n_expert_used
    n_rows, miss = min(n_used, n_hot), 1.0 - use.coverage(n_hot, n_tokens)
    returned = block.returned + block.returned_each * block.extent  # of all experts of a token
    n_up, n_down = own.upload_bytes(own.extent, rows), own.download_bytes(own.extent, rows)
    joined, n_biases = n_down // F32 + miss * returned * rows, block.biases * n_hot * F32
    if of.around.resident:
        # input, experts and routing weights come down with one wait; what comes together here goes up, and is launched
        n_up = n_rows * rows * F32 * (2 if own.n_summed(rows) > 1 else 1)
        crossing = rates.crossing(n_up + n_biases, n_down, joined, 1)
        fetch_s = link.copy_out.seconds((block.sent + n_used) * rows * F32)
        lift_s = link.copy_in.seconds(returned // block.summed * rows * F32)
        crossing = replace(
            crossing, send_s=crossing.send_s + fetch_s, join_s=crossing.join_s + lift_s + 2 * link.split_s
        )
    else:
        crossing = rates.crossing(n_up + n_biases, n_down, joined, 1)
    behind_s = crossing.staged_out_s
    gpu_s = of.gemms.gpu_s(n_rows / n_used, rows) + behind_s
    step = Step(0.0, gpu_s, crossing.launch_s + crossing.staged_in_s, crossing.staged_in_s, behind_s)
    lines = of.gemms.at(rows)

    def made(cpu_s: float, more_s: float = 0.0) -> BlockTimes:
        late = replace(crossing, join_s=crossing.join_s + more_s)
        return both_sides(of, rates, late, (step,), cpu_s, rows)

    if rows > 1:
        expert_s = of.gemms.at(1).cpu_rest_s / n_used
        read_s = expert_s * cold_experts_read(n_expert - n_hot, miss * n_used, rows)
        return made(lines.cpu_alpha_s + max(miss * lines.cpu_rest_s, read_s) if miss > 0 else 0.0)
    seconds = [0.0, *(lines.cpu_alpha_s + n / n_used * lines.cpu_rest_s for n in range(1, n_used + 1))]
    odds = miss_odds(n_used, 1.0 - miss)
    average = made(sum(p * s for p, s in zip(odds, seconds, strict=True)))
    expected_s = sum(p * alone_seconds(made(s)) for p, s in zip(odds, seconds, strict=True))
    return made(average.cpu_s, max(0.0, expected_s - alone_seconds(average)))
