"""The host: how many threads are the default, how much memory is left, and models that it cannot hold, which are
refused before they are loaded (files that are mostly holes stand for them)."""

from types import SimpleNamespace

import psutil
import pytest
from gguf_factory import write_gguf
from gguf_factory.raw import tiny_llama
from processes import here

from oallama.cli.served import host_left
from oallama.core.errors import BridgeError, DoesNotFit
from oallama.device.cpu import core_kinds, thread_counts
from oallama.device.host_memory import host_free_bytes
from oallama.placer import Placer
from oallama.profile.emulate import usual_threads

# ---- threads


def machine(root, files):
    """A tree of /sys with these files below devices/."""
    for name, text in files.items():
        path = root / "sys/devices" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def each(cpus, name, text):
    return {f"system/cpu/cpu{cpu}/{name}": text for cpu in cpus}


INTEL = {
    "cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-7",
    **each((0, 1), "topology/thread_siblings_list", "0,1"), **each((2, 3), "topology/thread_siblings_list", "2,3"),
}  # fmt: skip
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
def test_cores_are_told_apart_as_linux_says(tmp_path, files, n_cpus, kinds, counts):
    root = machine(tmp_path, files)
    assert core_kinds(root, range(n_cpus)) == kinds
    assert thread_counts(root, range(n_cpus)) == counts


@pytest.mark.parametrize(("quota", "counts"), [("300000 100000", (2, 3)), ("150000 100000", (2,)), ("max 1", (2, 6))])
def test_a_containers_quota_limits_them(tmp_path, quota, counts):
    root = machine(tmp_path, INTEL)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text(quota)
    assert thread_counts(root, range(8)) == counts


@pytest.mark.parametrize(
    ("rates", "chosen"), [({4: 50e9, 12: 40e9}, 4), ({4: 40e9, 12: 50e9}, 12), ({4: 5e9, 12: 5e9}, 4)]
)
def test_the_count_that_decodes_fastest_is_taken(rates, chosen):
    assert usual_threads(lambda count: SimpleNamespace(bytes_per_s=rates[count]), (4, 12)) == chosen


def test_where_it_cannot_be_measured_every_core_is_used():
    def fails(count):
        raise BridgeError("no library")

    assert usual_threads(fails, (4, 12)) == 12


def cpu_plan(placer):
    return placer.plan("cpu", workload=placer.workload(8, 8), measure=False)


def test_a_placer_uses_what_is_fastest_unless_the_user_says_a_count(tmp_path, monkeypatch):
    asked = []

    def rates(count, say=None):
        asked.append(count)
        return SimpleNamespace(bytes_per_s={1: 50e9, 2: 40e9}[count])

    monkeypatch.setattr("oallama.profile.emulate.thread_counts", lambda: (1, 2))
    monkeypatch.setattr("oallama.placer.model_on_device.this_host", rates)
    model = write_gguf(tmp_path / "model.gguf", "llama")
    assert Placer.load(model, device="none", threads=7).threads == 7 and not asked
    placer = Placer.load(model, device="none")
    assert not asked  # looking at a model measures nothing
    for _ in range(2):
        assert placer.threads == 1 and asked == [1, 2]
    with placer.llama(cpu_plan(placer)) as llama:
        assert llama.n_threads == 1


# ---- memory


def test_a_model_beyond_the_host_s_memory_is_refused(tmp_path):
    """One layer whose FFN takes twice the memory, of which nothing is written."""
    n_ff = (2 * psutil.virtual_memory().total // (3 * 2 * 64) + 63) // 64 * 64
    g = tiny_llama()
    g.set("llama.feed_forward_length", n_ff)
    for role, shape in (("gate", [64, n_ff]), ("up", [64, n_ff]), ("down", [n_ff, 64])):
        tensor = g.tensor(f"blk.0.ffn_{role}.weight")
        tensor.shape, tensor.type = shape, 1
    path = g.write(tmp_path / "model.gguf")
    done = here("run", path, "hi", "-n", "1", "--device", "none", code=1, cache=tmp_path)
    assert "GiB on the host but only" in done.stderr and "use a smaller or more quantized model" in done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["warning", "oallama"]  # of its context, this


def loaded_bytes(placer):
    return placer.load_needs(cpu_plan(placer)).host_bytes


@pytest.fixture
def placer(tmp_path):
    return Placer.load(write_gguf(tmp_path / "model.gguf", "llama"), device="none", threads=1)


def test_an_engine_for_a_plan_of_a_file_is_refused_too(placer, monkeypatch):
    needed, plan = loaded_bytes(placer), cpu_plan(placer)
    monkeypatch.setattr("oallama.run.no_alloc_loads.host_memory_bytes", lambda: needed // 2)
    with pytest.raises(DoesNotFit) as caught:
        Placer.load(placer.model.path, device="none", threads=1).engine(plan)
    assert caught.value.available == needed // 2 < caught.value.required


def test_experts_that_a_token_does_not_use_may_stay_on_disk(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", "qwen3moe", n_expert=16, n_ff=1024)
    placer = Placer.load(path, device="none", threads=1)
    idle = sum(round((1 - op.active_fraction) * op.bytes) for op in placer.operators)
    assert idle > 1 << 20
    needed = loaded_bytes(placer)
    monkeypatch.setattr("oallama.run.no_alloc_loads.host_memory_bytes", lambda: needed - idle // 2)
    cpu_plan(placer)
    monkeypatch.setattr("oallama.run.no_alloc_loads.host_memory_bytes", lambda: needed - 2 * idle)
    with pytest.raises(DoesNotFit):
        cpu_plan(placer)


def test_what_a_container_has_left_is_its_limit_less_what_is_used_and_no_page_of_a_file(tmp_path):
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("100000\n")
    (folder / "memory.current").write_text("60000\n")
    (folder / "memory.stat").write_text("anon 30000\nactive_file 9000\ninactive_file 1000\n")
    assert host_free_bytes(tmp_path) == 50000
    (folder / "memory.current").write_text("900000\n")
    assert host_free_bytes(tmp_path) == 0
    (folder / "memory.max").write_text("max\n")
    assert host_free_bytes(tmp_path) > 100000


def test_what_the_host_has_left_beside_a_plan(placer, monkeypatch):
    needed = loaded_bytes(placer)
    for free, left in ((100 * needed, 90 * needed - needed), (needed, 0)):
        monkeypatch.setattr("oallama.device.host_memory.host_free_bytes", lambda free=free: free)
        assert host_left(placer, cpu_plan(placer)) == left
