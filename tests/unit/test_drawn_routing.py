"""scripts/routing.py: what is drawn has the concentration and the overlap that were asked for; files read back."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, islice
from math import comb, prod, sqrt
from pathlib import Path

import numpy as np
import pytest
from gguf_factory import write_gguf

from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.profile.routing_store import read_routing as read_counts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from routing import (
    RoutingDraw,
    Row,
    chained,
    curve_shares,
    draw,
    inclusion,
    keep_for,
    main,
    odds_of,
    overlap,
    read_routing,
    write_routing,
    zipf_shares,
)

GLM = ((0.25, 0.74), (0.375, 0.84), (0.5, 0.91), (0.75, 0.98))


def traffic(rows: Iterable[Row], n_expert: int) -> list[float]:
    """Each expert's share of all uses."""
    counts = Counter(expert for row in rows for expert in row)
    return [counts[expert] / counts.total() for expert in range(n_expert)]


def coverage(shares: Sequence[float], part: float) -> float:
    """The share of the traffic that the most used part of the experts carries."""
    return sum(sorted(shares, reverse=True)[: round(part * len(shares))])


def chain(odds: list[float], n_used: int, keep: float, n: int, seed: int = 3) -> list[tuple[int, ...]]:
    return list(islice(chained(odds, n_used, keep, random.Random(seed)), n))


def test_inclusion_probabilities_are_those_of_all_sets() -> None:
    """Against a count over every set of three of seven."""
    odds = np.array([0.1, 3.0, 1.0, 0.5, 2.0, 8.0, 0.01])
    sets = {chosen: prod(odds[list(chosen)]) for chosen in combinations(range(7), 3)}
    expected = [sum(p for chosen, p in sets.items() if i in chosen) / sum(sets.values()) for i in range(7)]
    assert inclusion(odds, 3) == pytest.approx(expected, rel=1e-12)
    assert inclusion(np.ones(9), 4) == pytest.approx([4 / 9] * 9)


@pytest.mark.parametrize(("n_expert", "n_used", "exponent"), [(16, 2, 0.9), (128, 8, 0.6), (512, 10, 0.4), (8, 8, 0.0)])
def test_odds_give_the_traffic_that_was_asked_for(n_expert: int, n_used: int, exponent: float) -> None:
    shares = zipf_shares(n_expert, exponent)
    found = inclusion(np.array(odds_of(shares, n_used)), n_used) / n_used
    assert found == pytest.approx(shares, abs=1e-8)


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_sets_are_drawn_in_proportion_to_their_odds_however_sticky(keep: float) -> None:
    """Frequencies of all ten sets of two of five; neighbours are not independent, so every 40th row counts."""
    odds = [4.0, 2.0, 1.0, 1.0, 0.5]
    counts = Counter(tuple(sorted(row)) for row in chain(odds, 2, keep, 80_000)[::40])
    n, whole = counts.total(), sum(odds[a] * odds[b] for a, b in combinations(range(5), 2))
    for a, b in combinations(range(5), 2):
        p = odds[a] * odds[b] / whole
        assert counts[a, b] / n == pytest.approx(p, abs=5 * sqrt(p * (1 - p) / n))


def test_overlap_is_that_of_the_chain_worked_out_by_hand() -> None:
    """Equal experts: m of k are drawn anew from the n - k + m others, and each dropped one comes back as likely."""
    n, k, keep = 20, 4, 0.6
    expected = sum(
        comb(k, m) * (1 - keep) ** m * keep ** (k - m) * ((k - m) + m * m / (n - k + m)) / k for m in range(k + 1)
    )
    assert overlap(chain([1.0] * n, k, keep, 20_000)) == pytest.approx(expected, abs=0.01)
    shares = zipf_shares(32, 0.8)
    alone = overlap(chain(odds_of(shares, 4), 4, 0.0, 20_000))
    assert alone == pytest.approx(4 * sum(share**2 for share in shares), abs=0.01)


def test_a_drawing_has_the_published_curve_and_overlap() -> None:
    shares = curve_shares(288, GLM)
    routing = draw(RoutingDraw(n_layer=2, shares=shares, n_used=8, n_tokens=6000, overlap=0.4, seed=5))
    for rows in routing.values():
        assert len(rows) == 6000 and all(len(set(row)) == 8 and {*row} <= {*range(288)} for row in rows)
        found = traffic(rows, 288)
        for part, carried in GLM:
            assert coverage(found, part) == pytest.approx(carried, abs=0.015)
        assert overlap(rows) == pytest.approx(0.4, abs=0.015)
    hot = [set(np.argsort(traffic(rows, 288))[-72:].tolist()) for rows in routing.values()]
    assert len(hot[0] & hot[1]) < 36, "each layer has its own"


def test_a_seed_is_a_drawing() -> None:
    drawings = [draw(RoutingDraw(2, zipf_shares(16, 0.5), 2, 50, overlap=0.5, seed=seed)) for seed in (1, 1, 2)]
    assert drawings[0] == drawings[1] != drawings[2]


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"would be used by 1\.06 of all tokens"):
        odds_of(zipf_shares(288, 0.93), 8)
    with pytest.raises(ValueError, match="cannot use 9 of 8"):
        odds_of(zipf_shares(8, 0.0), 9)
    with pytest.raises(ValueError, match="chance alone gives"):
        keep_for(odds_of(zipf_shares(16, 0.5), 4), 4, 0.05)
    with pytest.raises(ValueError, match="rise"):
        curve_shares(16, ((0.5, 0.8), (0.4, 0.9)))
    with pytest.raises(ValueError, match="most used experts first"):
        curve_shares(16, ((0.5, 0.4),))


def test_a_file_reads_back_and_its_head_is_a_shorter_run(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    routing = {3: [(1, 2), (5, 0), (7, 1)], 0: [(4, 3), (2, 6)]}
    write_routing(path, routing, "a remark")
    assert read_routing(path) == {3: list(routing[3]), 0: list(routing[0])}
    assert path.read_text().splitlines() == ["# a remark", "0 4 3", "3 1 2", "0 2 6", "3 5 0", "3 7 1"]
    path.write_text("0 1\n0 one\n")
    with pytest.raises(ValueError, match=r":2: a line is LAYER ID"):
        read_routing(path)


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids.txt"
    asked = ["draw", "--layers", "2", "--experts", "16", "--used", "2", "--tokens", "400", "-o", str(path)]
    assert main([*asked, "--curve", "25%=50%", "--overlap", "0.5", "--seed", "7"]) == 0
    assert path.read_text().startswith("# drawn: curve 25%=50%, overlap 0.5, seed 7")
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
    first = [(i % 4, 4 + i % 3) for i in range(20)]
    later = [(i % 2, 7) for i in range(21)]
    ids, rest = tmp_path / "ids.txt", tmp_path / "later.txt"
    write_routing(ids, {layer: [*first, *later] for layer in (0, 1, 7)}, "a third layer that the model has not")
    assert main(["keep", str(ids), "--model", str(model), "-o", str(rest)]) == 0
    info = model_info(read_gguf(model))
    known = read_counts(info.fingerprint, info.n_expert, info.n_expert_used)
    assert known is not None and [layer.layer for layer in known.decode] == [0, 1]
    for layer in (*known.decode, *known.prompt):
        chosen, judged = (Counter(e for row in rows for e in row) for rows in (first[:10], first[10:]))
        assert layer.n_tokens == 20 and layer.latest == tuple(float(judged[e]) for e in range(8))
        assert layer.before == pytest.approx(tuple(chosen[e] for e in range(8)), rel=0.01)
    assert read_routing(rest)[1] == later
    write_routing(ids, {0: [(0, 1, 2), (3, 4, 5)]}, "of three experts a token")
    capsys.readouterr()
    assert main(["keep", str(ids), "--model", str(model), "-o", str(rest)]) == 2
    assert "not of a model of 8 experts, 2 a token" in capsys.readouterr().err
