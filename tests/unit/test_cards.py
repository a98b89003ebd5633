"""Presets of cards: found by name and alias, ordered, and true to the published runs they are made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oallama.core.errors import UsageError
from oallama.core.units import GIB
from oallama.device.cards import ALIASES, CARDS, USUAL_PC, pc, preset

PEAK_BYTES_PER_S = {
    "gtx1650-4": 192e9,
    "rtx3050-6": 168e9,
    "rx5700xt": 448e9,
    "rtx4060ti-8": 288e9,
    "arc-a770": 560e9,
    "rx7900xtx": 960e9,
    "rtx3060-12": 360e9,
    "rtx4060ti-16": 288e9,
    "rtx3090": 936e9,
    "rtx4090": 1008e9,
    "rtx5090": 1792e9,
    "h100": 3352e9,
}
PEAK_LINK = {
    name: 15.75e9 if name in ("gtx1650-4", "rtx3050-6", "rtx4060ti-8", "rtx4060ti-16") else
    63e9 if name in ("rtx5090", "h100") else 31.5e9
    for name in PEAK_BYTES_PER_S
}  # fmt: skip


@pytest.mark.parametrize(("text", "name"), [*ALIASES.items(), ("RTX4090", "rtx4090"), (" h100 ", "h100")])
def test_a_preset_is_found_by_name_and_alias(text, name):
    assert preset(text) is CARDS[name]


def test_an_unknown_preset_is_named_with_those_that_exist():
    with pytest.raises(UsageError, match=r"'rtx9090'.*gtx1650-4, rtx3050-6, .*, rtx3090, rtx4090, rtx5090, h100"):
        preset("rtx9090")


def test_presets_are_called_by_their_names_in_order_of_memory():
    assert all(name == card.name for name, card in CARDS.items())
    sizes = [card.memory_bytes for card in CARDS.values()]
    assert sizes == sorted(sizes)
    assert {size // GIB for size in sizes} >= {4, 6, 8, 12, 16, 24}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_no_rate_is_above_what_the_hardware_can_do(card):
    assert 0.28 * PEAK_BYTES_PER_S[card.name] < card.bytes_per_s < PEAK_BYTES_PER_S[card.name]
    assert card.pageable_bytes_per_s < card.pinned_bytes_per_s < PEAK_LINK[card.name]
    assert 4e12 < card.flops_float_per_s < 1000e12


def test_a_pc_is_the_usual_one_with_other_cores_and_memory():
    assert replace(pc(8, None), name=USUAL_PC.name) == USUAL_PC
    assert pc(4, 40.0).flops_per_s == USUAL_PC.flops_per_s / 2
    assert pc(None, 40.0).bytes_per_s == 40e9


def test_the_document_has_the_cards_rates():
    text = (Path(__file__).resolve().parents[2] / "docs" / "what-if.md").read_text(encoding="utf-8")
    for card in CARDS.values():
        rates = (card.bytes_per_s / 1e9, card.flops_per_s / 1e12, card.flops_float_per_s / 1e12)
        cells = [f"{card.memory_bytes >> 30}", *(f"{rate:.0f}" for rate in rates)]
        cells += [f"{rate / 1e9:.1f}" for rate in (card.pinned_bytes_per_s, card.pageable_bytes_per_s)]
        assert f"| `{card.name}` | {' | '.join(cells)} |" in text
