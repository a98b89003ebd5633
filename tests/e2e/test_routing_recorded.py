"""Which experts tokens go to: counted while an engine answers, drawn by the emulated device, and hit as often as a plan
made from counts promises."""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from devices import REAL
from e2e.batch import Batch
from e2e.described_card import slow_cpu_fast_card
from e2e.forced import N_UBATCH, ffn, forced, nothing, written
from processes import here
from traced import traced

from oallama.bench.readback import weight_of
from oallama.core.routing import ExpertCounts, LayerCounts
from oallama.cost.experts import expert_use
from oallama.placer import Given, Placer
from oallama.profile.routing import read_routing, write_routing

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from routing import counts_of, draw, first_and_second
from routing import write_routing as write_ids

pytestmark = pytest.mark.usefixtures("kept_engines")

PROMPT = [int(token) for token in np.random.default_rng(11).integers(0, 300, 150)]
N_EXPERT, N_LAYER = 8, 4


def zipf_shares(exponent: float) -> tuple[float, ...]:
    """Traffic of each expert in proportion to rank^-exponent."""
    traffic = [rank**-exponent for rank in range(1, N_EXPERT + 1)]
    return tuple(each / sum(traffic) for each in traffic)


def given_ids(path: Path, decoded: Sequence[int]) -> dict[int, list[npt.NDArray[np.int32]]]:
    """By layer, the ids [n_tokens, n_used] that stock llama.cpp gives to the down mul-mat, batch after batch: of the
    prompt, of whose last token alone logits are computed, and of the tokens that are decoded behind it."""
    seen: dict[int, list[npt.NDArray[np.int32]]] = {}

    def on_node(op: str, node: Any, ask: bool) -> bool:
        name = weight_of(node).name.decode() if op == "MUL_MAT_ID" else ""
        if "ffn_down_exps" in name and not ask:
            ids = node.src[2].contents
            rows = [(ctypes.c_int32 * ids.ne[0]).from_address(ids.data + i * ids.nb[1]) for i in range(ids.ne[1])]
            if rows:
                seen.setdefault(int(name.split(".")[1]), []).append(np.array(rows, dtype=np.int32))
        return "ffn_down_exps" in name or not ask

    batch, position = Batch(N_UBATCH), 0
    prompt = [PROMPT[start : start + N_UBATCH] for start in range(0, len(PROMPT), N_UBATCH)]
    with traced(path, on_node, n_ubatch=N_UBATCH) as context:
        for tokens in (*prompt, *([token] for token in decoded)):
            position += len(tokens)
            batch.decode(context, tokens, position - len(tokens), "last" if position >= len(PROMPT) else "none")
    batch.free()
    return seen


@pytest.mark.parametrize(
    ("arch", "n_used", "device", "hot"),
    [
        ("gpt-oss", 2, REAL, (1, 3)),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (
            ("qwen2moe", 2, "rpc-worker:1", ()),
            ("gpt-oss", 2, "none", ()), ("llama-moe", 1, "none", ()), ("deepseek2", 2, "none", ()),
            ("llama-moe", 2, REAL, (1, 3)), ("llama-moe", 7, REAL, ()),
        )),
    ],
)  # fmt: skip
def test_what_is_counted_is_what_the_experts_were_given(
    arch: str, n_used: int, device: str, hot: tuple[int, ...], models: Path
) -> None:
    """Also where experts are split, or some are hot. Of a prompt the last layer computes the last token alone, which
    counts with the tokens that are decoded."""
    path, taken = written(models, arch, n_expert_used=n_used), list[ExpertCounts]()
    case = forced(path, device, nothing if hot or device == "none" else ffn(0.5), hot=hot, probe=False)
    with case.engine(on_expert_counts=taken.append) as engine:
        answer = engine.generate(PROMPT, 9, temperature=0)
    (expert_counts,) = taken
    seen = given_ids(path, answer.tokens[: 9 - (answer.end == "limit")])
    assert expert_counts.decode.keys() == seen.keys()
    for layer, batches in seen.items():
        for counts_by_layer, is_single in ((expert_counts.decode, True), (expert_counts.prompt, False)):
            ids = [batch for batch in batches if (len(batch) == 1) == is_single]
            expected = np.bincount(np.concatenate(ids).ravel(), minlength=N_EXPERT) if ids else None
            assert (layer in counts_by_layer) == (expected is not None), layer
            if expected is not None:
                assert counts_by_layer[layer].n_tokens == sum(map(len, ids))
                assert counts_by_layer[layer].uses == tuple(expected)


@pytest.mark.thorough
def test_experts_on_the_device_are_not_counted(models: Path) -> None:
    taken: list[ExpertCounts] = []
    case = forced(written(models, "llama-moe", n_expert_used=2), REAL, whole=lambda operator: True)
    with case.engine(on_expert_counts=taken.append) as engine:
        engine.generate(PROMPT, 3, temperature=0)
    assert taken == [ExpertCounts({}, {})]


def test_run_and_chat_count_what_they_answer(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path))
    path = written(models, "llama-moe", n_expert_used=2)
    model = Placer.load(path, device="none").model
    asked = ("--device", "none", "-t", 1, "-n", 40, "--temp", 0, "--no-chat")

    def answered(*more: object) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(here("run", path, "-p", "Hello", "--json", *asked, *more).stdout)
        return made

    def n_counted() -> tuple[int, int]:
        """Tokens of decode and of prompts, of the first layer."""
        routing = read_routing(model.fingerprint, model.n_expert, model.n_expert_used)
        assert routing is not None
        return routing.decode[0].n_tokens, routing.prompt[0].n_tokens

    answer = answered()
    assert list(tmp_path.glob("routing-*")) == []
    found = answered("--count-experts")
    assert found["tokens"] == answer["tokens"]
    assert found["memory"]["host_bytes"] < 1.1 * answer["memory"]["host_bytes"], "experts lie there once"
    n_decode, n_prompt = n_counted()
    assert n_prompt == answer["n_prompt"] and n_decode in (answer["n_gen"] - 1, answer["n_gen"])
    here("chat", path, "--count-experts", *asked, input="Hello\n")
    assert n_counted()[0] > n_decode and n_counted()[1] > n_prompt, "they add up"


@pytest.mark.parametrize("words", [("run", "-p", "Hello"), ("chat",)])
def test_what_has_no_experts_is_not_counted(words: tuple[str, ...], models: Path) -> None:
    asked = (words[0], written(models, "llama"), *words[1:], "--no-chat", "--device", "none", "--count-experts")
    assert "--count-experts" in here(*asked, code=2).stderr.splitlines()[-1]


def test_the_device_follows_a_file_and_begins_again_behind_its_end(models: Path, tmp_path: Path) -> None:
    """Each layer's tokens in their order, over several graphs; rows of 7 end in the middle of a prompt. Experts are on
    the host, where they are counted. What llama-server tries when it has loaded the model comes first: two tokens."""
    rows = draw(N_LAYER, zipf_shares(0.5), 2, 7)
    write_ids(tmp_path / "ids.txt", rows, "seven tokens")
    device = f"emulated:vram=1GiB,scale=1,values=drawn,routing={tmp_path / 'ids.txt'}"
    placer = Placer.load(written(models, "llama-moe", n_layer=N_LAYER), device=device, threads=1)
    there = [operator.name for operator in placer.operators if not operator.routed]
    plan = placer.plan(Given(there, N_LAYER + 1), 64, 16, measure=False)
    expert_counts: list[ExpertCounts] = []
    with placer.engine(plan, on_expert_counts=expert_counts.append) as engine:
        engine.generate(list(range(1, 17)), max_tokens=8, temperature=1.0)
    for layer, chosen in rows.items():
        n_seen = 2
        for counts_by_layer in (expert_counts[0].prompt, expert_counts[0].decode):
            layer_counts = counts_by_layer.get(layer, LayerCounts(0, (0,) * N_EXPERT))
            uses = Counter(expert for i in range(layer_counts.n_tokens) for expert in chosen[(n_seen + i) % 7])
            assert layer_counts.uses == tuple(uses[expert] for expert in range(N_EXPERT)), layer
            n_seen += layer_counts.n_tokens
    assert expert_counts[0].prompt[0].n_tokens == 16


def test_later_traffic_hits_as_often_as_promised(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device follows the second half of a drawing; the plan was made from the first."""
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path / "cache"))
    path = written(models, "qwen3moe", weight_type="F16", n_layer=N_LAYER)
    model = Placer.load(path, device="none").model
    first, second = first_and_second(draw(N_LAYER, zipf_shares(1.0), model.n_expert_used, 1200))
    counts = counts_of(first, model.fingerprint, N_LAYER, N_EXPERT, model.n_expert_used)
    write_routing(counts)
    write_ids(tmp_path / "later.txt", second, "the second half")
    device = f"emulated:vram=1GiB,scale=1,values=drawn,routing={tmp_path / 'later.txt'}"
    profile = slow_cpu_fast_card(path, 2e7)  # a link so slow that nothing is streamed
    placer = Placer.load(path, device=device, profile=profile, gpu_weights=0.4, threads=1, n_ubatch=64)
    plan = placer.plan("experts", n_prompt=16, n_gen=256)
    pairs = list(zip(placer.operators, plan.operators, strict=True))
    hot = {o.layer: p.hot_experts for o, p in pairs if p.hot_experts and o.layer is not None}
    assert hot and all(p.gg == 1 for o, p in pairs if o.role == "ffn_gate_inp"), "only these follow the file"
    expert_counts: list[ExpertCounts] = []
    with placer.engine(plan, on_expert_counts=expert_counts.append) as engine:
        n_decoded = 0
        while n_decoded < 150:  # what is drawn may end an answer
            n_decoded += engine.generate(list(range(1, 17)), max_tokens=50, temperature=1.0).n_gen
    use, decode = expert_use(counts), expert_counts[0].decode
    assert hot.keys() <= decode.keys()
    hits = sum(decode[layer].uses[expert] for layer, experts in hot.items() for expert in experts)
    promised = sum(use[layer].decode[len(experts)] * sum(decode[layer].uses) for layer, experts in hot.items())
    n_uses = sum(sum(decode[layer].uses) for layer in hot)
    assert hits / n_uses == pytest.approx(promised / n_uses, abs=0.07)
