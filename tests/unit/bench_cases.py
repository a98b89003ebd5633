"""A made-up comparison for tests of the bench: two layers of two operators, arms that say what they did, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oallama.bench.process import Deadline
from oallama.bench.records import ArmResult, ArmSpec, BenchResult, BenchTest, Block, LoadReport, Sample, Series, Setting
from oallama.core.types import Operator
from oallama.device.load_params import LoadSettings
from oallama.run.stock import Cap, Place, StockPlacement

N_LAYER = 2
OPERATORS = (
    *(
        Operator(f"blk.{layer}.{role}.weight", layer, role, "MUL_MAT", "Q4_0", (256, 256, 1), 1000, 1.0)
        for layer in range(N_LAYER)
        for role in ("attn_q", "ffn_down")
    ),
    Operator("output.weight", None, "output", "MUL_MAT", "Q8_0", (256, 512, 1), 3000, 1.0),
)
NAMES = tuple(operator.name for operator in OPERATORS)

SETTING = Setting(LoadSettings("model.gguf", device="rpc-worker:1", n_ctx=256, n_threads=1))
HOST = SETTING.changed(device="none")

FACTS = {
    "build_commit": "0c1e570", "build_number": 1, "cpu_info": "a CPU", "gpu_info": "rpc-worker:1", "backends": "RPC",
    "model_type": "llama ?B Q4_0", "model_size": 2311168, "model_n_params": 3738880, "flash_attn": -1,
}  # fmt: skip


def places_of(*on_device: str) -> dict[str, Place]:
    return {name: "device" if name in on_device else "host" for name in NAMES}


def report(*on_device: str, device: str = "RPC0", **changes: Any) -> LoadReport:
    """What an arm reads back that has these operators on the device."""
    places = places_of(*on_device)
    made = LoadReport(
        device=device if on_device else "none",
        device_bytes=sum(o.bytes for o in OPERATORS if o.name in on_device),
        host_bytes=10_000,
        places=places,
        layouts={name: "CPU_REPACK" for name, place in places.items() if place == "host"},
        device_share={},
        buffers={"CPU": (10_000, 0, 0)},
        n_ctx=256,
        n_batch=2048,
        n_ubatch=512,
        n_threads=1,
        type_k="f16",
        type_v="f16",
        flash_attn=True,
        n_gpu_layers=0,
        plugins=(),
        facts=FACTS,
    )
    return replace(made, **changes)


def stock(name: str, n_gpu_layers: int, **changes: Any) -> ArmSpec:
    return ArmSpec(name, SETTING if n_gpu_layers else HOST, StockPlacement(n_gpu_layers), **changes)


def planned(name: str, shares: Mapping[str, float]) -> ArmSpec:
    rows = [{"name": n, "gg": shares.get(n, 0.0), "cg": 0.0, "cc": 1 - shares.get(n, 0.0)} for n in NAMES]
    return ArmSpec(name, SETTING, plan={"operators": rows, "workload": {"n_ubatch": 512}}, plan_fingerprint="f" * 64)


def series(test: BenchTest, *arms: Sequence[float]) -> Series:
    """Samples of each arm in seconds, two a block; times go to the prompt and the generation as the test has them."""

    def sample(seconds: float) -> Sample:
        share = test.n_prompt / test.n_tokens
        return Sample(seconds * share, seconds * (1 - share))

    blocks = tuple(
        Block(tuple((sample(arm[i]), sample(arm[i + 1])) for arm in arms), 0.0) for i in range(0, len(arms[0]), 2)
    )
    return Series(test, blocks, ())


def capped(spec: ArmSpec, cap: Cap) -> ArmSpec:
    return replace(spec, setting=replace(spec.setting, cap=cap))


def result(arms: Sequence[ArmResult], *made: Series, **changes: Any) -> BenchResult:
    whole = BenchResult(OPERATORS, tuple(arms), made, "2026-11-21T04:00:00Z", True)
    return replace(whole, **changes)


@dataclass
class FakeArm:
    """An arm's process without a process: answers `load` with its report, `measure` with what `seconds` says of the
    turn (counted over all arms together)."""

    spec: ArmSpec
    world: World
    deadline: Deadline | None = None
    closed: int = 0

    def load(self, operators: Sequence[str]) -> LoadReport:
        self.world.say("load", self.spec.name)
        if (error := self.world.load_errors.pop(self.spec.name, None)) is not None:
            raise error
        return self.world.reports[self.spec.name]

    def warm_up(self, tests: Sequence[BenchTest]) -> tuple[int, int]:
        self.world.say("warm_up", self.spec.name)
        made = self.world.reports[self.spec.name]
        return made.device_bytes + self.world.grows.get(self.spec.name, 0), made.host_bytes

    def measure(self, tests: Sequence[BenchTest]) -> dict[BenchTest, Sample]:
        self.world.say("measure", self.spec.name)
        self.world.turn += 1
        seconds = self.world.seconds(self.spec.name, self.world.turn - 1)
        self.world.pass_time(seconds)
        if self.deadline is not None:
            self.deadline.check()
        return {test: Sample(seconds if test.n_prompt else 0.0, seconds if test.n_gen else 0.0) for test in tests}

    def cpu_seconds(self) -> float:
        return self.world.cpu(self.spec.name)

    def close(self) -> None:
        self.world.say("close", self.spec.name)

    def kill(self) -> None:
        self.world.say("kill", self.spec.name)


@dataclass
class World:
    """What fake arms share: how long a turn takes, and a record of what happened."""

    reports: dict[str, LoadReport]
    seconds: Callable[[str, int], float]
    turn: int = 0
    said: list[tuple[str, str]] = field(default_factory=list)
    load_errors: dict[str, Exception] = field(default_factory=dict)
    grows: dict[str, int] = field(default_factory=dict)
    cpu: Callable[[str], float] = lambda name: 0.0
    pass_time: Callable[[float], None] = lambda seconds: None  # a turn took so long

    def say(self, what: str, who: str) -> None:
        self.said.append((what, who))

    def start(self, spec: ArmSpec, deadline: Deadline | None = None) -> FakeArm:
        return FakeArm(spec, self, deadline)
