"""The split back end holds the device memory that the plan counts, to the byte, for any cut and any stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations, product
from pathlib import Path

import pytest
from devices import REAL
from e2e.forced import N_UBATCH, Share, everything, ffn, forced, movable, nothing, written
from e2e.logits import assert_stock, placed_logits
from gguf_factory import write_llama_shape
from make_model import write_shape
from seeds import crossed

from oallama.core.types import SPLIT_LAYOUT, Operator, StreamSettings
from oallama.core.units import KIB
from oallama.cost.blocks import can_split, family_blocks, ffn_of, has_host_input, in_runs, takes_n_g
from oallama.cost.experts import experts_alike
from oallama.cost.following import following
from oallama.cost.kernels import NO_TIME, Kernel
from oallama.cost.slices import BlockContext, BlockType, Cut, Gemm, Gemms
from oallama.device.load_params import load_bridge
from oallama.model.shapes import ModelShape, glm4moe, qwen3
from oallama.plan.split import slice_counts
from oallama.planner.staging import ring_bytes, staging_bytes

ALIGNMENT = 1 * KIB  # of tensors that lie one behind the other
PROMPT = [1 + i % 290 for i in range(N_UBATCH)]
NO_SECONDS = Kernel(NO_TIME)


def assert_as_planned(
    path: Path, share: Share = nothing, *, resident: bool = False, n_g: int = 0, n_hot: int = 0, follows: bool = False
) -> None:
    """The ring and the activations that the device holds are those of the plan, and a prompt is computed as stock does.
    resident: what is not split is whole on the device. n_g: of a whole micro-batch. n_hot: experts of each layer that
    the device has; follows: they follow the conversation."""

    def is_hot(operator: Operator) -> bool:
        return n_hot > 0 and operator.routed

    def split(operator: Operator) -> tuple[float, float] | float | None:
        if is_hot(operator):
            return 0.0
        return share(operator) if can_split(operator) and movable(operator) else None

    def on_device(operator: Operator) -> bool:
        return movable(operator) and split(operator) is None

    case = forced(
        path, REAL, split, whole=on_device if resident else None, layout="CPU", hot=range(n_hot), residents=resident,
        streaming=StreamSettings(exchange="idle" if follows else "off"),
        token_assignment=((1, 0), (N_UBATCH, n_g)) if n_g else (),
    )  # fmt: skip
    operators, cuts = case.placer.operators, {}
    for i, (operator, place) in enumerate(zip(operators, case.plan.operators, strict=True)):
        cut = Cut(*slice_counts(operator, place), len(place.hot_experts))
        if place.gg < 1 and (not cut.is_uncut or (n_g and takes_n_g(operator))):
            cuts[i] = cut
    families: dict[object, list[int]] = {}
    for i in cuts:
        family = (operators[i].layer, "experts") if is_hot(operators[i]) else ffn_of(i, operators[i])
        families.setdefault(family, []).append(i)
    blocks = chain.from_iterable(family_blocks(operators, m, [cuts[i] for i in m]) for m in families.values())
    layers = []
    for block in in_runs(operators, blocks):
        members = [operators[i] for i in block.operators]
        cost = BlockType(
            block, Gemms(Gemm(one.mul_mat, one.bytes, NO_SECONDS, NO_SECONDS) for one in members),
            context=BlockContext(
                resident=resident and members[0].layer is not None, host_input=has_host_input(members[0], 0)
            ),
            takes_n_g=takes_n_g(members[0]),
            use=following(experts_alike(members[0].shape[2])) if follows and is_hot(members[0]) else None,
        )  # fmt: skip
        layers.append((cost, cuts[block.operators[0]]))
    settings = case.plan.streaming or StreamSettings()
    ring = ring_bytes(layers, settings, N_UBATCH, n_g)
    before = load_bridge().split().memory()
    with case.changed(streaming=replace(settings, ring_bytes=ring)).llama() as llama:
        assert_stock(placed_logits(llama, PROMPT), path, PROMPT)
        held = load_bridge().split().memory().device_compute - before.device_compute
    planned = staging_bytes(layers, settings, N_UBATCH, n_g)
    assert planned - ALIGNMENT <= held <= planned


def of_layers(gg: float, cg: float) -> Share:
    return lambda operator: None if operator.layer is None else (gg, cg)


def of_roles(*roles: str) -> Share:
    return lambda operator: 0.5 if operator.role in roles else None


HEADS, FFN = ("attn_q", "attn_v", "attn_k"), ("ffn_gate", "ffn_up", "ffn_down")
PARALLEL = (*FFN[1:], "attn_output")


def subsets(*families: tuple[str, tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
    """Each subset of an architecture's mul-mats that are computed together."""
    return [(arch, some) for arch, of in families for n in range(1, len(of) + 1) for some in combinations(of, n)]


@pytest.mark.parametrize(
    ("subset", "resident"),
    [
        *crossed(subsets(("llama", FFN), ("llama", HEADS)), [False, True]),
        # biases; no gate; an FFN behind attention's output, and before it
        *crossed(
            subsets(("qwen2", HEADS), ("gpt2", FFN[1:]), ("falcon", PARALLEL), ("phi2", PARALLEL), ("phi2", HEADS)),
            [False, True],
        ),
    ],
)
def test_whatever_is_split(subset: tuple[str, tuple[str, ...]], resident: bool, models: Path) -> None:
    """With the others whole on the host or on the device."""
    arch, roles = subset
    assert_as_planned(written(models, arch, weight_type="Q4_0"), of_roles(*roles), resident=resident)


ARCHITECTURES = (
    "llama", "phi2", "falcon", "qwen2", "gpt2", "command-r", "qwen2moe", "phi3", "gemma2", "bloom", "granitemoe",
    "deepseek2-fused", "gptneox", "glm4", "gpt-oss",
)  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "resident", "share", "n_g"),
    crossed(
        ARCHITECTURES,
        [False, True],
        [of_layers(0.25, 0.5), everything(0.5), of_layers(0, 0.25), ffn(0.25, 0.5)],
        [0, N_UBATCH // 2, N_UBATCH],
    ),
)
def test_whatever_is_streamed(arch: str, share: Share, n_g: int, resident: bool, models: Path) -> None:
    """With CC for some tokens of a prompt or for all."""
    assert_as_planned(written(models, arch, weight_type="Q4_0"), share, n_g=n_g, resident=resident)


@pytest.mark.parametrize("n_g", [0, N_UBATCH // 2])
def test_attention_that_reads_the_embedding(n_g: int, models: Path) -> None:
    """Without a norm before it, which would have left it on the device: it is sent there."""
    assert_as_planned(written(models, "olmo2", weight_type="Q4_0"), of_roles(*HEADS), resident=True, n_g=n_g)


@pytest.mark.parametrize(
    ("arch", "roles", "resident"),
    [
        *product(["llama"], [("attn_v", "attn_k"), ("ffn_gate", "ffn_up")], [False, True]),
        *product(["refact"], [HEADS[:2]], [False, True]),
    ],
)
def test_an_input_that_is_read_of_some_tokens_and_then_of_all(
    arch: str, roles: tuple[str, str], resident: bool, models: Path
) -> None:
    """The first on the host but for n_g, the other split."""
    shares = dict(zip(roles, (0.0, 0.5), strict=True))
    path = written(models, arch, weight_type="Q4_0")
    assert_as_planned(path, lambda o: shares.get(o.role), resident=resident, n_g=N_UBATCH // 2)


@pytest.mark.parametrize(
    ("arch", "resident", "share", "n_g"),
    crossed(["refact", "cohere2"], [False, True], [(0.5, 0.0), (0.25, 0.5)], [0, N_UBATCH // 2]),
)
def test_attention_without_rope(arch: str, resident: bool, share: tuple[float, float], n_g: int, models: Path) -> None:
    """Q, K and V are one run: in all layers, and in one of four."""
    path = written(models, arch, weight_type="Q4_0", n_layer=4)
    assert_as_planned(path, lambda o: share if o.role in HEADS else None, resident=resident, n_g=n_g)


@pytest.mark.parametrize("cg", [0.5, 1.0])
@pytest.mark.parametrize("arch", ["llama", "falcon"])
def test_down_alone_beside_what_it_reads(arch: str, cg: float, models: Path) -> None:
    """All of its columns are read where they lie, some of them are made contiguous."""
    path = written(models, arch, weight_type="Q4_0")
    assert_as_planned(path, lambda o: (0.0, cg) if o.role == "ffn_down" else None, resident=True)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("gg", [1 / 16, 1 / 4, 15 / 16])
def test_the_parts_of_an_ffn(gg: float, resident: bool, tmp_path: Path) -> None:
    """GG, then CG: what a small part leaves before its result is of no use to the next one."""
    path = write_llama_shape(tmp_path / "wide.gguf", 2, 512, 2048, 8, 4, 2000, "Q4_0")
    assert_as_planned(path, ffn(gg, 1.0 - gg), resident=resident)


@pytest.mark.parametrize("n_g", [0, N_UBATCH // 2, N_UBATCH])
@pytest.mark.parametrize("shape", [qwen3, glm4moe])
def test_experts_whose_results_each_side_adds_up(shape: Callable[..., ModelShape], n_g: int, tmp_path: Path) -> None:
    """Each part has a result of every expert of a token before these are added up; an expert that all tokens use
    follows."""
    made = shape(2, 1024, 256, 8, 2, 300, 512, 1e6, head_dim=64, n_expert=16, n_expert_used=8, n_ff_expert=256)
    assert_as_planned(write_shape(tmp_path / "model.gguf", made, "Q4_0"), ffn(0.25, 0.25), n_g=n_g)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(
    ("arch", "share", "n_hot", "resident"),
    crossed(
        ["qwen3moe", "qwen2moe", "gpt-oss", "granitemoe", "deepseek2-fused", "llama-moe"],
        [ffn(0.25, 0.5), ffn(0.5), nothing], [3, 2], [False, True],
    ),
)  # fmt: skip
def test_hot_experts(arch: str, share: Share, n_hot: int, follows: bool, resident: bool, models: Path) -> None:
    """With slices of an expert that all tokens use; their rows in one launch, or packed."""
    path = written(models, arch, weight_type="Q4_0", n_expert=32)
    assert_as_planned(path, share, n_hot=n_hot, follows=follows, resident=resident)


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_a_no_alloc_load_of_hot_experts(arch: str, models: Path) -> None:
    """It says what llama.cpp takes itself: the split back end adds the biases of hot experts, as in the load after."""
    case = forced(
        written(models, arch, weight_type="Q4_0", n_expert=32), REAL, lambda o: 0.0 if o.routed else None,
        whole=lambda o: movable(o) and not o.routed, layout="CPU", hot=range(3), residents=True,
        streaming=StreamSettings(exchange="idle"),
    )  # fmt: skip
    placement, attention = case.placer.placed(case.plan), case.placer.attention_for(case.plan)
    taken = case.placer.no_alloc_loads.taken(case.plan.workload, placement, attention)
    with case.placer.llama(case.plan) as llama:
        buffers = [buffer for buffer in llama.buffers if not buffer.is_host and buffer.buft != SPLIT_LAYOUT]
        held = sum(buffer.model + buffer.context + buffer.compute for buffer in buffers)
    assert held == taken.weights_gpu + taken.kv + taken.compute
