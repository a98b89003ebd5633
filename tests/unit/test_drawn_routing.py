"""scripts/routing.py: what is drawn has the concentration that was asked for; files read back."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from gguf_factory import write_gguf

from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.profile.routing import read_routing as read_counts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from routing import (
    main,
    read_routing,
    write_routing,
)


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids.txt"
    asked = ["draw", "--layers", "2", "--experts", "16", "--used", "2", "--tokens", "400", "-o", str(path)]
    assert main([*asked, "--curve", "25%=50%", "--seed", "7"]) == 0
    assert path.read_text().startswith("# drawn: curve 25%=50%, seed 7")
    assert {layer: len(rows) for layer, rows in read_routing(path).items()} == {0: 400, 1: 400}
    assert main([*asked, "--curve", "25%=much"]) == 2
    assert "is not like 25%=74%" in capsys.readouterr().err
    none = str(tmp_path / "none.txt")
    assert main(["keep", none, "--model", none, "-o", none]) == 2


def test_a_file_is_kept_as_if_the_model_had_been_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path / "cache"))
    model = write_gguf(tmp_path / "model.gguf", "llama-moe")  # two layers, 2 of 8 experts
    first = [(i % 4, 4 + i % 3) for i in range(200)]
    later = [(i % 2, 7) for i in range(201)]
    ids, rest = tmp_path / "ids.txt", tmp_path / "later.txt"
    write_routing(ids, {layer: [*first, *later] for layer in (0, 1, 7)}, "a third layer that the model has not")
    assert main(["keep", str(ids), "--model", str(model), "-o", str(rest)]) == 0
    info = model_info(read_gguf(model))
    known = read_counts(info.fingerprint, info.n_expert, info.n_expert_used)
    assert known is not None and [layer.layer for layer in known.decode] == [0, 1]
    for layer in (*known.decode, *known.prompt):
        chosen, judged = (Counter(e for row in rows for e in row) for rows in (first[:100], first[100:]))
        assert layer.n_tokens == 200 and layer.latest == tuple(float(judged[e]) for e in range(8))
        assert layer.before == pytest.approx(tuple(chosen[e] for e in range(8)), rel=0.02)
    assert read_routing(rest)[1] == later
    write_routing(ids, {0: [(0, 1, 2), (3, 4, 5)]}, "of three experts a token")
    capsys.readouterr()
    assert main(["keep", str(ids), "--model", str(model), "-o", str(rest)]) == 2
    assert "not of a model of 8 experts, 2 a token" in capsys.readouterr().err
