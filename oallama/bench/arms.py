"""What each arm loads: plans of our policies, and stock llama.cpp at its strongest.

Stock arms get what a user of llama.cpp could find out: `stock-ngl` the best -ngl of a measured search, `stock-ncmoe`
the best -ncmoe, `stock-fit` llama.cpp's own --fit. All keep to the same memory cap. A name with `-ubN` behind it is the
same with micro-batches of N tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from oallama.bench.ab import Progress, quiet
from oallama.bench.fit import fit_under
from oallama.bench.fit_plan import fit_plan, fit_sentence
from oallama.bench.process import ArmProcess
from oallama.bench.records import ArmSpec, BenchTest, Cap, Sample, Setting, StockPlacement
from oallama.bench.stock import (
    best_value,
    expert_overrides,
    largest_that_fits,
    operator_bytes_on_device,
    parse_stock_args,
)
from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.types import Workload
from oallama.cost.passes import Pass, passes_at
from oallama.device.load_params import LoadSettings
from oallama.model.memory import probe_memory
from oallama.place.decide import FIT, POLICIES
from oallama.placer import Placer
from oallama.plan.plan import Plan

STOCK_CPU, STOCK_NGL, STOCK_FIT, STOCK_NCMOE = "stock-cpu", "stock-ngl", "stock-fit", "stock-ncmoe"
STOCK_ARMS = (STOCK_CPU, STOCK_NGL, STOCK_FIT, STOCK_NCMOE)
STOCK_ARGS = "stock-args"  # arms of --stock-args are called so, the second stock-args-2

_UBATCH = re.compile(r"(.+)-ub([1-9][0-9]{0,6})")

SEARCH_GEN = 16  # generated tokens while searching; their time is scaled to the test's
SEARCH_TURNS = 2  # of which the faster counts


@dataclass(frozen=True, slots=True)
class ArmMaker:
    """Makes arms for one model, device and set of tests.

    plan_options: keywords of Placer.plan (affinity, fill). auto: makes the arm of that name where there is a device
    (the gate); None: the plan that is predicted to be the fastest.
    """

    placer: Placer
    setting: Setting
    cap: Cap
    tests: tuple[BenchTest, ...] = ()
    plan_options: dict[str, Any] = field(default_factory=dict)
    progress: Progress = quiet
    auto: Callable[[ArmMaker], ArmSpec] | None = None

    def make(self, name: str) -> ArmSpec:
        """The arm of that name: one of STOCK_ARMS, with `-ubN` or without, a policy, or a plan file (*.json).

        Raises UsageError for a name that is none of these or needs a device where there is none, DoesNotFit, and what
        planning and probing raise.
        """
        if name in STOCK_ARMS:
            return self._stock(name)
        larger = _UBATCH.fullmatch(name)
        if larger and larger[1] in STOCK_ARMS:
            return self._with_ubatch(larger[1], int(larger[2]))
        if name.endswith(".json"):
            return self.of_plan(Path(name).stem, Plan.load(name))
        if name not in (*POLICIES, FIT):
            arms = ", ".join((*POLICIES, FIT, *STOCK_ARMS))
            raise UsageError(f"there is no arm {name!r}; arms are {arms}, and plan files (*.json)")
        if name == "auto" and self.auto is not None and self.placer.has_device:
            return self.auto(self)
        return self.of_plan(name, self._plan(name))

    def at_the_plans_ubatch(self, specs: Sequence[ArmSpec]) -> list[ArmSpec]:
        """stock-fit once more for each larger micro-batch that a plan among these arms has, where stock-fit is one of
        them: what of a plan's gain is the micro-batch alone."""
        names = {spec.name for spec in specs}
        if STOCK_FIT not in names:
            return []
        load = self.setting.load
        sizes = {int(spec.plan["workload"]["n_ubatch"]) for spec in specs if spec.plan is not None}
        larger = (n for n in sorted(sizes) if load.n_ubatch < n <= load.n_batch)
        return [self._with_ubatch(STOCK_FIT, n) for n in larger if f"{STOCK_FIT}-ub{n}" not in names]

    def make_of_args(self, name: str, arguments: str) -> ArmSpec:
        """The arm of a user's own llama.cpp flags, as they are. Raises UsageError."""
        placement, setting = parse_stock_args(arguments, self.setting)
        if placement.n_gpu_layers != 0 and not self.placer.has_device:
            setting = setting.changed(device="none")
        return ArmSpec(name, setting, placement, notes=(f"llama.cpp with {arguments}",))

    def of_plan(self, name: str, plan: Plan) -> ArmSpec:
        """The arm of a plan. Raises PlanError for one of another model."""
        plan.check(self.placer.model, self.placer.operators)
        return ArmSpec(
            name=name,
            setting=self.setting.changed(device="none") if plan.device == "none" else self.setting,
            plan=plan.to_json(),
            plan_fingerprint=plan.fingerprint,
            predicted=None if plan.predicted is None else asdict(plan.predicted),
            bound=None if plan.record.bound is None else asdict(plan.record.bound),
            notes=(*plan.record.notes, *self._other_cache(plan)),
        )

    @property
    def workload(self) -> Workload:
        """What plans are made for: the longest prompt and generation of the tests, and their context."""
        n_prompt = max(1, *(test.n_prompt for test in self.tests))
        load = self.setting.load
        return self.placer.workload(n_prompt, max(test.n_gen for test in self.tests), load.n_ctx, load.n_ubatch)

    @property
    def attention_passes(self) -> tuple[Pass, ...]:
        """What is computed at which depth, for which plans choose their attention: the prompts and generations of all
        tests, where a run has one prompt and generates behind it."""
        n_ubatch = self.setting.load.n_ubatch
        return tuple(p for test in self.tests for p in passes_at(test.n_depth, test.n_prompt, test.n_gen, n_ubatch))

    def _plan(self, policy: str) -> Plan:
        if policy == FIT:
            self.progress("ask llama.cpp's --fit for its plan")
            return fit_plan(self.placer, self.workload, self.setting, self.cap)
        if policy == "cpu" or (policy == "auto" and not self.placer.has_device):  # nothing to measure for these
            return self.placer.cpu_plan(**asdict(self.workload), attention_passes=self.attention_passes)
        options = self.plan_options if policy == "oato" else {}
        load = self.workload
        lengths = (load.n_prompt, load.n_gen, load.n_ctx)  # the micro-batch may be larger, unless the user fixed it
        return self.placer.plan(policy, *lengths, attention_passes=self.attention_passes, **options)

    def _other_cache(self, plan: Plan) -> tuple[str, ...]:
        """A note where the plan was made for another KV cache than the arms share."""
        planned, shared = plan.record.attention, self.setting.load.attention
        if planned is None or (planned.type_k, planned.type_v) == (shared.type_k, shared.type_v):
            return ()
        flags = f"-ctk {shared.type_k} -ctv {shared.type_v}"
        return (f"planned for a KV cache of {planned.type_k} and {planned.type_v}, but all arms run with {flags}",)

    def _stock(self, name: str) -> ArmSpec:
        if name == STOCK_CPU:
            return ArmSpec(name, self.setting.changed(device="none"), StockPlacement(0))
        if self.placer.device.is_pair:
            raise UsageError(f"{name} cannot be on cpu-pair: llama.cpp has no second CPU; compare with {STOCK_CPU}")
        if not self.placer.has_device:
            raise UsageError(f"{name} needs a device and there is none; name one with --device, such as rpc-worker")
        if name == STOCK_NGL:
            return self._best_layers(name)
        if name == STOCK_NCMOE:
            return self._best_expert_layers(name)
        return self._fit(name)

    def _with_ubatch(self, name: str, n_ubatch: int) -> ArmSpec:
        n_batch = max(self.setting.load.n_batch, n_ubatch)  # llama.cpp takes the smaller of the two
        made = replace(self, setting=self.setting.changed(n_ubatch=n_ubatch, n_batch=n_batch))._stock(name)
        return replace(made, name=f"{name}-ub{n_ubatch}")

    def _fit(self, name: str) -> ArmSpec:
        self.progress(f"ask llama.cpp's --fit for {name}")
        placement, steps = fit_under(self.cap, self.placer.operators, self.setting.load)
        shown = tuple({"flag": "--fit", "value": step.n_gpu_layers, **asdict(step)} for step in steps)
        return ArmSpec(name, self.setting, placement, search=shown, notes=(fit_sentence(placement, steps),))

    def _best_layers(self, name: str) -> ArmSpec:
        n_layer = self.placer.model.n_layer
        most = largest_that_fits(0, n_layer + 1, lambda n: self._fits(StockPlacement(n)))
        if most is None:
            raise self._no_room(name, StockPlacement(0))
        return self._searched(name, "-ngl", 0, most, StockPlacement)

    def _best_expert_layers(self, name: str) -> ArmSpec:
        model = self.placer.model
        if not model.n_expert:
            raise UsageError(f"{name} is for models with experts, and this one has none; use {STOCK_NGL}")

        def placement(n: int) -> StockPlacement:
            return StockPlacement(model.n_layer + 1, expert_overrides(n), n)

        most = largest_that_fits(0, model.n_layer, lambda on_device: self._fits(placement(model.n_layer - on_device)))
        if most is None:
            raise self._no_room(name, placement(model.n_layer))
        return self._searched(name, "-ncmoe", model.n_layer - most, model.n_layer, placement)

    def _searched(self, name: str, flag: str, low: int, high: int, placement: Any) -> ArmSpec:
        def seconds(value: int) -> float:
            self.progress(f"search {flag}: {value}")
            return time_of(ArmSpec(f"{flag} {value}", self.setting, placement(value)), self.tests)

        best, measured = best_value(low, high, seconds)
        steps = tuple({"flag": flag, "value": value, "seconds": measured[value]} for value in sorted(measured))
        note = f"best {flag} is {best} of {low}..{high}, which fit the cap"
        return ArmSpec(name, self.setting, placement(best), search=steps, notes=(note,))

    def _fits(self, placement: StockPlacement) -> bool:
        """Whether a load keeps to the cap, by llama.cpp's own dry load."""
        cap, placer = self.cap, self.placer
        if cap.operator_bytes is not None:
            used = operator_bytes_on_device(placer.operators, placer.model.n_layer, placement)
            if used > cap.operator_bytes:
                return False
        return cap.device_bytes is None or self._device_bytes(placement) <= cap.device_bytes

    def _device_bytes(self, placement: StockPlacement) -> int:
        taken = probe_memory(stock_load(self.setting, placement))
        return sum(taken.on_device(part) for part in ("model", "context", "compute"))

    def _no_room(self, name: str, placement: StockPlacement) -> DoesNotFit:
        assert self.cap.device_bytes is not None
        return DoesNotFit(self._device_bytes(placement), self.cap.device_bytes, self.setting.load.device, f"arm {name}")


def stock_load(setting: Setting, placement: StockPlacement) -> LoadSettings:
    """How a stock arm loads, for a dry load of it."""
    patterns = tuple((pattern, None) for pattern, where in placement.overrides if where == "CPU")
    return replace(setting.load, n_gpu_layers=placement.n_gpu_layers, host_patterns=patterns)


def time_of(spec: ArmSpec, tests: Sequence[BenchTest]) -> float:
    """Seconds of one pass over the tests, from a short measurement of its own."""
    short = {test: replace(test, n_gen=min(test.n_gen, SEARCH_GEN)) for test in tests}
    unique = tuple(dict.fromkeys(short.values()))
    arm = ArmProcess(spec)
    try:
        arm.load(())
        arm.warm_up([replace(test, n_prompt=min(test.n_prompt, 8)) for test in unique])
        turns = [arm.measure(unique) for _ in range(SEARCH_TURNS)]
        return min(sum(scaled_seconds(test, tried, turn[tried]) for test, tried in short.items()) for turn in turns)
    except KeyboardInterrupt:
        arm.kill()
        raise
    finally:
        arm.close()


def scaled_seconds(test: BenchTest, tried: BenchTest, sample: Sample) -> float:
    """Seconds of `test` by a sample of the same with fewer generated tokens."""
    return sample.prompt_s + sample.gen_s * (test.n_gen / tried.n_gen if tried.n_gen else 1.0)
