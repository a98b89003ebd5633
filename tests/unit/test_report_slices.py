"""What a plan says of its slices."""

from __future__ import annotations

import dataclasses

from worlds import model_info, weights_of

from oallama.core.affinity import Affinity
from oallama.core.types import MemoryLedger, OperatorPlacement, StreamSettings, Workload
from oallama.plan.plan import Plan
from oallama.report.plan import plan_sentences, slice_sentences
from oallama.report.slices import slices_table
from oallama.report.table import plain
from oallama.report.text import PAPERS, PLAIN

OPERATORS = list(weights_of(model_info(n_layer=4, n_embd=256)))
CUTS = {0: (0.5, 0.25, 0.25), 1: (0.5, 0.25, 0.25), 2: (0.5, 0.25, 0.25), 3: (1.0, 0.0, 0.0), None: (0.0, 0.5, 0.5)}


def record() -> Plan:
    placements = [
        OperatorPlacement(op.name, gg, cg, cc)
        for op in OPERATORS
        for cc, cg, gg in [CUTS[op.layer] if not op.role.startswith("attn") else (0.0, 0.0, 1.0)]
    ]
    ledger = MemoryLedger(6000, 0.9, 5400, 3000, 2000, 512, 256, 0, 1632)
    load = Workload(512, 32, 1024)
    return Plan("m.gguf", "", "", "RPC0", "scheinfer", load, tuple(placements), 5, ledger, None)


def test_layers_that_are_cut_alike_are_named_together() -> None:
    ring, slices = slice_sentences(record(), OPERATORS, PAPERS)
    assert slices == "divided, CC/CG/GG: layers 0-2 50/25/25 %; layer 3 100/0/0 %; output 0/50/50 %"
    streamed = sum(CUTS[op.layer][1] * op.bytes for op in OPERATORS if not op.role.startswith("attn"))
    assert f"{streamed / 1024:.0f} KiB of weights are copied to the card for each token" in ring
    assert ring.endswith("as soon as a slot is free, through a ring of 2 slots")


def test_tokens_and_copies_are_said() -> None:
    table = ((31, 0), (32, 9), (64, 40), (128, 90), (256, 190), (300, 220), (512, 400))
    told = dataclasses.replace(record(), token_assignment=table, streaming=StreamSettings(1, "layer", True))
    ring, _, tokens = slice_sentences(told, OPERATORS, PAPERS)
    assert ring.endswith("layer by layer, through a ring of 1 slot")
    lengths = "0 of 31, 9 of 32, 90 of 128, 190 of 256, 220 of 300, 400 of 512"
    table6 = ((31, 0), (32, 9), (128, 90), (256, 190), (300, 220), (512, 400))
    short = slice_sentences(dataclasses.replace(told, token_assignment=table6), OPERATORS, PAPERS)[2]
    assert tokens == short, "of seven lengths six are shown"
    assert tokens.endswith(f": {lengths}, CC kept in host memory twice")


def test_plain_words_name_places_and_leave_the_ring_out() -> None:
    table = ((31, 0), (32, 9), (64, 40))
    told = dataclasses.replace(record(), token_assignment=table, streaming=StreamSettings(1, "layer", True))
    ring, slices, tokens = slice_sentences(told, OPERATORS, PLAIN)
    assert ring.endswith("KiB of weights are copied to the card for each token")
    assert slices.startswith("divided, CPU/copied/card: layers 0-2 50/25/25 %")
    assert tokens.startswith("from 32 tokens of a prompt on")
    assert not any(word in " ".join((ring, slices, tokens)) for word in ("CC", "CG", "GG", "ring", "n_g"))


def test_what_only_prompts_stream_is_told_so() -> None:
    still = tuple(OperatorPlacement(op.name, 0.25, 0.0, 0.75) for op in OPERATORS)
    told = dataclasses.replace(record(), operators=still, token_assignment=((64, 32),))
    ring, slices, tokens = slice_sentences(told, OPERATORS, PAPERS)
    assert ring.startswith("weights are copied to the card for prompts only, as soon")
    assert slices.startswith("divided, CC/CG/GG: layers 0-3 75/0/25 %")
    assert tokens.endswith(": 32 of 64")


def test_a_plan_that_streams_nothing_says_nothing_of_it() -> None:
    still = tuple(OperatorPlacement(op.name, 0.25, 0.0, 0.75) for op in OPERATORS)
    assert slice_sentences(dataclasses.replace(record(), operators=still), OPERATORS, PAPERS) == ()
    assert f"{len(OPERATORS)} divided" in plan_sentences(dataclasses.replace(record(), operators=still), OPERATORS)[0]


def test_hot_experts_are_on_the_device_too() -> None:
    expert = dataclasses.replace(
        OPERATORS[-1], name="blk.0.up_exps.weight", op="MUL_MAT_ID", shape=(256, 512, 8), bytes=8000
    )
    held = OperatorPlacement(expert.name, 0.0, 0.0, 1.0, hot_experts=(1, 5))
    told = plan_sentences(dataclasses.replace(record(), operators=(held,)), [expert])
    assert "of weights (25%)" in told[0] and ", 1 divided between" in told[0]


def test_hot_experts_are_counted_where_cuts_are_told() -> None:
    ffn = [op for op in OPERATORS if op.layer == 1 and op.role.startswith("ffn")]
    names = {op.name for op in ffn}
    hot = tuple(
        OperatorPlacement(p.name, 0.0, 0.0, 1.0, hot_experts=(0, 2, 5)) if p.name in names else p
        for p in record().operators
    )
    _, slices = slice_sentences(dataclasses.replace(record(), operators=hot), OPERATORS, PAPERS)
    assert "layer 0 50/25/25 %; layer 1 3 hot experts; layer 2 50/25/25 %" in slices
    row = Affinity("a", 1, "ffn_up_exps", "Q4_0", (256, 512, 8), 800, 1.0, 0.1, 0.0, 1.0, 1.0, 1, "split", n_hot=3)
    table = slices_table([row, dataclasses.replace(row, n_hot=0, gg=0.25, cc=0.75, layer=2)], PAPERS)
    assert table is not None
    text = plain(table)
    assert "3 of 8 experts" in text and "75/0/25 %" in text and "the most used ones" in text
