"""The emulated device: its time, its memory and its streams, through the bridge. What may abort runs in a child."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from native_helpers import RunHere

import ggml_bridge
from ggml_bridge.emulated import EmulatedDevice
from ggml_bridge.library import library_folder, soname
from ggml_bridge.timing import MulMatCase

pytestmark = pytest.mark.timed

NAME = "Emulated0"
RATES = """
description a card for tests, emulated
memory_bytes 268435456
bytes_per_s 2e10
flops_per_s 1e12
flops_float_per_s 5e11
pinned_bytes_per_s 2e9
pageable_bytes_per_s 1e9
kernel_s 5e-5
launch_s 1e-4
launch_node_s 1e-5
copy_s 2e-4
copy_issue_s 1e-4
synchronize_s 1e-4
"""
REAL = f"name {NAME}\nvalues real\ncpu -1\n{RATES}"
Q4_0_BYTES = 18 / 32


def own_core() -> int:
    """For the device; asked before it takes that core from this process."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one core: a device that keeps time needs one of its own")
    return cpus[-1]


@contextmanager
def keeping_time(bridge: ggml_bridge.Bridge, rates: str = RATES) -> Iterator[EmulatedDevice]:
    """A device that keeps time."""
    device = bridge.emulated()
    device.register(f"name {NAME}\nvalues drawn\ncpu {own_core()}\n{rates}")
    try:
        device.reset_stats()
        yield device
    finally:
        device.unregister()


@pytest.fixture
def timed(bridge: ggml_bridge.Bridge):
    """A device that keeps time, for one test."""
    with keeping_time(bridge) as device:
        yield device


@pytest.fixture
def real(bridge: ggml_bridge.Bridge):
    device = bridge.emulated()
    device.register(REAL)
    yield device
    device.unregister()


SECOND = REAL.replace(NAME, "Emulated1").replace("268435456", "134217728")


def test_several_devices_have_memory_of_their_own_and_are_registered_together(bridge: ggml_bridge.Bridge) -> None:
    device = bridge.emulated()
    device.register(f"{REAL}---\n{SECOND}")
    try:
        assert [bridge.device(name).memory_total for name in (NAME, "Emulated1")] == [268435456, 134217728]
        with bridge.mul_mat("Emulated1", None, "Q4_0", 1024, 1024, n_tokens=4, working_set_bytes=0):
            free = [bridge.device(name).memory_free for name in (NAME, "Emulated1")]
        assert free[0] == 268435456 and free[1] < 134217728
        pinned = ctypes.CDLL(str(library_folder() / soname("ggml-base"))).ggml_backend_dev_host_buffer_type
        pinned.argtypes, pinned.restype = [ctypes.c_void_p], ctypes.c_void_p
        types = {pinned(bridge.device(name).pointer) for name in (NAME, "Emulated1")}
        assert len(types) == 1 and None not in types, "pinned memory is one type, as CUDA's is"
        device.register(REAL)
        assert "Emulated1" not in [one.name for one in bridge.devices()]
    finally:
        device.unregister()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{REAL}---\n{REAL}", f"two emulated devices are called {NAME}"),
        (f"{REAL}---\n", "needs memory_bytes"),
        (f"{REAL}---\n{SECOND.replace('cpu -1', 'cpu 0')}", "share one core"),
        ("---\n".join(REAL.replace(NAME, f"E{i}") for i in range(9)), "at most 8"),
    ],
)
def test_devices_that_cannot_be_together_are_refused(bridge: ggml_bridge.Bridge, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        bridge.emulated().register(text)


def test_it_is_a_gpu_while_it_is_registered(bridge: ggml_bridge.Bridge, real: EmulatedDevice) -> None:
    info = bridge.device(NAME)
    assert (info.type, info.backend, info.memory_total) == ("GPU", "Emulated", 268435456)
    assert info.asynchronous and info.host_buffer and info.events and "emulated" in info.description
    real.unregister()
    assert NAME not in [device.name for device in bridge.devices()]
    real.register(REAL)


def test_nothing_ends_before_its_time(bridge: ggml_bridge.Bridge, timed: EmulatedDevice) -> None:
    """Later is possible on a busy machine; earlier never."""
    n_bytes = 4 << 20
    for pinned, rate in ((True, 2e9), (False, 1e9)):
        for direction in ("h2d", "d2h"):
            with bridge.transfer(NAME, direction, pinned, n_bytes) as timer:
                copied = min(timer.run(3))
            assert copied >= 0.99 * n_bytes / rate
    for n_tokens in (1, 64):
        with bridge.mul_mat(NAME, None, "Q4_0", 512, 1024, n_tokens=n_tokens, working_set_bytes=0) as timer:
            assert min(timer.run(3)) >= 0.99 * timed.mul_mat_seconds(2, 512, 1024, 1, 0, n_tokens) - 5e-5
    stats = timed.stats()
    assert stats.bytes_in >= 3 * 2 * n_bytes and stats.late_s > 0 and stats.n_graphs > 0


def test_an_asynchronous_copy_holds_up_its_caller_for_its_call_only(
    bridge: ggml_bridge.Bridge, timed: EmulatedDevice
) -> None:
    n_bytes = 64 << 20  # so long that the fastest of five calls returns before half of it, whatever else runs here
    with bridge.issue(NAME, True, n_bytes) as timer:
        assert 1e-4 <= min(timer.run(5)) < 0.5 * n_bytes / 2e9
    with bridge.issue(NAME, False, n_bytes) as timer:
        assert min(timer.run(5)) >= 0.99 * n_bytes / 1e9, "memory that is not pinned is copied while the caller waits"


def test_the_latency_of_a_copy_does_not_hold_up_those_queued_behind_it(bridge: ggml_bridge.Bridge) -> None:
    n_copies, latency_s = 16, 0.05
    rates = RATES.replace("copy_s 2e-4", f"copy_s {latency_s}")
    with keeping_time(bridge, rates), bridge.transfer(NAME, "h2d", True, n_copies << 10, 1 << 10) as copies:
        found_s = min(copies.begin() + copies.finish() for _ in range(5))
    assert latency_s <= found_s < 8 * latency_s


def test_copies_of_one_stream_do_not_wait_for_results_of_another(
    bridge: ggml_bridge.Bridge, timed: EmulatedDevice
) -> None:
    """The graph and its result use other engines than the copy to the device, which takes 34 ms."""
    assert bridge.copy_wait(NAME, True, 64 << 20) < 0.5


@pytest.mark.parametrize("first", ["CPU", NAME])
def test_copies_are_timed_beside_mul_mats(bridge: ggml_bridge.Bridge, timed: EmulatedDevice, first: str) -> None:
    """Only that both rates come back: native_test (test_contention) tests how they follow from times."""
    mul_mats = MulMatCase(first, None, "Q4_0", 2048, 2048, working_set_bytes=32 << 20)
    found = bridge.link_contention(mul_mats, NAME, 1 << 20, 0.1)
    assert min(found.first_alone, found.first_with_second, found.second_alone) > 0
    assert 0 <= found.second_with_first <= found.second_alone


def test_the_boundary_is_crossed_in_pinned_memory(bridge: ggml_bridge.Bridge) -> None:
    """Nothing ends before its time, so here pinned memory is the slower one."""
    n_bytes, n_excursions = 4 << 20, 3
    with keeping_time(bridge, RATES.replace("pinned_bytes_per_s 2e9", "pinned_bytes_per_s 1e8")):
        with bridge.boundary(NAME, n_bytes, n_excursions) as timer:
            assert timer.n_splits == 1 + 2 * n_excursions
            assert min(timer.run(3)) >= 0.99 * n_excursions * 2 * n_bytes / 1e8
        with bridge.boundary(NAME, n_bytes, n_excursions, on_cpu=True) as timer:
            assert timer.n_splits == 1


def test_a_small_copy_waits_for_the_copy_in_service_and_not_for_those_queued_behind_it(
    bridge: ggml_bridge.Bridge,
) -> None:
    """A busy machine only adds to a wait: the longest tells what was waited for, the shortest what was not."""
    rate, large, small = 5e8, 192 << 20, 8 << 10  # 0.4 s, four times what a thread may wait for a core
    rates = RATES.replace("pinned_bytes_per_s 2e9", f"pinned_bytes_per_s {rate}")
    with keeping_time(bridge, rates), bridge.transfer(NAME, "h2d", True, small) as copy:
        for piece in (large, 1 << 20):
            with bridge.transfer(NAME, "h2d", True, large, piece) as stream:
                samples = [(stream.begin(), *copy.run(1), stream.finish()) for _ in range(4)]
            queue_s, small_s, rest_s = zip(*samples, strict=True)
            assert min(queue_s) >= 0.99e-4 * large / piece, "each call has its price"
            if piece == large:
                assert max(small_s) >= 0.5 * large / rate, "behind one copy that is not interrupted"
            else:
                assert min(small_s) < 0.5 * large / rate
                assert max(rest_s) > 0.25 * large / rate, "there was more to wait for"


def test_a_launch_issue_is_one_graph(bridge: ggml_bridge.Bridge, timed: EmulatedDevice) -> None:
    with bridge.launch_issue(NAME) as timer:
        before = timed.stats().n_graphs
        assert len(timer.run(5)) == 5 and timed.stats().n_graphs == before + 5


@pytest.mark.parametrize(("type_name", "number", "in_float"), [("Q4_0", 2, False), ("F16", 1, True)])
def test_a_kernel_takes_what_the_card_says(real: EmulatedDevice, type_name: str, number: int, in_float: bool) -> None:
    from oallama.device.card import Card

    card = Card("test", "", 1, 2e10, 1e12, 5e11, 5e-5, 1e-4, 1e-5, 2e-4, 1e-4, 1e-4, 2e9, 1e9)
    per_element = Q4_0_BYTES if type_name == "Q4_0" else 2.0
    for n_tokens in (1, 7, 512):
        moved = 512 * 1024 * per_element + 4 * n_tokens * (512 + 1024)
        wanted = card.kernel_seconds(2.0 * 512 * 1024 * n_tokens, moved, in_float)
        assert real.mul_mat_seconds(number, 512, 1024, 1, 0, n_tokens) == pytest.approx(wanted, rel=1e-9)


def test_experts_are_read_as_often_as_they_are_used(real: EmulatedDevice) -> None:
    one = real.mul_mat_seconds(2, 512, 1024, 8, 2, 1)
    many = real.mul_mat_seconds(2, 512, 1024, 8, 2, 64)
    assert one == pytest.approx(2 * 512 * 1024 * Q4_0_BYTES / 2e10 + 4 * 2 * 1536 / 2e10 + 5e-5)
    assert many > 3 * (one - 5e-5)


def test_measured_kernels_come_before_rates_and_the_least_time_counts(bridge: ggml_bridge.Bridge) -> None:
    device = bridge.emulated()
    kernel = "kernel MUL_MAT Q4_0 512x1024x1 0"
    device.register(REAL + f"{kernel} 1 0.002\n{kernel} 11 0.02\n{kernel} 11 0.012\n")
    seconds = [device.mul_mat_seconds(2, 512, 1024, 1, 0, n) for n in (1, 6, 11, 22)]
    assert seconds == pytest.approx([0.002, 0.007, 0.012, 0.024])
    assert device.mul_mat_seconds(2, 512, 2048, 1, 0, 1) < 0.001
    device.unregister()


@pytest.mark.parametrize(("number", "K"), [(4, 512), (2, 500)])
def test_a_mul_mat_by_rows_that_cannot_be_takes_no_time(real: EmulatedDevice, number: int, K: int) -> None:
    """Type 4 was removed from ggml; a block of Q4_0 has 32 elements."""
    with pytest.raises(ValueError, match="multiple of the type"):
        real.mul_mat_seconds(number, K, 1024, 1, 0, 1)


def test_real_values_are_those_of_the_cpu(bridge: ggml_bridge.Bridge, real: EmulatedDevice) -> None:
    for type_name, n_expert, n_used in (("F16", 1, 0), ("Q4_0", 1, 0), ("Q4_0", 8, 2)):
        with bridge.mul_mat(NAME, None, type_name, 256, 96, n_expert, n_used, 5, 0) as timer:
            timer.run(1)
            assert timer.check() < 1e-4


def test_it_holds_no_more_than_its_memory(bridge: ggml_bridge.Bridge, real: EmulatedDevice) -> None:
    with pytest.raises(ggml_bridge.OutOfMemory):
        bridge.transfer(NAME, "h2d", True, 300 << 20)
    with bridge.transfer(NAME, "h2d", True, 200 << 20):
        assert real.stats().device_bytes >= 200 << 20
        assert bridge.device(NAME).memory_free < 60 << 20
    assert real.stats().device_bytes == 0 and real.stats().pinned_bytes == 0


def test_pinned_memory_beyond_its_limit_is_plain_as_with_cuda(bridge: ggml_bridge.Bridge) -> None:
    """Its buffer type never fails; only the type of the buffer tells. So a copy that is to be timed says so."""
    device = bridge.emulated()
    device.register(f"{REAL}pinned_bytes {200 << 20}\n")
    try:
        assert bridge.pins(NAME, 128 << 20) and not bridge.pins(NAME, 256 << 20)
        assert device.stats().pinned_bytes == 0, "what is tried is freed"
        first = bridge.transfer(NAME, "h2d", True, 1 << 20)  # of 128 MiB
        with first, pytest.raises(ggml_bridge.Unsupported, match="no pinned host memory left"):
            bridge.transfer(NAME, "h2d", True, 1 << 20)
        with bridge.transfer(NAME, "h2d", False, 1 << 20) as timer:
            timer.run(1)
    finally:
        device.unregister()


def test_blocks_can_live_on_it_where_it_knows_buffer_types_by_name(bridge: ggml_bridge.Bridge) -> None:
    device = bridge.emulated()
    for text, taken in (("", True), ("knows_buffers_by name\n", True), ("knows_buffers_by address\n", False)):
        device.register(REAL + text)
        assert bridge.device(NAME).takes_residents == taken
        device.unregister()
    assert not bridge.device("CPU").takes_residents, "its memory is the host's"


def test_it_keeps_its_parameters_while_it_is_used(bridge: ggml_bridge.Bridge, real: EmulatedDevice) -> None:
    with bridge.transfer(NAME, "h2d", True, 1 << 20):
        with pytest.raises(ggml_bridge.Unsupported, match="in use"):
            real.register(REAL)
        with pytest.raises(ggml_bridge.Unsupported, match="in use"):
            real.unregister()
    real.register(REAL.replace("268435456", "1000000"))
    assert bridge.device(NAME).memory_total == 1000000


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("bytes_per_s 0", "above 0"),
        ("bytes_per_s fast", "no number"),
        ("bytes_per_s", "missing"),
        ("kernel_s -1", "negative"),
        ("colour red", "unknown parameter colour"),
        ("values guessed", "unknown choice guessed"),
        ("memory_bytes 1.5", "whole number"),
        ("cpu 4294967297", "unknown CPU"),
        ("kernel MUL_MAT Q4_0 256x512x1 0 0 1e-5", "some tokens"),
        ("kernel MUL_MAT Q4_9 1x1x1 0 1 1", "unknown type"),
        ("kernel MUL_MAT Q4_0 1x1 0 1 1", "KxNxE"),
        ("copy up pinned 1 1", "unknown choice up"),
        ("routing no-such-file", "cannot be read"),
        ("knows_buffers_by colour", "unknown choice colour"),
        ("values drawn", "core of its own"),
        ("values drawn\ncpu 4000", "core 4000"),
    ],
)
def test_wrong_parameters_are_refused_in_one_sentence(bridge: ggml_bridge.Bridge, line: str, what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        bridge.emulated().register(REAL + line + "\n")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["zero 1 2", "0 1 x", "0 1 2.5", "0", "-1 2 3", "0 3 3"])
def test_a_line_of_a_routing_file_that_is_none_is_refused(
    bridge: ggml_bridge.Bridge, tmp_path: Path, line: str
) -> None:
    path = tmp_path / "routing.txt"
    path.write_text(f"# remark\n\n0 1 2\n{line}\n")
    what = "repeats an expert" if line == "0 3 3" else "line 4 of the routing file"
    with pytest.raises(ValueError, match=what):
        bridge.emulated().register(REAL + f"routing {path}\n")


def test_host_code_that_touches_device_memory_is_stopped(run_here: RunHere) -> None:
    with pytest.raises(ggml_bridge.ChildDied) as caught:
        run_here("native_cases", {"case": "touch", "parameters": REAL})
    assert caught.value.signal == signal.SIGSEGV


def test_it_has_a_core_of_its_own_while_it_is_registered(bridge: ggml_bridge.Bridge) -> None:
    last, before = own_core(), os.sched_getaffinity(0)
    for core in (last, min(before)):
        bridge.emulated().register(f"name {NAME}\nvalues drawn\ncpu {core}\n{RATES}")
        assert os.sched_getaffinity(0) == before - {core}
    bridge.emulated().unregister()
    assert os.sched_getaffinity(0) == before


def test_a_core_that_is_not_there_leaves_no_device_behind(bridge: ggml_bridge.Bridge, real: EmulatedDevice) -> None:
    with pytest.raises(ValueError, match="core 4000"):
        real.register(f"name {NAME}\nvalues drawn\ncpu 4000\n{RATES}")
    assert NAME not in [device.name for device in bridge.devices()]
    with pytest.raises(ValueError, match="no emulated device is registered"):
        real.stats()
    real.unregister()
    real.register(REAL)
    assert NAME in [device.name for device in bridge.devices()]


@pytest.fixture
def core_file() -> Iterator[Path]:
    """Where devices of this user notice each other on the first core; what is there is put back."""
    path = Path(f"/dev/shm/oallama-emulated-{os.geteuid()}-cpu{min(os.sched_getaffinity(0))}")
    kept = path.with_name(f"{path.name}.kept-by-a-test")
    with suppress(FileNotFoundError):
        path.rename(kept)
    yield path
    path.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        kept.rename(path)


@pytest.mark.parametrize("planted", ["a link", "a second name", "a pipe"])
def test_what_a_stranger_put_in_the_place_of_its_file_is_left_as_it_is(
    bridge: ggml_bridge.Bridge, core_file: Path, planted: str
) -> None:
    own_core()
    private = core_file.with_name(f"{core_file.name}.private")
    private.write_text("a private file of the user's own")
    private.chmod(0o600)
    parameters = f"name {NAME}\nvalues drawn\ncpu {core_file.name.rpartition('cpu')[2]}\n{RATES}"
    try:
        if planted == "a pipe":
            os.mkfifo(core_file)
        else:
            (core_file.symlink_to if planted == "a link" else core_file.hardlink_to)(private)
        with pytest.raises(ggml_bridge.BridgeError, match=f"cannot use {core_file}: it is not a file of this user"):
            bridge.emulated().register(parameters)
        assert private.read_text() == "a private file of the user's own"
        assert private.stat().st_mode & 0o777 == 0o600
    finally:
        private.unlink()
    core_file.unlink()
    bridge.emulated().register(parameters)
    bridge.emulated().unregister()
    assert core_file.stat().st_mode & 0o777 == 0o600 and core_file.stat().st_size == 8


def test_two_on_one_core_notice_each_other(run_here: RunHere) -> None:
    """One process keeps its device at work while another one's wants the same core."""
    parameters = f"name {NAME}\nvalues drawn\ncpu {own_core()}\n{RATES}"
    found = run_here("native_cases", {"case": "two", "parameters": parameters}, timeout_s=300.0)
    assert found["together"] > 0
