"""Which experts tokens go to: counted while a model runs, drawn by the emulated device, and hit as often as a plan made
from counts promises."""

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
from e2e.described_card import slow_cpu_fast_card
from e2e.forced import N_UBATCH, ffn, forced, nothing, written
from oallama.run.generate import Batch
from processes import here
from traced import traced

from oallama.bench.readback import weight_of
from oallama.core.routing import Traffic
from oallama.cost.experts import expert_use
from oallama.placer import Given, Placer
from oallama.profile.routing import read_routing, write_routing

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from routing import RoutingDraw, counts_of, draw, first_and_second, zipf_shares
from routing import write_routing as write_ids

PROMPT = [int(token) for token in np.random.default_rng(11).integers(0, 300, 150)]
N_EXPERT, N_LAYER = 8, 4


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
    ("arch", "n_used", "device"),
    [
        ("llama-moe", 2, "none"), ("llama-moe", 1, "none"), ("llama-moe", 8, "none"), ("qwen2moe", 2, "none"),
        ("deepseek2", 2, "none"), ("gpt-oss", 2, "none"),
        ("llama-moe", 2, "rpc-worker:1"), ("llama-moe", 2, "cpu-pair"),
    ],
)  # fmt: skip
def test_what_is_recorded_is_what_the_experts_were_given(arch: str, n_used: int, device: str, models: Path) -> None:
    """Also where all operators are on the device, or experts are split."""
    path, taken = written(models, arch, n_expert_used=n_used), list[Traffic]()
    whole = (lambda operator: True) if device == "rpc-worker:1" else None
    case = forced(path, device, ffn(0.5) if device == "cpu-pair" else nothing, whole=whole)
    with case.engine(on_traffic=taken.append) as engine:
        answer = engine.generate(PROMPT, 9, temperature=0)
    (traffic,) = taken
    seen, n_decoded = given_ids(path, answer.tokens[:-1]), len(answer.tokens) - 1
    assert traffic.decode.keys() == traffic.prompt.keys() == seen.keys()
    for layer, parts in seen.items():
        together = np.concatenate(parts)
        halves = together[: len(together) - n_decoded], together[len(together) - n_decoded :]
        for tally, ids in zip((traffic.prompt[layer], traffic.decode[layer]), halves, strict=True):
            assert tally.n_tokens == len(ids)
            assert tally.uses == tuple(np.bincount(ids.ravel(), minlength=N_EXPERT))


def test_a_broken_off_answer_is_recorded_as_far_as_it_went(models: Path) -> None:
    taken: list[Traffic] = []
    with forced(written(models, "llama-moe", n_expert_used=2)).engine(on_traffic=taken.append) as engine:
        stream = engine.stream(PROMPT[:20], 50, temperature=0)
        next(stream)
        stream.close()
        engine.generate(PROMPT[:20], 4, temperature=0)
    broken, whole = taken
    assert (whole.decode[0].n_tokens, whole.prompt[0].n_tokens, broken.prompt[0].n_tokens) == (3, 20, 20)


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
    for times in (1, 2):
        assert answered("--count-experts")["tokens"] == answer["tokens"]
        n_decode, n_prompt = n_counted()
        assert n_prompt == times * answer["n_prompt"]
        assert n_decode in (times * (answer["n_gen"] - 1), times * answer["n_gen"])
    here("chat", path, "--count-experts", *asked, input="Hello\n")
    assert n_counted()[0] > n_decode


@pytest.mark.parametrize("words", [("run", "-p", "Hello"), ("chat",)])
def test_what_has_no_experts_is_not_counted(words: tuple[str, ...], models: Path) -> None:
    asked = (words[0], written(models, "llama"), *words[1:], "--no-chat", "--device", "none", "--count-experts")
    assert "--count-experts" in here(*asked, code=2).stderr.splitlines()[-1]


def test_the_device_follows_a_file_and_begins_again_behind_its_end(models: Path, tmp_path: Path) -> None:
    """Each layer's tokens in their order, over several graphs; rows of 7 end in the middle of a prompt."""
    rows = draw(RoutingDraw(N_LAYER, zipf_shares(N_EXPERT, 0.5), 2, 7))
    write_ids(tmp_path / "ids.txt", rows, "seven tokens")
    device = f"emulated:vram=1GiB,scale=1,values=drawn,routing={tmp_path / 'ids.txt'}"
    placer = Placer.load(written(models, "llama-moe", n_layer=N_LAYER), device=device, threads=1)
    plan = placer.plan(Given([o.name for o in placer.operators], N_LAYER + 1), 64, 16, measure=False)
    traffic: list[Traffic] = []
    with placer.engine(plan, progress=False, on_traffic=traffic.append) as engine:
        engine.generate(list(range(1, 17)), max_tokens=8, temperature=1.0)
    for layer, chosen in rows.items():
        n_seen = 0
        for tally in (traffic[0].prompt[layer], traffic[0].decode[layer]):
            uses = Counter(expert for i in range(tally.n_tokens) for expert in chosen[(n_seen + i) % 7])
            assert tally.uses == tuple(uses[expert] for expert in range(N_EXPERT)), layer
            n_seen += tally.n_tokens
    assert traffic[0].prompt[0].n_tokens == 16


def test_later_traffic_hits_as_often_as_promised(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device follows the second half of a drawing; the plan was made from the first."""
    monkeypatch.setenv("OALLAMA_CACHE_DIR", str(tmp_path / "cache"))
    path = written(models, "qwen3moe", weight_type="F16", n_layer=N_LAYER)
    model = Placer.load(path, device="none").model
    first, second = first_and_second(draw(RoutingDraw(N_LAYER, zipf_shares(N_EXPERT, 1.0), model.n_expert_used, 1200)))
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
    traffic: list[Traffic] = []
    with placer.engine(plan, progress=False, on_traffic=traffic.append) as engine:
        while (
            sum(one.decode[0].n_tokens for one in traffic if 0 in one.decode) < 150
        ):  # what is drawn may end an answer
            engine.generate(list(range(1, 17)), max_tokens=50, temperature=1.0)
    use = expert_use(counts)
    uses = [(layer, one.decode[layer].uses) for layer in hot for one in traffic if layer in one.decode]
    hits = sum(of_layer[expert] for layer, of_layer in uses for expert in hot[layer])
    promised = sum(use[layer].decode[len(hot[layer])] * sum(of_layer) for layer, of_layer in uses)
    n_uses = sum(sum(of_layer) for _, of_layer in uses)
    assert hits / n_uses == pytest.approx(promised / n_uses, abs=0.07)
