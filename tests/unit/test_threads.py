"""How many threads are the default: on made-up machines, with made-up rates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from gguf_factory import write_gguf

from oallama.core.errors import BridgeError
from oallama.device.card import Host
from oallama.device.cpu import core_kinds, thread_counts
from oallama.placer import Placer
from oallama.profile.emulate import usual_threads


def machine(root: Path, files: Mapping[str, str]) -> Path:
    """A tree of /sys with these files below devices/."""
    for name, text in files.items():
        path = root / "sys/devices" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def each(cpus: range | tuple[int, ...], name: str, text: object) -> dict[str, str]:
    return {f"system/cpu/cpu{cpu}/{name}": str(text) for cpu in cpus}


def siblings(*pairs: tuple[int, int]) -> dict[str, str]:
    return {
        f"system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{a},{b}" for a, b in pairs for cpu in (a, b)
    }  # fmt: skip


INTEL = {"cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-7", **siblings((0, 1), (2, 3))}
BIG_LITTLE = {
    **each((0, 1, 2, 3), "cpu_capacity", 300), **each((4, 5, 6), "cpu_capacity", 800),
    **each((7,), "cpu_capacity", 1024),
}  # fmt: skip
DENSE = {
    **each((0, 1), "cpufreq/cpuinfo_max_freq", 5_100_000), **each((2,), "cpufreq/cpuinfo_max_freq", 4_900_000),
    **each((3, 4, 5), "cpufreq/cpuinfo_max_freq", 3_300_000),
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "n_cpus", "kinds", "counts"),
    [
        (INTEL, 8, ((0, 1, 2, 3), (4, 5, 6, 7)), (2, 6)),
        (BIG_LITTLE, 8, ((7,), (4, 5, 6), (0, 1, 2, 3)), (1, 4, 8)),
        (DENSE, 6, ((0, 1, 2), (3, 4, 5)), (3, 6)),
        (each(range(4), "cpu_capacity", 1024), 4, ((0, 1, 2, 3),), (4,)),
        ({}, 4, ((0, 1, 2, 3),), (4,)),
        ({"cpu_core/cpus": "0-3"}, 4, ((0, 1, 2, 3),), (4,)),  # no efficiency cores
        ({"cpu_core/cpus": "0-1", "cpu_atom/cpus": "x"}, 4, ((0, 1, 2, 3),), (4,)),
        (each((0, 1), "cpu_capacity", 1024), 4, ((0, 1, 2, 3),), (4,)),  # nothing is said of the others
        (each(range(2), "cpu_capacity", 0), 2, ((0, 1),), (2,)),
        ({}, 0, (), ()),
    ],
)
def test_cores_are_told_apart_as_linux_says(
    tmp_path: Path, files: dict[str, str], n_cpus: int, kinds: tuple[tuple[int, ...], ...], counts: tuple[int, ...]
) -> None:
    root = machine(tmp_path, files)
    assert core_kinds(root, range(n_cpus)) == kinds
    assert thread_counts(root, range(n_cpus)) == counts


@pytest.mark.parametrize(("quota", "counts"), [("300000 100000", (2, 3)), ("150000 100000", (2,)), ("max 1", (2, 6))])
def test_a_containers_quota_limits_them(tmp_path: Path, quota: str, counts: tuple[int, ...]) -> None:
    root = machine(tmp_path, INTEL)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text(quota)
    assert thread_counts(root, range(8)) == counts


def host(bytes_per_s: float) -> Host:
    return Host(name="made up", bytes_per_s=bytes_per_s, flops_per_s=1e12, source="a test")


@pytest.mark.parametrize(
    ("rates", "chosen"), [({4: 50e9, 12: 40e9}, 4), ({4: 40e9, 12: 50e9}, 12), ({4: 5e9, 12: 5e9}, 4)]
)
def test_the_count_that_decodes_fastest_is_taken(rates: dict[int, float], chosen: int) -> None:
    assert usual_threads(lambda count: host(rates[count]), (4, 12)) == chosen


def test_where_it_cannot_be_measured_every_core_is_used() -> None:
    def fails(count: int) -> Host:
        raise BridgeError("no library")

    assert usual_threads(fails, (4, 12)) == 12


def test_a_placer_uses_what_is_fastest_unless_the_user_says_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def rates(count: int, say: object = None) -> Host:
        asked.append(count)
        return host({1: 50e9, 2: 40e9}[count])

    monkeypatch.setattr("oallama.profile.emulate.thread_counts", lambda: (1, 2))
    monkeypatch.setattr("oallama.placer.measured.this_host", rates)
    model = write_gguf(tmp_path / "model.gguf", "llama")
    assert Placer.load(model, device="none", threads=7).threads == 7 and not asked
    placer = Placer.load(model, device="none")
    assert not asked  # looking at a model measures nothing
    assert placer.threads == 1 and asked == [1, 2]
    assert placer.threads == 1 and asked == [1, 2]
    with placer.engine(placer.plan("cpu", workload=placer.workload(8, 8), measure=False), progress=False) as engine:
        assert engine.n_threads == 1
