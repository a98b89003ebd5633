"""The command line of stock llama.cpp for a plan: quoting, devices, overrides, and what split operators need."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from worlds import placed, some_plan, weight

from oallama.core.errors import PlanError
from oallama.plan.export import Plugin, Target, export_command, splits, stock_device
from oallama.plan.plan import Plan

PLUGIN = Plugin("/opt/o llama/libggml-oallama.so", "/plans/plan.oallama")
ROLES = ("attn_q", "ffn_gate", "ffn_up", "ffn_down")
OPERATORS = tuple(weight(role=role, k=256, n=256, layer=layer) for layer in range(2) for role in ROLES)
NAMES = [operator.name for operator in OPERATORS] + ["token_embd.weight", "blk.0.attn_norm.weight"]


def plan(gg_of_ffn: float = 0.5, gg_of_attention: float = 1.0, cg: float = 0.0, **changes: Any) -> Plan:
    """Layer 0's FFN is split, its attention and layer 1 lie whole; layer 1's FFN is on the host."""
    share = {(0, True): gg_of_ffn, (0, False): gg_of_attention, (1, True): 0.0, (1, False): 1.0}
    placements = [
        placed(operator.name, gg=gg, cg=cg if gg < 1 else 0.0)
        for operator in OPERATORS
        for gg in [share[operator.layer or 0, operator.role.startswith("ffn")]]
    ]
    return some_plan(**{"operators": placements, "device": "rpc://10.0.0.2:50052", "n_gpu_layers": 999, **changes})


def words_of(made: Plan, target: Target = "llama-server", plugin: Plugin | None = PLUGIN) -> list[str]:
    return shlex.split(export_command(made, OPERATORS, NAMES, target, plugin))


def overrides(words: list[str]) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words) if word == "-ot"]


def test_a_path_is_quoted_for_the_shell_and_devices_are_named_as_the_program_has_them() -> None:
    words = words_of(plan(gg_of_ffn=0.0, model_path="my models/it's.gguf", device="CUDA0"))
    for option, value in (("-m", "my models/it's.gguf"), ("-ngl", "999"), ("--device", "CUDA0")):
        assert words[words.index(option) + 1] == value
    remote = words_of(plan(gg_of_ffn=0.0), "llama-cli")
    assert remote[0] == "llama-cli" and remote[remote.index("--rpc") + 1] == "10.0.0.2:50052"
    assert remote[remote.index("--device") + 1] == "RPC0"
    host_only = [placed(operator.name) for operator in OPERATORS]
    assert words_of(plan(operators=host_only, device="none"))[-4:] == ["--device", "none", "-ngl", "0"]


def test_split_operators_go_to_the_plugin_before_the_host_ones() -> None:
    assert overrides(words_of(plan())) == [
        r"^blk\.0\.(?:ffn_down\.weight|ffn_gate\.weight|ffn_up\.weight)$=OALLAMA_Split",
        r"^blk\.1\.(?:ffn_down\.weight|ffn_gate\.weight|ffn_up\.weight)$=CPU",
    ]


def test_a_shell_sets_the_variables_and_starts_the_program() -> None:
    """Not the quoted NAME=value, which a shell would take for the program's name."""
    line = export_command(plan(), OPERATORS, NAMES, "llama-server", PLUGIN)
    assert line.startswith("GGML_BACKEND_PATH='/opt/o llama/libggml-oallama.so' OALLAMA_PLAN=/plans/plan.oallama llama")
    words = shlex.split(line)
    assert words[0] == "GGML_BACKEND_PATH=/opt/o llama/libggml-oallama.so" and words[2] == "llama-server"


def test_llama_bench_gets_all_overrides_in_one_option_and_the_workload() -> None:
    words = words_of(plan(), "llama-bench")
    (joined,) = overrides(words)
    assert joined == ";".join(overrides(words_of(plan())))
    assert words[words.index("-p") + 1] == "64" and words[words.index("-n") + 1] == "32"
    assert "-c" not in words and "--fit" not in words, "llama-bench has neither"


def test_a_plan_of_whole_operators_needs_no_plugin_and_names_none() -> None:
    whole = plan(gg_of_ffn=0.0)
    assert not splits(whole, OPERATORS) and splits(plan(), OPERATORS)
    assert words_of(whole, plugin=None) == words_of(whole)
    assert words_of(whole)[0] == "llama-server"


def test_a_plan_that_splits_is_refused_without_plugin_or_device() -> None:
    with pytest.raises(PlanError, match="plugin"):
        words_of(plan(), plugin=None)
    with pytest.raises(PlanError, match="device"):
        words_of(plan(device="none"))


def test_streamed_operators_go_to_the_plugin_too() -> None:
    host_only = plan(gg_of_ffn=0.0)
    streamed = plan(gg_of_ffn=0.0, cg=0.25)
    assert overrides(words_of(streamed)) == [
        r"^blk\.(?:0|1)\.(?:ffn_down\.weight|ffn_gate\.weight|ffn_up\.weight)$=OALLAMA_Split"
    ]
    assert overrides(words_of(host_only))[0].endswith("=CPU")


def test_with_a_token_assignment_layers_in_host_memory_are_the_plugins() -> None:
    """Those of attention as well: whatever lies in a layer."""
    assigned = plan(gg_of_ffn=0.0, gg_of_attention=0.0, token_assignment=((64, 0), (512, 100)))
    assert splits(assigned, OPERATORS)
    assert overrides(words_of(assigned)) == [
        r"^blk\.(?:0|1)\.(?:ffn_down\.weight|ffn_gate\.weight|ffn_up\.weight)$=OALLAMA_Split",
        r"^blk\.0\.attn_q\.weight$=OALLAMA_Split",
    ]


def test_devices_that_no_stock_program_has_are_refused() -> None:
    assert stock_device(plan(device="CUDA1")) == "CUDA1"
    assert stock_device(plan(device="none")) == "none"
    with pytest.raises(PlanError, match="rpc-server"):
        stock_device(plan(device="rpc-worker:1"))
    with pytest.raises(PlanError, match="second CPU"):
        stock_device(plan(device="cpu-pair"))
    with pytest.raises(PlanError, match="emulated"):
        stock_device(plan(device="emulated"))


@pytest.mark.parametrize(("target", "character"), [("llama-server", ","), ("llama-cli", "="), ("llama-bench", ";")])
def test_a_name_that_would_end_the_override_is_refused(target: Target, character: str) -> None:
    name = f"odd{character}name.weight"
    odd = replace(weight(role="odd", k=256, n=256), name=name)
    made = plan(operators=[placed(name)])
    with pytest.raises(PlanError, match="odd"):
        export_command(made, [odd], [name], target)
