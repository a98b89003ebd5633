"""Slices with fewer rows than the model is wide, in decode: unquantised weights, 1024 rows of K = 4096, 1 to 8 tokens.

CUDA computes gate, up and GLU of one token in one kernel whose waves read the input until the last one is done. ggml's
allocator places the GLU's result on an input that has no reader left, if it fits there: then later waves read what
earlier ones wrote. What the device is sent must therefore keep its memory; the split back end refuses a graph where it
does not, on every device, so that this can be seen without a card.

Bounds are for NMSE of logits against stock llama.cpp on the CPU; a card multiplies in TF32.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e.logits import nmse
from e2e.placed import placed
from e2e.plugin_runs import loaded, logits_of, with_plugin
from e2e.split_cases import ffn, split_placements
from gguf_factory import write_llama_shape

from oallama.cost.blocks import is_ffn
from oallama.device.load_params import load_bridge
from oallama.device.opening import open_device
from oallama.device.spec import parse_device

pytestmark = pytest.mark.usefixtures("prober")

DEVICES = (
    "cpu-pair",
    "rpc-worker",
    "emulated:vram=2GiB,scale=1,values=real",
    pytest.param("Vulkan0", marks=pytest.mark.vulkan),
    pytest.param(os.environ.get("OALLAMA_TEST_GPU", "CUDA0"), marks=pytest.mark.gpu),
)
K, ROWS = 4096, 1024
TOKENS = [7, 91, 33, 250, 12, 180, 77, 3]
EXACT, CARD = 1e-6, 1e-3


@pytest.fixture(scope="module", params=["F16", "BF16", "F32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("narrow") / f"{request.param}.gguf"
    return write_llama_shape(path, 1, K, 2 * ROWS, 32, 8, 300, request.param)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_device_is_sent_is_not_overwritten(device: str, model: Path) -> None:
    if device.isidentifier() and not any(info.name == device for info in load_bridge().devices()):
        pytest.skip(f"there is no {device} here")
    case = placed(model)
    given = [operator.name for operator in case.operators if is_ffn(operator)]
    placements = split_placements(case.operators, ffn(0.5))
    batches = range(1, len(TOKENS) + 1)
    with loaded(model) as context:
        wanted = {n: logits_of(context, TOKENS[:n]) for n in batches}
    with open_device(parse_device(device)) as opened, with_plugin(case, placements, given, opened.name) as context:
        found = {n: logits_of(context, TOKENS[:n]) for n in batches}
        on_card = opened.info is not None and opened.info.backend in ("CUDA", "Vulkan")
    for n in batches:
        error = nmse(found[n], wanted[n])
        assert error <= (CARD if on_card else EXACT), f"{n} tokens: {error:.2g}"
