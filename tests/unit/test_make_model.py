"""scripts/make_model.py: the synthetic Llamas that timings and tests run on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_factory import random_blocks, write_llama_shape

from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.model.operators import operators

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_model.py"
STORED = {"F32": np.float32, "F16": np.float16}


@pytest.mark.parametrize("type_name", [k.name for k in gguf.quants._type_traits if k.name != "Q8_K"])
def test_random_blocks_are_valid_and_of_the_spread_asked_for(type_name: str) -> None:
    blocks = random_blocks(type_name, 512, 0.02, np.random.default_rng(0))
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][1]
    assert blocks.shape == (512, block_bytes)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])
    assert np.isfinite(values).all()
    assert 0.3 < values.std() / 0.02 < 3


def test_the_command_writes_the_shape_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    options = "--layers 3 --embd 512 --ff 768 --heads 8 --kv-heads 2 --vocab 300 --type Q4_0 --context 128"
    done = subprocess.run([sys.executable, SCRIPT, *options.split(), "-o", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    info = model_info(read_gguf(path))
    assert (info.n_layer, info.n_embd, info.n_ff, info.n_head, info.n_head_kv) == (3, 512, 768, 8, 2)
    assert (info.n_vocab, info.n_ctx_train) == (300, 128)
    assert {operator.type for operator in operators(read_gguf(path))} == {"Q4_0"}


@pytest.mark.parametrize(
    "options",
    ["--embd 100", "--heads 3", "--kv-heads 5", "--vocab 10", "--type Q9_9", "--type I8"],
)
def test_shapes_that_cannot_be_are_refused_in_one_line(options: str, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, *options.split(), "--layers", "1", "-o", tmp_path / "model.gguf"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("make_model: ")
    assert done.stderr.count("\n") == 1


def test_the_same_seed_makes_the_same_file(tmp_path: Path) -> None:
    a, b, c = (write_llama_shape(tmp_path / f"{i}.gguf", 1, 256, 256, 4, 2, 264, seed=i // 2) for i in range(3))
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()
