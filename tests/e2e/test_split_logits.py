"""Whole models with the split back end against stock llama.cpp, teacher-forced: on one side alone bit for bit, on both
sides within what the order of sums can change (logits.py). Whatever part of each operator is CC, CG and GG, and the
same again when the model is loaded anew: so a seed gives one text under any plan, as it does under stock llama.cpp.

Every kind of sub-graph and every type, with a tight bound: tests/native/split_test_random.cpp. This is what llama.cpp
makes of it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from devices import REAL
from e2e.forced import Share, block_of, everything, ffn, forced, movable, written
from e2e.logits import ARCHITECTURES, EXACT_NMSE, TOKENS, assert_alike, assert_stock, nmse
from e2e.plugin_runs import context_of, counted, loaded, logits_of, logits_of_sequences, with_plugin
from gguf_factory import ARCHITECTURES as KNOWN
from gguf_factory import write_llama_shape
from make_model import HALF_SCALES
from seeds import SEEDS, crossed

import ggml_bridge
from oallama.core.types import Operator
from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge
from oallama.device.opening import device_pointers, open_device

api = ggml_bridge.load().libraries.llama_cpp.llama_cpp

DEVICES = ("CPU", "rpc-worker", REAL)
FLOAT = ("F32", "F16")
ROUNDED = ("BF16", *HALF_SCALES, "IQ1_M", "MXFP4")  # BF16 rounds activations as coarsely: 1.3e-6 was seen
MODELS = [
    *((arch, "F16") for arch in KNOWN if arch != "t5"),  # whose decoder stock does not run without an encoded text
    *(("llama", weight_type) for weight_type in ("F32", *ROUNDED)),
]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """ggml's name of an open device, or of the CPU, whose second back end is one then."""
    with contextlib.nullcontext() if request.param == "CPU" else open_device(request.param) as opened:
        yield opened.name if opened else "CPU"


@pytest.mark.parametrize(("arch", "weight_type"), crossed(ARCHITECTURES, ["F16", "Q4_0", "Q4_K"]))
def test_all_cc_is_bit_identical_to_stock(arch: str, weight_type: str, models: Path) -> None:
    path = written(models, arch, weight_type=weight_type)
    with loaded(path) as context:
        wanted = logits_of(context, TOKENS)
    with with_plugin(path, "CPU", everything(0)) as context:
        assert np.array_equal(logits_of(context, TOKENS), wanted)


@pytest.mark.parametrize(
    ("arch", "weight_type", "device"), crossed(ARCHITECTURES, ["F16", "Q4_0"], DEVICES), indirect=["device"]
)
def test_all_gg_is_bit_identical_to_the_device(arch: str, weight_type: str, device: str, models: Path) -> None:
    """To stock llama.cpp with the same operators there by tensor overrides. A second CPU back end keeps its weights
    plain, so the CPU it is compared with must, too. Beside a device with pinned memory, stock llama.cpp keeps host
    weights there, and plain."""
    path = written(models, arch, weight_type=weight_type)
    plain = {"use_extra_bufts": False} if device in ("CPU", "Emulated0") else {}
    with with_plugin(path, device, ffn(1), **plain) as context:
        found = logits_of(context, TOKENS)
    names = forced(path, share=ffn(1), probe=False).given
    devices = [] if device == "CPU" else device_pointers([device])
    with loaded(path, load_bridge().buft(device), names, devices, **plain) as context:
        assert np.array_equal(found, logits_of(context, TOKENS))


def drawn(rng: random.Random) -> Share:
    """Each block of operators: whole on either side, or cut anywhere; any part of what is not CC is streamed."""
    shares: dict[object, tuple[float, float]] = {}

    def share(operator: Operator) -> tuple[float, float] | None:
        there, streamed = rng.choice((0.0, 1.0, rng.random(), rng.random())), rng.choice((0.0, 1.0, rng.random()))
        kept = shares.setdefault(block_of(operator), (there * (1 - streamed), there * streamed))
        return kept if movable(operator) else None

    return share


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("model", "device"), crossed(MODELS, DEVICES), indirect=["device"])
def test_any_plan_computes_what_stock_does(model: tuple[str, str], device: str, seed: str, models: Path) -> None:
    arch, weight_type = model
    rng = random.Random(f"{SEEDS[seed]} {model}")
    path = written(models, arch, weight_type=weight_type)
    tokens = [rng.randrange(300) for _ in range(rng.randint(1, 150))]
    share, found = drawn(rng), []
    with counted() as done:
        for _ in range(2):
            with with_plugin(path, device, share) as context:
                found.append(logits_of(context, tokens))
    assert done[0].bytes_in > 0 and done[0].bytes_out > 0
    assert_stock(found[0], path, tokens)
    assert np.array_equal(*found)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("apart", [{}, {"ffn_gate": 0.25, "ffn_down": 0.75}], ids=["cut-alike", "cut-apart"])
@pytest.mark.parametrize(("arch", "device"), crossed(["llama", "phi3"], DEVICES[1:]), indirect=["device"])
def test_mul_mats_of_an_ffn_may_be_cut_apart(
    arch: str, apart: dict[str, float], streamed: bool, device: str, models: Path
) -> None:
    path = written(models, arch, weight_type="F16")

    def share(operator: Operator) -> tuple[float, float] | None:
        there = apart.get(operator.role, 0.5)
        return ((0.0, there) if streamed else (there, 0.0)) if is_ffn(operator) else None

    with counted() as done, with_plugin(path, device, share) as context:
        assert_stock(logits_of(context, TOKENS[:64]), path, TOKENS[:64])
    assert (done[0].n_segments == 2) == (not apart), "in two layers; what is cut alike is one block"


@pytest.mark.parametrize(
    ("model", "device"),
    crossed([("llama", "F16"), ("qwen3moe", "F16"), ("gpt2", "F32")], DEVICES),
    indirect=["device"],
)
def test_several_sequences_in_a_batch(model: tuple[str, str], device: str, models: Path) -> None:
    path = written(models, model[0], weight_type=model[1])
    sequences = [TOKENS[start : start + 12] for start in (0, 20, 40, 60)]
    with loaded(path, n_seq=len(sequences)) as context:
        wanted = logits_of_sequences(context, sequences)
    with with_plugin(path, device, everything(0.5), n_seq=len(sequences)) as context:
        found = logits_of_sequences(context, sequences)
    assert_alike(found, wanted, path)
    assert nmse(found[0], wanted[1]) > 0.1, "the sequences differ, so the comparison says something"


def test_two_contexts_of_one_model(device: str, models: Path) -> None:
    with with_plugin(written(models, "llama", weight_type="F16"), device, ffn(0.5)) as first:
        alone = logits_of(first, TOKENS)
        with context_of(api.llama_get_model(first), n_threads=2) as second:
            assert nmse(logits_of(second, TOKENS), alone) <= EXACT_NMSE
            assert np.array_equal(logits_of(first, TOKENS), alone)
        assert np.array_equal(logits_of(first, TOKENS), alone)


@pytest.mark.parametrize(("weight_type", "device"), crossed(["F16", "BF16", "F32"], DEVICES), indirect=["device"])
def test_what_a_device_is_sent_is_not_overwritten(weight_type: str, device: str, models: Path) -> None:
    """Slices with fewer rows than the model is wide, in decode: 1024 rows of K = 4096, 1 to 8 tokens.

    CUDA computes gate, up and GLU of one token in one kernel whose waves read the input until the last one is done.
    ggml's allocator places the GLU's result on an input that has no reader left, if it fits there: then later waves
    read what earlier ones wrote. What the device is sent must therefore keep its memory; the split back end refuses a
    graph where it does not, on every device.
    """
    path = write_llama_shape(models / f"narrow-{weight_type}.gguf", 1, 4096, 2048, 32, 8, 300, weight_type)
    with with_plugin(path, device, ffn(0.5)) as context:
        for n_tokens in range(1, 9):
            assert_stock(logits_of(context, TOKENS[:n_tokens]), path, TOKENS[:n_tokens], (weight_type,))
