"""What is measured, kept and served: through profile_model, over a bridge to a machine that is a formula."""

from __future__ import annotations

import functools
import io
import json
import math
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import until
from seeds import examples
from worlds import ATTENTION, model_info, weight

from ggml_bridge import BridgeError as NativeError
from ggml_bridge import ChildDied, OutOfMemory, Unsupported
from ggml_bridge.child import ChildError
from ggml_bridge.timing import ConcurrentRates as Rates
from oallama.core.errors import BridgeError, DeviceError, OallamaError, ProfileError, UsageError
from oallama.core.files import FOLDER_VARIABLE, cache_folder
from oallama.core.options import DEFAULT_ATTENTION
from oallama.core.profile import Profile
from oallama.core.types import DeviceInfo, ModelInfo, MulMat, Operator
from oallama.core.units import KIB, MIB
from oallama.device.identity import KnownDevice
from oallama.device.opening import OpenDevice
from oallama.device.spec import parse_device
from oallama.profile.busy import Others, busy_percent, caveat
from oallama.profile.child import handle
from oallama.profile.fit import fit_linear
from oallama.profile.profiler import DEFAULT_TOKENS, profile_model, stored_profile
from oallama.profile.store import measuring_lock
from oallama.profile.timing import TimingPolicy, measure, relative_half_width

ISSUE_S, GRAPH_S, EXCURSION = 1e-6, 1e-3, (5e-5, 1e-9)
COPY_S = {("h2d", True): (1e-6, 1e-10), ("h2d", False): (2e-6, 3e-10), ("d2h", True): (3e-6, 2e-10),
          ("d2h", False): (4e-6, 4e-10)}  # fmt: skip
RATES = Rates(first_alone=11e9, second_alone=7e9, first_with_second=5e9, second_with_first=3e9)

MODEL = model_info(n_layer=12, n_embd=256)
DENSE = tuple(weight(role=role, k=256, n=n, layer=0) for role, n in zip(ATTENTION, (256, 64, 64, 256), strict=True))
EXPERTS = tuple(
    weight(role=role, k=k, n=n, layer=0, n_expert=8, used=2)
    for role, k, n in (("ffn_up_exps", 256, 64), ("ffn_down_exps", 64, 256))
)
OUTPUT = weight(role="output", k=256, n=3200)
OPERATORS = (*DENSE, *EXPERTS, OUTPUT)


def known(spec: str = "CUDA0", description: str = "a card", memory_bytes: int = 12 << 30) -> KnownDevice:
    identity = {"description": description, "backend": "CUDA", "type": "GPU", "memory_bytes": memory_bytes}
    return KnownDevice(parse_device(spec), identity)


NONE, CARD = KnownDevice(parse_device("none")), known()


@dataclass
class Machine:
    """A bridge to a machine on which everything takes what a formula says, and what it was asked to time.

    refused: layouts and devices without a kernel; crashing: layout and experts a weight of what ends the process;
    raises: at the first question. slowdown: of everything, repacked: of the plain layout against the other. pattern:
    factor of the n-th run of a mul-mat. disturbed: seconds of what is asked first of all. interrupted_after: so many
    questions.
    """

    refused: tuple[str, ...] = ()
    crashing: tuple[str, int] | None = None
    raises: Exception | None = None
    pinned: bool = True
    most_bytes: float = math.inf
    slowdown: float = 1.0
    repacked: float = 2.0
    pattern: Callable[[int], float] = lambda run: 1.0
    disturbed: dict[tuple[Any, ...], float] = field(default_factory=dict)
    interrupted_after: float = math.inf
    others_percent: float = 0.0
    llc_bytes: int = 16 * KIB
    now: float = 0.0
    n_open: int = 0
    n_children: int = 0
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def profile(
        self,
        operators: Iterable[Operator] = OPERATORS,
        device: KnownDevice = CARD,
        *,
        model: ModelInfo = MODEL,
        tokens: tuple[int, ...] = (1, 32),
        progress: bool = False,
        **options: Any,
    ) -> Profile:
        info = DeviceInfo(
            name="CUDA0", description="a card", backend="CUDA", type="GPU", memory_total=12 << 30,
            memory_free=12 << 30, asynchronous=True, host_buffer=True, events=True,
        )  # fmt: skip
        spec = device.spec
        opened = OpenDevice("none", None, spec) if spec.is_none else OpenDevice("CUDA0", info, spec)

        def run_child(module: str, request: Mapping[str, Any], send: Callable[[dict[str, Any]], None]) -> Any:
            self.n_children += 1
            if self.raises:
                raise self.raises
            return handle(json.loads(json.dumps(request)), lambda message: send(json.loads(json.dumps(message))))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ggml_bridge.child.run_in_child", run_child)
            patch.setattr("oallama.device.load_params.load_bridge", lambda: self)
            patch.setattr("oallama.device.opening.open_device", lambda spec: nullcontext(opened))
            clock = SimpleNamespace(perf_counter=lambda: self.now, strftime=time.strftime, gmtime=time.gmtime)
            patch.setattr("oallama.profile.child.time", clock)
            looked = SimpleNamespace(looked=lambda: self.others_percent)
            patch.setattr("oallama.profile.child.Others", lambda: looked)
            patch.setattr("oallama.profile.profiler.others_percent", lambda: self.others_percent)
            patch.setattr("oallama.profile.machine.last_level_cache", lambda root, n_threads: self.llc_bytes)
            made = profile_model(model, tuple(operators), device, 1, tokens, progress=progress, **options)
        assert self.n_open == 0, "each timer was freed"
        return made

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, *_ in self.asked}

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [tuple(question) for name, *question in self.asked if name == kind]

    def _timer(self, seconds: float, *question: Any) -> Any:
        self.asked.append(question)
        if len(self.asked) > self.interrupted_after:
            raise KeyboardInterrupt
        seconds = self.disturbed.pop(question, self.slowdown * seconds)
        self.n_open += 1
        n_done = 0

        def run(n: int) -> list[float]:
            nonlocal n_done
            taken = [seconds * (self.pattern(i) if question[0] == "mul_mat" else 1) for i in range(n_done, n_done + n)]
            n_done += n
            self.now += sum(taken)
            return taken

        def close() -> None:
            self.n_open -= 1

        return SimpleNamespace(run=run, close=close)

    def mul_mat(self, device: str, layout: str | None, type_name: str, k: int, n: int, e: int, routed: int,
                n_tokens: int, working_set_bytes: int, n_threads: int, input_f32: bool) -> Any:  # fmt: skip
        assert routed == (2 if e == 8 else 0)
        if (layout, e) == self.crashing:
            self.asked.append(("crash", layout, e))
            raise ChildDied("oallama.profile.child", -11)
        if working_set_bytes >= self.most_bytes:
            raise OutOfMemory("no memory")
        if layout in self.refused or device in self.refused or (input_f32 and layout is None):
            raise Unsupported(f"no kernel in {layout or device}")
        seconds = self.mul_mat_s(layout, (k, n, e), n_tokens)
        return self._timer(seconds, "mul_mat", device, layout, (k, n, e), n_tokens, working_set_bytes)

    def mul_mat_s(self, layout: str | None, shape: tuple[int, ...], n_tokens: int) -> float:
        rate = {"CPU": 1e9 / self.repacked, "CPU_REPACK": 1e9, None: 4e9}[layout]
        return shape[0] * shape[1] * (1 + 0.1 * n_tokens) / rate

    def layer_rest(self, device: str, n_tokens: int, n_kv: int, n_layer: int, n_threads: int, flash_attn: bool,
                   *types: str, n_embd: int, n_head: int, n_head_kv: int, head_dim_k: int, head_dim_v: int,
                   n_ff: int) -> Any:  # fmt: skip
        if device in self.refused:
            raise Unsupported("no kernel of attention")
        assert (n_embd, head_dim_k, head_dim_v) == (MODEL.n_embd, MODEL.n_embd_head_k, MODEL.n_embd_head_v)
        shape = (n_head, n_head_kv, n_ff)
        seconds = rest_s(device, n_kv, flash_attn)
        return self._timer(seconds, "layer_rest", device, n_tokens, n_kv, n_layer, flash_attn, types, shape)

    def transfer(self, device: str, way: str, pinned: bool, n_bytes: int) -> Any:
        self._pins(pinned)
        alpha_s, beta_s = COPY_S[way, pinned]
        return self._timer(alpha_s + beta_s * n_bytes, "transfer", way, pinned, n_bytes)

    def issue(self, device: str, pinned: bool, n_bytes: int) -> Any:
        self._pins(pinned)
        seconds = ISSUE_S if pinned else ISSUE_S + COPY_S["h2d", False][1] * n_bytes
        return self._timer(seconds, "issue", pinned, n_bytes)

    def boundary(self, device: str, n_bytes: int, n_excursions: int, n_threads: int, on_cpu: bool) -> Any:
        alpha_s, beta_s = EXCURSION
        seconds = GRAPH_S + (0.0 if on_cpu else n_excursions * (alpha_s + beta_s * n_bytes))
        return self._timer(seconds, "boundary", n_bytes, on_cpu)

    def launch(self, device: str, n_threads: int) -> Any:
        return self._timer(1e-5, "launch")

    def launch_issue(self, device: str) -> Any:
        return self._timer(2e-6, "launch_issue")

    def copy_wait(self, device: str, pinned: bool, n_bytes: int) -> float:
        assert n_bytes >= MIB, "a copy long enough to be waited for"
        self._pins(pinned)
        self.asked.append(("copy_wait",))
        return 0.25

    def link_contention(self, first: Any, device: str, chunk_bytes: int, seconds: float) -> Rates:
        self.asked.append(("link_contention", first))
        return RATES

    def compute_contention(self, first: Any, second: Any, seconds: float) -> Rates:
        self.asked.append(("compute_contention", first, second))
        return RATES

    def _pins(self, pinned: bool) -> None:
        if pinned and not self.pinned:
            raise Unsupported("no pinned memory")

    def cpu_layouts(self) -> list[str]:
        return ["CPU", "CPU_REPACK"]

    def layout_supports(self, layout: str, type_name: str, k: int, n: int, e: int, routed: int) -> bool:
        return routed == 0 and n > 64

    def ggml_commit(self) -> str:
        return "abc"

    def cpu_features(self) -> list[str]:
        return ["avx2"]

    def pins(self, device: str, n_bytes: int) -> bool:
        return self.pinned

    def device(self, name: str) -> Any:
        return SimpleNamespace(takes_residents=True)


def rest_s(device: str, n_kv: int, flash_attn: bool) -> float:
    return (1e-7 if device == "CPU" else 1e-8) * n_kv * (1 if flash_attn else 2)


def measured(profile: Profile) -> Profile:
    """What two measurements have in common."""
    return replace(profile, fingerprint={})


def files(pattern: str) -> list[Path]:
    return sorted(cache_folder().glob(pattern))


@contextmanager
def fresh_cache() -> Iterator[None]:
    """For each example that is drawn."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(Path(folder) / "of" / "oallama"))
        yield


#
# measured
#


def test_a_model_s_work_is_measured_where_it_may_run_and_asked_for_once() -> None:
    machine = Machine()
    profile = machine.profile(tokens=(1, 32, 512))

    # the output sees no whole prompt; steps of several requests or drafts have 2 to 8 tokens
    sizes_of = (1, 2, 3, 4, 5, 8, 32, 512)
    everywhere = dict.fromkeys(((256, 256, 1), (256, 64, 1), (256, 64, 8), (64, 256, 8)), sizes_of)
    expected = {
        ("CPU", "CPU"): everywhere,
        ("CPU", "CPU_REPACK"): {(256, 256, 1): sizes_of},
        ("CUDA0", None): everywhere,
    }
    at = {(*on, shape, n) for on, shapes in expected.items() for shape, sizes in shapes.items() for n in sizes}
    at |= {(*on, (256, 3200, 1), n) for on in expected for n in sizes_of if n < 64}
    asked = [question[:4] for question in machine.of("mul_mat")]
    assert set(asked) == at and len(asked) == len(at)
    assert [n for *_, n in asked] == sorted(n for *_, n in asked), "cheap ones first"
    for case in profile.cases:
        layout = None if case.device == "CUDA0" else case.layout
        assert case.seconds == pytest.approx(machine.mul_mat_s(layout, case.mul_mat.shape, case.n_tokens))
        assert case.n_tokens > 1 or len(case.samples) == 6, "one, and then a batch of five that settles it"
    assert not profile.skipped and not profile.warnings

    sizes = {(n, n_kv) for _, n, n_kv, *_ in machine.of("layer_rest")}
    assert sizes == {(1, 32), (1, 512), (1, 2048), (32, 32), (32, 512), (32, 2048), (64, 64), (64, 512), (64, 2048),
                     (512, 512), (512, 2048)}  # fmt: skip
    assert {(n, n_layer) for _, n, _, n_layer, *_ in machine.of("layer_rest")} == {(1, 8), (32, 2), (64, 1), (512, 1)}
    assert {shape for *_, shape in machine.of("layer_rest")} == {(8, 2, 2 * 64)}, "of the experts in use"
    assert len(profile.rest) == 2 * 2 * len(sizes)
    for rest in profile.rest:
        assert (rest.shape.n_head, rest.shape.n_head_kv, rest.shape.n_ff) == (8, 2, 2 * 64)
        assert rest.seconds == pytest.approx(rest_s(rest.device, rest.n_kv, rest.shape.flash_attn))

    for name, (way, pinned) in {"h2d_pinned": ("h2d", True), "h2d_pageable": ("h2d", False),
                                "d2h_pinned": ("d2h", True), "d2h": ("d2h", False)}.items():  # fmt: skip
        line = profile.link[name]
        assert (line.alpha_s, line.beta_s_per_byte) == pytest.approx(COPY_S[way, pinned])
        assert [size for size, _ in line.points] == [4096 * 4**i for i in range(7)]
    assert profile.link["issue_pinned"].alpha_s == pytest.approx(ISSUE_S)
    assert profile.link["issue_pageable"].beta_s_per_byte == pytest.approx(COPY_S["h2d", False][1])
    assert (profile.boundary.alpha_s, profile.boundary.beta_s_per_byte) == pytest.approx(EXCURSION), "of one excursion"
    assert (profile.launch_s, profile.launch_issue_s, profile.copy_wait) == pytest.approx((1e-5, 2e-6, 0.25))

    pairs = {("cpu", "device"), ("cpu", "link"), ("device", "link")}
    assert Counter((row.first, row.second) for row in profile.sharing) == Counter(2 * list(pairs))
    for row in profile.sharing:
        assert (row.first_alone_gb_per_s, row.second_alone_gb_per_s) == (11, 7)
        assert (row.first_with_second_gb_per_s, row.second_with_first_gb_per_s) == (5, 3)
    workers = [worker for _, *workers in machine.asked if _.endswith("contention") for worker in workers]
    assert {(one.device, one.layout) for one in workers} == {("CPU", "CPU_REPACK"), ("CUDA0", None)}, "the fastest"
    assert {(one.n_tokens, one.working_set_bytes > 0) for one in workers} == {(1, True), (32, False)}
    assert {(one.K, one.N) for one in workers} == {(256, 256)}, "the largest with more than one copy"

    facts = profile.fingerprint
    assert (facts["device_name"], facts["device_pins"], facts["n_threads"]) == ("CUDA0", True, 1)


@pytest.mark.parametrize(
    ("tokens", "depths"),
    [((1, 32), [(n, n_kv) for n in (1, 32) for n_kv in (32, 256, 1024)]),
     ((4096,), [(64, 64), (64, 512), (64, 2048), (512, 512), (512, 2048)])],
)  # fmt: skip
def test_attention_is_timed_fresh_and_at_two_depths_that_hold_the_batch(tokens, depths) -> None:
    machine = Machine()
    machine.profile(DENSE, NONE, tokens=tokens)
    assert {(n, n_kv) for _, n, n_kv, *_ in machine.of("layer_rest")} == set(depths)
    assert machine.kinds == {"mul_mat", "layer_rest"}


@pytest.mark.parametrize("odd", [{"n_head": 0}, {"n_head_kv": 3}, {"n_embd_head_k": 33}, {"n_embd_head_v": 0}])
def test_layers_that_are_no_llama_block_have_no_attention_to_time(odd: dict[str, int]) -> None:
    assert Machine().profile(DENSE, NONE, model=replace(MODEL, **odd)).rest == ()


def test_a_matrix_before_the_layers_sees_all_tokens_and_an_output_alone_is_timed_all_the_same() -> None:
    machine = Machine()
    machine.profile([weight(role="per_layer_model_proj", k=256, n=768), *DENSE, OUTPUT], NONE, tokens=(1, 512))
    assert {n for _, layout, shape, n, _ in machine.of("mul_mat") if shape[1] == 768} == {1, 2, 3, 4, 5, 8, 512}
    assert {case.n_tokens for case in Machine().profile([OUTPUT], NONE, tokens=(512,)).cases} == {512}


@pytest.mark.parametrize(
    ("weight_mib", "model_mib", "llc_mib", "expected_mib"),
    [
        (10, 4000, 32, 128),  # a large model: four times the cache
        (1, 9, 32, 9),  # a model in the cache: measured there
        (1, 100, 32, 100),  # larger than the cache, but not four times
        (100, 4000, 32, 200),  # at least two copies
        (300, 4000, 32, 300),  # cold all by itself
        (5, 9, 32, 10),  # two copies, though the model has only one
    ],
)
def test_in_decode_a_weight_is_read_as_cold_as_it_will_be(weight_mib, model_mib, llc_mib, expected_mib) -> None:
    machine = Machine(llc_bytes=llc_mib * MIB)
    one, others = (
        weight(role="ffn_up", k=1024, n=mib * MIB // 2048, layer=0, type_name="F16")
        for mib in (weight_mib, model_mib - weight_mib)
    )
    machine.profile([one, others], NONE, tokens=(1,))
    assert {n_bytes for *_, shape, _, n_bytes in machine.of("mul_mat") if shape == one.shape} == {expected_mib * MIB}


@pytest.mark.parametrize(("repacked", "left_out"), [(1.9, False), (2.0, False), (2.5, True), (0.3, True)])
def test_a_layout_more_than_twice_as_slow_is_left_out_at_large_batches(repacked: float, left_out: bool) -> None:
    machine = Machine(repacked=repacked)
    profile = machine.profile([DENSE[0], weight(role="ffn_up", k=256, n=64, layer=0)], NONE, tokens=(1, 32, 512))
    slow, fast = ("CPU", "CPU_REPACK") if repacked > 1 else ("CPU_REPACK", "CPU")
    reason = f"{max(repacked, 1 / repacked):.1f} times slower than {fast} at 32 tokens"
    assert [(case.layout, case.n_tokens, case.reason) for case in profile.skipped] == [(slow, 512, reason)] * left_out
    assert len(profile.cases) == 24 - left_out


def test_what_has_no_kernel_is_left_out_and_not_asked_for_again() -> None:
    machine = Machine(refused=("CUDA0", "CPU_REPACK"))
    profile = machine.profile()
    assert {case.device for case in (*profile.cases, *profile.rest)} == {"CPU"}
    reasons = {(case.layout, case.reason) for case in profile.skipped}
    assert reasons == {("device", "no kernel in CUDA0"), ("CPU_REPACK", "no kernel in CPU_REPACK")}
    assert {(row.first, row.second) for row in profile.sharing} == {("cpu", "link")}
    again = Machine()
    assert again.profile() == profile and not again.asked


def test_a_mul_mat_whose_input_is_read_in_f32_is_asked_for_as_such() -> None:
    """CUDA has none by experts: such a weight stays on the host. Its cases are others than those of its shape."""
    machine = Machine()
    profile = machine.profile((*EXPERTS, replace(EXPERTS[1], input_f32=True)))
    assert {(case.device, case.mul_mat.input_f32) for case in profile.skipped} == {("CUDA0", True)}
    assert {case.device for case in profile.cases if case.mul_mat.input_f32} == {"CPU"}
    assert "CUDA0" in {case.device for case in profile.cases if case.mul_mat == EXPERTS[1].mul_mat}
    again = Machine()
    assert again.profile((*EXPERTS, replace(EXPERTS[1], input_f32=True))) == profile and not again.asked


@pytest.mark.parametrize(("most_bytes", "n_cases"), [(1, 21), (0, 0)])
def test_without_memory_for_copies_of_a_weight_one_is_timed(most_bytes: int, n_cases: int) -> None:
    profile = Machine(most_bytes=most_bytes).profile(DENSE, NONE)
    assert len(profile.cases) == n_cases
    assert {case.reason for case in profile.skipped} == (set() if n_cases else {"no memory"})


def test_a_device_without_pinned_memory_has_the_lines_of_pageable() -> None:
    profile = Machine(pinned=False).profile()
    assert profile.link["h2d_pinned"] == profile.link["h2d_pageable"] and profile.copy_wait == 0.25
    assert not profile.is_pinned


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (lambda run: 1 + 0.01 * run, ("did not settle", "drifted")),
        (lambda run: 9 if run % 5 == 3 else 1, ("outliers",)),
    ],
)
def test_samples_that_are_doubtful_are_told_with_the_worst_of_them(pattern, said) -> None:
    profile = Machine(pattern=pattern).profile(DENSE, NONE)
    assert len(profile.warnings) == len(said)
    for warning, word in zip(profile.warnings, said, strict=True):
        assert word in warning and "21 of 33 cases" in warning and "worst: CPU" in warning and "--refresh" in warning


@pytest.mark.parametrize(("n_tokens", "n_samples"), [(1, 5), (64, 3)])
def test_long_passes_are_run_less_often(n_tokens: int, n_samples: int) -> None:
    """Here a run takes 0.02 s. Making the timer ran two passes, so that none only warms up."""
    large = weight(role="output", k=8192, n=65536)
    machine = Machine()
    machine.slowdown = 0.02 / machine.mul_mat_s("CPU", large.shape, n_tokens)
    case = next(one for one in machine.profile([large], NONE, tokens=(n_tokens,)).cases if one.layout == "CPU")
    assert len(case.samples) == n_samples


def test_one_run_is_enough_of_what_takes_seconds() -> None:
    machine = Machine(slowdown=1e5)  # 1.3 s a run, of which the least is five
    profile = machine.profile(DENSE[:1], NONE, tokens=(1,))
    assert {len(case.samples) for case in profile.cases} == {1}


def test_a_copy_that_something_disturbed_is_timed_again() -> None:
    far = {("transfer", "h2d", True, 4 * MIB): 0.005, ("transfer", "h2d", True, 16 * MIB): 0.007}
    machine = Machine(disturbed=dict(far))
    line = machine.profile().link["h2d_pinned"]
    assert (line.alpha_s, line.beta_s_per_byte) == pytest.approx(COPY_S["h2d", True])
    times = Counter(machine.asked)
    assert {times[one] for one in far} == {2} and times["transfer", "h2d", False, 4 * MIB] == 1


def test_a_slow_link_is_spared_large_copies() -> None:
    line = Machine(slowdown=2e4).profile(DENSE).link["h2d_pinned"]
    assert len(line.points) == 3 and line.seconds(16 * MIB) == pytest.approx(2e4 * (1e-6 + 1e-10 * 16 * MIB))


#
# kept, merged, resumed
#


def test_a_profile_is_kept_for_its_user_alone_and_serves_the_next_call() -> None:
    profile = Machine().profile()
    (path,) = files("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Machine()
    assert again.profile() == profile and not again.asked and again.n_children == 0
    assert stored_profile(MODEL, OPERATORS, NONE, 1) is None
    slower = Machine(slowdown=2.0)
    assert slower.profile(refresh=True).cases[0].seconds == pytest.approx(2 * profile.cases[0].seconds)


def test_a_second_model_adds_what_is_new_and_each_gets_its_own() -> None:
    first, second = Machine(), Machine()
    small, whole = first.profile(DENSE), second.profile()
    assert not set(first.of("mul_mat")) & set(second.of("mul_mat"))
    assert set(small.cases) < set(whole.cases)
    assert measured(Machine().profile(DENSE)) == measured(small)


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"tokens": (1, 32, 512)}, {"mul_mat", "layer_rest"}),
        ({"model": replace(MODEL, n_head_kv=4)}, {"layer_rest"}),
        ({"kv": replace(DEFAULT_ATTENTION, flash_attn="on", type_k="q8_0", type_v="q8_0")}, {"layer_rest"}),
    ],
)
def test_what_another_call_needs_is_measured_beside(change: dict[str, Any], kinds: set[str]) -> None:
    before = Machine().profile(DENSE)
    machine = Machine()
    profile = machine.profile(DENSE, **change)
    assert machine.kinds == kinds
    assert all(512 in question or question == machine.of("mul_mat")[-1] for question in machine.of("mul_mat"))
    if "kv" in change:
        assert {shape.flash_attn for shape in (rest.shape for rest in profile.rest)} == {True}, "it needs it"
    assert measured(Machine().profile(DENSE)) == measured(before)


SHARES = {"link_contention", "compute_contention"}
LACKING: dict[str, tuple[Callable[[dict[str, Any]], object], set[str]]] = {
    "a copy": (lambda stored: stored["link"].pop("h2d_pinned"), {"transfer"}),
    "the boundary": (lambda stored: stored.update(boundary=None), {"boundary"}),
    "a launch": (lambda stored: stored.update(launch_s=0), {"launch"}),
    "the issue of a launch": (lambda stored: stored.pop("launch_issue_s"), {"launch_issue"}),
    "the wait for copies": (lambda stored: stored.pop("copy_wait"), {"copy_wait"}),
    "a depth": (lambda stored: stored["rest"].pop(), {"layer_rest"}),
    "a way of attention": (
        lambda stored: stored.update(rest=[one for one in stored["rest"] if one["flash_attn"]]), {"layer_rest"},
    ),
    "a mul-mat": (lambda stored: stored["cases"].pop(), {"mul_mat"}),
    "a pair": (lambda stored: stored["sharing"].pop(), {"link_contention"}),
    "all pairs": (lambda stored: stored.pop("sharing"), SHARES),
}  # fmt: skip
"""A part of a stored profile: how it comes to lack that, and what is asked of the bridge then."""


@pytest.mark.parametrize("part", LACKING)
def test_a_part_that_is_missing_is_measured_and_nothing_else(part: str) -> None:
    whole = Machine().profile()
    (path,) = files("*.json")
    stored = json.loads(path.read_text())
    damage, kinds = LACKING[part]
    damage(stored)
    path.write_text(json.dumps(stored))
    machine = Machine()
    assert measured(machine.profile()) == measured(whole)
    assert machine.kinds == kinds


@functools.cache
def uninterrupted() -> Profile:
    with fresh_cache():
        return measured(Machine().profile(DENSE))


@given(st.integers(0, 80))
@settings(max_examples=examples(40))
def test_an_interrupted_measurement_goes_on_where_it_was(n_questions: int) -> None:
    """Also where it is interrupted twice."""
    expected = uninterrupted()
    with fresh_cache():
        first, second, third = Machine(interrupted_after=n_questions), Machine(interrupted_after=9), Machine()
        with pytest.raises(KeyboardInterrupt):
            first.profile(DENSE)
        with suppress(KeyboardInterrupt):
            second.profile(DENSE)
        assert measured(third.profile(DENSE)) == expected
        assert not set(first.of("mul_mat")[:-1]) & {*second.of("mul_mat"), *third.of("mul_mat")}
        assert not set(second.of("mul_mat")[:-1]) & set(third.of("mul_mat"))


def test_a_mul_mat_is_timed_in_the_plain_layout_last() -> None:
    """So that an interruption never leaves out another layout: what is timed in the plain one counts as complete."""
    machine = Machine()
    machine.profile(DENSE[:1], NONE, tokens=(1,))
    assert [layout for _, layout, *_ in machine.of("mul_mat")] == ["CPU_REPACK", "CPU"]


def test_an_interrupted_refresh_leaves_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    before = Machine().profile(DENSE)
    with pytest.raises(KeyboardInterrupt):
        Machine(slowdown=2.0, interrupted_after=80).profile(DENSE, refresh=True, progress=True)
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert Machine().profile(DENSE) == before


def test_a_damaged_file_is_measured_again_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    whole = Machine().profile(DENSE, NONE)
    (path,) = files("*.json")
    path.write_text(path.read_text()[:-20])
    assert measured(Machine().profile(DENSE, NONE, progress=True)) == measured(whole)
    said = capsys.readouterr()
    assert said.out == "" and "measuring again" in said.err


def test_only_the_same_device_gets_what_was_measured() -> None:
    def is_new(device: KnownDevice) -> bool:
        machine = Machine()
        machine.profile(DENSE, device)
        return bool(machine.asked)

    assert is_new(known("CUDA0")) and not is_new(known("CUDA0"))
    assert is_new(known("CUDA0", "another card")) and is_new(known("CUDA0", memory_bytes=8 << 30))
    assert is_new(known("CUDA1"))
    assert is_new(KnownDevice(parse_device("CUDA0"))), "nobody knows what it is"
    assert not is_new(known("CUDA0")), "the first card's profile is still there"


def test_a_second_measurement_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    machine = Machine()
    second = threading.Thread(target=lambda: machine.profile(DENSE, NONE, progress=True))
    with measuring_lock(cache_folder(), lambda: pytest.fail("nobody else has it")):
        assert (cache_folder() / "measuring.lock").stat().st_mode & 0o077 == 0, "others could hold it for ever"
        second.start()
        until(lambda: "another process is profiling" in said.getvalue())
        assert not machine.asked
    second.join()
    assert machine.asked


@pytest.mark.parametrize("refresh", [False, True])
def test_a_cache_that_cannot_be_written_costs_one_note(refresh, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "cache"))
    assert Machine().profile(DENSE, refresh=refresh, progress=True).cases, "what was measured is there"
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and FOLDER_VARIABLE in notes[0] and "measurements are not kept" in notes[0]
    with pytest.raises(KeyboardInterrupt):
        Machine(interrupted_after=40).profile(DENSE, refresh=refresh, progress=True)
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for said, folder in (
        (str(tmp_path / "own"), tmp_path / "own"),
        ("~/own", tmp_path / "own"),
        ("~nobody-of-this-name/own", Path("~nobody-of-this-name/own")),
        ("", tmp_path / "xdg" / "oallama"),
    ):
        monkeypatch.setenv(FOLDER_VARIABLE, said)
        assert cache_folder() == folder


#
# beside other programs
#


@pytest.mark.parametrize("refresh", [False, True])
def test_what_was_measured_beside_other_programs_is_kept_until_a_calm_machine_replaces_it(refresh, monkeypatch) -> None:
    monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "20")

    def at(percent: float, *, measures: bool, **options: Any) -> Profile:
        machine = Machine(others_percent=percent)
        found = machine.profile(DENSE, NONE, tokens=DEFAULT_TOKENS, **options)
        assert bool(machine.asked) is measures
        return found

    busy = at(60.0, measures=True, refresh=refresh)
    monkeypatch.setattr("oallama.profile.machine.last_level_cache", lambda *_: Machine().llc_bytes)
    kept = stored_profile(MODEL, DENSE, NONE, 1)
    assert kept is not None and kept.cases == busy.cases and "other programs" in caveat(kept)
    assert "60 % of the CPU" in busy.warnings[-1] and "again once they end" in busy.warnings[-1]
    assert at(45.0, measures=False) == busy, "there is nothing better as long as it is busy"
    quiet = at(3.0, measures=True)
    assert not quiet.warnings and caveat(quiet) == ""
    assert at(70.0, measures=False) == quiet, "a busy machine does not touch what is known"
    at(70.0, measures=True, refresh=True)
    at(2.0, measures=True)
    assert len(files("profile-*.json")) == 1


@pytest.mark.parametrize("percent_meanwhile", [3.0, 60.0])
def test_an_interrupted_measurement_leaves_the_profile_of_a_busy_machine(percent_meanwhile, monkeypatch) -> None:
    """The machine is calm when the measurement begins."""
    monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "20")

    class Begun(Machine):
        def ggml_commit(self) -> str:
            self.others_percent = percent_meanwhile
            return super().ggml_commit()

    Machine(others_percent=60.0).profile(DENSE, NONE, tokens=DEFAULT_TOKENS)
    with pytest.raises(KeyboardInterrupt):
        Begun(interrupted_after=9).profile(DENSE, NONE, tokens=DEFAULT_TOKENS)
    monkeypatch.setattr("oallama.profile.machine.last_level_cache", lambda *_: Machine().llc_bytes)
    kept = stored_profile(MODEL, DENSE, NONE, 1)
    assert kept is not None and "other programs" in caveat(kept)


@pytest.mark.parametrize("said", ["quiet", "-1", "101", "nan"])
def test_a_wrong_share_of_the_cpu_is_named(said: str) -> None:
    with pytest.raises(UsageError, match=f"OALLAMA_BUSY_PERCENT must be a number from 0 to 100, not '{said}'"):
        busy_percent({"OALLAMA_BUSY_PERCENT": said})


def test_a_wrong_share_of_the_cpu_is_named_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "quiet")
    machine = Machine()
    with pytest.raises(UsageError, match="OALLAMA_BUSY_PERCENT"):
        machine.profile(DENSE)
    assert not machine.asked


@pytest.mark.parametrize("percent", ["many", None, [60.0], 10**400, -1])
def test_a_stored_use_of_the_cpu_that_is_no_share_says_nothing(percent: object) -> None:
    profile = Machine().profile(DENSE, NONE)
    assert caveat(replace(profile, fingerprint={**profile.fingerprint, "others_cpu_percent": percent})) == ""


def test_other_programs_are_looked_for_now_and_then() -> None:
    percents, times = iter([80.0, 4.0, 6.0]), iter([0.0, 0.0, 4.9, 5.0, 5.0, 20.0, 20.0])
    others = Others(lambda: next(percents), lambda: next(times))
    assert [others.looked() for _ in range(4)] == [80.0, None, 42.0, 6.0]


#
# refused, crashed
#


@pytest.mark.parametrize("n_expert", [1, 4])
def test_a_layout_or_its_kernel_that_crashes_is_left_out_and_named(n_expert: int) -> None:
    """Of a kernel for 3-D weights only that."""
    stacked = replace(DENSE[0], shape=(256, 256, 4), bytes=4 * DENSE[0].bytes)
    machine = Machine(crashing=("CPU_REPACK", n_expert))
    profile = machine.profile([*DENSE, stacked], NONE)
    left = {case.mul_mat.shape[2] for case in profile.cases if case.layout == "CPU_REPACK"}
    assert left == (set() if n_expert == 1 else {1})
    (warning,) = profile.warnings
    assert "CPU_REPACK" in warning and "SIGSEGV" in warning and "oallama setup --refresh" in warning
    assert ("3-D MUL_MAT" in warning) is (n_expert == 4)
    assert machine.n_children == 2 and len(machine.of("crash")) == 1
    assert len(machine.asked) == len(set(machine.asked)), "the second child goes on where the first one died"


@pytest.mark.parametrize(
    ("crashing", "device", "kind", "says"),
    [
        (("CPU", 1), NONE, ProfileError, "measuring CPU Q4_0 .*run the same command again"),
        ((None, 1), CARD, DeviceError, "the device CUDA0 was lost while measuring CUDA0"),
    ],
)
def test_a_crash_of_what_is_needed_ends_it_and_keeps_what_was_finished(crashing, device, kind, says) -> None:
    with pytest.raises(kind, match=says):
        Machine(crashing=crashing).profile([*EXPERTS, *DENSE], device)
    machine = Machine()
    machine.profile([*EXPERTS, *DENSE], device)
    assert "transfer" not in machine.kinds, "the link was finished"


def test_an_error_of_the_measuring_process_keeps_what_was_finished() -> None:
    class Failing(Machine):
        def layer_rest(self, *shape: Any, **more: Any) -> Any:
            raise NativeError("the device failed")

    with pytest.raises(BridgeError, match="the device failed"):
        Failing().profile(DENSE)
    machine = Machine()
    machine.profile(DENSE)
    assert machine.kinds.isdisjoint({"transfer", "mul_mat"})


@pytest.mark.parametrize(
    ("raised", "device", "kind"),
    [
        (ChildDied("oallama.profile.child", -4), NONE, ProfileError),
        (ChildDied("oallama.profile.child", -4), CARD, DeviceError),
        (ChildError("DeviceError", "SIGILL of CUDA7"), NONE, DeviceError),
        (ChildError("UsageError", "SIGILL of CUDA7"), NONE, UsageError),
        (ChildError("KeyError", "SIGILL of CUDA7"), NONE, ProfileError),
        (ValueError("SIGILL of CUDA7"), NONE, BridgeError),
        (NativeError("SIGILL of CUDA7"), NONE, BridgeError),
    ],
)
def test_errors_of_the_measuring_process_are_ours(raised, device, kind: type[OallamaError]) -> None:
    with pytest.raises(kind, match="SIGILL") as error:
        Machine(raises=raised).profile(DENSE, device)
    assert type(error.value) is kind


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"tokens": ()}, UsageError, "--tokens"),
        ({"tokens": (0, 32)}, UsageError, "--tokens"),
        ({"n_threads": 0}, UsageError, "--threads"),
        ({"device": "rpc://nowhere"}, UsageError, "--device"),
        ({"operators": []}, ProfileError, r"m\.gguf has no mul-mat weights"),
    ],
)
def test_bad_requests_are_refused_before_anything_starts(change, kind, says) -> None:
    with pytest.raises(kind, match=says):
        profile_model(MODEL, **{"operators": DENSE, "device": "none", "n_threads": 1, **change})


#
# the schedule, and lines through points
#


@given(st.lists(st.floats(1e-7, 1.0), min_size=200, max_size=200), st.integers(1, 8), st.floats(0.01, 2.0))
def test_any_schedule_ends_with_the_median_of_what_it_kept(times: list[float], min_repeats: int, cap_s: float) -> None:
    left, spent = iter(times), [100.0]

    def run(n: int) -> list[float]:
        taken = [next(left) for _ in range(n)]
        spent.extend(taken)
        return taken

    policy = TimingPolicy(min_repeats=min_repeats, max_repeats=60, time_cap_s=cap_s)
    timing = measure(run, lambda: sum(spent), policy)
    assert 1 <= len(timing.samples) <= 60
    assert list(timing.samples) == times[1 : 1 + len(timing.samples)], "all but the warm-up"
    assert timing.seconds in timing.samples
    assert sum(one < timing.seconds for one in timing.samples) <= (len(timing.samples) - 1) // 2
    assert sum(one > timing.seconds for one in timing.samples) <= len(timing.samples) // 2
    settled = relative_half_width(timing.samples) < policy.target and len(timing.samples) >= min_repeats
    assert settled or len(timing.samples) == 60 or sum(spent[1:]) >= cap_s


def test_the_interval_of_the_median_is_that_of_the_sign_test() -> None:
    """Textbook ranks at 95 %: all of up to 8 samples, 2nd to 9th of 10, 6th to 15th of 20, 40th to 61st of 100."""
    assert relative_half_width([9.0, 10.0, 11.0]) == pytest.approx(0.1)
    for n, low, high in ((10, 2, 9), (20, 6, 15), (100, 40, 61)):
        assert relative_half_width(list(range(1, n + 1))) == pytest.approx((high - low) / (n + 1))
    assert relative_half_width([5.0]) == math.inf
    assert relative_half_width([2.0, 2.0]) == 0


def test_a_falling_line_becomes_a_constant_and_a_negative_latency_zero() -> None:
    falling = fit_linear([(1000, 2.0), (2000, 1.0)])
    assert falling.beta_s_per_byte == 0 and 1.0 < falling.alpha_s < 2.0
    steep = fit_linear([(1000, 1.0), (2000, 3.0)])
    assert steep.alpha_s == 0 and 1.0 <= steep.seconds(1000) <= 1.5
    for points in ([], [(8, 1.0)], [(8, 1.0), (8, 2.0)]):
        with pytest.raises(ValueError):
            fit_linear(points)


@pytest.mark.parametrize("wild", [0.0, -2e-5, 1e-2])
@pytest.mark.parametrize("where", range(7))
def test_one_wild_point_does_not_carry_the_others_with_it(wild: float, where: int) -> None:
    line = [(4096 * 4**i, 20e-6 + 1e-9 * 4096 * 4**i) for i in range(7)]
    fit = fit_linear([(size, wild if i == where else seconds) for i, (size, seconds) in enumerate(line)])
    off = sorted(abs(fit.seconds(size) / seconds - 1) for i, (size, seconds) in enumerate(line) if i != where)
    assert off[3] < 0.15 and fit.r2 < 1


def test_bytes_and_flops_of_a_dense_a_stacked_and_a_routed_mul_mat() -> None:
    dense, stacked = (MulMat(op="MUL_MAT", type="F16", shape=(64, 32, e)) for e in (1, 8))
    assert (dense.flops(3), dense.bytes_read(3)) == (2 * 64 * 32 * 3, 4096)
    assert (stacked.flops(3), stacked.bytes_read(3)) == (8 * dense.flops(3), 8 * 4096)
    routed = MulMat(op="MUL_MAT_ID", type="F16", shape=(64, 32, 8), n_expert_used=2)
    assert routed.flops(1) == 2 * 64 * 32 * 2 and routed.bytes_read(1) == pytest.approx(2 * 4096)
    # two tokens of 2 in 8 experts meet in an expert with probability 1/4
    assert routed.bytes_read(2) == pytest.approx(8 * 4096 * (1 - 0.75**2))
