"""A Placer: one model on one device of this machine, what was asked for; profile, affinities, plans and engines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from oallama.core.affinity import Affinity, AffinityReport, Baseline
from oallama.core.errors import DeviceError, PlanError, UsageError
from oallama.core.history import BlockRuns
from oallama.core.keywords import check_names, check_type
from oallama.core.options import STOCK_UBATCH, Options
from oallama.core.profile import Profile
from oallama.core.types import (
    CPU_DEVICE,
    Attention,
    FlashAttention,
    MemoryLedger,
    ModelInfo,
    Operator,
    Phase,
    Predicted,
    PrefetchMode,
    Workload,
)
from oallama.core.units import format_bytes
from oallama.cost.graph import Graph, build_graph
from oallama.cost.passes import Pass
from oallama.device.spec import DeviceSpec
from oallama.place.affinity import AffinityRule, FillRule
from oallama.place.attention import AttentionRule, with_attention
from oallama.place.decide import decide_as_given, larger_ubatches, policy_named
from oallama.place.explain import STOCK, baselines, physical_bound
from oallama.place.memory import ledger
from oallama.place.placement import (
    Decision,
    Placed,
    placed_as_named,
    placed_by_plan,
    plan_record,
    unmeasured_cpu_record,
    unmeasured_record,
)
from oallama.place.policies.registry import Policy, Rules
from oallama.place.policies.stock import stock_decision
from oallama.place.price import price, seen_passes
from oallama.place.problem import Problem
from oallama.place.pure_plan import Header, decide_with_attention
from oallama.place.verify import on_cpu
from oallama.placer.affinity import plan_report, run_plan, search_report
from oallama.placer.measured import Measured
from oallama.plan.plan import Plan
from oallama.run.dry_loads import DryLoads

if TYPE_CHECKING:
    from oallama.device.machines import Machine
    from oallama.model.memory import Prober
    from oallama.place.simulate import Simulation
    from oallama.run.engine import Engine
    from oallama.run.generate import Generation

HOST_FILL = 0.9  # share of the host's free memory that a plan may count on


class Placer(Measured):
    """Places one model on one device. Make it with Placer.load.

    The attributes model and operators describe the model. Measuring and loading are put off until something needs them.
    """

    def __init__(
        self,
        model: ModelInfo,
        operators: Sequence[Operator],
        tensor_names: Sequence[str],
        options: Options,
        profile: Profile | None = None,
        prober: Prober | None = None,
    ) -> None:
        super().__init__(model, operators, options, profile)
        self.tensor_names = tuple(tensor_names)
        self.attention_rule = AttentionRule(model, options)
        self.graph: Graph = build_graph(model, self.operators, tensor_names)
        self.dry_loads = DryLoads(
            model, self.operators, self.tensor_names, self.device.timed, lambda: self.threads, prober
        )

    @classmethod
    def load(
        cls,
        gguf_path: str | os.PathLike[str],
        device: str | DeviceSpec | None = None,
        vram: int | str | None = None,
        vram_fill: float = 0.9,
        gpu_weights: float | str | None = None,
        threads: int | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Placer:
        """Read and check a GGUF; no native code sees it yet.

        device: as `--device` names it; None: the first GPU, or none. vram: bytes of its memory to plan with, or a text
        such as "6GiB"; None: what is free. vram_fill: the share of it that may be used. gpu_weights: a cap on the share
        of the weights' bytes on the device, such as 0.5 or "50%". threads: of the CPU; None: one per physical core.
        profile: a Profile or the path of one; None: measured, or taken from the cache, when it is needed. options:
        n_ctx, n_batch, n_ubatch (tokens), type_k, type_v (of the KV cache) and flash_attn ("auto", "on", "off").
        Raises ModelFileError, UsageError, ProfileError.
        """
        if not isinstance(gguf_path, str | os.PathLike):
            raise UsageError(f"the model is of type {type(gguf_path).__name__}; give the path of a GGUF file")
        if not isinstance(profile, Profile | str | os.PathLike | None):
            raise UsageError(f"the profile is of type {type(profile).__name__}; give a Profile or the path of one")
        device = str(device) if isinstance(device, DeviceSpec) else device
        size = str(vram) if isinstance(vram, Real) else vram  # so that 6 is refused as "6" is
        asked = {"device": device, "vram": size, "vram_fill": vram_fill, "gpu_weights": gpu_weights, "threads": threads}
        return cls.of_file(gguf_path, Options.given(**asked, **options), profile)

    @classmethod
    def of_file(
        cls,
        gguf_path: str | os.PathLike[str],
        options: Options,
        profile: Profile | str | os.PathLike[str] | None = None,
        prober: Prober | None = None,
    ) -> Placer:
        """As load, with the options in a record. prober: the process for dry loads, where the caller has started one
        already; the caller ends it."""
        from oallama.model.gguf_reader import read_gguf
        from oallama.model.hyperparameters import model_info
        from oallama.model.operators import operators
        from oallama.profile.store import read_profile

        gguf = read_gguf(gguf_path)
        names = [tensor.name for tensor in gguf.tensors]
        given = read_profile(Path(profile)) if isinstance(profile, str | os.PathLike) else profile
        return cls(model_info(gguf), operators(gguf), names, options, given, prober)

    def __repr__(self) -> str:
        model, asked = self.model, self.options
        cap = "" if asked.vram is None else f", vram {format_bytes(asked.vram)}"
        what = f"{model.arch}, {model.n_layer} layers, {format_bytes(model.file_bytes)}"
        return f"<Placer of {Path(model.path).name} ({what}) on {self.device}{cap}>"

    @property
    def header(self) -> Header:
        return Header(self.model, self.operators, self.graph)

    def keep_runs(self, plan: Plan, runs: Sequence[BlockRuns]) -> None:
        """Add what runs of a plan's blocks took to the history, where one is kept. Raises ProfileError where the cache
        cannot be written, and as problem."""
        if runs and self.keeps_history:
            self.keep_seen(seen_passes(self.problem_for(plan), plan, self._placed(plan), runs))

    def workload(
        self, n_prompt: int, n_gen: int, n_ctx: int | None = None, n_ubatch: int | None = None, n_past: int = 0
    ) -> Workload:
        """Token counts of a run. n_ctx, n_ubatch: None: what the options ask for. Without either, the context holds
        prompt and generation, and at least 4096 tokens or what the model was trained on; the micro-batch is stock
        llama.cpp's. n_past: tokens in the KV cache before the prompt."""
        for name, n in (("n_prompt", n_prompt), ("n_gen", n_gen), ("n_past", n_past)):
            check_type(name, n, int)
        for name, maybe in (("n_ctx", n_ctx), ("n_ubatch", n_ubatch)):
            check_type(name, maybe, int, type(None))
        if n_prompt < 1 or n_gen < 0 or n_past < 0:
            raise UsageError("a workload needs at least one prompt token and no negative count; check -p and -n")
        n_tokens = n_past + n_prompt + n_gen
        needed = -(-n_tokens // 256) * 256
        trained = self.model.n_ctx_train or needed
        context = n_ctx or self.options.n_ctx or max(needed, min(4096, trained))
        if context < n_tokens:
            past = f"{n_past} earlier, " if n_past else ""
            tokens = f"{past}{n_prompt} prompt and {n_gen} generated tokens"
            raise UsageError(f"a context of {context} tokens cannot hold {tokens}; raise -c")
        return Workload(n_prompt, n_gen, context, n_ubatch or self.options.n_ubatch or STOCK_UBATCH, n_past)

    def problem(self, flash_attn: FlashAttention) -> Problem:
        """What decisions are made from, for one way of attention. Raises as profile."""
        return Problem(
            self.operators,
            self.graph,
            with_attention(self.profile(), flash_attn),
            partial(self.dry_loads.taken, attention=self.attention_rule.attention(flash_attn)),
            self.options.vram,
            self.options.vram_fill,
            self.options.gpu_weights,
            slices_only=self.device.is_pair,  # llama.cpp has no second CPU
            host_room=_host_free_beside(self.model.file_bytes),
            routing=self.routing,
        )

    def problem_for(self, plan: Plan) -> Problem:
        """With the attention that this plan is loaded with."""
        return self.problem(self._attention_for(plan).flash_attn)

    def plan(
        self,
        policy: str | Policy = "auto",
        n_prompt: int = 512,
        n_gen: int = 128,
        n_ctx: int | None = None,
        n_ubatch: int | None = None,
        affinity: AffinityRule = "default",
        fill: FillRule = "continue",
        attention_passes: Sequence[Pass] | None = None,
        prefetch: PrefetchMode = "ahead",
        n_past: int = 0,
    ) -> Plan:
        """Place the model for n_prompt prompt and n_gen generated tokens, and verify by a dry load that the plan fits.
        policy: a name, such as "auto", or one of the caller's own (place/policies/registry.py).

        n_ubatch: None: what the options ask for; where they ask for nothing, 512 or what more is predicted to take less
        time (place/decide.py).
        attention_passes: forward passes that attention is chosen for; None: those of the workload. prefetch: how far
        copies of streamed weights run ahead. n_past: tokens in the KV cache before the prompt.
        Raises UsageError for a policy of another version, DoesNotFit, ProfileError, DeviceError.
        """
        load = self.workload(n_prompt, n_gen, n_ctx, n_ubatch, n_past)
        return self.place(policy, load, Rules(affinity, fill, prefetch), attention_passes, n_ubatch is None)

    def place(
        self,
        policy: str | Policy,
        load: Workload,
        rules: Rules = Rules(),  # noqa: B008 - frozen
        attention_passes: Sequence[Pass] | None = None,
        larger_ubatches_too: bool = True,
    ) -> Plan:
        """As plan, for a workload; larger_ubatches_too: its micro-batch may be larger, unless the options ask for
        one."""
        larger = larger_ubatches(load, self.options) if larger_ubatches_too else ()
        return self._plan_of(*self._decide(policy, load, "mixed", rules, attention_passes, larger))

    def cpu_plan(
        self, load: Workload, attention_passes: Sequence[Pass] | None = None, stock_attention: bool = False
    ) -> Plan:
        """Everything on the CPU, without measuring anything: such a plan predicts nothing. attention_passes as in plan;
        stock_attention: where the user asked for nothing, llama.cpp decides."""
        nothing = placed_as_named(self.model, self.operators, (), 0)
        flash_attn = self.options.flash_attn if stock_attention else self._unmeasured(load, attention_passes)
        attention = self.attention_rule.attention(flash_attn)
        taken = self.dry_loads.taken(load, nothing, attention)
        self.dry_loads.check_host(load, nothing, attention)
        record = unmeasured_cpu_record(self.model, self.operators, load, taken.weights_host)
        return replace(record, attention=attention)

    def plan_of(
        self,
        on_device: Iterable[str],
        gpu_layers: int,
        load: Workload,
        policy: str = "manual",
        stock_attention: bool = False,
    ) -> Plan:
        """A plan of the caller's own: the names of the operators that go to the device, and how many layers (counted
        from the end, the output first) have their norms and KV there. Priced and probed, not changed.
        stock_attention as in cpu_plan.

        Raises UsageError for unknown names or an operator in a layer that is not on the device.
        """
        placed = placed_as_named(self.model, self.operators, on_device, gpu_layers)

        def given(flash_attn: FlashAttention) -> Decision:
            return decide_as_given(self.problem(flash_attn), placed, load, policy)

        if stock_attention:
            return self._plan_of(given(self.options.flash_attn), self.options.flash_attn)
        return self._plan_of(*self.attention_rule.decide(given, self.profile(), load))

    def unpriced_plan(self, on_device: Iterable[str], gpu_layers: int, load: Workload, policy: str) -> Plan:
        """As plan_of, with llama.cpp's attention, and without a profile: such a plan predicts nothing."""
        placed = placed_as_named(self.model, self.operators, on_device, gpu_layers)
        attention = self.attention_rule.attention(self.options.flash_attn)
        taken = self.dry_loads.taken(load, placed, attention)
        capacity = taken.device_free if self.options.vram is None else self.options.vram
        memory = ledger(
            capacity, self.options.vram_fill, taken.weights_gpu, taken.weights_host, taken.kv, taken.compute
        )
        record = unmeasured_record(self.model, self.operators, load, placed, memory, policy, str(self.device))
        return replace(record, attention=attention)

    def affinity(self, phase: Phase = "decode", **options: Any) -> list[Affinity]:
        """The affinity of each operator, best rank first: the rows of report(), which takes the same options."""
        return list(self.report(phase, **options).operators)

    def report(
        self,
        phase: Phase = "decode",
        n_prompt: int = 512,
        n_gen: int = 128,
        affinity: AffinityRule = "default",
        fill: FillRule = "continue",
        n_ctx: int | None = None,
    ) -> AffinityReport:
        """Report where OATO's search puts each operator for one phase ("decode", "prefill" or "mixed"), and why.

        affinity "paper" and fill "paper" follow Algorithm 1 to the letter. Raises UsageError for a phase, affinity or
        fill that there is not, DoesNotFit, ProfileError, DeviceError.
        """
        if phase not in get_args(Phase):
            raise UsageError(f"phase is {phase!r}; give one of {', '.join(get_args(Phase))}")
        load = self.workload(n_prompt, n_gen, n_ctx)
        larger = larger_ubatches(load, self.options)
        decision, flash_attn = self._decide("oato", load, phase, Rules(affinity, fill), larger=larger)
        against = self._baselines(load, decision.memory)
        report = search_report(self.model, self.problem(flash_attn), decision, phase, affinity, against)
        return replace(report, notes=self._with_doubt(report.notes))

    def plan_report(self, plan: Plan, load: Workload, phase: Phase = "decode") -> AffinityReport:
        """Report where a plan puts each operator. load: the workload that it was asked for."""
        against = self._baselines(load, plan.memory)
        return plan_report(self.model, self.problem_for(plan), plan, phase, against)

    def with_run(self, report: AffinityReport, plan: Plan, measured: bool) -> AffinityReport:
        """The report beside the plan that `oallama run` uses. measured: that plan won against stock llama.cpp here.
        Stock's own placement, where that is predicted to be faster than a plan that was not measured."""
        run = run_plan(self.model, self.problem_for(plan), plan, measured)
        stock = next((one.predicted for one in report.baselines if one.name == STOCK), None)
        if stock is not None and not measured and stock.total_s < run.predicted.total_s:
            load = self.workload(plan.workload.n_prompt, plan.workload.n_gen, plan.workload.n_ctx)
            decision = stock_decision(self.problem(self._stock_attention), load)
            record = plan_record(decision, self.model, self.operators, str(self.device), "")
            run = run_plan(self.model, self.problem(self._stock_attention), record, False)
        return replace(report, run=run)

    @property
    def _stock_attention(self) -> FlashAttention:
        """Stock llama.cpp's way of attention: what was asked for, else flash attention, as wherever a device has it."""
        return "on" if self.options.flash_attn == "auto" else self.options.flash_attn

    def _baselines(self, load: Workload, held: MemoryLedger) -> tuple[Baseline, ...]:
        """Baselines that every plan for a workload is compared with. held: memory of the plan; the bound has the KV
        cache and compute buffers on the host, as some plans do."""
        rule, held = self.attention_rule, replace(held, kv=0, compute=0)
        alone, _ = rule.decide(lambda way: on_cpu(self.problem(way), load, "mixed"), self.profile(), load)
        return baselines(self.problem(self._stock_attention), load, held, alone.predicted)

    def price(self, plan: Plan, load: Workload | None = None) -> Predicted:
        """Predicted seconds of a plan, by the same prices as search, report and simulate. load: None: the plan's.

        Raises as simulate.
        """
        problem = self.problem_for(plan)
        return price(problem, load or plan.workload, self._placed_on(plan, problem))

    def simulate(self, plan: Plan, load: Workload | None = None, machine: Machine | None = None) -> Simulation:
        """What the streams of a machine do while the plan runs (place/simulate.py). load: None: the plan's; machine:
        None: this one, as it was measured.

        Raises PlanError for a plan of another model or device, ProfileError.
        """
        from oallama.place.simulate import simulate

        plan.check(self.model, self.operators)  # before anything is measured
        if machine is None:
            problem = self.problem_for(plan)
        else:
            from oallama.placer.described import problem_on

            problem = problem_on(self, machine)
        return simulate(problem, load or plan.workload, self._placed_on(plan, problem))

    def expected(self, plan: Plan, n_prompt: int, n_gen: int, n_past: int = 0) -> Predicted | None:
        """What a plan is predicted to take for this prompt and generation, behind n_past tokens. None where it predicts
        nothing, or no profile is at hand: nothing is measured or asked for it. Raises as simulate."""
        if plan.predicted is None or self._profile is None:
            return None
        return self.price(plan, replace(plan.workload, n_prompt=n_prompt, n_gen=n_gen, n_past=n_past))

    def token_seconds(self, plan: Plan, depth: int) -> float | None:
        """Predicted seconds of one token that sees `depth` others (place/explain.py). None as in expected."""
        from oallama.place.explain import token_seconds

        if plan.predicted is None or self._profile is None:
            return None
        flash_attn = self._attention_for(plan).flash_attn
        return token_seconds(self._profile, flash_attn, self.model.n_layer, plan, depth)

    def as_asked(self, plan: Plan) -> Plan:
        """The plan with the context, micro-batch, KV cache and attention that the options ask for, where they do, as
        `engine` loads it. What it says of memory and times stays."""
        return replace(plan, workload=_load_of(plan, self.options), attention=self._attention_for(plan))

    def host_left(self, plan: Plan, device_lost: bool = False) -> int:
        """Bytes of host memory that may be used beside the model as this plan places it; device_lost: as the CPU alone
        would then hold it. Raises PlanError for a plan of another model, and what a dry load raises."""
        placed = self._placed(plan)
        on_host, on_device = self.dry_loads.sides(plan.workload, placed, self._attention_for(plan))
        return _host_free_beside(on_host + on_device if device_lost else on_host)

    def engine(self, plan: Plan, **keywords: Any) -> Engine:
        """Load the model as the plan says, with the context, KV cache and attention that the options ask for, the
        plan's where they ask for nothing. keywords: changes of the options; progress=False shows no bar;
        on_traffic is called with the experts that each answer used, of which record_every=n keeps every n-th token's.
        Use it in a `with` statement.

        Raises UsageError, PlanError (a plan of another model), DeviceError, ModelFileError.
        """
        from oallama.run.behaviour import Behaviour
        from oallama.run.engine import Engine

        placed = self._placed(plan)
        names, known = [field.name for field in fields(Behaviour)], [field.name for field in fields(Options)]
        check_names(keywords, [*known, *names], "keyword of an engine")
        changes = {name: value for name, value in keywords.items() if name not in names}
        behaviour = {name: value for name, value in keywords.items() if name in names}
        attention = self._attention_for(plan)
        asked = {"device": str(self.device), "threads": self.threads, **asdict(attention), **changes}
        options = replace(self.options, **asked)
        as_planned = options.n_batch is None and not changes
        probed = as_planned and self.dry_loads.has(_load_of(plan, options), placed, attention)  # it verified the plan
        return Engine(
            self.model,
            plan,
            options,
            operators=self.operators,
            tensor_names=self.tensor_names,
            probed=probed,
            **behaviour,
        )

    def run(self, prompt: str, max_tokens: int | None = None, system: str | None = None, **sampling: Any) -> Generation:
        """Answer one prompt as `oallama run` does: plan, load, generate, free. The prompt goes into the model's chat
        template where it has one, behind the system prompt. max_tokens None: until the model ends the answer, 128 where
        it does not end by itself. sampling: as in Engine.generate. For several prompts keep an engine.

        Raises as plan, engine and Engine.generate.
        """
        from oallama.run.engine import DEFAULT_TOKENS
        from oallama.run.template import prompt_of
        from oallama.run.vocabulary import Vocabulary

        check_type("prompt", prompt, str)
        given = prompt_of(self.model.path, prompt, None, system)
        tokens = given.tokens(Vocabulary(self.model.path))
        load = self.workload(len(tokens), DEFAULT_TOKENS if max_tokens is None else max_tokens)
        plan = self.place("auto", load) if self.has_device else self.cpu_plan(load)
        with self.engine(plan) as engine:
            most = (engine.n_ctx if given.ends else DEFAULT_TOKENS) if max_tokens is None else max_tokens
            return engine.generate(tokens, most, **sampling)

    def _decide(
        self,
        policy: str | Policy,
        load: Workload,
        phase: Phase,
        rules: Rules,
        attention_passes: Sequence[Pass] | None = None,
        larger: Sequence[int] = (),
    ) -> tuple[Decision, FlashAttention]:
        """larger: micro-batches above the workload's that may be taken instead."""
        if policy != "auto":
            policy_named(policy)  # before anything is measured
        rule, profile = self.attention_rule, self.profile()
        with self.dry_loads.together():
            return decide_with_attention(
                self.problem, rule, profile, policy, load, phase, rules, attention_passes, larger
            )

    def _plan_of(self, decision: Decision, flash_attn: FlashAttention) -> Plan:
        from oallama.profile.machine import fingerprint_key

        profile = self.profile()
        machine = fingerprint_key(profile.fingerprint)
        record = plan_record(decision, self.model, self.operators, str(self.device), machine)
        bound = physical_bound(self.problem(flash_attn), record.workload, record.memory)
        attention = self.attention_rule.attention(flash_attn)
        self.dry_loads.check_host(record.workload, decision.placed, attention)
        return replace(record, attention=attention, bound=bound, notes=self._with_doubt(record.notes))

    def _with_doubt(self, notes: tuple[str, ...]) -> tuple[str, ...]:
        """The notes with what makes times of the profile doubtful, once."""
        from oallama.profile.busy import doubt

        return tuple(dict.fromkeys((*notes, *filter(None, [doubt(self.profile())]))))

    def _unmeasured(self, load: Workload, attention_passes: Sequence[Pass] | None = None) -> FlashAttention:
        def known() -> Profile | None:
            with contextlib.suppress(DeviceError):  # what the CPU does alone needs no device
                return self.known_profile
            return None

        return self.attention_rule.unmeasured_on_cpu(load, known, attention_passes)

    def _placed(self, plan: Plan) -> Placed:
        """The placement of a plan. Raises PlanError for a plan of another model."""
        if not isinstance(plan, Plan):
            raise UsageError(f"{plan!r:.40} is no Plan; make one with `oallama plan`")
        plan.check(self.model, self.operators)
        return placed_by_plan(self.model.n_layer, self.operators, plan)

    def _placed_on(self, plan: Plan, problem: Problem) -> Placed:
        """The placement of a plan. Raises PlanError for a plan of another model, or for a device that is not there."""
        placed = self._placed(plan)
        if placed.uses_device(self.model.n_layer) and problem.profile.device == CPU_DEVICE:
            raise PlanError(f"the plan is for {plan.device}, and there is no device; name one with --device")
        return placed

    def _attention_for(self, plan: Plan) -> Attention:
        """What was asked for, else what the plan says, else as for a new plan."""
        planned = plan.attention
        if planned is None:
            planned = self.attention_rule.attention("auto" if plan.n_gpu_layers else self._unmeasured(plan.workload))
        return self.options.attention(planned)


def _load_of(plan: Plan, options: Options) -> Workload:
    """The plan's, with the context and the micro-batch that the options ask for, where they do."""
    load = plan.workload
    return replace(load, n_ctx=options.n_ctx or load.n_ctx, n_ubatch=options.n_ubatch or load.n_ubatch)


def _host_free_beside(n_bytes: int) -> int:
    """Bytes of host memory that may be used beside so many."""
    from oallama.device.host_memory import host_free_bytes

    return max(0, int(HOST_FILL * host_free_bytes()) - n_bytes)
