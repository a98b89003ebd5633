"""scripts/make_model.py: the synthetic models that timings and tests run on."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import gguf_factory  # noqa: F401 - puts scripts on the path
import pytest
from make_model import write_shape
from model_shapes import (
    KNOWN,
    TODAY,
    ModelShape,
    gemma3,
    glm4moe,
    gpt_oss,
    llama,
    llama3_long,
    opt,
    phimoe,
    qwen2,
    qwen2moe,
    qwen3,
)
from operator_trace import TracedOperator, tracing

from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_model.py"


def test_the_command_writes_the_shape_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    options = "--layers 3 --embd 512 --ff 768 --heads 8 --kv-heads 2 --vocab 300 --type Q4_0 --context 128"
    done = subprocess.run([sys.executable, SCRIPT, *options.split(), "-o", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    info = model_info(read_gguf(path))
    assert (info.n_layer, info.n_embd, info.n_ff, info.n_head, info.n_head_kv) == (3, 512, 768, 8, 2)
    assert (info.n_vocab, info.n_ctx_train) == (300, 128)
    assert {operator.type for operator in operators(read_gguf(path))} == {"Q4_0"}


Trace = Callable[[Path], tuple[TracedOperator, ...]]


@pytest.fixture(scope="module")
def trace() -> Iterator[Trace]:
    with tracing() as trace:
        yield trace


PUBLISHED = {  # parameters, as the models' cards state them
    "llama3-8b": 8_030_261_248,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen1.5-14b": 14_167_290_880,
    "qwq-32b": 32_763_876_352,
    "qwen2-57b-a14b": 57_408_658_944,
    "phi3.5-moe": 41_873_153_344,
    "minicpm3-4b": 4_261_902_848,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm-4.5-air": 106_852_251_264,  # without the layer that predicts the token after next
    "gemma-3-27b": 27_009_346_304 - 64 * 5376,  # without vision, and without the 64 tokens that its GGUFs leave out
    "llama-3.3-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_have_the_parameters_of_their_models(name: str) -> None:
    assert parameters(KNOWN[name]) == PUBLISHED[name]


def parameters(shape: ModelShape) -> int:
    """Those that training found: without factors of RoPE, which follow from the architecture."""
    tensors = {**shape.matrices, **shape.vectors, **{f"{role}.bias": ne for role, ne in shape.biases.items()}}
    sizes = {name: ne if isinstance(ne, int) else math.prod(ne) for name, ne in tensors.items()}
    experts = sum(n for name, n in sizes.items() if name.startswith(("ffn_", "exp_probs_b")) and name != "ffn_norm")
    dense = sum(map(math.prod, shape.dense.values()))
    outside = shape.n_embd * shape.n_vocab * (1 if shape.tied else 2) + shape.n_embd + sum(shape.last_biases.values())
    return shape.n_layer * sum(sizes.values()) + shape.n_dense * (dense - experts) + outside


@pytest.mark.parametrize(
    "name", ["qwq-32b", "minicpm3-4b", "mixtral-8x7b", "qwen2-57b-a14b", "phi3.5-moe", "opt-6.7b", *TODAY]
)
def test_like_writes_the_architecture_that_llama_cpp_runs(name: str, trace: Trace, tmp_path: Path) -> None:
    """Narrower and with fewer layers, so that it is quick; the command is the same."""
    small = {
        "qwq-32b": qwen2(2, 256, 512, 4, 2, 300, 512, 1e6),
        "minicpm3-4b": replace(KNOWN["minicpm3-4b"], n_vocab=300, n_layer=1),
        "mixtral-8x7b": llama(2, 256, 512, 4, 2, 300, n_expert=8, rope_base=1e6),
        "qwen2-57b-a14b": qwen2moe(
            2, 256, 512, 4, 2, 300, 512, 1e6, n_expert=8, n_expert_used=4, n_ff_expert=256, n_ff_shared=512
        ),
        "phi3.5-moe": phimoe(2, 256, 512, 4, 2, 300, 8192, n_expert=4),
        "qwen3-32b": qwen3(2, 256, 512, 4, 2, 300, 512, 1e6),
        "qwen3-30b-a3b": qwen3(2, 256, 512, 4, 2, 300, 512, 1e6, n_expert=8, n_expert_used=4, n_ff_expert=128),
        "gpt-oss-20b": gpt_oss(2, 288, 288, 8, 2, 300, 512, head_dim=64, n_expert=4, n_expert_used=2, window=128),
        "gpt-oss-120b": gpt_oss(2, 288, 288, 8, 2, 300, 512, head_dim=64, n_expert=8, n_expert_used=2, window=128),
        "glm-4.5-air": glm4moe(
            2, 256, 512, 6, 2, 300, 512, 1e6, head_dim=64, n_expert=8, n_expert_used=4, n_ff_expert=128
        ),
        "gemma-3-27b": gemma3(7, 256, 512, 4, 2, 300, 512, head_dim=64, window=64),
        "llama-3.3-70b": llama3_long(llama(2, 256, 512, 4, 2, 300, rope_base=500000.0)),
        "opt-6.7b": replace(opt(2, 256, 4), n_vocab=300),
    }[name]
    assert small.matrices.keys() == KNOWN[name].matrices.keys()
    path = write_shape(tmp_path / "model.gguf", small, "Q4_0")
    traced = trace(path)
    static = operators(read_gguf(path))
    assert [operator.name for operator in traced] == [operator.name for operator in static]
    assert model_info(read_gguf(path)).arch == KNOWN[name].arch
    assert small.metadata.keys() == KNOWN[name].metadata.keys()
    assert (small.dense.keys(), small.biases.keys()) == (KNOWN[name].dense.keys(), KNOWN[name].biases.keys())
