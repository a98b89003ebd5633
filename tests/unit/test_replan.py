"""Re-planning: which cuts are kept and what they cost, and what the rule makes of a machine that drifts."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_cases import gemm, machine, streamed

from oallama.core.errors import DeviceError
from oallama.core.profile import LinearFit
from oallama.core.types import DeviceInfo, MemoryLedger, Operator
from oallama.cost.block_cost import BlockCost, Cut
from oallama.cost.slices import Pricing
from oallama.cost.tracker import BlockSeconds
from oallama.cost.transfer import TransferRates
from oallama.device.opening import OpenDevice
from oallama.device.spec import parse_device
from oallama.place.cuts import Layers, solve_cg
from oallama.place.kept_cuts import Rates, Replan, kept_cuts, twice_bytes, with_kept
from oallama.place.replan import DRIFT, Choice, Replanner, drift
from oallama.run.split import LoadedSplit

N_LAYERS, EXTENT = 3, 1024
PLENTY = 1 << 40
ROLES = (("ffn_up", (256, EXTENT, 1)), ("ffn_gate", (256, EXTENT, 1)), ("ffn_down", (EXTENT, 256, 1)))

OPERATORS = [
    Operator(f"blk.{layer}.{role}.weight", layer, role, "MUL_MAT", "Q4_0", shape, 1_000_000, 1.0)
    for layer in range(N_LAYERS)
    for role, shape in ROLES
]


def blocks(cpu_s: float = 3e-3) -> list[BlockCost]:
    gemms = [gemm(cpu_s, 1e-4)] * 3
    return [replace(streamed(gemms, first=3 * i, gap_s=1e-4), kind=1) for i in range(N_LAYERS)]


def planned(on: Pricing, cpu_s: float = 3e-3, gg: int = 256) -> Layers:
    return [(of, solve_cg(of, on, gg)[0]) for of in blocks(cpu_s)]


def staging(layers: Layers) -> int:
    return max((cut.cg for _, cut in layers), default=0)


def kept(on: Pricing, host_room: int = PLENTY, device_room: int = PLENTY, layers: Layers | None = None) -> Replan:
    layers = planned(on) if layers is None else layers
    return kept_cuts(OPERATORS, layers, (), on, host_room, staging, device_room, staging)


def test_cuts_are_kept_for_a_slow_cpu_and_for_a_slow_link() -> None:
    on = machine()
    replan = kept(on)
    assert [one.operators for one in replan.blocks] == [
        tuple(o.name for o in OPERATORS[3 * i : 3 * i + 3]) for i in range(N_LAYERS)
    ]
    for one, (of, cut) in zip(replan.blocks, planned(on), strict=True):
        assert one.cuts[0] == cut and len(one.cuts) == len(set(one.cuts)) == 3
        assert {(other.extent, other.gg) for other in one.cuts} == {(EXTENT, cut.gg)}
        assert all(other.cc % of.block.step == 0 and other.cc > 0 for other in one.cuts)
        slow_cpu, slow_link = one.cuts[1:]
        assert slow_cpu.cc < cut.cc < slow_link.cc
    assert replan.ring_bytes == max(cut.cg for one in replan.blocks for cut in one.cuts)
    assert replan.staging_bytes == max(c.cg for c in replan.blocks[0].cuts) - replan.blocks[0].cuts[0].cg
    assert replan.moves and not replan.notes


@given(st.lists(st.integers(0, 24), min_size=1, max_size=4, unique=True), st.sampled_from(OPERATORS[:3]))
def test_bytes_that_are_kept_twice(ends: Sequence[int], operator: Operator) -> None:
    """Rows: each row that some cut has on the host is there once as CC, and each that some cut streams once as CG."""
    cuts = [Cut(32 * end, 768 - 32 * end, 256) for end in ends]
    if operator.role == "ffn_down":
        held = sum(cut.cc + cut.cg for cut in cuts)
    else:
        held = len({row for cut in cuts for row in range(cut.cc)})
        held += len({row for cut in cuts for row in range(cut.cc, cut.cc + cut.cg)})
    assert twice_bytes(operator, EXTENT, cuts) == pytest.approx(operator.bytes * (held - 768) / EXTENT, abs=1)


def test_no_more_is_kept_than_there_is_room_for() -> None:
    on = machine()
    all_of_it = kept(on)
    nothing = kept(on, host_room=0)
    assert not nothing.moves and nothing.twice_bytes == nothing.staging_bytes == 0 and nothing.notes
    some = kept(on, host_room=all_of_it.twice_bytes - 1)
    assert 0 < some.twice_bytes < all_of_it.twice_bytes and some.moves
    narrow = kept(on, device_room=all_of_it.staging_bytes // 2)
    assert 0 < narrow.staging_bytes <= all_of_it.staging_bytes // 2 and "room for" in narrow.notes[0]
    none = kept(on, device_room=0)
    assert none.staging_bytes == 0 and all(cut.cg <= one.cuts[0].cg for one in none.blocks for cut in one.cuts)


def test_some_is_left_to_the_cpu_however_slow_it_is() -> None:
    """It tells how fast the CPU is. The plan streams more than it leaves to it."""
    on = machine(1e-12)
    layers = [(of, Cut(64, 704, 256)) for of in blocks(cpu_s=1.0)]
    assert all(cut.cc > 0 for one in kept(on, layers=layers).blocks for cut in one.cuts)


def test_the_ledger_says_what_is_kept() -> None:
    memory = MemoryLedger(100, 0.9, 90, 10, 10, 10, 10, 10, 50)
    replan = kept(machine())
    after = with_kept(memory, replan)
    assert after.weights_host == 10 + replan.twice_bytes
    assert (after.staging, after.spare) == (10 + replan.staging_bytes, 50 - replan.staging_bytes)


def test_blocks_that_the_split_back_end_does_not_hold_are_left_out() -> None:
    on = machine()
    whole = [(of, Cut(EXTENT, 0, 0)) for of in blocks()]
    assert kept(on, layers=whole).blocks == ()


#
# the rule
#


def seen_at(rule: Replanner, choice: Choice, rates: Rates) -> BlockSeconds:
    """What a machine of these rates takes with the cuts of a choice."""
    return rule.expected(choice, rates)


def best_of_kept(rule: Replanner, rates: Rates) -> tuple[int, ...]:
    return tuple(
        min(range(len(one.cuts)), key=lambda cut, block=block: rule.predicted(block, cut, rates).total_s)  # type: ignore[misc]
        for block, one in enumerate(rule.replan.blocks)
    )


@given(st.floats(1 / 1.19, 1.19))
@settings(deadline=None, max_examples=30)
def test_nothing_changes_within_the_share(factor: float) -> None:
    rule = Replanner(kept(machine()))
    start = rule.start()
    expected = rule.expected(start)
    seen = BlockSeconds(expected.cpu_s * factor, expected.wait_s * factor, expected.other_s * factor)
    assert abs(drift(seen, expected)) <= DRIFT
    assert rule.revised(start, seen) == start


@pytest.mark.parametrize("cpu", [1.6, 2.0, 4.0])
def test_a_slow_cpu_gives_to_the_device_and_takes_back(cpu: float) -> None:
    """The rates are found, the best of the kept cuts is taken, and that is stable; so is the way back."""
    rule, rates = Replanner(kept(machine())), Rates(cpu=cpu)
    start = rule.start()
    slow = rule.revised(start, seen_at(rule, start, rates))
    assert slow.rates.cpu == pytest.approx(cpu, rel=0.1) and slow.rates.device == 1
    assert slow.cuts == best_of_kept(rule, rates) != start.cuts
    assert rule.expected(slow, rates).total_s < rule.expected(start, rates).total_s
    slow = rule.revised(slow, seen_at(rule, slow, rates))
    assert slow.cuts == best_of_kept(rule, rates) and slow.before is None, "it paid"
    assert rule.revised(slow, seen_at(rule, slow, rates)) == slow
    back = rule.revised(slow, seen_at(rule, slow, Rates()))
    assert back.cuts == start.cuts and back.rates.cpu == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("longer", [0.99, 1.0, 1.3])
def test_cuts_that_do_not_make_tokens_faster_are_moved_back_and_stay(longer: float) -> None:
    """A program that takes turns with the host's thread looks like a slow CPU, but no cut helps."""
    rule = Replanner(kept(machine()))
    start = rule.start()
    expected, seen = rule.expected(start), seen_at(rule, start, Rates(cpu=2.0))
    moved = rule.revised(start, seen)
    assert moved.cuts != start.cuts
    worse = BlockSeconds(longer * seen.total_s, 0.0, 0.0)
    back = rule.revised(moved, worse)
    assert back.cuts == start.cuts
    assert rule.revised(back, seen) == back, "as long as nothing changes"
    assert rule.revised(back, expected).cuts == start.cuts


def test_a_slow_link_gives_to_the_cpu() -> None:
    rule, rates = Replanner(kept(machine())), Rates(device=3.0)
    start = rule.start()
    seen = seen_at(rule, start, rates)
    assert seen.wait_s > 0
    slow = rule.revised(start, seen)
    assert slow.rates.device == pytest.approx(3, rel=0.2)
    assert slow.cuts == best_of_kept(rule, rates) != start.cuts


def test_cuts_stay_where_others_gain_nothing() -> None:
    """The rates are taken over nevertheless, so that what is seen is as expected from then on."""
    rule = Replanner(kept(machine(), host_room=0))
    start = rule.start()
    seen = seen_at(rule, start, Rates(cpu=3.0))
    after = rule.revised(start, seen)
    assert after.cuts == start.cuts and after.rates.cpu == pytest.approx(3, rel=0.1)
    assert rule.revised(after, seen) == after


def test_slow_sending_and_joining_are_expected_from_then_on() -> None:
    transfer = TransferRates(LinearFit(5e-4, 1e-10, 1.0), LinearFit(5e-4, 1e-10, 1.0), 5e-6)
    rule = Replanner(kept(machine(transfer=transfer)))
    start = rule.start()
    after = rule.revised(start, seen_at(rule, start, Rates(other=10.0)))
    assert after.rates.other == pytest.approx(10, rel=0.1) and after.rates.cpu == pytest.approx(1, rel=0.1)
    assert rule.revised(after, seen_at(rule, after, Rates(other=10.0))) == replace(after, before=None)


def test_nothing_is_made_of_nothing() -> None:
    rule = Replanner(kept(machine()))
    start = rule.start()
    assert rule.revised(start, BlockSeconds(0, 0, 0)) == start
    empty = Replanner(Replan((), machine().streaming))
    assert empty.revised(empty.start(), BlockSeconds(1, 1, 1)) == empty.start()


#
# what was loaded
#


class LoadedPlan:
    """A plan of the split back end of which each weight was loaded with these cuts."""

    buft = 1

    def __init__(self, cuts: dict[str, tuple[int, ...]]) -> None:
        self._cuts, self.moved = cuts, {}  # type: ignore[var-annotated]

    def slices(self) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(name=name, cuts=cuts) for name, cuts in self._cuts.items()]

    def move_cut(self, name: str, cc: int) -> None:
        self.moved[name] = cc


@pytest.mark.parametrize("shrunk", [0, 64])
def test_a_model_begins_with_the_plan_s_cuts(shrunk: int) -> None:
    """It is loaded with the most that may be streamed. Where GG shrank at the load nothing moves after that."""
    replan = kept(machine())
    loaded = LoadedPlan(
        {name: tuple(sorted(cut.cc + shrunk for cut in one.cuts)) for one in replan.blocks for name in one.operators}
    )
    backend = types.SimpleNamespace(memory=lambda: None)
    split = LoadedSplit(backend, loaded, types.SimpleNamespace(label="device"), replan)  # type: ignore[arg-type]
    assert split.take_planned_cuts() == (not shrunk)
    assert loaded.moved == {name: one.cuts[0].cc + shrunk for one in replan.blocks for name in one.operators}


def test_a_device_without_room_to_compute_in_is_told_with_what_it_had_free() -> None:
    memory = types.SimpleNamespace(n_programs=0)
    there = [types.SimpleNamespace(device_bytes=n_bytes) for n_bytes in (3 << 20, 1 << 20)]
    loaded = types.SimpleNamespace(buft=0, problems=lambda: (True, ()), slices=lambda: there)
    info = DeviceInfo("CUDA0", "a card", "CUDA", "GPU", 8 << 20, 5 << 20, True, True, True)
    device = OpenDevice("CUDA0", info, parse_device("CUDA0"))
    split = LoadedSplit(types.SimpleNamespace(memory=lambda: memory), loaded, device)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"^CUDA0 \(5 MiB were free\) has no room .* beside 4 MiB of .* -ub"):
        split.corrected(None, ())  # type: ignore[arg-type]
