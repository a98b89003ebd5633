"""The plugin's plan text: the golden file of version 1, what is listed, and what the format cannot carry."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.core.errors import PlanError
from oallama.core.ggml_types import GGML_TYPES_BY_NAME
from oallama.core.types import MemoryLedger, Operator, OperatorPlacement, StreamSettings, Workload
from oallama.cost import blocks
from oallama.model.cut import cut_extent, cut_granularity
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import plugin_text, split_text
from oallama.plan.split import slice_counts

GOLDEN = Path(__file__).parent.parent / "golden" / "plugin_plan_v1.oallama"
STREAMED = GOLDEN.with_name("plugin_plan_v1_streamed.oallama")
N_LAYER = 2


def operator(name: str, type: str, shape: tuple[int, int, int], **fields: bool) -> Operator:
    layer = int(name.split(".")[1]) if name.startswith("blk.") else None
    op = "MUL_MAT_ID" if "_exps" in name else "MUL_MAT"
    return Operator(name, layer, name.split(".")[-2], op, type, shape, 1, 1.0, **fields)


OPERATORS = (
    operator("blk.0.attn_q.weight", "Q4_0", (2048, 2048, 1)),
    operator("blk.0.ffn_gate.weight", "Q4_0", (2048, 8192, 1)),
    operator("blk.0.ffn_up.weight", "Q4_0", (2048, 8192, 1)),
    operator("blk.0.ffn_down.weight", "Q4_K", (8192, 2048, 1)),
    operator("blk.1.ffn_up.weight", "Q4_0", (3072, 16384, 1), gate_up=True),
    operator("blk.1.ffn_gate_exps.weight", "Q8_0", (256, 512, 8)),
    operator("blk.1.ffn_down_exps.weight", "Q8_0", (512, 256, 8)),
    operator("output.weight", "F16", (512, 1001, 1)),
)


def split(name: str, gg: float, layout: str | None = None) -> OperatorPlacement:
    return OperatorPlacement(name, gg, 0.0, 1.0 - gg, layout)


PLACEMENTS = (
    split("blk.0.attn_q.weight", 1.0),
    split("blk.0.ffn_gate.weight", 0.375, "CPU_REPACK"),
    split("blk.0.ffn_up.weight", 0.375),
    split("blk.0.ffn_down.weight", 0.375, "CPU_REPACK"),
    split("blk.1.ffn_up.weight", 8128 / 8192, "CPU"),
    split("blk.1.ffn_gate_exps.weight", 0.0, "CPU_REPACK"),
    split("blk.1.ffn_down_exps.weight", 480 / 512),
    split("output.weight", 969 / 1001),
)


def record(placements: tuple[OperatorPlacement, ...] = PLACEMENTS) -> Plan:
    ledger = MemoryLedger(6000, 0.9, 5400, 3000, 2000, 512, 256, 0, 1632)
    workload = Workload(64, 32, 512)
    return Plan("m.gguf", "ab" * 32, "cd" * 32, "rpc://h:1", "split", workload, placements, 0, ledger, None)


def test_the_text_of_version_1() -> None:
    assert plugin_text(record(), OPERATORS, N_LAYER, "RPC0") == GOLDEN.read_text(encoding="utf-8")


def test_a_plan_and_its_record_give_the_same_text() -> None:
    assert plugin_text(record(), OPERATORS, N_LAYER, "RPC0") == plugin_text(record(), OPERATORS, N_LAYER, "RPC0")


def test_lines_are_in_graph_order_whatever_the_order_of_the_plan() -> None:
    assert plugin_text(record(PLACEMENTS[::-1]), OPERATORS, N_LAYER, "RPC0") == GOLDEN.read_text(encoding="utf-8")


def test_every_operator_is_listed_on_request_with_no_layout_where_nothing_is_on_the_host() -> None:
    lines = plugin_text(record(), OPERATORS, N_LAYER, "CUDA0", every_operator=True).splitlines()
    assert [line.split()[1] for line in lines[4:]] == [operator.name for operator in OPERATORS]
    assert "tensor blk.0.attn_q.weight Q4_0 2048x2048x1 rows 0 0 2048 -" in lines
    assert "tensor blk.1.ffn_gate_exps.weight Q8_0 256x512x8 rows 512 0 0 CPU_REPACK" in lines


def test_blocks_live_on_the_device_where_the_norms_of_their_layer_do() -> None:
    router = operator("blk.1.ffn_gate_inp.weight", "F32", (256, 8, 1))
    operators = (*OPERATORS, router)

    def residents(n_gpu_layers: int, router_gg: float) -> list[str]:
        made = dataclasses.replace(record((*PLACEMENTS, split(router.name, router_gg))), n_gpu_layers=n_gpu_layers)
        text = plugin_text(made, operators, N_LAYER, "RPC0", every_operator=True)
        return [line.split()[1] for line in text.splitlines() if line.endswith(" resident")]

    experts = ["blk.1.ffn_gate_exps.weight", "blk.1.ffn_down_exps.weight"]
    assert residents(0, 1.0) == residents(1, 1.0) == [], "the output's result is read on the host"
    assert residents(2, 1.0) == ["blk.1.ffn_up.weight", *experts]
    assert residents(2, 0.0) == ["blk.1.ffn_up.weight"], "experts are chosen on the host"
    assert residents(3, 1.0) == [o.name for o in OPERATORS if o.layer is not None]


def test_blocks_that_only_predict_further_tokens_count_as_layers() -> None:
    """MTP: such a block has no operators, and -ngl counts it, here with the output and block 1."""
    made = dataclasses.replace(record(), n_gpu_layers=3)
    lines = plugin_text(made, OPERATORS, N_LAYER + 1, "RPC0", every_operator=True).splitlines()[4:]
    found = tuple(line.endswith(" resident") for line in lines)
    assert found == blocks.residents(OPERATORS, [p.gg == 1 for p in PLACEMENTS], 1)
    assert any(found) and not found[1], "block 0 has its norms and KV on the host"


def test_no_block_lives_on_a_device_that_takes_none() -> None:
    made = dataclasses.replace(record(), n_gpu_layers=3)
    assert " resident" in plugin_text(made, OPERATORS, N_LAYER, "RPC0")
    assert " resident" not in plugin_text(dataclasses.replace(made, residents=False), OPERATORS, N_LAYER, "RPC0")
    assert " resident" in split_text(OPERATORS, PLACEMENTS, 1)
    assert " resident" not in split_text(OPERATORS, PLACEMENTS, 1, residents=False)
    there = [p.gg == 1 for p in PLACEMENTS]
    assert not any(blocks.residents(OPERATORS, there, 1, taken=False))


def streamed_record() -> Plan:
    """A quarter of the first FFN is streamed, and CC of all of them for some tokens of a prompt."""
    streams = ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight")
    placements = tuple(
        dataclasses.replace(p, gg=0.25, cg=0.125, cc=0.625) if p.name in streams else p for p in PLACEMENTS
    )
    made = record(placements)
    memory = dataclasses.replace(made.memory, staging=22151168)
    table = ((31, 0), (32, 9), (512, 400))
    return dataclasses.replace(
        made, memory=memory, token_assignment=table, streaming=StreamSettings(4, "layer", kept_twice=True)
    )


def test_the_text_of_a_plan_that_streams() -> None:
    """With the operator that is all CC, which the device computes for n_g tokens."""
    text = plugin_text(streamed_record(), OPERATORS, N_LAYER, "RPC0")
    assert text == STREAMED.read_text(encoding="utf-8")


def test_the_text_says_how_copies_are_asked_for() -> None:
    streaming = StreamSettings(piece_bytes=262144, link_bytes_per_s=12 * 10**9, ring_bytes=101711872)
    made = dataclasses.replace(streamed_record(), streaming=streaming)
    lines = plugin_text(made, OPERATORS, N_LAYER, "RPC0").splitlines()
    assert {"piece 262144", "link 12000000000", "ring 101711872"} < set(lines)


def test_what_is_the_default_or_streams_nothing_is_not_said() -> None:
    default = dataclasses.replace(streamed_record(), streaming=StreamSettings(), token_assignment=())
    lines = plugin_text(default, OPERATORS, N_LAYER, "RPC0").splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["oallama-plan", "model", "device", "sum", "staging", "tensor"]
    still = dataclasses.replace(record(), streaming=StreamSettings(4, "layer", kept_twice=True))
    assert plugin_text(still, OPERATORS, N_LAYER, "RPC0") == GOLDEN.read_text(encoding="utf-8")


def test_an_operator_without_a_place_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no place for operator output\.weight"):
        plugin_text(record(PLACEMENTS[:-1]), OPERATORS, N_LAYER, "RPC0")


@pytest.mark.parametrize("device", ["", "RPC 0", "RPC0\n", "x" * 128])
def test_names_that_no_word_of_a_line_can_hold_are_refused(device: str) -> None:
    with pytest.raises(PlanError, match="without blanks"):
        plugin_text(record(), OPERATORS, N_LAYER, device)


def test_a_tensor_name_with_a_line_end_cannot_smuggle_in_another_line() -> None:
    name = "output.weight\ntensor token_embd.weight"
    operators = (*OPERATORS[:-1], dataclasses.replace(OPERATORS[-1], name=name))
    placements = (*PLACEMENTS[:-1], dataclasses.replace(PLACEMENTS[-1], name=name))
    with pytest.raises(PlanError, match="without blanks"):
        plugin_text(record(placements), operators, N_LAYER, "RPC0")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Operator, OperatorPlacement]:
    """An operator of any type and a placement that splits it somewhere."""
    type_name = draw(st.sampled_from(["F32", "F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"]))
    block = GGML_TYPES_BY_NAME[type_name].block_size
    k = block * 32 * draw(st.integers(1, 8))
    role = draw(st.sampled_from(["ffn_up", "ffn_down", "attn_q"]))
    made = operator(f"blk.3.{role}.weight", type_name, (k, 64 * draw(st.integers(1, 100)), 1))
    extent, step = cut_extent(made), cut_granularity(made)
    cc = step * draw(st.integers(0, extent // step))
    return made, OperatorPlacement(made.name, (extent - cc) / extent, 0.0, cc / extent)


@given(cuts())
def test_counts_are_those_of_the_placement_and_fill_the_extent(cut: tuple[Operator, OperatorPlacement]) -> None:
    made, placement = cut
    text = plugin_text(record((placement,)), [made], 4, "RPC0", every_operator=True)
    _, name, type_name, shape, axis, *counts, layout = text.splitlines()[4].split()
    assert (name, type_name, shape) == (made.name, made.type, "x".join(map(str, made.shape)))
    assert tuple(map(int, counts)) == slice_counts(made, placement)
    assert sum(map(int, counts)) == made.shape[0 if axis == "cols" else 1]
    assert (layout == "-") == (int(counts[0]) == 0)


def test_a_load_without_its_plan_is_told_what_is_split_and_along_which_axis() -> None:
    lines = split_text(OPERATORS, PLACEMENTS, N_LAYER + 1).splitlines()
    assert lines[:2] == ["oallama-plan 1", "sum 262144"]
    assert [line.split()[1:] for line in lines[2:5]] == [
        ["blk.0.ffn_gate.weight", "Q4_0", "2048x8192x1", "rows", "8192", "0", "0", "CPU"],
        ["blk.0.ffn_up.weight", "Q4_0", "2048x8192x1", "rows", "8192", "0", "0", "CPU"],
        ["blk.0.ffn_down.weight", "Q4_K", "8192x2048x1", "cols", "8192", "0", "0", "CPU"],
    ]
    assert not any("attn_q" in line or "device" in line for line in lines), "it is whole; and there is no device"
    assert split_text(OPERATORS, PLACEMENTS, N_LAYER + 1) == split_text(
        OPERATORS,
        PLACEMENTS[:1] + tuple(dataclasses.replace(p, gg=0.5, cc=0.5) if 0 < p.gg < 1 else p for p in PLACEMENTS[1:]),
        N_LAYER + 1,
    ), "wherever they are cut"
    assert split_text(OPERATORS[:1], PLACEMENTS, N_LAYER + 1) == ""


def test_hot_experts_are_listed() -> None:
    placements = tuple(
        dataclasses.replace(p, gg=0.0, cc=1.0, layout="CPU", hot_experts=(0, 3, 7)) if "_exps" in p.name else p
        for p in PLACEMENTS
    )
    made = dataclasses.replace(record(placements), n_gpu_layers=3)
    lines = [line for line in plugin_text(made, OPERATORS, N_LAYER, "CPU").splitlines() if "_exps" in line]
    assert lines == [
        "tensor blk.1.ffn_gate_exps.weight Q8_0 256x512x8 rows 512 0 0 CPU hot=0,3,7 resident",
        "tensor blk.1.ffn_down_exps.weight Q8_0 512x256x8 cols 512 0 0 CPU hot=0,3,7 resident",
    ]
