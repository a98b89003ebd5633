"""The split back end holds the device memory that the plan counts, to the byte, for any cut and any stream."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import pytest
from e2e.forced import N_UBATCH, Share, Where, everything, ffn, forced, movable, written
from e2e.logits import REAL, assert_stock, placed_logits
from gguf_factory import write_llama_shape
from make_model import write_shape
from seeds import crossed

from oallama.core.types import Operator, StreamSettings
from oallama.core.units import KIB
from oallama.cost.blocks import can_split, split_blocks, takes_n_g
from oallama.cost.kernels import NO_TIME, Kernel
from oallama.cost.slices import BlockContext, BlockType, Cut, Gemm, Gemms
from oallama.device.load_params import load_bridge
from oallama.model.shapes import ModelShape, glm4moe, qwen3
from oallama.plan.split import slice_counts
from oallama.planner.memory import ring_bytes, staging_bytes

ALIGNMENT = 1 * KIB  # of tensors that lie one behind the other
PROMPT = [1 + i % 290 for i in range(N_UBATCH)]
NO_SECONDS = Kernel(NO_TIME)


def assert_as_planned(path: Path, share: Share, *, resident: bool = False, n_g: int = 0) -> None:
    """The ring and the activations that the device holds are those of the plan, and a prompt is computed as stock does.
    resident: what is not split is whole on the device. n_g: of a whole micro-batch."""

    def split(operator: Operator) -> tuple[float, float] | float | None:
        return share(operator) if can_split(operator) and movable(operator) else None

    whole: Where | None = (lambda operator: movable(operator) and split(operator) is None) if resident else None
    case = forced(
        path, REAL, split, whole=whole, layout="CPU", residents=resident, streaming=StreamSettings(),
        token_assignment=((1, 0), (N_UBATCH, n_g)) if n_g else (),
    )  # fmt: skip
    operators, kinds = case.placer.operators, {}
    for i, (operator, place) in enumerate(zip(operators, case.plan.operators, strict=True)):
        cut = Cut(*slice_counts(operator, place))
        if place.gg < 1 and (cut.cg or cut.gg or (n_g and takes_n_g(operator))):
            kinds[i] = cut
    numbers = {cut: number for number, cut in enumerate(dict.fromkeys(kinds.values()), start=1)}
    layers = []
    for block in split_blocks(operators, [numbers[kinds[i]] if i in kinds else 0 for i in range(len(operators))]):
        members = [operators[i] for i in block.operators]
        gemms = Gemms(Gemm(one.mul_mat, one.bytes, NO_SECONDS, NO_SECONDS) for one in members)
        context = BlockContext(resident=resident and members[0].layer is not None)
        cost = BlockType(block, gemms, context=context, takes_n_g=takes_n_g(members[0]))
        layers.append((cost, kinds[block.operators[0]]))
    streaming = StreamSettings()
    settings = StreamSettings(ring_bytes=ring_bytes(layers, streaming, N_UBATCH, n_g))
    planned = staging_bytes(layers, streaming, N_UBATCH, n_g)
    before = load_bridge().split().memory()
    with case.changed(streaming=settings).llama() as llama:
        assert_stock(placed_logits(llama, PROMPT), path, PROMPT)
        held = load_bridge().split().memory().device_compute - before.device_compute
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
        *product(subsets(("llama", FFN), ("llama", HEADS)), [False, True]),
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
