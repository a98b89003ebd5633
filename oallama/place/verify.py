"""Propose a placement, verify it by what it really takes, and propose again with what was learned. Pure but for the
problem's probe.

What llama.cpp takes beside operators is only known from a dry load. So a placement is proposed again, with less room
while it does not fit, with more where it leaves some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from oallama.core.types import Phase, Workload
from oallama.core.units import format_bytes, format_seconds
from oallama.cost.blocks import residents, split_blocks
from oallama.cost.rates import transfer_rates
from oallama.cost.whole import Costs
from oallama.place.memory import CorrectedRoom, DeviceMemory, ledger
from oallama.place.placement import Decision, Placed, cpu
from oallama.place.price import price
from oallama.place.problem import Problem, costs_of, measured, own_bytes, with_layouts

ROUNDS = 6
"""Most dry loads of a search, each of which costs seconds for a large model."""


def verified(
    problem: Problem,
    policy: str,
    workload: Workload,
    costs: Costs,
    placed: Placed,
    notes: Sequence[str] = (),
    capacity: int | None = None,
) -> Decision:
    """A placement with the ledger of a dry load: `spare` may be negative. costs: over the phase that was asked for.
    notes: on what was changed before it was searched for. capacity: bytes of the device; None: as that load found it.
    """
    placed = with_layouts(problem, costs, placed)
    memory = measured(problem, workload, placed, capacity)
    predicted = price(problem, workload, placed)
    notes = (*notes, *placed.notes, *_streaming_notes(problem, placed), *_resident_notes(problem, placed))
    return Decision(policy, workload, costs, placed, memory, predicted, notes)


def on_cpu(problem: Problem, workload: Workload, phase: Phase) -> Decision:
    """Everything on the CPU. `costs` are those that a placement would be made from."""
    alone = costs_of(problem, workload, phase, llama_uses_device=False)
    placed = cpu(alone)
    taken = problem.probe(workload, placed)
    memory = ledger(0, problem.vram_fill, 0, taken.weights_host, 0, 0)
    predicted = price(problem, workload, placed)
    costs = costs_of(problem, workload, phase)
    return Decision("cpu", workload, costs, with_layouts(problem, costs, placed), memory, predicted, ())


def nothing_placed(
    problem: Problem, policy: str, workload: Workload, phase: Phase, capacity: int, reason: str
) -> Decision:
    """CPU-only decision that says why the device is unused, with the device's ledger."""
    decision = on_cpu(problem, workload, phase)
    empty = ledger(capacity, problem.vram_fill, 0, decision.memory.weights_host, 0, 0)
    note = f"nothing is placed on {problem.profile.device}: {reason}"
    return replace(decision, policy=policy, memory=empty, notes=(note,))


def verified_in_rounds(
    problem: Problem,
    policy: str,
    workload: Workload,
    costs: Costs,
    memory: DeviceMemory,
    propose: Callable[[DeviceMemory], Placed | None],
    notes: Sequence[str] = (),
    key: Callable[[Decision], float] = lambda decision: decision.placed.seconds,
) -> tuple[Decision | None, Decision | None]:
    """(the one with the least key of those that fit, the last that was tried).

    memory: as it is before any operator. propose: for what the device has room for; None: it had better stay empty,
    which ends the rounds, as does a last try that another would not better.
    """
    room, best = CorrectedRoom(memory), None
    for _ in range(ROUNDS):
        placed = propose(room.memory)
        if placed is None:
            return best, None
        last = verified(problem, policy, workload, costs, placed, notes, memory.capacity)
        if last.memory.spare >= 0 and (best is None or key(last) < key(best)):
            best = last
        if not room.learn(last.placed.first_device_layer, own_bytes(problem, last.placed), last.memory):
            break
    return best, last


def _streaming_notes(problem: Problem, placed: Placed) -> tuple[str, ...]:
    """A note with the cost of streaming from pageable memory, where the device has no other."""
    profile = problem.profile
    if placed.slices is None or not placed.slices.streams or profile.is_pinned:
        return ()
    rate = format_bytes(1 / profile.link["h2d_pageable"].beta_s_per_byte)
    cost = f"{profile.device} has no pinned host memory: weights are streamed from pageable memory, at {rate}/s"
    return (cost + ", and the CPU waits for every copy" if profile.is_blocking else cost,)


def _resident_notes(problem: Problem, placed: Placed) -> tuple[str, ...]:
    """A note with the seconds lost where split blocks cannot live on the device beside their neighbours."""
    profile, slices = problem.profile, placed.slices
    if slices is None or profile.takes_residents:
        return ()
    resident = residents(problem.operators, placed.on_device, placed.first_device_layer)
    there = tuple((gg + cg) * resident for gg, cg, resident in zip(slices.gg, slices.cg, resident, strict=True))
    blocks = split_blocks(problem.operators, there)
    if not blocks:
        return ()
    rates = transfer_rates(profile)
    seconds = sum(
        rates.split_s
        + rates.copy_in.seconds(block.upload_bytes(there[block.operators[0]], 1))
        + rates.copy_out.seconds(block.download_bytes(there[block.operators[0]], 1))
        for block in blocks
    )
    return (
        f"{profile.device} takes no buffer type but its own: {len(blocks)} split blocks whose neighbours are there "
        f"compute through host memory, which takes {format_seconds(seconds)} a token",
    )
