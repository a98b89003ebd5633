"""mul-mat timers: they compute what they time, on as much memory as asked for."""

from __future__ import annotations

import math
import time

import pytest

import ggml_bridge
from ggml_bridge.bridge import TypeInfo

NMSE_LIMITS = {"F32": 1e-8, "F16": 1e-6}
QUANTISED_LIMIT = 2e-4


def row_bytes(info: TypeInfo, n_elements: int) -> int:
    return n_elements // info.block_elements * info.block_bytes


@pytest.mark.parametrize("n_tokens", [1, 5, 40])
@pytest.mark.parametrize(("e", "n_expert_used"), [(1, 0), (4, 0), (8, 2)])
@pytest.mark.parametrize("type", ["F32", "F16", "Q4_0", "Q8_0", "Q4_K", "IQ1_M", "IQ2_XXS", "MXFP4"])
def test_kernels_agree_with_numpy(
    bridge: ggml_bridge.Bridge, type: str, e: int, n_expert_used: int, n_tokens: int
) -> None:
    checked = 0
    for layout in bridge.cpu_layouts():
        if bridge.layout_supports(layout, type, 512, 96, e, n_expert_used):
            with bridge.mul_mat("CPU", layout, type, 512, 96, e, n_expert_used, n_tokens, 1 << 20) as timer:
                assert timer.check() < NMSE_LIMITS.get(type, QUANTISED_LIMIT), layout
            checked += 1
    assert checked >= 1


def test_a_wrong_product_would_be_seen(bridge: ggml_bridge.Bridge) -> None:
    """The check compares with other rows when told another tile: so an error in row order cannot pass."""
    with bridge.mul_mat("CPU", "CPU", "F32", 64, 33, working_set_bytes=0) as timer:
        assert timer.check() < 1e-10
        timer.info.tile_rows -= 1
        with pytest.raises(ValueError, match="has not the size of the tile"):
            timer.check()


def test_the_set_is_as_large_as_asked_for(bridge: ggml_bridge.Bridge) -> None:
    row = row_bytes(bridge.type_info("Q8_0"), 256)
    with bridge.mul_mat("CPU", "CPU", "Q8_0", 256, 64, working_set_bytes=10 * 64 * row) as timer:
        assert timer.info.copy_bytes == 64 * row
        assert timer.info.n_copies == 10
        assert timer.info.n_nodes % 10 == 0 or timer.info.n_nodes > 10
    with bridge.mul_mat("CPU", "CPU", "Q8_0", 256, 64, working_set_bytes=10 * 64 * row + 1) as timer:
        assert timer.info.n_copies == 11
    with bridge.mul_mat("CPU", "CPU", "Q8_0", 256, 64, working_set_bytes=0) as timer:
        assert timer.info.n_copies == 1


def test_routed_mul_mats_touch_the_whole_set_in_decode(bridge: ggml_bridge.Bridge) -> None:
    """One token reads 2 of 16 experts, so a set of one copy needs eight mul-mats to be read once."""
    expert = 64 * row_bytes(bridge.type_info("Q4_0"), 256)
    with bridge.mul_mat("CPU", "CPU", "Q4_0", 256, 64, 16, 2, 1, working_set_bytes=16 * expert) as timer:
        assert timer.info.n_copies == 1
        assert timer.info.n_nodes >= 8
        first = timer._read(2, (1, 2), "int32")
        assert len(set(first[0].tolist())) == 2
        assert all(0 <= i < 16 for i in first[0])


def test_samples_are_times(bridge: ggml_bridge.Bridge) -> None:
    with bridge.mul_mat("CPU", "CPU", "Q4_0", 512, 512, working_set_bytes=1 << 22) as timer:
        samples = timer.run(7)
        assert len(samples) == 7
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in samples)
        assert timer.info.copy_bytes / min(samples) < 1e12, "no CPU reads weights at a terabyte per second"
        assert timer.run(0) == []


@pytest.mark.timed
def test_more_work_takes_longer(bridge: ggml_bridge.Bridge) -> None:
    """Sixteen times the weight, in seconds of this thread: time of others does not count."""

    def thread_s(k: int, n: int) -> float:
        with bridge.mul_mat("CPU", "CPU", "Q4_0", k, n, working_set_bytes=1 << 20) as timer:
            start = time.thread_time()
            timer.run(15)
            return (time.thread_time() - start) / timer.info.n_nodes

    assert thread_s(2048, 512) > 4 * thread_s(512, 128)


def test_refusals(bridge: ggml_bridge.Bridge) -> None:
    with pytest.raises(ValueError, match="no ggml device is called GPU9"):
        bridge.mul_mat("GPU9", None, "Q4_0", 512, 96)
    with pytest.raises(ValueError, match="the CPU has no layout FPGA"):
        bridge.mul_mat("CPU", "FPGA", "Q4_0", 512, 96)
    with pytest.raises(ggml_bridge.Unsupported, match="ggml cannot multiply by a weight of type i8"):
        bridge.mul_mat("CPU", "CPU", "I8", 512, 96)
    with pytest.raises(ValueError, match="threads must be 1 to 512"):
        bridge.mul_mat("CPU", "CPU", "Q4_0", 512, 96, n_threads=0)
    with pytest.raises(ValueError, match="does not fit in 64 bits"):
        bridge.mul_mat("CPU", "CPU", "F32", 1 << 40, 1 << 40)
    if "CPU_REPACK" in bridge.cpu_layouts():
        with pytest.raises(ggml_bridge.Unsupported, match="cannot compute MUL_MAT by f16"):
            bridge.mul_mat("CPU", "CPU_REPACK", "F16", 512, 96)


def test_a_closed_timer_says_so(bridge: ggml_bridge.Bridge) -> None:
    timer = bridge.mul_mat("CPU", "CPU", "Q4_0", 512, 96, working_set_bytes=0)
    timer.close()
    timer.close()
    with pytest.raises(ValueError, match="this timer is closed"):
        timer.run()
