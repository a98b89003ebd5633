"""A plan for the plug-in and for stock llama.cpp: its text, the patterns of tensors, the command line. That the text of
any plan agrees with the plan: test_every_plan.py."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import placed, some_plan, weight

from oallama.core.errors import PlanError
from oallama.core.types import (
    NGRAM,
    SPLIT_LAYOUT,
    DecodeStep,
    Draft,
    Operator,
    OperatorPlacement,
    SplitSettings,
    StockOptions,
    StreamSettings,
)
from oallama.plan.export import Backend, Plugin, Target, export_command, needs_plugin, stock_device
from oallama.plan.patterns import escape, host_patterns, split_names
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import plugin_text, split_texts

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


#
# the plug-in's text
#


def text_of(made: Plan, device: str = "RPC0", n_layer: int = N_LAYER, every_operator: bool = False) -> str:
    return plugin_text(made, OPERATORS, n_layer, [device], every_operator)


def residents(text: str) -> list[str]:
    """Operators that compute where their layer's norms are, on the device."""
    return [line.split()[1] for line in text.splitlines() if line.endswith(" resident")]


def test_the_text_of_version_1_in_graph_order_whatever_the_order_of_the_plan() -> None:
    for placements in (PLACEMENTS, PLACEMENTS[::-1]):
        assert text_of(plan(placements)) == GOLDEN.read_text(encoding="utf-8")
    still = plan(streaming=StreamSettings(n_slots=4, prefetch="layer", kept_twice=True))
    assert text_of(still) == GOLDEN.read_text(encoding="utf-8"), "what streams nothing says nothing of it"


def test_every_operator_is_listed_on_request_with_no_layout_where_nothing_is_on_the_host() -> None:
    lines = text_of(plan(), "CUDA0", every_operator=True).splitlines()
    assert [line.split()[1] for line in lines[4:]] == [operator.name for operator in OPERATORS]
    assert "tensor blk.0.attn_q.weight Q4_0 2048x2048x1 rows 0 0 2048 -" in lines
    assert "tensor blk.1.ffn_gate_exps.weight Q8_0 256x512x8 rows 512 0 0 CPU_REPACK" in lines


def test_blocks_live_on_the_device_where_the_norms_of_their_layer_do() -> None:
    def of(n_gpu_layers: int, n_layer: int = N_LAYER, **changes: object) -> list[str]:
        return residents(text_of(plan(n_gpu_layers=n_gpu_layers, **changes), n_layer=n_layer, every_operator=True))

    of_layer_1 = ["blk.1.ffn_up.weight", "blk.1.ffn_gate_exps.weight", "blk.1.ffn_down_exps.weight"]
    assert of(0) == of(1) == [], "logits are read on the host"
    assert of(2) == of_layer_1
    assert of(3) == [o.name for o in OPERATORS if o.layer is not None]
    assert of(3, N_LAYER + 1) == of_layer_1, "a block of MTP has no operators and counts"
    parts = split_texts(OPERATORS, PLACEMENTS, 1, [SplitSettings(residents=False)])
    assert of(3, residents=False) == residents(parts[0]) == []


def test_experts_are_on_the_host_where_their_router_is() -> None:
    router = weight(role="ffn_gate_inp", k=256, n=8, layer=1, type_name="F32")
    for gg in (0.0, 1.0):
        made = plan((*PLACEMENTS, placed(router.name, gg=gg)), n_gpu_layers=2)
        text = plugin_text(made, (*OPERATORS, router), N_LAYER, ["RPC0"], every_operator=True)
        assert ("blk.1.ffn_gate_exps.weight" in residents(text)) is (gg == 1.0)


def test_the_text_of_a_plan_that_streams() -> None:
    """A quarter of the first FFN, and CC of all operators, which the device computes for some tokens of a prompt."""
    placements = tuple(
        replace(p, gg=0.25, cg=0.125, cc=0.625) if p.name.startswith("blk.0.ffn") else p for p in PLACEMENTS
    )
    made = plan(placements, token_assignment=((31, 0), (32, 9), (512, 400)))
    made = replace(made, memory=replace(made.memory, staging=22151168))

    def streamed(settings: StreamSettings, **changes: object) -> str:
        return text_of(replace(made, streaming=settings, **changes))

    assert streamed(StreamSettings(n_slots=4, prefetch="layer", kept_twice=True)) == STREAMED.read_text(
        encoding="utf-8"
    )
    lines = streamed(StreamSettings(), token_assignment=()).splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["oallama-plan", "model", "device", "sum", "staging", "tensor"]
    asked = streamed(StreamSettings(piece_bytes=262144, link_bytes_per_s=12 * 10**9, ring_bytes=101711872))
    assert {"piece 262144", "link 12000000000", "ring 101711872"} < set(asked.splitlines())


def test_a_load_without_its_plan_is_told_what_is_split_and_along_which_axis_wherever_it_is_cut() -> None:
    (text,) = split_texts(OPERATORS, PLACEMENTS, N_LAYER + 1)
    lines = text.splitlines()
    assert lines[:2] == ["oallama-plan 1", "sum 262144"]
    assert [line.split()[1:] for line in lines[2:5]] == [
        ["blk.0.ffn_gate.weight", "Q4_0", "2048x8192x1", "rows", "8192", "0", "0", "CPU"],
        ["blk.0.ffn_up.weight", "Q4_0", "2048x8192x1", "rows", "8192", "0", "0", "CPU"],
        ["blk.0.ffn_down.weight", "Q4_K", "8192x2048x1", "cols", "8192", "0", "0", "CPU"],
    ]
    assert not any("attn_q" in line or "device" in line for line in lines), "it is whole; and there is no device"
    halves = [replace(p, gg=0.5, cc=0.5) if 0 < p.gg < 1 else p for p in PLACEMENTS]
    assert split_texts(OPERATORS, halves, N_LAYER + 1) == (text,)
    assert split_texts(OPERATORS[:1], PLACEMENTS, N_LAYER + 1) == ()


def test_hot_experts_are_listed() -> None:
    hot = tuple(
        placed(p.name, layout="CPU", hot=(0, 3, 7)) if p.name.endswith("exps.weight") else p for p in PLACEMENTS
    )
    lines = [line for line in text_of(plan(hot, n_gpu_layers=3), "CPU").splitlines() if "_exps" in line]
    assert lines == [
        "tensor blk.1.ffn_gate_exps.weight Q8_0 256x512x8 rows 512 0 0 CPU hot=0,3,7 resident",
        "tensor blk.1.ffn_down_exps.weight Q8_0 512x256x8 cols 512 0 0 CPU hot=0,3,7 resident",
    ]


def test_experts_that_are_exchanged_need_the_link_s_speed_and_no_ring() -> None:
    hot = tuple(placed(p.name, layout="CPU", hot=(0, 3)) if p.name.endswith("exps.weight") else p for p in PLACEMENTS)
    settings = StreamSettings(kept_twice=True, piece_bytes=262144, link_bytes_per_s=12 * 10**9, exchange="idle")
    asked = {"exchange idle", "twice 1", "piece 262144", "link 12000000000"}
    assert asked < set(text_of(plan(hot, streaming=settings)).splitlines())
    assert not asked & set(text_of(plan(hot, streaming=replace(settings, exchange="off"))).splitlines())
    assert not asked & set(text_of(plan(streaming=settings)).splitlines()), "none are hot"
    made = plan(hot, streaming=settings)
    assert Plan.from_json(made.to_json()) == made
    assert "exchange" not in plan(hot, streaming=StreamSettings()).to_json()["streaming"]


@pytest.mark.parametrize("word", ["", "RPC 0", "RPC0\n", "x" * 128, "output.weight\ntensor token_embd.weight"])
def test_names_that_no_word_of_a_line_can_hold_are_refused(word: str) -> None:
    """Of a device, or of a tensor, which might smuggle in another line."""
    with pytest.raises(PlanError, match="without spaces"):
        text_of(plan(), word)
    named = [*PLACEMENTS[:-1], replace(PLACEMENTS[-1], name=word)]
    with pytest.raises(PlanError, match="without spaces"):
        plugin_text(plan(tuple(named)), (*OPERATORS[:-1], replace(OPERATORS[-1], name=word)), N_LAYER, ["RPC0"])


#
# patterns of tensors
#

ROLES = ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "ffn_up_exps")


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Operator], list[OperatorPlacement], set[str]]:
    """Operators, their places, and the names of all tensors."""
    roles = draw(st.lists(st.sampled_from(ROLES), min_size=1, unique=True))
    operators = [weight(role=r, k=256, n=512, layer=i) for i in range(draw(st.integers(1, 12))) for r in roles]
    operators.append(weight(role=draw(st.sampled_from(["output", "token_embd"])), k=256, n=512))
    others = {f"blk.{o.layer}.{norm}.weight" for o in operators for norm in ("attn_norm", "ffn_norm")}
    others |= {"token_embd.weight", "output_norm.weight", "rope_freqs.weight"}
    for operator in operators[:-1]:
        others.add(operator.name.removesuffix(".weight") + draw(st.sampled_from([".weight", ".bias", ".scale"])))
    layouts, shares = st.sampled_from([None, "CPU", "CPU_REPACK"]), st.sampled_from([0.0, 0.0, 0.25, 0.999, 1.0, 1.0])
    places = [
        placed(o.name, gg=draw(st.sampled_from([0.0, 1.0]) if o.role == "token_embd" else shares), layout=draw(layouts))
        for o in operators
    ]
    return operators, places, {o.name for o in operators} | others


@given(models())
def test_exactly_the_tensors_that_are_not_whole_on_the_device_match_once(
    model: tuple[list[Operator], list[OperatorPlacement], set[str]],
) -> None:
    operators, places, tensor_names = model
    patterns = host_patterns(operators, places, tensor_names)
    hosted = {p.name: SPLIT_LAYOUT if p.gg else p.layout for p in places if p.gg < 1}
    stems = {name.removesuffix(".weight") for name in hosted}
    for name in tensor_names:
        found = [layout for pattern, layout in patterns if re.search(pattern, name)]  # as llama.cpp does
        if name in hosted:
            assert found == [None if name == "token_embd.weight" else hosted[name]]
        elif name.rsplit(".", 1)[0] in stems:
            assert found == [None], "a bias or scale stays beside its weight, in llama.cpp's own layout"
        else:
            assert found == []
    assert patterns == host_patterns(operators[::-1], places[::-1], sorted(tensor_names)), "in a fixed order"
    assert len(patterns) <= len(ROLES) * 7 + 1, "per role one for each of four layouts and for each companion"
    layouts = [layout for _, layout in patterns]
    assert layouts[: layouts.count(SPLIT_LAYOUT)] == [SPLIT_LAYOUT] * layouts.count(SPLIT_LAYOUT), "split ones first"


def test_more_patterns_than_llama_cpp_takes_are_refused() -> None:
    names = [f"x.part{i}.weight" for i in range(4097)]
    operators, places = [replace(OPERATORS[0], name=name) for name in names], [placed(name) for name in names]
    assert len(host_patterns(operators[1:], places, [])) == 4096
    with pytest.raises(PlanError, match=r"needs 4097 tensor patterns, but llama\.cpp accepts 4096"):
        host_patterns(operators, places, [])


@pytest.mark.parametrize("of", [text_of, lambda made: host_patterns(OPERATORS, made.operators, [])])
def test_an_operator_without_a_place_is_refused(of: Any) -> None:
    with pytest.raises(PlanError, match=r"does not place operator output\.weight"):
        of(plan(PLACEMENTS[:-1]))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\u2028\u2029\x85"), min_size=1, max_size=20))
def test_escaped_text_matches_itself_only(text: str) -> None:
    assert re.fullmatch(escape(text), text)
    assert not re.fullmatch(escape(text), text + "x")


#
# the command line of stock llama.cpp
#

PLUGIN = Plugin("/opt/o llama/libggml-oallama.so", "/plans/plan.oallama")
SMALL = tuple(
    weight(role=role, k=256, n=256, layer=layer)
    for layer in range(2)
    for role in ("attn_q", "ffn_gate", "ffn_up", "ffn_down")
)
NAMES = [operator.name for operator in SMALL] + ["token_embd.weight", "blk.0.attn_norm.weight"]
FFN = r"(?:ffn_down\.weight|ffn_gate\.weight|ffn_up\.weight)"


def laid(gg_of_ffn: float = 0.5, gg_of_attention: float = 1.0, cg: float = 0.0, **changes: Any) -> Plan:
    """Layer 0's FFN is split, its attention and layer 1 lie whole; layer 1's FFN is on the host."""
    share = {(0, True): gg_of_ffn, (0, False): gg_of_attention, (1, True): 0.0, (1, False): 1.0}
    placements = [
        placed(operator.name, gg=gg, cg=cg if gg < 1 else 0.0)
        for operator in SMALL
        for gg in [share[operator.layer, operator.role.startswith("ffn")]]
    ]
    return some_plan(**{"operators": placements, "device": "rpc://10.0.0.2:50052", "n_gpu_layers": 999, **changes})


def words_of(made: Plan, target: Target = "llama-server", plugin: Plugin | None = PLUGIN) -> list[str]:
    return shlex.split(export_command(made, SMALL, NAMES, target, plugin))


def after(option: str, words: list[str]) -> list[str]:
    return [value for word, value in pairwise(words) if word == option]


def test_a_path_is_quoted_for_the_shell_and_devices_are_named_as_the_program_has_them() -> None:
    words = words_of(laid(gg_of_ffn=0.0, model_path="my models/it's.gguf", device="CUDA0"))
    for option, value in (("-m", "my models/it's.gguf"), ("-ngl", "999"), ("--device", "CUDA0")):
        assert after(option, words) == [value]
    remote = words_of(laid(gg_of_ffn=0.0), "llama-cli", plugin=None)
    assert remote[0] == "llama-cli"
    assert after("--rpc", remote) == ["10.0.0.2:50052"] and after("--device", remote) == ["RPC0"]
    slices = words_of(laid(n_gpu_layers=0))
    assert after("--device", slices) == ["none"], "llama.cpp would keep a buffer there for no layer"
    host_only = [placed(operator.name) for operator in SMALL]
    assert words_of(laid(operators=host_only, device="none"))[-4:] == ["--device", "none", "-ngl", "0"]


@pytest.mark.parametrize(
    ("made", "overrides"),
    [
        (laid(), [rf"^blk\.0\.{FFN}$=OALLAMA_Split", rf"^blk\.1\.{FFN}$=CPU"]),
        (laid(gg_of_ffn=0.0), [rf"^blk\.(?:0|1)\.{FFN}$=CPU"]),
        (laid(gg_of_ffn=0.0, cg=0.25), [rf"^blk\.(?:0|1)\.{FFN}$=OALLAMA_Split"]),
        (  # with a token assignment layers in host memory are the plug-in's, attention as well
            laid(gg_of_ffn=0.0, gg_of_attention=0.0, token_assignment=((64, 0), (512, 100))),
            [rf"^blk\.(?:0|1)\.{FFN}$=OALLAMA_Split", r"^blk\.0\.attn_q\.weight$=OALLAMA_Split"],
        ),
    ],
)
def test_what_is_split_goes_to_the_plugin_before_what_is_the_host_s(made: Plan, overrides: list[str]) -> None:
    """llama-bench takes all in one option."""
    assert after("-ot", words_of(made)) == overrides
    assert after("-ot", words_of(made, "llama-bench")) == [";".join(overrides)]
    assert bool(split_names(made, SMALL)) is ("OALLAMA_Split" in overrides[0])


def test_with_tokens_assigned_an_output_stays_llama_cpp_s() -> None:
    """As what is whole on the device does: CG' is of CC, and there is none."""
    places = [placed(OPERATORS[0].name, gg=1.0), placed(OPERATORS[1].name), placed("output.weight")]
    operators = (*OPERATORS[:2], OPERATORS[-1])
    assert host_patterns(operators, places, [p.name for p in places], with_n_g={0}) == (
        (r"^blk\.0\.ffn_gate\.weight$", SPLIT_LAYOUT),
        (r"^output\.weight$", None),
    )


def test_drafts_go_with_the_plan() -> None:
    draft = Draft("draft-simple", 3, "/models/small one.gguf", on_device=True)
    words = words_of(laid(draft=draft))
    assert [after(option, words) for option in ("--spec-type", "-md", "-devd", "-ngld", "--spec-draft-n-max")] == [
        ["draft-simple"], ["/models/small one.gguf"], ["RPC0"], ["all"], ["3"],
    ]  # fmt: skip
    assert after("-devd", words_of(laid(draft=replace(draft, on_device=False)))) == ["none"]
    assert after("--spec-ngram-simple-size-m", words_of(laid(draft=NGRAM))) == ["48"]
    workload = replace(laid().workload, step=DecodeStep(1, 2, 1.0, mtp=True))
    own = words_of(laid(workload=workload, draft=Draft("draft-mtp", 2)))
    assert (after("--spec-type", own), after("--spec-draft-n-max", own)) == (["draft-mtp"], ["2"]) and "-md" not in own
    assert after("--parallel", own) == ["1"], "as many slots as have memory for snapshots"
    with pytest.raises(PlanError, match="llama-bench has no drafts"):
        words_of(laid(draft=draft), "llama-bench")
    assert Plan.from_json(laid(draft=draft).to_json()).draft == draft


def test_a_shell_sets_the_variables_and_starts_the_program() -> None:
    """Not the quoted NAME=value, which a shell would take for the program's name."""
    line = export_command(laid(), SMALL, NAMES, "llama-server", PLUGIN)
    assert line.startswith("GGML_BACKEND_PATH='/opt/o llama/libggml-oallama.so' OALLAMA_PLAN=/plans/plan.oallama llama")
    assert shlex.split(line)[2] == "llama-server"
    whole = laid(gg_of_ffn=0.0)
    assert words_of(whole, plugin=None)[0] == "llama-server"
    for own, plugin, variables in (
        (whole, None, "GGML_BACKEND_PATH=/opt/mine.so MINE=1 llama-server"),
        (laid(), PLUGIN, "OALLAMA_EXTRA_BACKENDS=/opt/mine.so OALLAMA_PLAN=/plans/plan.oallama MINE=1 llama-server"),
    ):
        line = export_command(own, SMALL, NAMES, "llama-server", plugin, Backend("/opt/mine.so", {"MINE": "1"}))
        assert variables in line


@pytest.mark.parametrize(
    ("layouts", "server", "bench"),
    [
        ((None, None), ["CPU"], ["CPU"]),
        (("CPU_REPACK", None), ["CPU_REPACK", "CPU"], ["CPU_REPACK", "CPU"]),
        (("CPU", "CPU"), ["CPU", "--no-repack"], ["OALLAMA_CPU"]),
        (("CPU", "AMX"), ["CPU", "AMX", "--no-repack"], ["OALLAMA_CPU", "AMX"]),
    ],
)
@pytest.mark.parametrize("device", ["CUDA0", "none"])
def test_layouts_of_the_cpu_are_named(
    layouts: tuple[str | None, str | None], server: list[str], bench: list[str], device: str
) -> None:
    """Those that stock llama.cpp has no name for by the plug-in's. Without a device it chooses where the plan does."""
    operators = [weight(role="attn_q", k=256, n=256, layer=layer) for layer in range(2)]
    made = some_plan([placed(o.name, layout=layout) for o, layout in zip(operators, layouts, strict=True)],
                     device=device, n_gpu_layers=0 if device == "none" else 3)  # fmt: skip
    for target, expected in (("llama-server", server), ("llama-cli", server), ("llama-bench", bench)):
        names = [word.split("=")[-1] for word in shlex.split(export_command(made, operators, [], target, PLUGIN))
                 if "=" in word and "PATH" not in word for word in word.split(";")]  # fmt: skip
        words = shlex.split(export_command(made, operators, [], target, PLUGIN))
        flags = [word for word in words if word == "--no-repack"]
        chosen = device == "none" and None in layouts  # llama.cpp chooses, and needs no pattern for that
        assert names + flags == [name for name in expected if not chosen or name != "CPU"]
        assert needs_plugin(made, operators, target) is any(name not in ("CPU", "--no-repack") for name in expected)
        assert "OALLAMA_PLAN" not in " ".join(words)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        (StockOptions(), []), (StockOptions(no_host=True), ["--no-host"]),
        (StockOptions(n_cpu_moe=2), ["-ncmoe", "2"]),
        (StockOptions(moe_cache_bytes=1500 << 20), ["--moe-cache-mib", "1500", "--load-mode", "none"]),
    ],
)  # fmt: skip
def test_stock_llama_cpps_own_options_are_written_as_they_are(options: StockOptions, flags: list[str]) -> None:
    """-ngl says what lies where, so no override does."""
    rows = [placed(operator.name, gg=float(operator.layer == 1)) for operator in SMALL]
    words = words_of(laid(operators=rows, n_gpu_layers=2, stock=options), plugin=None)
    assert after("-ngl", words) == ["2"] and after("-ot", words) == [] and " ".join(flags) in " ".join(words)
    nothing = words_of(laid(operators=[placed(o.name) for o in SMALL], n_gpu_layers=0, stock=options), plugin=None)
    assert after("--device", nothing) == ["RPC0"], "large batches are computed there"


def test_llama_bench_has_no_host_with_a_value_and_no_expert_cache() -> None:
    rows = [placed(operator.name) for operator in SMALL]
    words = words_of(laid(operators=rows, n_gpu_layers=0, stock=StockOptions(no_host=True)), "llama-bench", None)
    assert after("--no-host", words) == ["1"]
    with pytest.raises(PlanError, match="no expert cache"):
        words_of(laid(operators=rows, n_gpu_layers=0, stock=StockOptions(moe_cache_bytes=1 << 20)), "llama-bench", None)


def test_the_file_is_read_where_weights_are_copied_out_of_it() -> None:
    assert after("--load-mode", words_of(laid())) == ["none"]
    assert after("--load-mode", words_of(laid(gg_of_ffn=0.0))) == []


def test_llama_bench_gets_the_workload_and_no_option_that_it_has_not() -> None:
    words = words_of(laid(), "llama-bench")
    assert after("-p", words) == ["64"] and after("-n", words) == ["32"]
    assert "-c" not in words and "--fit" not in words


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: words_of(laid(), plugin=None), "plugin"),
        (lambda: words_of(laid(device="none")), "device"),
    ],
)
def test_what_no_stock_program_can_do_is_refused(refused: Any, says: str) -> None:
    known = {"CUDA1": "CUDA1", "none": "none", "emulated:rtx3060,scale=2": "Emulated0"}
    assert {device: stock_device(laid(device=device)) for device in known} == known
    with pytest.raises(PlanError, match=says):
        refused()


@pytest.mark.parametrize(("target", "character"), [("llama-server", ","), ("llama-cli", "="), ("llama-bench", ";")])
def test_a_name_that_would_end_the_override_is_refused(target: Target, character: str) -> None:
    odd = replace(weight(role="odd", k=256, n=256), name=f"odd{character}name.weight")
    with pytest.raises(PlanError, match="odd"):
        export_command(laid(operators=[placed(odd.name)]), [odd], [odd.name], target)
