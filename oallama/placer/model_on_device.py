"""A model on a device of this machine: the device, the profile, and the planning problem."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from oallama.core.errors import DeviceError, PlanError, UsageError
from oallama.core.history import BlockRuns, History
from oallama.core.keywords import check_type
from oallama.core.options import DEFAULT_UBATCH, Options
from oallama.core.profile import Profile
from oallama.core.routing import Routing
from oallama.core.types import CPU_DEVICE, Attention, DecodeStep, FlashAttention, ModelInfo, Operator, Workload
from oallama.cost.graph import Graph, build_graph
from oallama.device.identity import KnownDevice, found_gpus, known_device
from oallama.device.spec import DeviceSpec, parse_device
from oallama.plan.plan import Plan
from oallama.planner.attention import AttentionRule, ModelHeader, Problems, problem_of
from oallama.planner.memory import vram_beside
from oallama.planner.placement import Placement, placed_by_plan
from oallama.planner.price import seen_passes
from oallama.planner.problem import Problem, costs_of
from oallama.profile.busy import was_busy
from oallama.profile.emulate import resolved, this_host, usual_threads
from oallama.profile.history import adopted, corrected, rates_text, read_history, timings_of, with_seen, write_history
from oallama.profile.progress import Progress
from oallama.run.no_alloc_loads import NoAllocLoads

if TYPE_CHECKING:
    from oallama.model.memory import NoAllocLoader
    from oallama.placer.drafter import Drafter

HOST_FILL = 0.9  # share of the host's free memory that a plan may count on


class ModelOnDevice:
    """A model on one device, or on several; measures only when needed. members: the model on each of several devices
    alone; with several devices, profile and device properties are those of the first."""

    def __init__(
        self,
        model: ModelInfo,
        operators: Sequence[Operator],
        tensor_names: Sequence[str],
        options: Options,
        profile: Profile | None = None,
        no_alloc_loader: NoAllocLoader | None = None,
    ) -> None:
        self.model = model
        self.operators = tuple(operators)
        self.options = options if options.n_ctx != 0 else replace(options, n_ctx=model.n_ctx_train or None)
        rates = partial(this_host, say=Progress(True).say)
        self.device, self._threads = resolved(asked_device(options, profile), options.threads, rates)
        check_several(self.device, options, profile)
        self.members: tuple[ModelOnDevice, ...] = ()
        if self.device.others:
            sizes = (options.vram, *(options.other_vram or (None,) * len(self.device.others)))
            self.members = tuple(
                type(self)(model, operators, tensor_names,
                           replace(options, device=str(device), vram=vram, other_vram=(), threads=self._threads))
                for device, vram in zip(self.device.each, sizes, strict=True)
            )  # fmt: skip
        if self.members and self.chose_devices:
            self.members = in_order_of_speed(self.members)
            first_device, *other_devices = (member.device for member in self.members)
            self.device = replace(first_device, others=tuple(other_devices))
        self.attention = options.attention()  # with the KV cache that is measured and planned for
        self.given_profile = self._profile = profile
        self._measured: Profile | None = None  # before it was corrected; None of one that was given
        self._is_doubtful = False  # the profile is of a busy machine, which may be calm now
        self.drafter: Drafter | None = None  # that the user asks for; what is tuned is tuned with it
        self.tensor_names = tuple(tensor_names)
        self.attention_rule = AttentionRule(model, options)
        self.graph: Graph = build_graph(model, self.operators, tensor_names)
        self.no_alloc_loads = NoAllocLoads(
            model, self.operators, self.tensor_names, self.device.timed, lambda: self.threads, no_alloc_loader
        )

    def with_options(self, profile: Profile | None = None, **changes: Any) -> Self:
        """The same model with changed options."""
        return type(self)(self.model, self.operators, self.tensor_names, replace(self.options, **changes), profile)

    def keeping_free(self, n_bytes: int, limit: int, what: str, remedy: str) -> Self:
        """The same with n_bytes of the device's limit kept free. what, remedy: what uses them, and what to do if they
        do not fit. Raises DoesNotFit, UsageError for several devices."""
        self.check_one_device(what)
        vram = vram_beside(limit, self.options.vram_fill, n_bytes, str(self.device), what, remedy)
        return self.with_options(self.given_profile, vram=vram)

    @property
    def chose_devices(self) -> bool:
        """Whether the devices were chosen here, not by the user."""
        return parse_device(self.options.device).kind == "auto"

    def check_one_device(self, what: str) -> None:
        """Raises UsageError for several devices."""
        if self.members:
            names = ", ".join(str(member.device) for member in self.members)
            n_devices = len(self.members)
            raise UsageError(
                f"{what} needs a single device, but {n_devices} are in use; choose one with --device: {names}"
            )

    @cached_property
    def threads(self) -> int:
        """Number of CPU threads: from the options, else one per physical core. With fast and slow cores it is the
        number that decodes fastest, measured at the first call and cached."""
        if self.options.threads is not None or self.device.is_emulated:
            return self._threads
        return usual_threads(partial(this_host, say=Progress(True).say))

    @property
    def has_device(self) -> bool:
        """Whether there is a device to place on. Raises the same as found_device."""
        return not self.found_device.is_none

    @property
    def found_device(self) -> DeviceSpec:
        """The requested device; for `auto` the one that is found. Raises DeviceError and BridgeError for `auto`."""
        return self.known_device.spec if self.device.kind == "auto" else self.device

    @cached_property
    def known_device(self) -> KnownDevice:
        """The device, queried once. Raises DeviceError, BridgeError."""
        return self.members[0].known_device if self.members else known_device(self.device)

    @property
    def machine_key(self) -> str:
        """Key under which profiles and histories of this machine with the device are kept. Raises as found_device."""
        from oallama.profile.machine import fingerprint_key
        from oallama.profile.profiler import machine_with

        return fingerprint_key(machine_with(self.known_device, self.threads))

    @cached_property
    def routing(self) -> Routing | None:
        """Expert use counts; None if there are none."""
        from oallama.profile.routing import read_routing

        model = self.model
        return read_routing(model.fingerprint, model.n_expert, model.n_expert_used) if model.n_expert else None

    def profile(self, progress: bool = True, refresh: bool = False, tokens: Sequence[int] = (1, 32, 512)) -> Profile:
        """The timings of this model's mul-mats on this machine, from the cache if possible. Timings of a busy machine
        are measured again once it is calm.

        Raises ProfileError, DeviceError.
        """
        if self.members:
            self._profile, *_ = (member.profile(progress, refresh, tokens) for member in self.members)
            return self._profile
        if self._profile is None or self._is_doubtful or refresh:
            from oallama.profile.profiler import profile_model

            measured = profile_model(
                self.model,
                self.operators,
                self.known_device,
                self.threads,
                tuple(tokens),
                refresh,
                progress,
                kv=self.attention,
            )
            self._measured, self._profile = measured, corrected(measured, self._history(measured))
            self._is_doubtful = False
        return self._profile

    @property
    def known_profile(self) -> Profile | None:
        """The profile that is available without measuring, even from a busy machine; None without one.
        Raises DeviceError, BridgeError."""
        if self.members:
            first_profile, *other_profiles = (member.known_profile for member in self.members)
            return None if None in other_profiles else first_profile
        if self._profile is None:
            from oallama.profile.profiler import stored_profile

            device, threads = self.known_device, self.threads
            stored = stored_profile(self.model, self.operators, device, threads, kv=self.attention)
            self._measured = stored
            self._profile = None if stored is None else corrected(stored, self._history(stored))
            self._is_doubtful = stored is not None and was_busy(stored)
        return self._profile

    @property
    def header(self) -> ModelHeader:
        return ModelHeader(self.model, self.operators, self.graph)

    def workload(
        self,
        n_prompt: int,
        n_gen: int,
        n_ctx: int | None = None,
        n_ubatch: int | None = None,
        n_past: int = 0,
        n_parallel: int = 1,
    ) -> Workload:
        """The workload of a run. n_ctx, n_ubatch None: from the options; else the context holds prompt and generation,
        and at least 4096 tokens (or as many as the model was trained on), and the micro-batch is stock llama.cpp's.
        n_past: tokens in the KV cache before the prompt. n_parallel: requests in flight; memory is planned for each."""
        for name, n in (("n_prompt", n_prompt), ("n_gen", n_gen), ("n_past", n_past), ("n_parallel", n_parallel)):
            check_type(name, n, int)
        for name, maybe in (("n_ctx", n_ctx), ("n_ubatch", n_ubatch)):
            check_type(name, maybe, int, type(None))
        if n_prompt < 1 or n_gen < 0 or n_past < 0 or n_parallel < 1:
            raise UsageError(
                "a workload needs at least one request and one prompt token, and counts must not be negative; check "
                "-p, -n and -d"
            )
        n_tokens = n_past + n_prompt + n_gen
        rounded_context = -(-n_tokens // 256) * 256
        trained = self.model.n_ctx_train or rounded_context
        context = n_ctx or self.options.n_ctx or max(rounded_context, min(4096, trained))
        if context < n_tokens:
            past = f"{n_past} earlier, " if n_past else ""
            tokens = f"{past}{n_prompt} prompt and {n_gen} generated tokens"
            raise UsageError(f"a context of {context} tokens cannot hold {tokens}; raise -c")
        ubatch = n_ubatch or self.options.n_ubatch or DEFAULT_UBATCH
        return Workload(n_prompt, n_gen, context, ubatch, n_past, DecodeStep(n_parallel, n_slots=n_parallel))

    def problem(self, flash_attn: FlashAttention) -> Problem:
        """The planning problem for one attention mode. Raises the same as profile."""
        load = partial(self.no_alloc_loads.taken, attention=self.attention_rule.attention(flash_attn))
        if self.members:
            first_problem, *other_problems = (member.problem(flash_attn) for member in self.members)
            return replace(first_problem, no_alloc_load=load, devices=(first_problem, *other_problems))
        profile = self._profile or self.profile()
        budget = host_free_beside(self.model.file_bytes)
        return problem_of(self.header, self.options, profile, flash_attn, load, budget, self.routing)

    @property
    def problems(self) -> Problems:
        """The planning problems by attention mode. Raises the same as profile."""
        return Problems(self.attention_rule, self._profile or self.profile(), self.problem)

    def problem_for(self, plan: Plan) -> Problem:
        """The planning problem with the plan's attention mode and decode step."""
        return self.problem(self.attention_for(plan).flash_attn).of_step(plan.workload.step)

    def placed(self, plan: Plan) -> Placement:
        """The placement of a plan. Raises PlanError for a plan of another model."""
        if not isinstance(plan, Plan):
            raise UsageError(f"{plan!r:.40} is not a valid plan; make a plan with `placer.plan()`")
        plan.check(self.model, self.operators)
        return placed_by_plan(self.model.n_layer, self.operators, plan)

    def placed_on(self, plan: Plan, problem: Problem) -> Placement:
        """The placement of a plan. Raises PlanError for a plan of another model, or for a missing device."""
        placement = self.placed(plan)
        if placement.uses_device(self.model.n_layer) and problem.profile.device == CPU_DEVICE:
            raise PlanError(f"the plan needs {plan.device}, but no device is used; choose it with --device")
        return placement

    def attention_for(self, plan: Plan) -> Attention:
        """The attention of the options, else of the plan, else as for a new plan."""
        attention = plan.attention
        if attention is None:
            mode: FlashAttention = "auto" if plan.n_gpu_layers else self.unmeasured_attention(plan.workload)
            attention = self.attention_rule.attention(mode)
        return self.options.attention(attention)

    def unmeasured_attention(self, workload: Workload) -> FlashAttention:
        """The attention mode on the CPU alone, without measuring."""

        def known() -> Profile | None:
            with contextlib.suppress(DeviceError):  # what the CPU does alone needs no device
                return self.known_profile
            return None

        return self.attention_rule.unmeasured_on_cpu(workload, known)

    def keep_block_times(self, plan: Plan, runs: Sequence[BlockRuns]) -> None:
        """Add measured times of a plan's blocks to the history of this model and machine, if one is kept; adopt_history
        corrects the profile from it. Raises ProfileError if the cache cannot be written, and as problem."""
        measured = self._own_profile() if runs else None
        if measured and (seen := seen_passes(self.problem_for(plan), plan, self.placed(plan), runs)):
            write_history(with_seen(self._history(measured), seen), self.machine_key)

    def _own_profile(self) -> Profile | None:
        """The profile before it was corrected, to which the history belongs; None if it came from a file, nothing was
        measured, or the device is emulated."""
        return None if self.device.is_emulated or self.known_profile is None else self._measured

    def adopt_history(self) -> str:
        """Correct the profile by the history from now on; returns the correction in words, "" if there is none. Raises
        ProfileError."""
        if self.members:
            messages = {str(member.device): member.adopt_history() for member in self.members}
            self._profile = self.members[0]._profile
            return "; ".join(f"{device}: {rates}" for device, rates in messages.items() if rates)
        if (measured := self._own_profile()) is None:
            return ""
        history = self._history(measured)
        adopted_history = adopted(history)
        if adopted_history == history:
            return ""
        write_history(adopted_history, self.machine_key)
        self._profile = corrected(measured, adopted_history)
        return rates_text(adopted_history)

    def _history(self, measured: Profile) -> History:
        """History of runs under this profile."""
        return read_history(self.model.fingerprint, self.machine_key, timings_of(measured))


def asked_device(options: Options, profile: Profile | None) -> DeviceSpec:
    """The requested devices; by default all local GPUs, or only the first one with an option that is for one device.
    Raises as found_gpus."""
    spec = parse_device(options.device)
    is_of_one = options.vram is not None or options.gpu_weights is not None or profile is not None
    gpus = found_gpus() if spec.kind == "auto" and not is_of_one else ()
    return parse_device(",".join(str(gpu.spec) for gpu in gpus)) if len(gpus) > 1 else spec


AS_FAST = 1.1  # times as long as another a device may take to count as fast, so that a new profile changes no order


def in_order_of_speed(members: Sequence[ModelOnDevice]) -> tuple[ModelOnDevice, ...]:
    """The devices ordered by the seconds of a token's mul-mats, the fastest first; unchanged if one was not measured,
    or if they are about equally fast."""
    if any(member.known_profile is None for member in members):
        return tuple(members)
    ordered: list[tuple[float, ModelOnDevice]] = []
    for member in members:
        costs = costs_of(member.problem("on"), member.workload(1, 1), "decode")
        seconds = sum(cost.t_gpu_s or 0.0 for cost in costs.operators)
        at = next((at for at, (other_s, _) in enumerate(ordered) if AS_FAST * seconds < other_s), len(ordered))
        ordered.insert(at, (seconds, member))
    return tuple(member for _, member in ordered)


def check_several(device: DeviceSpec, options: Options, profile: Profile | None) -> None:
    """Raises UsageError for options that need a single device, or if --vram does not give one size per device."""
    n_devices, n_sizes = len(device.each), len(options.other_vram) + 1
    if options.other_vram and n_sizes != n_devices:
        raise UsageError(f"--vram gives {n_sizes} sizes, but --device names {n_devices}; give one for each device")
    if n_devices == 1:
        return
    if options.vram is not None and n_sizes != n_devices:
        raise UsageError(f"--vram gives one size, but --device names {n_devices}; give one for each, e.g. 10GiB,6GiB")
    for option, given in (("--gpu-weights", options.gpu_weights), ("--profile", profile)):
        if given is not None:
            raise UsageError(f"{option} needs one device, but --device names {n_devices}; omit it, or name one device")


def host_free_beside(n_bytes: int) -> int:
    """Bytes of host memory that may be used besides these."""
    from oallama.device.host_memory import host_free_bytes

    return max(0, int(HOST_FILL * host_free_bytes()) - n_bytes)
