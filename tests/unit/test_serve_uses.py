"""What the plug-in of llama-server leaves of the uses of experts is read; other lines are passed over."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import weight

from oallama.core.types import Operator
from oallama.profile.routing import counted, unknown_routing
from oallama.serve.uses import traffic_of

N_EXPERT = 4


def expert_operators() -> list[Operator]:
    return [
        weight(role=role, k=64, n=64, layer=layer, n_expert=N_EXPERT, used=2)
        for layer in (0, 1)
        for role in ("ffn_gate_exps", "ffn_up_exps")
    ] + [weight(role="output", k=64, n=64)]


def test_uses_are_added_by_layer_and_kind(tmp_path: Path) -> None:
    file = tmp_path / "uses"
    file.write_text(
        "blk.0.ffn_gate_exps.weight single 5 4 3 2 1\n"
        "blk.0.ffn_up_exps.weight single 5 4 3 2 1\n"  # the same tokens once more
        "blk.0.ffn_gate_exps.weight several 7 14 0 0 0\n"
        "blk.1.ffn_gate_exps.weight single 1 1 1 0 0\n"
        "blk.0.ffn_gate_exps.weight single 2 0 0 2 2\n",  # of a second start
        encoding="utf-8",
    )
    found = unknown_routing("f" * 64, N_EXPERT, 2)
    for traffic in traffic_of(file, expert_operators(), N_EXPERT):
        found = counted(found, traffic)
    assert [(each.layer, each.n_tokens, each.latest) for each in found.decode] == [
        (0, 7, (4.0, 3.0, 4.0, 3.0)),
        (1, 1, (1.0, 1.0, 0.0, 0.0)),
    ]
    assert [(each.layer, each.n_tokens, each.latest) for each in found.prompt] == [(0, 7, (14.0, 0.0, 0.0, 0.0))]


@pytest.mark.parametrize(
    "line",
    [
        "", "blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_exps.weight single",
        "blk.9.ffn_gate_exps.weight single 1 1 1 0 0",
        "blk.0.ffn_gate_exps.weight single 5 4 3 2", "blk.0.ffn_gate_exps.weight single 5 4 3 2 -1",
        "blk.0.ffn_gate_exps.weight single 0 0 0 0 0", "blk.0.ffn_gate_exps.weight single 5 4 3 2 99999999999999999999",
    ],
)  # fmt: skip
def test_lines_that_are_no_use_are_passed_over(line: str, tmp_path: Path) -> None:
    (tmp_path / "uses").write_text(line + "\n", encoding="utf-8")
    assert not list(traffic_of(tmp_path / "uses", expert_operators(), N_EXPERT))


def test_a_file_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert not list(traffic_of(tmp_path / "uses", expert_operators(), N_EXPERT))
    (tmp_path / "uses").write_bytes(b"\xff\xfe")
    assert not list(traffic_of(tmp_path / "uses", expert_operators(), N_EXPERT))
