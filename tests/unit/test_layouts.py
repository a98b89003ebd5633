"""Which layouts weights get on CPUs that this one is not: of AMX, and of builds with a fault."""

from dataclasses import dataclass, field, replace

import pytest
from worlds import placed, weight

from ggml_bridge.layouts import FAULTS_FILE, fault_name, faults_of_kinds, layout_faults, mul_mat_kind
from oallama.core.types import FORCED_PLAIN_LAYOUT, PLAIN_LAYOUT
from oallama.device import layouts
from oallama.run.weight_places import usable_layouts

MATRIX = weight(role="attn_output", k=256, n=256, layer=0)
HEADS = replace(weight(role="attn_k_b", k=256, n=64, layer=0), shape=(256, 64, 4))
EXPERTS = replace(
    weight(role="ffn_up_exps", k=256, n=512, layer=0), shape=(256, 512, 4), op="MUL_MAT_ID", n_expert_used=2
)
ODD = weight(role="output", k=256, n=97)
OPERATORS = (MATRIX, HEADS, EXPERTS, ODD)
SINGLE, SEVERAL, ROUTED = "MUL_MAT", "3-D MUL_MAT", "MUL_MAT_ID"


@dataclass
class Cpu:
    """The bridge's answers on a CPU. kinds: layout -> kinds that ggml takes; wrong: those of them that are wrong."""

    kinds: dict = field(default_factory=lambda: {"AMX": {SINGLE, SEVERAL}, "CPU_REPACK": {SINGLE, ROUTED}})
    wrong: set = field(default_factory=lambda: {("AMX", SEVERAL)})
    layout_faults: dict = field(default_factory=dict)

    def cpu_layouts(self):
        return [*self.kinds, "CPU"]

    def layout_takes(self, layout, type_name, k, n, e, n_expert_used=0):
        return layout == "CPU" or (n % 32 == 0 and mul_mat_kind(e, n_expert_used) in self.kinds[layout])

    def layout_supports(self, layout, type_name, k, n, e, n_expert_used=0):
        kind = mul_mat_kind(e, n_expert_used)
        sound = (layout, kind) not in self.wrong and fault_name(layout, kind) not in self.layout_faults
        return sound and self.layout_takes(layout, type_name, k, n, e, n_expert_used)


def chosen(cpu, **wanted):
    """Layouts by role. wanted: a share on the device, or a layout, by role."""
    asked = []
    for operator in OPERATORS:
        want = wanted.get(operator.role)
        gg, layout = (want, None) if isinstance(want, float) else (0.0, want)
        asked.append(placed(operator.name, gg=gg, layout=layout))
    placements, warnings = usable_layouts(OPERATORS, asked, cpu, [])
    names = {p.name: p.layout for p in placements}
    return {operator.role: names[operator.name] for operator in OPERATORS}, warnings


def test_several_matrices_are_forced_to_be_plain_where_llama_cpp_would_take_them_to_amx():
    assert chosen(Cpu()) == (
        {"attn_output": None, "attn_k_b": FORCED_PLAIN_LAYOUT, "ffn_up_exps": None, "output": None}, ()
    )  # fmt: skip
    plain = Cpu(kinds={"CPU_REPACK": {SINGLE, ROUTED}})
    assert set(chosen(plain)[0].values()) == {None}, "the choice is llama.cpp's"


def test_of_a_fault_the_next_layout_is_named():
    routed = Cpu(kinds={"X": {SINGLE, ROUTED}, "CPU_REPACK": {SINGLE, ROUTED}}, layout_faults={"X MUL_MAT_ID": "died"})
    assert chosen(routed)[0]["ffn_up_exps"] == "CPU_REPACK"
    alone = Cpu(kinds={"CPU_REPACK": {SINGLE, ROUTED}}, layout_faults={"CPU_REPACK MUL_MAT_ID": "wrong"})
    found, _ = chosen(alone)
    assert found["ffn_up_exps"] == FORCED_PLAIN_LAYOUT and found["attn_output"] is None


def test_a_plan_that_names_the_wrong_layout_is_told_so():
    found, warnings = chosen(Cpu(), attn_k_b="AMX", attn_output="AMX")
    assert (found["attn_k_b"], found["attn_output"]) == (FORCED_PLAIN_LAYOUT, "AMX")
    assert len(warnings) == 1 and HEADS.name in warnings[0] and "AMX" in warnings[0]


def test_where_a_plan_wants_plain_memory_all_layouts_are_named():
    found, _ = chosen(Cpu(), attn_output=PLAIN_LAYOUT)
    assert found == {
        "attn_output": PLAIN_LAYOUT, "attn_k_b": PLAIN_LAYOUT, "ffn_up_exps": "CPU_REPACK", "output": PLAIN_LAYOUT
    }  # fmt: skip


def test_a_split_weight_is_right_too():
    found, _ = chosen(Cpu(), attn_k_b=0.5, attn_output=0.5)
    assert (found["attn_k_b"], found["attn_output"]) == (PLAIN_LAYOUT, "AMX")


def test_a_weight_whose_input_has_sequences_is_not_where_several_matrices_are_wrong():
    recurrent = replace(MATRIX, by_sequence=True)
    usable, _ = usable_layouts((recurrent,), [placed(recurrent.name)], Cpu(), [])
    assert usable[0].layout == "CPU_REPACK", "which takes no several matrices, and so is not asked about them"
    sound = Cpu(wrong=set())
    assert usable_layouts((recurrent,), [placed(recurrent.name)], sound, [])[0][0].layout is None


def test_stock_programs_need_no_repack_where_they_would_be_wrong(monkeypatch):
    def needs(cpu, operators):
        monkeypatch.setattr(layouts, "load_bridge", lambda: cpu)
        monkeypatch.setattr("ggml_bridge.layouts.layout_faults", lambda _: cpu.layout_faults)
        return layouts.needs_no_repack(operators)

    assert needs(Cpu(), OPERATORS)
    assert not needs(Cpu(), (MATRIX, EXPERTS, ODD))
    assert not needs(Cpu(kinds={"CPU_REPACK": {SINGLE, ROUTED}}), OPERATORS)
    assert needs(Cpu(layout_faults={"CPU_REPACK MUL_MAT_ID": "died"}), (MATRIX, EXPERTS))
    assert not needs(Cpu(layout_faults={"CPU_REPACK MUL_MAT_ID": "died"}), (MATRIX,))


def test_faults_are_kept_beside_the_libraries(tmp_path):
    results = {"AMX": "ok", "AMX 3-D MUL_MAT": "died", "CPU_REPACK": "wrong", "CPU": "ok", "self-test": "died"}
    assert faults_of_kinds(results) == {"AMX 3-D MUL_MAT": "died"}
    assert layout_faults(tmp_path) == {}
    file = tmp_path / FAULTS_FILE
    file.write_text('{"AMX 3-D MUL_MAT": "died"}')
    assert layout_faults(tmp_path) == {"AMX 3-D MUL_MAT": "died"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_a_file_of_faults_that_cannot_be_read_counts_as_none(content, tmp_path):
    (tmp_path / FAULTS_FILE).write_bytes(content)
    assert layout_faults(tmp_path) == {}
