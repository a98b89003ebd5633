"""Counts of experts: windows, halves, files, an imatrix, and the figures of the report."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from oallama.core.errors import ModelFileError, ProfileError
from oallama.core.routing import HALF_LIFE_TOKENS, LayerRouting, Routing, Tally
from oallama.cost.experts import expert_use
from oallama.model.imatrix import read_imatrix
from oallama.profile.routing import ENOUGH_TOKENS, Traffic, begun_with, counted, halves, tallied, unknown_routing
from oallama.profile.routing_store import read_routing, routing_path, write_routing
from oallama.profile.store import FOLDER_VARIABLE
from oallama.report.routing import routing_report, routing_tables
from oallama.report.routing_chart import routing_chart
from oallama.report.table import plain

MODEL = "f" * 64
N_EXPERT, N_USED = 8, 2

Ids = npt.NDArray[np.int32]


def ids(*tokens: tuple[int, ...]) -> Ids:
    return np.array(tokens, dtype=np.int32).reshape(len(tokens), N_USED)


def drawn(seed: int, n_tokens: int, weights: npt.NDArray[np.float64] | None = None) -> Ids:
    random = np.random.default_rng(seed)
    chosen = [random.choice(N_EXPERT, N_USED, replace=False, p=weights) for _ in range(n_tokens)]
    return np.array(chosen, dtype=np.int32).reshape(n_tokens, N_USED)


def of_decode(*runs: Ids, layer: int = 0) -> Traffic:
    return Traffic({layer: list(runs)}, {})


def unknown() -> Routing:
    return unknown_routing(MODEL, N_EXPERT, N_USED)


runs_of_ids = st.lists(
    st.lists(st.permutations(range(N_EXPERT)).map(lambda order: tuple(order[:N_USED])), max_size=6), max_size=4
)


@settings(max_examples=examples(60))
@given(runs_of_ids, runs_of_ids)
def test_counts_are_those_of_a_count_by_hand(
    first: list[list[tuple[int, ...]]], second: list[list[tuple[int, ...]]]
) -> None:
    routing = unknown()
    for recording in (first, second):
        routing = counted(routing, of_decode(*(ids(*run) for run in recording)))
    tokens = [token for recording in (first, second) for run in recording for token in run]
    if not tokens:
        assert routing.decode == ()
        return
    (layer,) = routing.decode
    uses, n_pairs, n_shared = [0.0] * N_EXPERT, 0, 0
    for since, token in enumerate(reversed(tokens)):
        for expert in token:
            uses[expert] += 2 ** (-since / HALF_LIFE_TOKENS)
    for run in (*first, *second):
        for before, after in itertools.pairwise(run):
            n_pairs += 1
            n_shared += len(set(before) & set(after))
    last = [token for run in second for token in run] or tokens  # an empty recording is none
    assert layer.n_tokens == len(tokens)
    assert layer.uses == pytest.approx(uses, abs=1e-3)
    assert (layer.n_pairs, layer.n_shared) == (n_pairs, n_shared)
    assert layer.latest == tuple(sum(expert in token for token in last) for expert in range(N_EXPERT))


def test_what_is_a_half_life_old_counts_half() -> None:
    old, new = ids((0, 1)), np.tile(ids((2, 3)), (HALF_LIFE_TOKENS, 1))
    (layer,) = counted(counted(unknown(), of_decode(old)), of_decode(new)).decode
    assert layer.uses[0] == pytest.approx(0.5, abs=1e-3)
    assert layer.before[0] == 1
    assert layer.latest == (0, 0, HALF_LIFE_TOKENS, HALF_LIFE_TOKENS, 0, 0, 0, 0)


def test_phases_and_layers_are_counted_apart() -> None:
    traffic = Traffic({1: [ids((0, 1))]}, {1: [ids((2, 3), (2, 4))], 5: [ids((6, 7))]})
    routing = counted(unknown(), traffic)
    assert [(layer.layer, layer.n_tokens) for layer in routing.decode] == [(1, 1)]
    assert [(layer.layer, layer.n_tokens) for layer in routing.prompt] == [(1, 2), (5, 1)]
    assert routing.prompt[0].uses[2] == pytest.approx(2, abs=1e-3)


def test_halves_keep_every_token_and_its_order() -> None:
    recordings = [of_decode(drawn(1, 3), drawn(2, 4)), of_decode(drawn(3, 6))]
    first, second = halves(recordings)
    together = [token for half in (first, second) for run in half.decode[0] for token in run.tolist()]
    assert together == [token for part in recordings for run in part.decode[0] for token in run.tolist()]
    assert sum(map(len, first.decode[0])) == 6


#
# files
#


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_written_is_read_again(cache: Path) -> None:
    routing = counted(unknown(), Traffic({0: [drawn(1, 50)]}, {0: [drawn(2, 80)], 3: [drawn(3, 8)]}))
    assert read_routing(MODEL, N_EXPERT, N_USED) is None
    write_routing(routing)
    assert read_routing(MODEL, N_EXPERT, N_USED) == routing
    assert [path.name for path in cache.iterdir()] == [routing_path(MODEL).name]


def _without_a_count(document: dict[str, object]) -> None:
    document["decode"][0]["uses"].pop()  # type: ignore[index]


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.update(version=99),
        lambda document: document.update(model_fingerprint="another"),
        lambda document: document.update(n_expert=9),
        lambda document: document.update(half_life_tokens=1e-300),
        lambda document: document["decode"][0].update(n_shared=1000),
        lambda document: document["decode"][0].update(latest=[1e300] * 8),
        lambda document: document.update(decode=document["decode"] * 2),
        lambda document: document["decode"][0].update(n_tokens=-1),
        lambda document: document["decode"][0].update(layer="first"),
        _without_a_count,
    ],
)
def test_a_damaged_file_is_as_good_as_none(damage: object, cache: Path) -> None:
    write_routing(counted(unknown(), of_decode(drawn(1, 5))))
    document = json.loads(routing_path(MODEL).read_text())
    damage(document)  # type: ignore[operator]
    routing_path(MODEL).write_text(json.dumps(document))
    assert read_routing(MODEL, N_EXPERT, N_USED) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff", '{"version": 1}', "[" * 100_000])
def test_a_file_that_is_no_routing_is_as_good_as_none(text: str, cache: Path) -> None:
    routing_path(MODEL).parent.mkdir(parents=True)
    routing_path(MODEL).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_routing(MODEL, N_EXPERT, N_USED) is None


def test_a_cache_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(ProfileError, match=FOLDER_VARIABLE):
        write_routing(unknown())


#
# importance matrices
#


def imatrix(path: Path, counts: dict[str, list[float]], kind: str = "imatrix") -> Path:
    """As llama-imatrix writes one: sums of squared activations and counts of each weight."""
    writer = gguf.GGUFWriter(path, "none")
    writer.add_type(kind)
    for weight, of_experts in counts.items():
        writer.add_tensor(f"{weight}.in_sum2", np.ones((len(of_experts), 4), dtype=np.float32))
        writer.add_tensor(f"{weight}.counts", np.array(of_experts, dtype=np.float32).reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_imatrix_gives_the_uses_of_each_expert(tmp_path: Path) -> None:
    of_layer_0, of_layer_3 = [float(i) for i in range(N_EXPERT)], [5.0] * N_EXPERT
    counts = {
        "blk.0.attn_q.weight": [512.0],
        "blk.0.ffn_gate_exps.weight": of_layer_0,
        "blk.0.ffn_down_exps.weight": of_layer_0,
        "blk.3.ffn_down_exps.weight": of_layer_3,
    }
    found = read_imatrix(str(imatrix(tmp_path / "i.gguf", counts)), N_EXPERT)
    assert found == {0: tuple(of_layer_0), 3: tuple(of_layer_3)}
    routing = begun_with(unknown(), found, "imatrix")
    assert routing.prior == "imatrix"
    assert routing.decode == routing.prompt
    assert routing.decode[0].n_tokens == 0
    uses = routing.decode[0].uses
    assert [each / sum(uses) for each in uses] == pytest.approx([n / 28 for n in of_layer_0])


def test_a_layer_of_which_nothing_was_counted_is_not_begun_with() -> None:
    begun = begun_with(unknown_routing("f" * 64, 2, 1), {0: (0.0, 0.0), 1: (3.0, 1.0)}, "a file")
    assert [layer.layer for layer in begun.decode] == [layer.layer for layer in begun.prompt] == [1]


def test_an_imatrix_weighs_no_more_than_a_half_life() -> None:
    (layer,) = begun_with(unknown(), {0: [1e9, 1e9, 0, 0, 0, 0, 0, 0]}, "imatrix").decode
    assert layer.window == N_USED * HALF_LIFE_TOKENS


@pytest.mark.parametrize(
    ("counts", "kind", "phrase"),
    [
        ({"blk.0.attn_q.weight": [1.0]}, "imatrix", "no counts of experts"),
        ({"blk.0.ffn_up_exps.weight": [1.0] * 3}, "imatrix", "counts 3 experts"),
        ({"blk.0.ffn_up_exps.weight": [1.0] * 7 + [-1.0]}, "imatrix", "none"),
        ({"blk.0.ffn_up_exps.weight": [1.0] * 7 + [float("nan")]}, "imatrix", "none"),
        ({"blk.0.ffn_up_exps.weight": [1.0] * 8}, "model", "no importance matrix"),
    ],
)
def test_what_is_no_imatrix_of_this_model_is_refused(
    counts: dict[str, list[float]], kind: str, phrase: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=phrase):
        read_imatrix(str(imatrix(tmp_path / "i.gguf", counts, kind)), N_EXPERT)


def test_an_imatrix_of_the_old_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "imatrix.dat").write_bytes(b"\x02\x00\x00\x00" + b"\x00" * 64)
    with pytest.raises(ModelFileError, match="importance matrix cannot be read"):
        read_imatrix(str(tmp_path / "imatrix.dat"), N_EXPERT)


#
# the report
#


def layer(uses: list[float], before: list[float] | None = None, latest: list[float] | None = None) -> LayerRouting:
    nothing = [0.0] * len(uses)
    return LayerRouting(0, 10, tuple(uses), tuple(before or nothing), tuple(latest or nothing), n_pairs=4, n_shared=2)


def test_the_report_of_uses_that_are_known() -> None:
    uses = [40.0, 0, 20, 0, 10, 10, 10, 10]
    before, latest = [9.0, 0, 1, 1, 0, 0, 0, 0], [1.0, 7, 2, 0, 0, 0, 0, 0]
    routing = Routing(1, MODEL, N_EXPERT, N_USED, 4096, (layer(uses, before, latest),), ())
    report = routing_report(routing)
    assert report.prompt is None
    assert report.decode is not None
    assert report.decode.coverage == pytest.approx((0.4, 0.6, 0.8, 1.0))
    assert report.decode.held_out == pytest.approx((0.1, 0.3, 1.0, 1.0))
    assert report.decode.shared == pytest.approx(2 / (4 * N_USED))
    assert report.shared_by_chance == 0.25
    per_token = [N_USED * each / 100 for each in uses]
    assert report.decode.shared_if_independent == pytest.approx(sum(each**2 for each in per_token) / N_USED)
    drawn_as = routing_chart("a model", report).svg()
    assert drawn_as.count("<rect") == 1 + 3 + 4 * 3
    assert ">40%<" in drawn_as
    text = "\n".join(map(plain, routing_tables(report)))
    assert "40.0%" in text
    assert "later traffic" in text
    assert "25.0%" in text


def test_traffic_that_changes_is_seen_in_what_is_held_out() -> None:
    hot = np.array([0.4, 0.4, *[0.2 / 6] * 6])
    same = [drawn(seed, 400, hot) for seed in (1, 2)]
    other = [drawn(1, 400, hot), drawn(2, 400, hot[::-1])]
    stays, moves = (
        routing_report(counted(counted(unknown(), of_decode(first)), of_decode(second))).decode
        for first, second in (same, other)
    )
    assert stays is not None
    assert stays.held_out is not None
    assert moves is not None
    assert moves.held_out is not None
    assert stays.held_out[1] > 0.6
    assert moves.held_out[1] < 0.2


def test_uses_alike_cover_their_share_and_are_shared_by_chance() -> None:
    report = routing_report(counted(unknown(), of_decode(drawn(5, 4000)))).decode
    assert report is not None
    assert report.coverage == pytest.approx((1 / 8, 1 / 4, 1 / 2, 3 / 4), abs=0.03)
    assert report.shared == pytest.approx(0.25, abs=0.03)
    assert report.shared_if_independent == pytest.approx(0.25, abs=0.01)
    assert report.held_out is None


#
# counts without an order
#


def uses_of(given: Ids) -> Tally:
    return Tally(len(given), tuple(int(n) for n in np.bincount(given.ravel(), minlength=N_EXPERT)))


def test_uses_count_nearly_as_ids_do() -> None:
    by_ids = by_uses = unknown_routing(MODEL, N_EXPERT, N_USED)
    for seed in range(4):
        given = drawn(seed, 64)
        by_ids = counted(by_ids, Traffic({0: [given]}, {0: [given[:5]]}))
        by_uses = tallied(by_uses, {0: uses_of(given)}, {0: uses_of(given[:5])})
    for one, other in ((by_ids.decode[0], by_uses.decode[0]), (by_ids.prompt[0], by_uses.prompt[0])):
        assert one.n_tokens == other.n_tokens
        assert other.uses == pytest.approx(one.uses, rel=0.02)
        assert other.window == pytest.approx(one.window, rel=1e-3)


def test_a_recording_goes_on_until_it_can_be_judged_on() -> None:
    """So a short answer does not take the place of what sets are judged on."""
    unknown = unknown_routing(MODEL, N_EXPERT, N_USED)
    known = counted(counted(unknown, Traffic({0: [drawn(1, 300)]}, {})), Traffic({0: [drawn(2, 300)]}, {}))
    first, before = known.decode[0].before, known.decode[0].latest
    more = tallied(known, {0: uses_of(drawn(3, 20))})
    assert more.decode[0].before == first
    assert sum(more.decode[0].latest) == sum(before) + 20 * N_USED
    full = tallied(known, {0: uses_of(drawn(4, ENOUGH_TOKENS))})
    after = tallied(full, {0: uses_of(drawn(5, 7))})
    assert after.decode[0].before == full.decode[0].uses
    assert sum(after.decode[0].latest) == 7 * N_USED
    assert expert_use(more)[0].decode[4] == pytest.approx(0.5, abs=0.1)


def test_an_answer_without_tokens_changes_nothing() -> None:
    known = tallied(unknown_routing(MODEL, N_EXPERT, N_USED), {0: uses_of(drawn(1, 30))})
    assert tallied(known, {0: Tally(0, (0,) * N_EXPERT)}) == known
