"""`--device emulated…`: text parses into a record and back, and becomes the parameters of libggml-emulated."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from pytest import approx

from oallama.core.errors import UsageError
from oallama.core.profile import ProfileCase
from oallama.core.types import MulMat
from oallama.device.card import Host
from oallama.device.cards import CARDS
from oallama.device.cpu import allowed_cpus
from oallama.device.emulated import Emulated, card_of, parameters_of, parse_emulated
from oallama.device.identity import known_device
from oallama.device.spec import parse_device
from oallama.profile.emulate import host_of, resolved
from oallama.profile.machine import fingerprint_key
from oallama.profile.merge import empty
from oallama.profile.profiler import machine_with

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("emulated", Emulated()),
        ("emulated:rtx3060", Emulated("rtx3060-12")),
        ("emulated:RTX4090", Emulated("rtx4090")),
        ("emulated,vram=8GiB", Emulated(vram=8 << 30)),
        ("emulated:vram=8GiB", Emulated(vram=8 << 30)),
        ("emulated:rtx4090,vram=8GiB,scale=2.3", Emulated("rtx4090", vram=8 << 30, scale=(2.3, 2.3))),
        ("emulated:scale=4/2,cpus=1,values=drawn", Emulated(scale=(4.0, 2.0), cpus=1, values="drawn")),
        ("emulated:link=12.5,gbps=300GB/s,tflops=20", Emulated(link=12.5, gbps=300.0, tflops=20.0)),
        ("emulated:latency=2us,seed=3,scale=auto,cpus=auto", Emulated(latency=2.0, seed=3)),
        ("emulated:card.json,scale=1", Emulated("card.json", scale=(1.0, 1.0))),
        ("emulated:routing=ids.txt,lost_after=3", Emulated(routing="ids.txt", lost_after=3)),
        ("emulated:fail_alloc=2", Emulated(fail_alloc=2)),
        ("emulated:pinned=1GiB,buffers=address", Emulated(pinned=1 << 30, buffers="address")),
        ("emulated:pinned=0", Emulated(pinned=0)),
    ],
)
def test_text_parses(text: str, spec: Emulated) -> None:
    assert parse_device(text).emulated == spec == parse_emulated(str(spec))


@pytest.mark.parametrize(
    "text",
    [
        "emulated:rtx2060",
        "emulated:",
        "emulated:rtx3090,gbps=0",
        "emulated:rtx3090,vram=0",
        "emulated:rtx3090,scale=2/",
        "emulated:rtx3090,cpus=0-1",
        "emulated:rtx3090,values=guessed",
        "emulated:rtx3090,seed=-1",
        "emulated:rtx3090,colour=red",
        "emulated:rtx3090,buffers=number",
        "emulated:rtx3090,seed=1,seed=2",
    ],
)
def test_wrong_text_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_device(text)
    assert "rtx3060-12" in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_spec_changes_is_changed_in_the_card() -> None:
    plain = card_of(Emulated("rtx3090", scale=(1.0, 1.0)))
    assert asdict(plain) == pytest.approx(asdict(CARDS["rtx3090"]))
    changed = card_of(parse_emulated("emulated:rtx3090,gbps=100,link=5,tflops=10,latency=7,vram=1GiB,scale=2/4"))
    assert changed.bytes_per_s == 50e9 and changed.flops_per_s == 2.5e12 and changed.memory_bytes == 1 << 30
    assert changed.pinned_bytes_per_s == 2.5e9 and changed.kernel_s == pytest.approx(14e-6)
    share = plain.pageable_bytes_per_s / plain.pinned_bytes_per_s
    assert changed.pageable_bytes_per_s == pytest.approx(2.5e9 * share)
    assert changed.copy_s == pytest.approx(2 * plain.copy_s)


def rates_of(bytes_per_s: float, flops_per_s: float):
    return lambda n_threads: Host("this CPU", bytes_per_s, flops_per_s, "a test")


def test_the_scale_is_how_much_slower_this_cpu_is() -> None:
    from oallama.device.cards import USUAL_PC

    found, threads = resolved(
        parse_device("emulated:rtx3060,values=real"), 1, rates_of(USUAL_PC.bytes_per_s / 5, USUAL_PC.flops_per_s / 8)
    )
    assert found.emulated is not None and found.emulated.scale == (5.0, 8.0) and threads == 1
    fast, _ = resolved(parse_device("emulated:values=real"), 1, rates_of(1e15, 1e18))
    assert fast.emulated is not None and fast.emulated.scale == (1.0, 1.0), "a card is never made faster"


def test_the_device_gets_a_core_that_computing_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oallama.profile.emulate.allowed_cpus", lambda: (0, 1, 5))
    monkeypatch.setattr("oallama.profile.emulate.default_threads", lambda: 3)
    found, threads = resolved(parse_device("emulated:scale=1"), None)
    assert found.emulated is not None and found.emulated.cpus == 5 and threads == 2
    with pytest.raises(UsageError, match="--threads 2"):
        resolved(parse_device("emulated:scale=1"), 3)
    monkeypatch.setattr("oallama.profile.emulate.allowed_cpus", lambda: (0,))
    with pytest.raises(UsageError, match="one core only"):
        resolved(parse_device("emulated:scale=1"), 1)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    beside, _ = resolved(parse_device("emulated:scale=1,cpus=7"), 1)
    assert beside.emulated is not None and beside.emulated.cpus == 7, "a core that others may not use"
    alone, _ = resolved(parse_device("emulated:scale=1,values=real"), 1)
    assert alone.emulated is not None and alone.emulated.cpus is None


def test_the_host_beside_a_card_has_its_best_rates() -> None:
    """Bytes of one token, flops of a prompt: of the plain layout where it was timed, and never the card's."""
    small, large = MulMat("MUL_MAT", "F16", (64, 64, 1)), MulMat("MUL_MAT", "F16", (64, 128, 1))

    def case(device: str, layout: str, mul_mat: MulMat, n_tokens: int, seconds: float) -> ProfileCase:
        return ProfileCase(device, layout, mul_mat, n_tokens, 0, seconds, (seconds,))

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


def test_a_profile_belongs_to_the_parameters_and_not_to_the_core() -> None:
    def key(text: str) -> str:
        return fingerprint_key(machine_with(known_device(parse_device(text)), 1))

    base = key("emulated:rtx3060,scale=2")
    assert key("emulated:rtx3060,scale=2,cpus=1,values=drawn,seed=4,lost_after=3") == base
    for other in ("scale=3", "scale=2,link=3", "scale=2,vram=1GiB", "scale=2,latency=9"):
        assert key(f"emulated:rtx3060,{other}") != base
    assert key("emulated:rtx3090,scale=2") != base


def test_a_profile_of_a_real_card_becomes_parameters() -> None:
    spec, _ = resolved(
        parse_device(f"emulated:{GOLDEN / 'profile-v1.json'},vram=2GiB,scale=2,values=real"), 1, rates_of(1.0, 1.0)
    )
    assert spec.emulated is not None
    text = parameters_of(spec.emulated)
    cases = [
        case for case in json.loads((GOLDEN / "profile-v1.json").read_text())["cases"] if case["layout"] == "device"
    ]
    assert text.count("\nkernel ") == len(cases) > 0
    assert f"memory_bytes {2 << 30}" in text
    link = json.loads((GOLDEN / "profile-v1.json").read_text())["link"]
    said = dict(line.split(maxsplit=1) for line in text.splitlines())
    for kind in ("pinned", "pageable"):
        assert float(said[f"{kind}_bytes_per_s"]) == approx(1 / link[f"h2d_{kind}"]["beta_s_per_byte"] / 2)


def test_a_profile_of_a_cpu_is_no_card(tmp_path: Path) -> None:
    document = json.loads((GOLDEN / "profile-v1.json").read_text())
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({**document, "device": "CPU"}))
    with pytest.raises(UsageError, match="CPU alone"):
        resolved(parse_device(f"emulated:{path},scale=1,values=real"), 1)
    with pytest.raises(UsageError, match="profile says them itself"):
        resolved(parse_device(f"emulated:{path},scale=1,link=3,values=real"), 1)
    on_host = [case for case in document["cases"] if case["layout"] != "device"]
    path.write_text(json.dumps({**document, "cases": on_host}))
    with pytest.raises(UsageError, match="no timings of its device"):
        resolved(parse_device(f"emulated:{path},scale=1,values=real"), 1)
    with pytest.raises(UsageError, match=r"missing\.json"):
        resolved(parse_device(f"emulated:{tmp_path / 'missing.json'},scale=1,values=real"), 1)


def test_a_core_that_is_not_there_is_refused() -> None:
    for core in (os.cpu_count(), 4000):
        assert core is not None and core not in allowed_cpus()
        with pytest.raises(UsageError, match=f"no core {core} here"):
            resolved(parse_device(f"emulated:scale=1,cpus={core}"), 1)
