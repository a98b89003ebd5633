"""Devices: what `--device` says and becomes, cards that are known by name, the emulated device, and what tells a device
from another. No native code here."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytest import approx

from ggml_bridge import BridgeError as NativeError
from ggml_bridge import ChildDied, ChildTimeout
from ggml_bridge.child import ChildError
from oallama.core.errors import BridgeError, DeviceError, UsageError
from oallama.core.profile import ProfileCase
from oallama.core.types import DeviceInfo, MulMat
from oallama.core.units import GIB, MIB
from oallama.device.card import Host
from oallama.device.cards import CARDS, USUAL_CARDS, USUAL_PC, pc, preset
from oallama.device.cpu import allowed_cpus
from oallama.device.emulated import Emulated, card_of, parameters_of, parse_emulated
from oallama.device.identity import KnownDevice, driver_files, found_gpus, identity_of, known_device, known_of
from oallama.device.opening import OpenDevice, device_pointers, open_device
from oallama.device.spec import DeviceSpec, parse_device
from oallama.profile.emulate import host_of, keep_rates, resolved, this_host
from oallama.profile.machine import fingerprint_key
from oallama.profile.merge import empty
from oallama.profile.profiler import machine_with

TESTS = Path(__file__).parents[1]
PROFILE = TESTS / "golden" / "profile-v1.json"

# ---- what --device says


def emulated(*source, **changes):
    return DeviceSpec("emulated", emulated=Emulated(*source, **changes))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (None, DeviceSpec("auto")), ("", DeviceSpec("auto")), ("auto", DeviceSpec("auto")),
        ("none", DeviceSpec("none")), ("CPU", DeviceSpec("none")), ("cpu", DeviceSpec("none")),
        ("CUDA0", DeviceSpec("ggml", name="CUDA0")), (" Vulkan1 ", DeviceSpec("ggml", name="Vulkan1")),
        ("rpc://127.0.0.1:50052", DeviceSpec("rpc", endpoint="127.0.0.1:50052")),
        ("rpc://gpu-box.lan:9/", DeviceSpec("rpc", endpoint="gpu-box.lan:9")),
        ("emulated", emulated()), ("emulated:rtx3060", emulated("rtx3060-12")),
        ("emulated:RTX4090", emulated("rtx4090")),
        ("emulated,vram=8GiB", emulated(vram=8 << 30)), ("emulated:vram=8GiB", emulated(vram=8 << 30)),
        ("emulated:rtx4090,vram=8GiB,scale=2.3", emulated("rtx4090", vram=8 << 30, scale=(2.3, 2.3))),
        ("emulated:scale=4/2,cpus=1,values=drawn", emulated(scale=(4.0, 2.0), cpus=1, values="drawn")),
        ("emulated:link=12.5,gbps=300GB/s,tflops=20", emulated(link=12.5, gbps=300.0, tflops=20.0)),
        ("emulated:latency=2us,seed=3,scale=auto,cpus=auto", emulated(latency=2.0, seed=3)),
        ("emulated:card.json,scale=1", emulated("card.json", scale=(1.0, 1.0))),
        ("emulated:routing=ids.txt,lost_after=3", emulated(routing="ids.txt", lost_after=3)),
        ("emulated:fail_alloc=2", emulated(fail_alloc=2)),
        ("emulated:pinned=1GiB,buffers=address", emulated(pinned=1 << 30, buffers="address")),
        ("emulated:pinned=0", emulated(pinned=0)),
    ],
)  # fmt: skip
def test_text_becomes_a_record_and_a_record_text(text, spec):
    assert parse_device(text) == spec == parse_device(str(spec))


@pytest.mark.parametrize(
    "text",
    [
        "0CUDA", "CUDA0;x", "rpc://", "rpc://host:0", "rpc://host:1:2", "rpc-workerx:1", "emulated:",
        "emulated:rtx2060",
        *(f"emulated:rtx3090,{wrong}" for wrong in (
            "gbps=0", "vram=0", "scale=2/", "cpus=0-1", "values=guessed", "seed=-1", "colour=red", "buffers=number",
            "seed=1,seed=2",
        )),
    ],
)  # fmt: skip
def test_wrong_text_is_refused_in_one_sentence(text):
    with pytest.raises(UsageError) as caught:
        parse_device(text)
    said = str(caught.value)
    assert ("rtx3060-12" if text.startswith("emulated") else "--device") in said and "\n" not in said


@pytest.mark.parametrize("number", ["fast", "", "nan", "0"])
def test_a_rate_that_is_no_number_in_range_is_refused_with_the_range(number):
    with pytest.raises(UsageError, match=rf"link: '{number}' is not a number within 1e-06 to 1e\+09; write emulated"):
        parse_device(f"emulated:link={number}")


# ---- cards that are known by name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((name, name) for name in CARDS), ("gtx1650", "gtx1650-4"), ("rtx3050", "rtx3050-6"), ("RTX4090", "rtx4090"),
        (" h100 ", "h100"), ("RTX 3060", "rtx3060-12"), ("3070", "rtx3070-8"), ("3080", "rtx3080-10"),
        ("4070", "rtx4070-12"), ("RTX 4070 Super", "rtx4070s-12"), ("RTX 4070 Ti SUPER", "rtx4070tis-16"),
        ("rtx4060ti", "rtx4060ti-16"), ("4060 Ti 8GB", "rtx4060ti-8"), ("5060 Ti", "rtx5060ti-16"),
        ("NVIDIA GeForce RTX 5070", "rtx5070-12"), ("RTX 3090 24 GiB", "rtx3090"), ("A770", "arc-a770"),
        ("Intel Arc B580", "arc-b580-12"), ("Radeon RX 7900 XTX", "rx7900xtx"), ("7800 xt", "rx7800xt-16"),
    ],
)  # fmt: skip
def test_a_card_is_found_as_people_write_it(text, name):
    assert preset(text) is CARDS[name]


def test_presets_are_in_order_of_memory_and_an_unknown_one_is_told_them():
    assert all(name == card.name for name, card in CARDS.items())
    sizes = [card.memory_bytes for card in CARDS.values()]
    assert sizes == sorted(sizes)
    assert {CARDS[name].memory_bytes // GIB for name in USUAL_CARDS} >= {4, 6, 8, 12, 16, 24}
    for unknown in ("rtx9090", "", "Intel", "3060 11GB"):
        with pytest.raises(UsageError, match=r"unknown card .*gtx1650-4, rtx3050-6, .*, rtx4090, rtx5090, h100"):
            preset(unknown)


@pytest.mark.parametrize(
    ("name", "memory_gb_per_s", "link_gb_per_s"),
    [
        ("gtx1650-4", 192, 15.75), ("rtx3050-6", 168, 15.75), ("rx5700xt", 448, 31.5), ("rtx4060ti-8", 288, 15.75),
        ("arc-a770", 560, 31.5), ("rx7900xtx", 960, 31.5), ("rtx3060-12", 360, 31.5), ("rtx4060ti-16", 288, 15.75),
        ("rtx3090", 936, 31.5), ("rtx4090", 1008, 31.5), ("rtx5090", 1792, 63), ("h100", 3352, 63),
        ("rtx3060ti-8", 448, 31.5), ("rtx3070-8", 448, 31.5), ("rtx4060-8", 272, 15.75), ("rtx5060-8", 448, 31.5),
        ("rtx5060ti-8", 448, 31.5), ("rtx3080-10", 760, 31.5), ("rtx2080ti-11", 616, 15.75), ("rtx5070-12", 672, 63),
        ("arc-b580-12", 456, 15.75), ("rtx4070-12", 504, 31.5), ("rtx4070s-12", 504, 31.5), ("rtx4070ti-12", 504, 31.5),
        ("rtx4070tis-16", 672, 31.5), ("rtx4080-16", 717, 31.5), ("rtx5070ti-16", 896, 63), ("rtx5080-16", 960, 63),
        ("rx6800xt-16", 512, 31.5), ("rx7800xt-16", 624, 31.5), ("rtx5060ti-16", 448, 31.5), ("rx7900xt-20", 800, 31.5),
    ],
)  # fmt: skip
def test_no_rate_is_above_what_the_hardware_can_do_and_all_are_documented(name, memory_gb_per_s, link_gb_per_s):
    card = CARDS[name]
    assert 0.28e9 * memory_gb_per_s < card.bytes_per_s < 1e9 * memory_gb_per_s
    assert card.pageable_bytes_per_s < card.pinned_bytes_per_s < 1e9 * link_gb_per_s
    assert 4e12 < card.flops_float_per_s < 1000e12
    rates = (card.bytes_per_s / 1e9, card.flops_per_s / 1e12, card.flops_float_per_s / 1e12)
    cells = [f"{card.memory_bytes >> 30}", *(f"{rate:.0f}" for rate in rates)]
    cells += [f"{rate / 1e9:.1f}" for rate in (card.pinned_bytes_per_s, card.pageable_bytes_per_s)]
    text = (TESTS.parent / "docs" / "what-if.md").read_text(encoding="utf-8")
    assert f"| `{card.name}` | {' | '.join(cells)} |" in text


def test_a_pc_is_the_usual_one_with_other_cores_and_memory():
    assert replace(pc(8, None), name=USUAL_PC.name) == USUAL_PC
    assert pc(4, 40.0).flops_per_s == USUAL_PC.flops_per_s / 2
    assert pc(None, 40.0).bytes_per_s == 40e9


# ---- the emulated device


def here(text, n_threads=1, bytes_per_s=1.0, flops_per_s=1.0):
    """(the device, threads) where this CPU has these rates."""
    spec, threads = resolved(parse_device(text), n_threads, lambda n: Host("CPU", bytes_per_s, flops_per_s, "a test"))
    return spec.emulated, threads


def test_what_a_spec_changes_is_changed_in_the_card():
    plain = card_of(Emulated("rtx3090", scale=(1.0, 1.0)))
    assert asdict(plain) == approx(asdict(CARDS["rtx3090"]))
    changed = card_of(parse_emulated("emulated:rtx3090,gbps=100,link=5,tflops=10,latency=7,vram=1GiB,scale=2/4"))
    assert changed.bytes_per_s == 50e9 and changed.flops_per_s == 2.5e12 and changed.memory_bytes == 1 << 30
    assert changed.pinned_bytes_per_s == 2.5e9 and changed.kernel_s == approx(14e-6)
    share = plain.pageable_bytes_per_s / plain.pinned_bytes_per_s
    assert changed.pageable_bytes_per_s == approx(2.5e9 * share)
    assert changed.copy_s == approx(2 * plain.copy_s)


def test_the_scale_is_how_much_slower_this_cpu_is():
    slow = USUAL_PC.bytes_per_s / 5, USUAL_PC.flops_per_s / 8
    found, threads = here("emulated:rtx3060,values=real", 1, *slow)
    assert found.scale == (5.0, 8.0) and threads == 1
    assert here("emulated:values=real", 1, 1e15, 1e18)[0].scale == (1.0, 1.0), "a card is never made faster"


def test_rates_taken_beside_other_programs_serve_only_as_long_as_these_run(monkeypatch):
    monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "20")
    measured, now, said = [], {}, []

    def ask_child(module, request, *_):
        measured.append(request["n_threads"])
        return {"bytes_per_s": now["rate"], "flops_per_s": 1e9, "others_cpu_percent": now["others"]}

    monkeypatch.setattr("oallama.profile.emulate.ask_child", ask_child)
    monkeypatch.setattr("oallama.profile.emulate.others_percent", lambda: now["others"])

    def rate_at(others, rate, n_threads=1):
        now.update(others=others, rate=rate)
        return this_host(n_threads, said.append).bytes_per_s

    assert rate_at(60.0, 9e9) == 9e9 and "other programs used 60 % of it" in said[-1]
    assert rate_at(45.0, 8e9) == 9e9 and len(measured) == 1, "every process has the same device meanwhile"
    assert rate_at(70.0, 5e9, n_threads=2) == 5e9, "each count has its own"
    said.clear()
    assert rate_at(3.0, 17e9) == 17e9 and len(said) == 1, "that it is measured, and no doubt"
    assert rate_at(70.0, 9e9) == 17e9 and measured == [1, 2, 1], "a busy machine does not touch what is known"
    keep_rates(2)
    assert rate_at(3.0, 12e9, n_threads=2) == 5e9 and measured == [1, 2, 1], "results were measured with them"


def test_devices_of_one_name_are_scaled_alike_whatever_happens_meanwhile():
    rates = iter([1e9, 9e9])
    spec, _ = resolved(parse_device("emulated,emulated"), 1, lambda n: Host("CPU", next(rates), 1e9, "a test"))
    assert len({one.emulated.scale for one in spec.each}) == 1


def test_the_device_gets_a_core_that_computing_does_not_use(monkeypatch):
    for core in (os.cpu_count(), 4000):
        assert core not in allowed_cpus()
        with pytest.raises(UsageError, match=f"unknown core {core}"):
            here(f"emulated:scale=1,cpus={core}")
    monkeypatch.setattr("oallama.profile.emulate.allowed_cpus", lambda: (0, 1, 5))
    monkeypatch.setattr("oallama.profile.emulate.default_threads", lambda: 3)
    found, threads = here("emulated:scale=1", None)
    assert (found.cpus, threads) == (5, 2)
    with pytest.raises(UsageError, match="--threads 2"):
        here("emulated:scale=1", 3)
    monkeypatch.setattr("oallama.profile.emulate.allowed_cpus", lambda: (0,))
    with pytest.raises(UsageError, match="only use one"):
        here("emulated:scale=1")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert here("emulated:scale=1,cpus=7")[0].cpus == 7, "a core that others may not use"
    assert here("emulated:scale=1,values=real")[0].cpus is None


def case(device, layout, mul_mat, n_tokens, seconds):
    return ProfileCase(device, layout, mul_mat, n_tokens, 0, seconds, (seconds,))


def test_the_host_beside_a_card_has_its_best_rates():
    """Bytes of one token, flops of a prompt: of the plain layout where it was timed, and never the card's."""
    small, large = MulMat("MUL_MAT", "F16", (64, 64, 1)), MulMat("MUL_MAT", "F16", (64, 128, 1))
    cases = [
        case("CPU", "CPU", small, 1, 2e-6), case("CPU", "CPU", large, 1, 8e-6), case("CPU", "CPU", small, 2, 1e-9),
        case("CPU", "CPU", small, 64, 4e-4), case("CPU", "CPU", small, 512, 4e-3),
        case("CPU", "CPU_REPACK", small, 512, 1e-3), case("CUDA0", "device", small, 1, 1e-9),
        case("CUDA0", "device", small, 512, 1e-9),
    ]  # fmt: skip
    profile = replace(empty({"cpu": "a host"}), device="CUDA0", cases=tuple(cases))
    flops = 2 * 64 * 64
    assert host_of(profile) == Host("a host", approx(8192 / 2e-6), approx(64 * flops / 4e-4), "its profile")
    repacked = replace(profile, cases=tuple(c for c in cases if c.layout != "CPU" or c.n_tokens == 1))
    assert host_of(repacked).flops_per_s == approx(512 * flops / 1e-3)
    for kept in ({1, 2}, {64, 512}):
        with pytest.raises(UsageError, match="no CPU timings of one token and of a prompt"):
            host_of(replace(profile, cases=tuple(c for c in cases if c.n_tokens in kept)))


def test_a_profile_belongs_to_the_parameters_and_not_to_the_core():
    def key(text):
        return fingerprint_key(machine_with(known_device(parse_device(text)), 1))

    base = key("emulated:rtx3060,scale=2")
    assert key("emulated:rtx3060,scale=2,cpus=1,values=drawn,seed=4,lost_after=3") == base
    for other in ("rtx3060,scale=3", "rtx3060,scale=2,link=3", "rtx3060,scale=2,vram=1GiB", "rtx3090,scale=2"):
        assert key(f"emulated:{other}") != base
    assert key("emulated:rtx3060,scale=2,latency=9") != base


def test_a_profile_of_a_real_card_becomes_parameters():
    text = parameters_of(here(f"emulated:{PROFILE},vram=2GiB,scale=2,values=real")[0])
    document = json.loads(PROFILE.read_text())
    assert text.count("\nkernel ") == sum(case["layout"] == "device" for case in document["cases"]) > 0
    assert f"memory_bytes {2 << 30}" in text
    said = dict(line.split(maxsplit=1) for line in text.splitlines())
    for kind in ("pinned", "pageable"):
        assert float(said[f"{kind}_bytes_per_s"]) == approx(1 / document["link"][f"h2d_{kind}"]["beta_s_per_byte"] / 2)


def test_a_profile_of_a_cpu_is_no_card(tmp_path):
    document, path = json.loads(PROFILE.read_text()), tmp_path / "cpu.json"
    on_host = [case for case in document["cases"] if case["layout"] != "device"]
    for changed, added, said in (
        ({"device": "CPU"}, "", "only a CPU"),
        ({"device": "CPU"}, ",link=3", "profile has its own values"),
        ({"cases": on_host}, "", "no timings of its device"),
    ):
        path.write_text(json.dumps({**document, **changed}))
        with pytest.raises(UsageError, match=said):
            here(f"emulated:{path},scale=1,values=real{added}")
    with pytest.raises(UsageError, match=r"missing\.json"):
        here(f"emulated:{tmp_path / 'missing.json'},scale=1,values=real")


# ---- what tells a device from another of its name

CARD = DeviceInfo("CUDA0", "Test Card 12GB", "CUDA", "GPU", 12 * GIB, 11 * GIB, True, True, True)
MAPPED = "7f00-7f01 r--p 00000000 08:01 42                         "


def opened(spec, info):
    return OpenDevice(info.name, info, parse_device(spec))


def test_what_tells_a_device_from_another_of_its_name():
    known = identity_of(CARD, ["libcuda.so.1 5"])
    assert json.loads(json.dumps(known)) == known
    for change in ({"description": "other"}, {"backend": "Vulkan"}, {"type": "IGPU"}, {"memory_total": 8 * GIB}):
        assert identity_of(replace(CARD, **change), ["libcuda.so.1 5"]) != known
    assert identity_of(CARD, ["libcuda.so.1 6"]) != known
    for change in ({"memory_free": 1}, {"name": "CUDA1"}, {"events": False}, {"memory_total": 12 * GIB - 9 * MIB}):
        assert identity_of(replace(CARD, **change), ["libcuda.so.1 5"]) == known


def test_driver_libraries_are_known_by_name_and_size(tmp_path):
    (tmp_path / "libcuda.so.999.1").write_bytes(b"12345")
    (tmp_path / "libvulkan_radeon.so").write_bytes(b"123")
    (tmp_path / "libc.so.6").write_bytes(b"1")
    names = ("libcuda.so.999.1", "libcuda.so.999.1", "libc.so.6", "libvulkan_radeon.so", "libvulkan_gone.so")
    maps = "\n".join([*(MAPPED + str(tmp_path / name) for name in names), "7ffe-7fff rw-p 00000000 00:00 0"])
    assert driver_files(maps) == ["libcuda.so.999.1 5", "libvulkan_gone.so 0", "libvulkan_radeon.so 3"]
    assert driver_files("") == []


def test_every_way_to_ask_for_a_device_of_ggml_is_the_same_device_and_a_servers_driver_is_not_ours():
    for spec in ("auto", "CUDA0", "cuda0"):
        assert known_of(opened(spec, CARD), "") == KnownDevice(DeviceSpec("ggml", name="CUDA0"), identity_of(CARD, []))
    maps = MAPPED + "/lib/libcuda.so.1"
    assert known_of(opened("CUDA0", CARD), maps).identity == identity_of(CARD, ["libcuda.so.1 0"])
    far = known_of(opened("rpc://box:50052", replace(CARD, name="RPC0", backend="RPC")), maps)
    assert str(far.spec) == "rpc://box:50052" and far.identity["driver_files"] == []


def test_of_devices_of_the_same_name_the_first_is_opened_and_used(monkeypatch):
    """A user's back end (GGML_BACKEND_PATH) may be a second build of one that llama.cpp has."""
    twice = [replace(CARD, description=text) for text in ("first", "second")]
    devices = [SimpleNamespace(**asdict(info), pointer=number) for number, info in enumerate(twice, start=1)]
    bridge = SimpleNamespace(devices=lambda ask_servers: devices)
    monkeypatch.setattr("oallama.device.opening.load_bridge", lambda: bridge)
    with open_device("cuda0") as device:
        assert device.info == twice[0] and device_pointers(device.names) == [1]


def test_auto_asks_only_where_there_is_a_back_end_for_gpus(tmp_path, monkeypatch):
    asked = []

    def run_in_child(module, request, timeout_s):
        asked.append(request)
        return {"devices": [{"spec": name, "identity": identity_of(CARD, [])} for name in ("CUDA0", "CUDA1")]}

    monkeypatch.setattr("ggml_bridge.child.run_in_child", run_in_child)
    monkeypatch.setattr("ggml_bridge.library.soname", lambda name: f"lib{name}.so.0")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.delenv("GGML_BACKEND_PATH", raising=False)
    for name in ("ggml", "ggml-base", "ggml-cpu", "ggml-rpc", "ggml-cpu-haswell", "ggml-blas"):
        (tmp_path / f"lib{name}.so.0").touch()
    assert known_device("auto") == known_device(None) == KnownDevice(DeviceSpec("none")) and asked == []
    monkeypatch.setenv("GGML_BACKEND_PATH", str(tmp_path / "libggml-cuda.so"))  # of this test, as it is asked once
    assert known_device("auto").identity and len(asked) == 1
    (tmp_path / "libggml-vulkan.so.0").touch()
    assert known_device("auto") == found_gpus()[0] == known_device(None)
    assert [gpu.spec.name for gpu in found_gpus()] == ["CUDA0", "CUDA1"] and asked == [{"device": ""}]
    assert tuple(map(known_device, ("CUDA0", "cuda1"))) == found_gpus() and asked == [{"device": ""}], (
        "each is opened once"
    )


def test_an_rpc_server_is_asked_each_time_as_another_may_answer_at_its_address(monkeypatch):
    cards = iter(("one card", "another card"))

    def run_in_child(module, request, timeout_s):
        info = replace(CARD, name="RPC0", backend="RPC", description=next(cards))
        return {"devices": [{"spec": request["device"], "identity": identity_of(info, [])}]}

    monkeypatch.setattr("ggml_bridge.child.run_in_child", run_in_child)
    identities = [known_device("rpc://box:50052").identity for _ in range(2)]
    assert [identity["description"] for identity in identities] == ["one card", "another card"]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ChildError("DeviceError", "there is no device 'CUDA0' here"), DeviceError),
        (ChildError("UsageError", "not a CUDA0"), UsageError),
        (ChildError("KeyError", "CUDA0"), DeviceError),
        (NativeError("no library for CUDA0"), BridgeError),
        (ChildDied("oallama.device.identity", -11), DeviceError),
        (ChildTimeout("no answer"), DeviceError),
    ],
)
def test_a_device_that_cannot_be_asked_is_an_error(monkeypatch, raised, kind):
    def fails(*_, **__):
        raise raised

    monkeypatch.setattr("ggml_bridge.child.run_in_child", fails)
    with pytest.raises(kind) as error:
        known_device("CUDA0")
    assert type(error.value) is kind
    assert "--device none" in str(error.value) or not isinstance(raised, ChildDied | ChildTimeout)
