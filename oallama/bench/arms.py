"""Arms of a comparison: plans of our policies, and stock llama.cpp at its strongest.

Stock arms use options that a user of llama.cpp could find: `stock-fit` llama.cpp's own --fit, `stock-no-host` the
same with --no-host, `stock-ngl` the best -ngl, `stock-ncmoe` the best -ncmoe, `stock-moe-cache` the best expert cache,
`stock-best` the fastest of these and other options (planner/policies/stock.py). All keep to the same memory cap. The
suffix `-ubN` sets a micro-batch of N tokens; `@N` is stock on one of several devices, counted from 0; `+draftN` plans
and runs with N drafts a step by a draft model, `+mtpN` by the model's MTP layer, `+ngram` with drafts of repeated
text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from oallama.bench.ab import ProgressCallback, measure_briefly, quiet
from oallama.bench.records import ArmSpec, BenchTest, Setting
from oallama.core.errors import DeviceError, DoesNotFit, UsageError
from oallama.core.types import NGRAM, DecodeStep, Draft, Predicted, StockOptions, Workload
from oallama.placer import Placer
from oallama.placer.drafter import Drafter, MtpDrafter, beside_drafts
from oallama.placer.stock import fit_sentence, promising_stock, stock_plan
from oallama.plan.plan import Plan
from oallama.planner.decide import POLICY_NAMES, larger_ubatches
from oallama.planner.policies.registry import Rules
from oallama.planner.policies.stock import FIT, STOCK_MODES
from oallama.profile.acceptance import PUBLISHED
from oallama.run.fit import fit_under
from oallama.run.stock import StockPlacement, effect_of

STOCK_CPU, STOCK_FIT, STOCK_NO_HOST, STOCK_BEST = "stock-cpu", "stock-fit", "stock-no-host", "stock-best"
STOCK_NGL, STOCK_NCMOE, STOCK_MOE_CACHE = "stock-ngl", "stock-ncmoe", "stock-moe-cache"
STOCK_ARMS = (STOCK_CPU, STOCK_FIT, STOCK_NGL, STOCK_NCMOE, STOCK_NO_HOST, STOCK_MOE_CACHE, STOCK_BEST)

NO_REPACK = (
    "runs with --no-repack: a layout that llama.cpp would choose on this CPU multiplies some of the weights wrong"
)

_DRAFTS = re.compile(r"(.+)\+(?:(draft|mtp)([1-9][0-9]?)|ngram)")
_VARIANT = re.compile(r"(.+)(?:-ub([1-9][0-9]{0,6})|@([0-9]{1,2}))")


@dataclass(frozen=True, slots=True)
class ArmMaker:
    """Makes arms for one model, device and set of tests.

    rules: of the arm oato. auto: makes the arm `auto` with a device (tune/); None: the plan that is predicted to be
    the fastest. step: of decode. drafter: makes the drafts of arms `NAME+draftN`; accepted: their acceptance rates by
    position.
    """

    placer: Placer
    setting: Setting
    tests: tuple[BenchTest, ...] = ()
    rules: Rules = Rules()  # noqa: RUF009 - frozen
    progress: ProgressCallback = quiet
    auto: Callable[[ArmMaker], ArmSpec] | None = None
    step: DecodeStep = DecodeStep()  # noqa: RUF009 - frozen
    drafter: Drafter | None = None
    accepted: tuple[float, ...] = PUBLISHED

    def make(self, name: str) -> ArmSpec:
        """The arm of that name: one of STOCK_ARMS, with `-ubN` or without, a policy, or a plan file (*.json).

        Raises UsageError for an unknown name, or one that needs a missing device, DoesNotFit, and what planning and a
        no_alloc load raise.
        """
        if name in STOCK_ARMS:
            return self._stock(name)
        if (variant := _VARIANT.fullmatch(name)) is not None and variant[1] in STOCK_ARMS:
            maker = self._at_ubatch(int(variant[2])) if variant[2] else self._on_device(name, int(variant[3]))
            return replace(maker.make(variant[1]), name=name)
        if (drafts := _DRAFTS.fullmatch(name)) is not None:
            return self._with_drafts(name, drafts[1], drafts[2], int(drafts[3] or 0))
        if name.endswith(".json"):
            return self.of_plan(Path(name).stem, Plan.load(name))
        if name not in POLICY_NAMES:
            arms = ", ".join((*POLICY_NAMES, *STOCK_ARMS))
            raise UsageError(f"unknown arm {name!r}; choose from {arms}, or give a plan file (*.json)")
        if name == "auto" and self.auto is not None and self.placer.has_device:
            return self.auto(self)
        return self.of_plan(name, self._plan(name))

    def at_the_plans_ubatch(self, specs: Sequence[ArmSpec]) -> list[ArmSpec]:
        """stock-fit again with each larger micro-batch of a plan among these arms, if stock-fit is one of them: it
        shows the part of a plan's gain that is due to the micro-batch alone."""
        names = {spec.name for spec in specs}
        if STOCK_FIT not in names:
            return []
        load = self.setting.load
        sizes = {spec.plan.workload.n_ubatch for spec in specs if spec.plan is not None}
        larger = (n for n in sorted(sizes) if load.n_ubatch < n <= load.n_batch)
        return [self.make(name) for n in larger if (name := f"{STOCK_FIT}-ub{n}") not in names]

    def of_plan(self, name: str, plan: Plan) -> ArmSpec:
        """The arm of a plan. Raises PlanError for a plan of another model."""
        plan.check(self.placer.model, self.placer.operators)
        return ArmSpec(
            name=name,
            setting=self.setting.changed(device="none") if plan.device == "none" else self._setting_of(plan),
            plan=plan,
            predicted={
                test.label: prediction for test in self.tests if (prediction := self._predicted(plan, test)) is not None
            },
            notes=(*plan.notes, *self._other_cache(plan)),
            draft=plan.draft,
        )

    def _other_cache(self, plan: Plan) -> tuple[str, ...]:
        """A note if the plan was made for another KV cache than that of the arms."""
        planned, shared = plan.attention, self.setting.load.attention
        if planned is None or (planned.type_k, planned.type_v) == (shared.type_k, shared.type_v):
            return ()
        flags = f"-ctk {shared.type_k} -ctv {shared.type_v}"
        return (f"planned for a KV cache of {planned.type_k} and {planned.type_v}, but all arms run with {flags}",)

    def _setting_of(self, plan: Plan) -> Setting:
        """The setting with the memory cap of the requested devices that the plan uses."""
        used = self.placer.on_devices_of(plan)
        numbers = [n for n, device in enumerate(self.placer.device.each) if device in used.device.each]
        return replace(self.setting, cap=self.setting.cap.of_some(numbers))

    def setting_alone(self, number: int) -> Setting:
        """The setting of stock on one of several devices, counted from 0."""
        changed = self.setting.changed(device=str(self.placer.members[number].device.timed))
        return replace(changed, cap=self.setting.cap.of_some([number]))

    @property
    def workload(self) -> Workload:
        """The workload to plan for: the longest prompt, generation and depth of the tests, and their context."""
        n_prompt, n_gen = max(1, *(test.n_prompt for test in self.tests)), max(test.n_gen for test in self.tests)
        load, n_past = self.setting.load, max(test.n_depth for test in self.tests)
        workload = self.placer.workload(n_prompt, n_gen, load.n_ctx, load.n_ubatch, n_past)
        return replace(workload, step=self.step, n_outputs=load.n_outputs)

    def _plan(self, policy: str) -> Plan:
        if policy == FIT:
            self.progress("ask llama.cpp's --fit for its plan")
            return self.placer.plan(FIT, workload=self.workload)
        if policy == "cpu" or (policy == "auto" and not self.placer.has_device):  # nothing to measure for these
            return self.placer.plan("cpu", workload=self.workload, measure=False)
        rules = self.rules if policy == "oato" else Rules()
        return self.placer.plan(policy, workload=self.workload, **asdict(rules))

    def _predicted(self, plan: Plan, test: BenchTest) -> dict[str, float] | None:
        """Predicted seconds of a plan for a test; 0 for a part that the test lacks. None: unknown, as a plan file may
        predict another run, and no profile is measured for it."""
        n_prompt, workload = max(1, test.n_prompt), plan.workload
        prediction = self.placer.expected(plan, n_prompt, test.n_gen, test.n_depth)
        planned = (workload.n_prompt, workload.n_gen, workload.n_past)
        if prediction is None and planned == (n_prompt, test.n_gen, test.n_depth):
            prediction = plan.predicted
        if prediction is None:
            return None
        ttft_s, tpot_s = prediction.ttft_s if test.n_prompt else 0.0, prediction.tpot_s if test.n_gen else 0.0
        return asdict(Predicted.of(ttft_s, tpot_s, test.n_gen))

    def _stock(self, name: str) -> ArmSpec:
        spec = self._placed(name)
        return replace(spec, notes=(*spec.notes, NO_REPACK)) if self.setting.load.no_repack else spec

    def _placed(self, name: str) -> ArmSpec:
        if name == STOCK_CPU:
            return ArmSpec(name, self.setting.changed(device="none"), StockPlacement(0))
        if not self.placer.has_device:
            raise UsageError(f"{name} needs a device; choose one with --device, e.g. emulated")
        if name == STOCK_FIT:
            return self._fit(name)
        if self.placer.members:
            raise UsageError(f"{name} uses one device: add its number among those of --device, e.g. {name}@0")
        if name == STOCK_NO_HOST:
            return self._fit(name, StockOptions(no_host=True))
        if name in (STOCK_NCMOE, STOCK_MOE_CACHE) and not self.placer.model.n_expert:
            raise UsageError(f"{name} needs a model with experts; use {STOCK_NGL}")
        return self._best(name)

    def _on_device(self, name: str, number: int) -> ArmMaker:
        """Makes arms on one of several devices, counted from 0. Raises UsageError for another number."""
        members = self.placer.members
        if number >= len(members):
            raise UsageError(f"{name}: --device names {len(members)} devices; choose from 0 to {len(members) - 1}")
        return replace(self, placer=members[number], setting=self.setting_alone(number), auto=None)

    def _at_ubatch(self, n_ubatch: int) -> ArmMaker:
        n_batch = max(self.setting.load.n_batch, n_ubatch)  # llama.cpp takes the smaller of the two
        return replace(self, setting=self.setting.changed(n_ubatch=n_ubatch, n_batch=n_batch))

    def _with_drafts(self, name: str, base: str, kind: str | None, n_draft: int) -> ArmSpec:
        """The arm `base` with n_draft drafts per step by a draft model (draft) or the model's MTP layer (mtp), or
        with drafts of repeated text (None). Raises UsageError, and DoesNotFit if the draft model leaves no room."""
        if kind is None:
            setting = self.setting.changed(n_outputs=NGRAM.n_draft + 1)
            return replace(self._drafting(replace(self, setting=setting, auto=None).make(base), NGRAM), name=name)
        drafter = MtpDrafter(self.placer) if kind == "mtp" else self.drafter
        if drafter is None:
            raise UsageError(f"arm {name} needs a draft model; name it with -md")
        most = min(len(self.accepted), drafter.most_drafts)
        if n_draft > most:
            raise UsageError(f"arm {name}: acceptance rates of {most} drafts are known")
        accepted, workload = self.accepted[:n_draft], self.workload
        limit = self.setting.cap.device_bytes or 0  # 0 without a device, where the draft model takes none
        placer, n_bytes, step = beside_drafts(self.placer, drafter, workload, accepted, limit)
        cap = replace(self.setting.cap, device_bytes=limit - n_bytes) if limit else self.setting.cap
        setting = replace(self.setting, cap=cap)
        spec = replace(self, placer=placer, setting=setting, auto=None, step=step).make(base)
        if (plan := spec.plan) is None:
            assert spec.stock is not None
            plan = stock_plan(placer, replace(workload, step=step), spec.stock, measure=False)
        spec = self._drafting(spec, drafter.draft(plan, accepted))
        return replace(spec, name=name, setting=replace(spec.setting, cap=self.setting.cap))

    def _drafting(self, spec: ArmSpec, draft: Draft) -> ArmSpec:
        return replace(spec, plan=spec.plan and replace(spec.plan, draft=draft), draft=draft)

    def _fit(self, name: str, options: StockOptions = StockOptions()) -> ArmSpec:  # noqa: B008 - frozen
        self.progress(f"ask llama.cpp's --fit for {name}")
        load = self.setting.load
        workload = Workload(1, 1, load.n_ctx, load.n_ubatch, step=self.step, n_outputs=load.n_outputs)
        load = replace(load, stock=options).of(workload)
        placement, steps = fit_under(self.setting.cap, self.placer.operators, load)
        shown = tuple({"flag": "--fit", "value": step.n_gpu_layers, **asdict(step)} for step in steps)
        return ArmSpec(name, self.setting, placement, search=shown, notes=(fit_sentence(placement, steps),))

    def _best(self, name: str) -> ArmSpec:
        """The fastest options of a stock arm: all are priced, the most promising are measured."""
        self.progress(f"price the options of {name}")
        n_ubatches: tuple[int, ...] = ()
        specs, modes = [], [name.removeprefix("stock-")]
        if name == STOCK_BEST:
            specs, modes = [self._fit(STOCK_FIT)], [mode for mode in STOCK_MODES if mode != FIT]
            n_ubatches = larger_ubatches(self.workload, self.placer.options)
        candidates = promising_stock(self.placer, self.workload, modes, n_ubatches)
        effect = partial(effect_of, self.placer.operators, self.placer.model.n_layer)
        effects = {effect(spec.stock) for spec in specs if spec.stock is not None}  # --fit may have chosen one of these
        specs += [
            ArmSpec(name, self.setting, placement) for placement, _ in candidates if effect(placement) not in effects
        ]
        if not specs:
            cap = self.setting.cap.device_bytes or 0
            raise DoesNotFit(cap + 1, cap, self.setting.load.device, f"arm {name}")
        if len(specs) == 1:
            return specs[0]
        flags = [spec.stock.flags for spec in specs if spec.stock is not None]
        seconds, faults = [], []
        for spec, options in zip(specs, flags, strict=True):
            self.progress(f"measure {options}")
            samples, fault = measure_briefly(spec, self.tests, self.placer.operators, self.placer.model.n_layer)
            faults += [f"{options} cannot be used: {fault}"] if fault else []
            seconds.append(math.inf if fault else sum(sample.seconds for sample in samples.values()))
        if math.isinf(min(seconds)):
            raise DeviceError(f"arm {name}: {faults[0]}")
        best = seconds.index(min(seconds))
        steps = [{"flag": "options", "value": o, "seconds": s} for o, s in zip(flags, seconds, strict=True)]
        note = f"{name} is {flags[best]}, the fastest of {len(specs)} measured options"
        return ArmSpec(name, self.setting, specs[best].stock, search=tuple(steps), notes=(note, *faults))
