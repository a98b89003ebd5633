"""Presets of cards: found by name and alias, ordered, and true to the published runs they are made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oallama.core.errors import UsageError
from oallama.core.units import GIB
from oallama.device import cards
from oallama.device.cards import ALIASES, CARDS, SOURCES, USUAL_PC, pc, preset

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


@pytest.mark.parametrize("published", cards._PUBLISHED, ids=lambda published: published.name)
def test_the_published_run_comes_out_again(published):
    """LLaMA-2-7B Q4_0, kernel by kernel as Card prices them, takes the published times of a token and of a prompt."""
    card = CARDS[published.name]
    shapes = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]
    small_nodes = 19 * 32 + 4 - len(shapes) * 32 - 1

    def mul_mats(n_tokens):
        layer = sum(card.kernel_seconds(2 * k * n * n_tokens, k * n * 18 / 32, False) for k, n in shapes)
        output = card.kernel_seconds(2 * 4096 * 32000, 4096 * 32000 * 210 / 256, False)  # Q6_K, of the last token
        return 32 * layer + output + small_nodes * card.kernel_s

    kv_s = 64 * 2 * 32 * 4096 * 2 / card.bytes_per_s
    attention_s = 32 * 4 * 512 * 512 * 4096 / card.flops_float_per_s
    assert 1 / (mul_mats(1) + kv_s) == pytest.approx(published.tg128, rel=0.01)
    rest_s = 32 * 4 * 512 * (18 * 4096 + 3 * 11008) / card.bytes_per_s
    assert 512 / (mul_mats(512) + attention_s + rest_s) == pytest.approx(published.pp512, rel=0.01)


def test_a_card_without_a_float_rate_has_that_of_quantised_weights():
    unknown = [published.name for published in cards._PUBLISHED if published.float_flops is None]
    assert unknown
    assert all(CARDS[name].flops_float_per_s == CARDS[name].flops_per_s for name in unknown)


def test_a_pc_is_the_usual_one_with_other_cores_and_memory():
    assert replace(pc(8, None), name=USUAL_PC.name) == USUAL_PC
    assert pc(4, 40.0).flops_per_s == USUAL_PC.flops_per_s / 2
    assert pc(None, 40.0).bytes_per_s == 40e9


def test_every_figure_names_a_source():
    assert {"tg128, pp512", "float_flops", "kernel_s", "pinned_bytes_per_s"} <= SOURCES.keys()
    assert USUAL_PC.source


def test_the_document_has_the_cards_rates():
    text = (Path(__file__).resolve().parents[2] / "docs" / "what-if.md").read_text(encoding="utf-8")
    for card in CARDS.values():
        rates = (card.bytes_per_s / 1e9, card.flops_per_s / 1e12, card.flops_float_per_s / 1e12)
        cells = [f"{card.memory_bytes >> 30}", *(f"{rate:.0f}" for rate in rates)]
        cells += [f"{rate / 1e9:.1f}" for rate in (card.pinned_bytes_per_s, card.pageable_bytes_per_s)]
        assert f"| `{card.name}` | {' | '.join(cells)} |" in text


def test_a_usual_pc_reads_weights_slower_than_its_card_and_faster_than_the_link():
    card = preset("rtx3060")
    assert card.pinned_bytes_per_s < USUAL_PC.bytes_per_s < card.bytes_per_s
    assert 5 < card.bytes_per_s / USUAL_PC.bytes_per_s < 6.5
