"""Types, devices, buffer types and layouts as the loaded ggml reports them."""

from __future__ import annotations

import psutil
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

import ggml_bridge

# the gguf package gives a block of Q8_1 40 bytes; ggml's own has two F16 and 32 bytes
WRONG_IN_GGUF = {"Q8_1": (32, 36)}


def test_types_agree_with_the_gguf_package(bridge: ggml_bridge.Bridge) -> None:
    for known in GGMLQuantizationType:
        expected = WRONG_IN_GGUF.get(known.name, GGML_QUANT_SIZES[known])
        info = bridge.type_info(known.name)
        assert (info.number, info.block_elements, info.block_bytes) == (known.value, *expected), known.name


def test_types_that_gguf_does_not_know_yet(bridge: ggml_bridge.Bridge) -> None:
    assert bridge.type_info("q2_0").number == 42
    with pytest.raises(ValueError, match="unknown tensor type Q9_9"):
        bridge.type_info("Q9_9")


def test_what_can_be_multiplied(bridge: ggml_bridge.Bridge) -> None:
    types = {info.name: info for info in bridge.types()}
    assert all(types[name].mul_mat for name in ("F32", "F16", "BF16", "Q4_0", "Q4_K", "IQ2_XXS", "MXFP4"))
    assert not any(types[name].mul_mat for name in ("I8", "I32", "F64", "Q8_K"))
    assert types["Q4_0"].quantized and not types["F16"].quantized


def test_the_cpu_is_a_device(bridge: ggml_bridge.Bridge) -> None:
    [cpu] = [device for device in bridge.devices() if device.backend == "CPU"]
    assert (cpu.name, cpu.type) == ("CPU", "CPU")
    assert cpu.memory_total == psutil.virtual_memory().total
    assert not cpu.asynchronous and not cpu.host_buffer and not cpu.events
    assert bridge.device("cpu") == cpu
    assert cpu.pointer != 0
    with pytest.raises(ValueError, match="unknown ggml device CUDA7; choose from CPU"):
        bridge.device("CUDA7")


def test_layouts_end_with_the_plain_one(bridge: ggml_bridge.Bridge) -> None:
    layouts = bridge.cpu_layouts()
    assert layouts[-1] == "CPU"
    assert ("REPACK" in bridge.cpu_features()) == ("CPU_REPACK" in layouts)
    assert bridge.buft("CPU", "CPU") == bridge.buft("CPU")
    assert len({bridge.buft("CPU", layout) for layout in layouts}) == len(layouts)
    with pytest.raises(ValueError, match="the CPU has no layout GPU_REPACK; it has: "):
        bridge.buft("CPU", "GPU_REPACK")


def test_layouts_support_what_llama_cpp_would_put_there(bridge: ggml_bridge.Bridge) -> None:
    for info in bridge.types():
        if info.mul_mat:
            assert bridge.layout_supports("CPU", info.name, 512, 96), info.name
    if "CPU_REPACK" not in bridge.cpu_layouts():
        pytest.skip("this CPU build repacks nothing")
    supports = bridge.layout_supports
    if "AVX2" in bridge.cpu_features():
        assert supports("CPU_REPACK", "Q4_0", 512, 96)
    assert not supports("CPU_REPACK", "F16", 512, 96)
    assert not supports("CPU_REPACK", "Q4_0", 512, 97), "rows are interleaved in groups"
    if supports("CPU_REPACK", "Q4_0", 512, 96):
        assert supports("CPU_REPACK", "Q4_0", 512, 96, E=8, n_expert_used=2)
        assert not supports("CPU_REPACK", "Q4_0", 512, 96, E=8), "a batched MUL_MAT has no repacked kernel"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("CPU", "Q4_0", 500, 96), "K must be a multiple of the type's block of 32"),
        (("CPU", "Q4_0", 512, 0), "must be positive"),
        (("CPU", "Q4_0", 512, 96, 4, 5), "cannot use more experts than there are"),
        (("CPU", "F32", 1 << 40, 1 << 40), "does not fit in 64 bits"),
    ],
)
def test_impossible_shapes(bridge: ggml_bridge.Bridge, arguments: tuple[str, str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bridge.layout_supports(*arguments)
