"""The plugin's plan text: the golden files of version 1, and what the format cannot carry. That the text of any plan
agrees with the plan: test_every_plan.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from worlds import placed, some_plan, weight

from oallama.core.errors import PlanError
from oallama.core.types import Operator, OperatorPlacement, StreamSettings
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import plugin_text, split_text

GOLDEN = Path(__file__).parent.parent / "golden" / "plugin_plan_v1.oallama"
STREAMED = GOLDEN.with_name("plugin_plan_v1_streamed.oallama")
N_LAYER = 2


def expert(role: str, k: int, n: int) -> Operator:
    return weight(role=role, k=k, n=n, layer=1, n_expert=8, type_name="Q8_0")


OPERATORS = (
    weight(role="attn_q", k=2048, n=2048, layer=0),
    weight(role="ffn_gate", k=2048, n=8192, layer=0),
    weight(role="ffn_up", k=2048, n=8192, layer=0),
    weight(role="ffn_down", k=8192, n=2048, layer=0, type_name="Q4_K"),
    replace(weight(role="ffn_up", k=3072, n=16384, layer=1), gate_up=True),
    expert("ffn_gate_exps", 256, 512),
    expert("ffn_down_exps", 512, 256),
    weight(role="output", k=512, n=1001, type_name="F16"),
)

PLACEMENTS = (
    placed("blk.0.attn_q.weight", gg=1.0),
    placed("blk.0.ffn_gate.weight", gg=0.375, layout="CPU_REPACK"),
    placed("blk.0.ffn_up.weight", gg=0.375),
    placed("blk.0.ffn_down.weight", gg=0.375, layout="CPU_REPACK"),
    placed("blk.1.ffn_up.weight", gg=8128 / 8192, layout="CPU"),
    placed("blk.1.ffn_gate_exps.weight", layout="CPU_REPACK"),
    placed("blk.1.ffn_down_exps.weight", gg=480 / 512),
    placed("output.weight", gg=969 / 1001),
)


def plan(placements: tuple[OperatorPlacement, ...] = PLACEMENTS, **changes: object) -> Plan:
    return some_plan(placements, **{"device": "rpc://h:1", "model_fingerprint": "ab" * 32, **changes})


def text_of(made: Plan, device: str = "RPC0", n_layer: int = N_LAYER, every_operator: bool = False) -> str:
    return plugin_text(made, OPERATORS, n_layer, device, every_operator)


def residents(made: Plan, n_layer: int = N_LAYER) -> list[str]:
    """Operators that compute where their layer's norms are, on the device."""
    lines = text_of(made, n_layer=n_layer, every_operator=True).splitlines()
    return [line.split()[1] for line in lines if line.endswith(" resident")]


def test_the_text_of_version_1_in_graph_order_whatever_the_order_of_the_plan() -> None:
    for placements in (PLACEMENTS, PLACEMENTS[::-1]):
        assert text_of(plan(placements)) == GOLDEN.read_text(encoding="utf-8")


def test_every_operator_is_listed_on_request_with_no_layout_where_nothing_is_on_the_host() -> None:
    lines = text_of(plan(), "CUDA0", every_operator=True).splitlines()
    assert [line.split()[1] for line in lines[4:]] == [operator.name for operator in OPERATORS]
    assert "tensor blk.0.attn_q.weight Q4_0 2048x2048x1 rows 0 0 2048 -" in lines
    assert "tensor blk.1.ffn_gate_exps.weight Q8_0 256x512x8 rows 512 0 0 CPU_REPACK" in lines


def test_blocks_live_on_the_device_where_the_norms_of_their_layer_do() -> None:
    of_layer_1 = ["blk.1.ffn_up.weight", "blk.1.ffn_gate_exps.weight", "blk.1.ffn_down_exps.weight"]
    assert residents(plan(n_gpu_layers=0)) == residents(plan(n_gpu_layers=1)) == [], "logits are read on the host"
    assert residents(plan(n_gpu_layers=2)) == of_layer_1
    assert residents(plan(n_gpu_layers=3)) == [o.name for o in OPERATORS if o.layer is not None]
    assert residents(plan(n_gpu_layers=3), N_LAYER + 1) == of_layer_1, "a block of MTP has no operators and counts"
    assert residents(plan(n_gpu_layers=3, residents=False)) == []
    assert " resident" not in split_text(OPERATORS, PLACEMENTS, 1, residents=False)


def test_experts_are_on_the_host_where_their_router_is() -> None:
    router = weight(role="ffn_gate_inp", k=256, n=8, layer=1, type_name="F32")
    for gg in (0.0, 1.0):
        made = plan((*PLACEMENTS, placed(router.name, gg=gg)), n_gpu_layers=2)
        text = plugin_text(made, (*OPERATORS, router), N_LAYER, "RPC0", every_operator=True)
        found = [line.split()[1] for line in text.splitlines() if line.endswith(" resident")]
        assert ("blk.1.ffn_gate_exps.weight" in found) is (gg == 1.0)


def streamed(streaming: StreamSettings, **changes: object) -> Plan:
    """A quarter of the first FFN is streamed, and CC of all of them for some tokens of a prompt."""
    placements = tuple(
        replace(p, gg=0.25, cg=0.125, cc=0.625) if p.name.startswith("blk.0.ffn") else p for p in PLACEMENTS
    )
    made = plan(placements, token_assignment=((31, 0), (32, 9), (512, 400)), streaming=streaming)
    return replace(made, memory=replace(made.memory, staging=22151168), **changes)


def test_the_text_of_a_plan_that_streams() -> None:
    """With the operator that is all CC, which the device computes for n_g tokens."""
    made = streamed(StreamSettings(n_slots=4, prefetch="layer", kept_twice=True))
    assert text_of(made) == STREAMED.read_text(encoding="utf-8")


def test_the_text_says_how_copies_are_asked_for() -> None:
    made = streamed(StreamSettings(piece_bytes=262144, link_bytes_per_s=12 * 10**9, ring_bytes=101711872))
    assert {"piece 262144", "link 12000000000", "ring 101711872"} < set(text_of(made).splitlines())


def test_what_is_the_default_or_streams_nothing_is_not_said() -> None:
    lines = text_of(streamed(StreamSettings(), token_assignment=())).splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["oallama-plan", "model", "device", "sum", "staging", "tensor"]
    still = plan(streaming=StreamSettings(n_slots=4, prefetch="layer", kept_twice=True))
    assert text_of(still) == GOLDEN.read_text(encoding="utf-8")


def test_an_operator_without_a_place_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no place for operator output\.weight"):
        text_of(plan(PLACEMENTS[:-1]))


@pytest.mark.parametrize("device", ["", "RPC 0", "RPC0\n", "x" * 128])
def test_names_that_no_word_of_a_line_can_hold_are_refused(device: str) -> None:
    with pytest.raises(PlanError, match="without blanks"):
        text_of(plan(), device)


def test_a_tensor_name_with_a_line_end_cannot_smuggle_in_another_line() -> None:
    name = "output.weight\ntensor token_embd.weight"
    operators = (*OPERATORS[:-1], replace(OPERATORS[-1], name=name))
    placements = (*PLACEMENTS[:-1], replace(PLACEMENTS[-1], name=name))
    with pytest.raises(PlanError, match="without blanks"):
        plugin_text(plan(placements), operators, N_LAYER, "RPC0")


def test_a_load_without_its_plan_is_told_what_is_split_and_along_which_axis_wherever_it_is_cut() -> None:
    text = split_text(OPERATORS, PLACEMENTS, N_LAYER + 1)
    lines = text.splitlines()
    assert lines[:2] == ["oallama-plan 1", "sum 262144"]
    assert [line.split()[1:] for line in lines[2:5]] == [
        ["blk.0.ffn_gate.weight", "Q4_0", "2048x8192x1", "rows", "8192", "0", "0", "CPU"],
        ["blk.0.ffn_up.weight", "Q4_0", "2048x8192x1", "rows", "8192", "0", "0", "CPU"],
        ["blk.0.ffn_down.weight", "Q4_K", "8192x2048x1", "cols", "8192", "0", "0", "CPU"],
    ]
    assert not any("attn_q" in line or "device" in line for line in lines), "it is whole; and there is no device"
    halves = [replace(p, gg=0.5, cc=0.5) if 0 < p.gg < 1 else p for p in PLACEMENTS]
    assert split_text(OPERATORS, halves, N_LAYER + 1) == text
    assert split_text(OPERATORS[:1], PLACEMENTS, N_LAYER + 1) == ""


def test_hot_experts_are_listed() -> None:
    hot = tuple(
        placed(p.name, layout="CPU", hot=(0, 3, 7)) if p.name.endswith("exps.weight") else p for p in PLACEMENTS
    )
    lines = [line for line in text_of(plan(hot, n_gpu_layers=3), "CPU").splitlines() if "_exps" in line]
    assert lines == [
        "tensor blk.1.ffn_gate_exps.weight Q8_0 256x512x8 rows 512 0 0 CPU hot=0,3,7 resident",
        "tensor blk.1.ffn_down_exps.weight Q8_0 512x256x8 cols 512 0 0 CPU hot=0,3,7 resident",
    ]
