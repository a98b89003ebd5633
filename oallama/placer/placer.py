"""A Placer: one model on the devices of this machine, and its profile, affinities, plans and engines."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oallama.core.affinity_report import Affinity
from oallama.core.errors import UsageError
from oallama.core.keywords import check_names, check_type
from oallama.core.options import DEFAULT_BATCH, Options
from oallama.core.profile import Profile
from oallama.core.types import Phase, Predicted, PrefetchMode, Workload
from oallama.core.units import format_bytes
from oallama.device.spec import DeviceSpec, device_for_plan, parse_device
from oallama.placer.described import problems_on
from oallama.placer.model_on_device import ModelOnDevice
from oallama.placer.plans import Given, checked, plan_over_devices, unmeasured_plan
from oallama.placer.report import search_report
from oallama.placer.stock import fit_plan
from oallama.placer.tuned import in_tuned_context, tuned_plan
from oallama.plan.plan import Plan
from oallama.planner.affinity import AffinityRule, FillRule
from oallama.planner.decide import larger_ubatches, plan, policy_named
from oallama.planner.explain import token_seconds
from oallama.planner.policies.registry import Policy, Request, Rules
from oallama.planner.price import price
from oallama.planner.simulate import Simulation, simulate

if TYPE_CHECKING:
    from oallama.core.routing import ExpertCounts
    from oallama.device.machines import Machine
    from oallama.model.memory import NoAllocLoader
    from oallama.profile.acceptance import Acceptance
    from oallama.run.answer import Generation
    from oallama.run.engine import Engine
    from oallama.run.held import LoadNeeds
    from oallama.run.placed_llama import PlacedLlama


class Placer(ModelOnDevice):
    """Places one model on one device, or on several. Create it with Placer.load.

    The attributes model and operators describe the model. Measuring and loading happen when first needed.
    """

    members: tuple[Placer, ...]

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
        """Read and check a GGUF; no native code reads it yet.

        gguf_path: path, or a name as on the command line: a downloaded model ("llama3.2:1b", "USER/REPO:Q4_K_M"), or
        hf.co/USER/REPO, which is downloaded if needed. device: as for `--device`; None: all local GPUs, or none. vram:
        device memory to plan with, in bytes or e.g. "6GiB", of two devices "10GiB,6GiB"; None: the free memory.
        vram_fill: share of it that may be used. gpu_weights: largest share of the weights' bytes on the device, e.g.
        0.5 or "50%". threads: CPU threads; None: one per physical core. profile: a Profile or its path; None: from the
        cache, or measured when needed. options: n_ctx, n_batch, n_ubatch (tokens), type_k, type_v (of the KV cache)
        and flash_attn ("auto", "on", "off").
        Raises ModelFileError, UsageError, ProfileError, DownloadError.
        """
        if not isinstance(gguf_path, str | os.PathLike):
            raise UsageError(f"the model must be the path of a GGUF file, not {type(gguf_path).__name__}")
        if isinstance(gguf_path, str):
            from oallama.stores.find import model_path

            gguf_path = model_path(gguf_path)
        if not isinstance(profile, Profile | str | os.PathLike | None):
            raise UsageError(f"the profile must be a Profile or its path, not {type(profile).__name__}")
        device = str(device) if isinstance(device, DeviceSpec) else device
        size = str(vram) if isinstance(vram, Real) else vram  # so that 6 is refused as "6" is
        given = Options.given(
            device=device, vram=size, vram_fill=vram_fill, gpu_weights=gpu_weights, threads=threads, **options
        )
        return cls.of_file(gguf_path, given, profile)

    @classmethod
    def of_file(
        cls,
        gguf_path: str | os.PathLike[str],
        options: Options,
        profile: Profile | str | os.PathLike[str] | None = None,
        no_alloc_loader: NoAllocLoader | None = None,
    ) -> Placer:
        """Like load, with the options in a record. no_alloc_loader: a process for no_alloc loads that the caller starts
        and ends."""
        from oallama.model.gguf_reader import read_gguf
        from oallama.model.hyperparameters import model_info
        from oallama.model.operators import operators
        from oallama.profile.store import read_profile

        gguf = read_gguf(gguf_path)
        names = [tensor.name for tensor in gguf.tensors]
        given_profile = read_profile(Path(profile)) if isinstance(profile, str | os.PathLike) else profile
        return cls(model_info(gguf), operators(gguf), names, options, given_profile, no_alloc_loader)

    def __repr__(self) -> str:
        model, options = self.model, self.options
        cap = "" if options.vram is None else f", vram {format_bytes(options.vram)}"
        description = f"{model.arch}, {model.n_layer} layers, {format_bytes(model.file_bytes)}"
        return f"<Placer of {Path(model.path).name} ({description}) on {self.device}{cap}>"

    def plan(
        self,
        policy: str | Policy | Given = "auto",
        n_prompt: int = 512,
        n_gen: int = 128,
        n_ctx: int | None = None,
        n_ubatch: int | None = None,
        affinity: AffinityRule = "default",
        fill: FillRule = "continue",
        prefetch: PrefetchMode = "ahead",
        n_past: int = 0,
        *,
        workload: Workload | None = None,
        measure: bool = True,
        draft_model: str | None = None,
        mtp: bool = False,
        n_parallel: int = 1,
    ) -> Plan:
        """Place the model for n_prompt prompt and n_gen generated tokens, and verify by a no_alloc load that the plan
        fits. policy: a name, e.g. "auto", a policy of the caller (planner/policies/registry.py), or a placement
        (Given).

        n_ubatch: micro-batch; None: from the options, else 512 or a larger size that is predicted to be faster
        (planner/decide.py). prefetch: how far copies of streamed weights run ahead. n_past: tokens in the KV cache
        before the prompt. workload: a record of these counts. draft_model: the path of a model that makes drafts; mtp:
        the model's MTP layer does. measure False: use no profile and predict nothing; for policies cpu and fit,
        or a placement. Raises UsageError for an unknown policy, DoesNotFit, ProfileError, DeviceError.
        """
        workload = workload or self.workload(n_prompt, n_gen, n_ctx, n_ubatch, n_past, n_parallel)

        def planned(placer: Placer, workload: Workload = workload) -> Plan:
            return placer.plan(
                policy, n_ubatch=n_ubatch, affinity=affinity, fill=fill, prefetch=prefetch, workload=workload,
            )  # fmt: skip

        if draft_model is not None or mtp:
            self.check_one_device("a drafter")
            from oallama.placer.drafter import DraftModel, MtpDrafter, planned_with_drafts

            drafter = MtpDrafter(self) if draft_model is None else DraftModel(self, draft_model)
            return planned_with_drafts(self, drafter, workload, planned)
        rules = Rules(affinity, fill, prefetch)
        chosen = policy.policy(self) if isinstance(policy, Given) else policy_named(policy, rules)
        if chosen is not None and chosen.by_llama_cpp and not (measure and self.members):
            return fit_plan(self, workload, measure)
        if not measure:
            if isinstance(policy, Given) or (chosen is not None and not chosen.uses_device):
                return unmeasured_plan(self, policy if isinstance(policy, Given) else None, workload)
            raise UsageError("without measuring, only policies cpu and fit and given placements can be planned")
        larger = larger_ubatches(workload, self.options) if n_ubatch is None else ()
        request = Request(workload, chosen, rules=rules, n_ubatches=larger)
        if self.members and (chosen is None or chosen.uses_device):
            return plan_over_devices(self, request, planned)
        problems = self.problems  # measure before the process for no_alloc loads starts
        with self.no_alloc_loads.together():
            best_plan = plan(problems, request, str(self.device))
        return checked(self, best_plan)

    def affinity(self, phase: Phase = "decode", **options: Any) -> list[Affinity]:
        """The affinity of each operator, best rank first: the rows of search_report (placer/report.py), with the same
        options."""
        return list(search_report(self, phase, **options).operators)

    def price(self, plan: Plan, workload: Workload | None = None) -> Predicted:
        """Predicted seconds of a plan, by the cost model that planning, report and simulate use. workload: None: the
        plan's.

        Raises the same as simulate.
        """
        target = self.on_devices_of(plan)
        problem = target.problem_for(plan)
        return price(problem, workload or plan.workload, target.placed_on(plan, problem))

    def simulate(self, plan: Plan, workload: Workload | None = None, machine: Machine | None = None) -> Simulation:
        """Simulate what the streams of a machine do while the plan runs (planner/simulate.py). workload: None:
        the plan's. machine: None: this machine, as measured.

        Raises PlanError for a plan of another model or device, ProfileError.
        """
        plan.check(self.model, self.operators)  # before anything is measured
        target = self.on_devices_of(plan)
        target.check_one_device("a simulation")
        problem = target.problem_for(plan) if machine is None else problems_on(target, machine).of("on")
        return simulate(problem, workload or plan.workload, target.placed_on(plan, problem))

    def expected(self, plan: Plan, n_prompt: int, n_gen: int, n_past: int = 0) -> Predicted | None:
        """Predicted times of a plan for this prompt and generation, after n_past tokens. None without a prediction in
        the plan or a loaded profile: nothing is measured or queried. Raises the same as simulate."""
        if plan.predicted is None or self._profile is None:
            return None
        return self.price(plan, replace(plan.workload, n_prompt=n_prompt, n_gen=n_gen, n_past=n_past))

    def token_seconds(self, plan: Plan, depth: int) -> float | None:
        """Predicted seconds of one token at context depth `depth` (planner/explain.py). None as in expected."""
        target = self.on_devices_of(plan)
        if plan.predicted is None or target._profile is None or target.members:
            return None
        flash_attn = target.attention_for(plan).flash_attn
        return token_seconds(target._profile, flash_attn, self.model.n_layer, plan, depth)

    def engine(
        self, plan: Plan, *, on_expert_counts: Callable[[ExpertCounts], None] | None = None, **options: Any
    ) -> Engine:
        """Start a llama-server with the model loaded as planned. Context, KV cache and attention come from the options,
        else from the plan. Use it in a `with` statement.

        on_expert_counts: called at the end with the use counts of each expert. options: chats (False: do not use the
        model's chat template), server_options (more options of llama-server, listed in docs/serve.md), mmproj (a vision
        projector, for messages with pictures), mmproj_offload (projector on the device; no plan counts its memory
        there), interactive (a person may stop an answer; no embeddings), once (one prompt is answered), and options of
        the placer.
        Raises UsageError, PlanError (a plan of another model), DeviceError, ModelFileError.
        """
        from oallama.placer.engine import EngineOptions, open_engine

        engine_names = [field.name for field in fields(EngineOptions)]
        check_names(options, [*(field.name for field in fields(Options)), *engine_names], "engine keyword")
        engine_options = EngineOptions(**{name: options.pop(name) for name in engine_names if name in options})
        placer = self.on_devices_of(plan)._changed(options)
        return open_engine(placer, plan, engine_options, on_expert_counts)

    def keep_drafts(self, plan: Plan, seen: Acceptance | None) -> None:
        """Keep the acceptance of a plan's drafts for later plans. Raises ProfileError if the cache cannot be written,
        ModelFileError."""
        from oallama.placer.drafter import draft_fingerprint
        from oallama.profile.acceptance import keep_acceptance

        if seen is not None and (drafting := draft_fingerprint(self.model, plan.draft)) is not None:
            keep_acceptance(self.model.fingerprint, drafting, seen)

    def as_asked(self, plan: Plan) -> Plan:
        """The plan as it is loaded: with the context, micro-batch, KV cache and attention of the options, where given.
        Its memory and times stay unchanged."""
        return replace(plan, workload=load_as_asked(plan, self.options), attention=self.attention_for(plan))

    def with_outputs(self, plan: Plan, n_outputs: int) -> Plan | None:
        """The plan for a llama-server that reserves memory for the logits of n_outputs tokens of each request; 0: of
        all tokens of a micro-batch, for embeddings. None if the plan leaves the device no room for that. Raises as a
        no_alloc load."""
        if plan.workload.n_outputs in (0, n_outputs):
            return plan
        workload = replace(plan.workload, n_outputs=n_outputs)
        if plan.device == "none":
            return replace(plan, workload=workload)
        placement, attention = self.placed(plan), self.attention_for(plan)
        _, bytes_before = self.no_alloc_loads.sides(plan.workload, placement, attention)
        _, bytes_after = self.no_alloc_loads.sides(workload, placement, attention)
        n_bytes, memory = bytes_after - bytes_before, plan.memory
        if n_bytes > max(0, memory.spare):
            return None
        memory = replace(memory, compute=memory.compute + n_bytes, spare=memory.spare - n_bytes)
        return replace(plan, workload=workload, memory=memory)

    def load_needs(self, plan: Plan) -> LoadNeeds:
        """Memory that a plan takes, by a no_alloc load. Raises DoesNotFit if each token would read more than the host's
        memory holds, and the same as a no_alloc load."""
        from oallama.run.held import LoadNeeds

        workload, placement, attention = plan.workload, self.placed(plan), self.attention_for(plan)
        on_host, on_device = self.no_alloc_loads.sides(workload, placement, attention)
        self.no_alloc_loads.check_host(workload, placement, attention)
        is_local_gpu = self.device.kind in ("auto", "ggml") and not self.members
        load = self.no_alloc_loads.taken(workload, placement, attention)
        return LoadNeeds(on_device, on_host, load.device_free if is_local_gpu else 0)

    def llama(self, plan: Plan, **arguments: Any) -> PlacedLlama:
        """Return a llama_cpp.Llama in this process, placed by the plan, for code built on llama-cpp-python, and for
        logits: with logits_all=True, llama.eval(tokens), then llama.scores. Without it llama.cpp has memory for the
        logits of a batch's last token alone. It has no chat template unless chat_format is set: chat with an engine.
        Use it in a `with` statement, or close it.

        arguments: of llama_cpp.Llama, without those that the plan and this placer's options set. n_ctx, n_batch,
        n_ubatch and n_threads default to theirs. Raises the same as engine.
        """
        from oallama.run.load import load_placed

        changes = {ours: arguments.pop(name) for name, ours in LLAMA_OPTIONS.items() if name in arguments}
        _check_arguments(arguments)
        target = self.on_devices_of(plan)._changed(changes)
        plan = plan.without_own_drafts
        asked = target.as_asked(plan)
        if any(arguments.get(name) for name in ALL_LOGITS):
            asked = replace(asked, workload=replace(asked.workload, n_outputs=0))
        target.load_needs(asked)  # raises
        placement, attention = target.placed(asked), target.attention_for(asked)
        settings = replace(
            target.no_alloc_loads.settings(asked.workload, placement, attention),
            device=str(target.device),
            n_batch=target.options.n_batch or DEFAULT_BATCH,
        )
        names = self.tensor_names
        return load_placed(
            self.model, plan, settings, operators=self.operators, tensor_names=names, arguments=arguments
        )

    @property
    def local_members(self) -> tuple[Placer, ...]:
        """The members on devices of this machine, without RPC servers."""
        return tuple(member for member in self.members if not member.device.is_remote)

    def on_devices_of(self, plan: Plan) -> Placer:
        """The placer on those of its devices that the plan uses. Raises UsageError if only the plan names an RPC
        server."""
        if not self.members or plan.device == "none":
            return self
        used_devices = parse_device(plan.device).each
        if len(used_devices) == len(self.members):
            return self
        member_by_name = {member.device.measured: member for member in self.members}
        used = [(device, member_by_name.get(device.measured)) for device in used_devices]
        for device, member in used:
            if member is None:
                device_for_plan(None, str(device))  # raises for an RPC server
        if len(used) == 1 and (member := used[0][1]) is not None:
            return member
        return self.on_devices([str(member.device if member else device) for device, member in used])

    def alone_on(self, device: str) -> Placer:
        """The placer on the one of several devices with this text; "": on all."""
        return next(member for member in self.members if str(member.device) == device) if device else self

    def on_devices(self, devices: Sequence[str]) -> Placer:
        """The placer on some of its devices (--device text), each with its own --vram; another device
        has no --vram."""
        vram = {str(member.device): member.options.vram for member in self.members}
        sizes = [size for device in devices if (size := vram.get(device)) is not None]
        first_size, other_sizes = (sizes[0], sizes[1:]) if len(sizes) == len(devices) else (None, [])
        return self.with_options(
            device=",".join(devices), threads=self.threads, vram=first_size, other_vram=tuple(other_sizes)
        )

    def _changed(self, changes: Mapping[str, Any]) -> Placer:
        """The placer with other options; itself without changes."""
        if not changes:
            return self
        return self.with_options(**{"device": str(self.device), "threads": self.threads, **changes})

    def run(self, prompt: str, max_tokens: int | None = None, system: str | None = None, **sampling: Any) -> Generation:
        """Answer one prompt, like `oallama run`, with the plan that `oallama tune` found. Without a result it uses the
        plan of policy auto, unlike the command, which then uses llama.cpp's own placement. The system prompt and the
        prompt go into the model's chat template if it has one. max_tokens None: until the model stops, or 128 without a
        chat template. sampling: as in Engine.generate. For several prompts keep an engine.

        Raises the same as plan, engine and Engine.generate.
        """
        from oallama.run.answer import DEFAULT_TOKENS
        from oallama.run.prompt import likely_tokens, prompt_for

        check_type("prompt", prompt, str)
        prepared_prompt = prompt_for(self.model, prompt, None, system)
        n_gen = DEFAULT_TOKENS if max_tokens is None else max(max_tokens, 0)
        workload = self.workload(likely_tokens(self.model.path, prepared_prompt, self.options.n_ctx, n_gen), n_gen)
        if not self.has_device:
            plan = self.plan("cpu", workload=workload, measure=False)
        else:
            tuned = tuned_plan(self, in_tuned_context(self, workload))
            plan = self.plan(workload=workload) if tuned is None else tuned.plan
        with self.engine(plan, chats=prepared_prompt.chats, once=True) as engine:
            return prepared_prompt.generate(engine, max_tokens, **sampling)


ALL_LOGITS = ("logits_all", "embedding", "draft_model")
"""Arguments of llama_cpp.Llama that have it compute the logits, or embeddings, of all tokens."""

LLAMA_OPTIONS = {"n_ctx": "n_ctx", "n_batch": "n_batch", "n_ubatch": "n_ubatch", "n_threads": "threads"}
"""Arguments of llama_cpp.Llama, and the options with the same meaning."""

DECIDED = frozenset({
    "model_path", "n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "use_mmap", "use_mlock", "vocab_only",
    "n_threads_batch", "offload_kqv", "op_offload", "flash_attn", "type_k", "type_v",
})  # fmt: skip
"""Arguments of llama_cpp.Llama that the plan and the placer set."""


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    import inspect

    from oallama.device.load_params import load_bridge

    for name in arguments:
        if name in DECIDED:
            raise UsageError(f"the plan and Placer.load set {name}; omit it")
    parameters = inspect.signature(load_bridge().libraries.llama_cpp.Llama).parameters
    check_names(arguments, [name for name in parameters if name not in DECIDED and name != "kwargs"], "Llama argument")


def load_as_asked(plan: Plan, options: Options) -> Workload:
    """The plan's workload, with the context and micro-batch of the options, where given."""
    workload = plan.workload
    return replace(workload, n_ctx=options.n_ctx or workload.n_ctx, n_ubatch=options.n_ubatch or workload.n_ubatch)
