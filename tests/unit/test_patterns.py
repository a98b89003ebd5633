"""The patterns match the weights that stay on the host or are split, their biases and scales, and no other tensor of
the model."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import placed, weight

from oallama.core.errors import PlanError
from oallama.core.types import SPLIT_LAYOUT, Operator, OperatorPlacement
from oallama.plan.patterns import Pattern, escape, host_patterns, is_split

ROLES = ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "ffn_up_exps")


def operator(name: str) -> Operator:
    layer = int(name.split(".")[1]) if name.startswith("blk.") else None
    return replace(weight(role=name.split(".")[-2], k=256, n=512, layer=layer), name=name)


def matches(patterns: tuple[Pattern, ...], name: str) -> list[str | None]:
    """Layouts of the patterns that match, as llama.cpp searches them."""
    return [layout for pattern, layout in patterns if re.search(pattern, name)]


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Operator], list[OperatorPlacement], set[str]]:
    n_layer = draw(st.integers(1, 12))
    roles = draw(st.lists(st.sampled_from(ROLES), min_size=1, unique=True))
    names = [f"blk.{layer}.{role}.weight" for layer in range(n_layer) for role in roles]
    names.append(draw(st.sampled_from(["output.weight", "token_embd.weight"])))
    others = {f"blk.{layer}.{norm}.weight" for layer in range(n_layer) for norm in ("attn_norm", "ffn_norm")}
    others |= {"token_embd.weight", "output_norm.weight", "rope_freqs.weight"}
    for name in names:
        suffix = draw(st.sampled_from(["", ".bias", ".scale"]))
        if suffix and name.startswith("blk."):
            others.add(name.removesuffix(".weight") + suffix)
    layouts, shares = st.sampled_from([None, "CPU", "CPU_REPACK"]), st.sampled_from([0.0, 0.0, 0.25, 0.999, 1.0, 1.0])
    placements = [
        placed(
            name,
            gg=draw(shares) if name != "token_embd.weight" else draw(st.sampled_from([0.0, 1.0])),
            layout=draw(layouts),
        )
        for name in names
    ]
    return [operator(name) for name in names], placements, set(names) | others


@given(models())
def test_exactly_the_tensors_that_are_not_whole_on_the_device_match_once(
    model: tuple[list[Operator], list[OperatorPlacement], set[str]],
) -> None:
    operators, placements, tensor_names = model
    patterns = host_patterns(operators, placements, tensor_names)
    hosted = {p.name: SPLIT_LAYOUT if p.gg else p.layout for p in placements if p.gg < 1}
    stems = {name.removesuffix(".weight") for name in hosted}
    for name in tensor_names:
        found = matches(patterns, name)
        if name in hosted:
            assert found == [None if name == "token_embd.weight" else hosted[name]]
        elif name.rsplit(".", 1)[0] in stems:
            assert found == [None], "a bias or scale stays beside its weight, in llama.cpp's own layout"
        else:
            assert found == []


@given(models())
def test_patterns_are_few_and_in_a_fixed_order(
    model: tuple[list[Operator], list[OperatorPlacement], set[str]],
) -> None:
    operators, placements, tensor_names = model
    patterns = host_patterns(operators, placements, tensor_names)
    assert patterns == host_patterns(operators[::-1], placements[::-1], sorted(tensor_names))
    # per role: at most one pattern for the weight in each of four layouts and one for each companion
    assert len(patterns) <= len(ROLES) * 7 + 1
    layouts = [layout for _, layout in patterns]
    n_split = layouts.count(SPLIT_LAYOUT)
    assert layouts[:n_split] == [SPLIT_LAYOUT] * n_split, "split ones come first"


def test_more_patterns_than_llama_cpp_takes_are_refused() -> None:
    names = [f"part{i}.weight" for i in range(4097)]
    operators, placements = [operator(f"x.{name}") for name in names], [placed(f"x.{name}") for name in names]
    assert len(host_patterns(operators[1:], placements, [])) == 4096
    with pytest.raises(PlanError, match=r"needs 4097 tensor patterns but llama\.cpp takes 4096"):
        host_patterns(operators, placements, [])


def test_an_operator_without_a_place_is_refused() -> None:
    with pytest.raises(PlanError, match=r"output\.weight"):
        host_patterns([operator("output.weight")], [], ["output.weight"])


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\u2028\u2029\x85"), min_size=1, max_size=20))
def test_escaped_text_matches_itself_only(text: str) -> None:
    assert re.fullmatch(escape(text), text)
    assert not re.fullmatch(escape(text), text + "x")


def test_with_tokens_assigned_what_is_whole_on_the_device_stays_llama_cpps() -> None:
    """CG' is of CC, and there is none; on the host every layer's weight is the plugin's, but not the output."""
    names = ["blk.0.ffn_up.weight", "blk.1.ffn_up.weight", "output.weight"]
    operators = [operator(name) for name in names]
    placements = [placed(names[0], gg=1.0), placed(names[1]), placed(names[2])]
    assert [is_split(o, p, streams_tokens=True) for o, p in zip(operators, placements, strict=True)] == [
        False, True, False
    ]  # fmt: skip
    assert not any(is_split(o, p, streams_tokens=False) for o, p in zip(operators, placements, strict=True))
    assert host_patterns(operators, placements, names, streams_tokens=True) == (
        (r"^blk\.1\.ffn_up\.weight$", SPLIT_LAYOUT),
        (r"^output\.weight$", None),
    )
