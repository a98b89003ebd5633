"""A plan as the command line of stock llama.cpp that makes the same placement; split operators run in the plugin."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from oallama.core.errors import PlanError
from oallama.core.types import (
    FORCED_PLAIN_LAYOUT,
    PLAIN_BUFT,
    PLAIN_LAYOUT,
    Attention,
    Draft,
    Operator,
    StockOptions,
    devices_with_n_g,
    n_layer_of,
)
from oallama.core.units import MIB
from oallama.device.emulated import DEVICE_NAME
from oallama.device.load_params import chooses_layouts, reads_file
from oallama.device.spec import parse_device
from oallama.plan.patterns import Pattern, host_patterns, split_names
from oallama.plan.plan import Plan

Target = Literal["llama-server", "llama-cli", "llama-bench"]
TARGETS: tuple[Target, ...] = get_args(Target)

LIBRARY_VARIABLE = "GGML_BACKEND_PATH"  # a library that ggml loads beside its own back ends
EXTRA_BACKENDS_VARIABLE = "OALLAMA_EXTRA_BACKENDS"  # further ones that our library loads, as ggml loads only one
PLAN_VARIABLE = "OALLAMA_PLAN"  # the plan file (plugin_text.py)
REPORT_VARIABLE = "OALLAMA_REPORT"  # file for the library's reports (run/plugin_report.py)
PARAMETERS_VARIABLE = "OALLAMA_EMULATED"  # file with the emulated device's parameters

# Without OpenMP llama.cpp's threads spin after each graph, on the cores on which the plugin computes.
_SLEEPING_THREADS = ["--poll", "0"]


@dataclass(frozen=True, slots=True)
class Plugin:
    """Paths of the plugin: libggml-oallama, and, for split operators, the plan file (plugin_text.py)."""

    library: str
    plan_file: str = ""


@dataclass(frozen=True, slots=True)
class Backend:
    """Further ggml back ends for a stock program: paths of libraries, separated by colons, and environment variables
    that they read."""

    library: str
    settings: Mapping[str, str] = field(default_factory=dict)


def needs_plugin(plan: Plan, operators: Sequence[Operator], target: Target = "llama-server") -> bool:
    """Whether stock llama.cpp needs the plugin for the plan: an operator is split, or in a CPU layout that stock
    llama.cpp cannot name."""
    patterns = host_patterns(operators, plan.operators, (), devices_with_n_g(plan.split_settings))
    return any(_buft(layout, target) != PLAIN_LAYOUT for _, layout in patterns)


def stock_device(plan: Plan) -> str:
    """ggml's name of the plan's device in a stock program; several names are joined by commas; "none": no device."""
    spec = parse_device(plan.device)
    n_local = len(spec.each) - len(spec.servers)
    local = [
        f"{DEVICE_NAME}{number}" if device.is_emulated else device.name or "none"
        for number, device in enumerate(spec.each)
    ]
    return ",".join((*local[:n_local], *(f"RPC{number}" for number in range(len(spec.servers)))))


def split_devices(plan: Plan) -> tuple[str, ...]:
    """ggml's names of the devices, in a stock program, that split operators are on beside the CPU; none for a plan
    without one."""
    names = stock_device(plan)
    return () if names == "none" else tuple(names.split(","))


def export_command(
    plan: Plan,
    operators: Sequence[Operator],
    all_tensor_names: Iterable[str],
    target: Target = "llama-server",
    plugin: Plugin | None = None,
    backend: Backend | None = None,
) -> str:
    """The shell-quoted command line of stock_command. Raises PlanError as that does."""
    settings, arguments = stock_command(plan, operators, all_tensor_names, target, plugin, backend)
    if (step := plan.workload.step).mtp and target == "llama-server":  # each slot has snapshots, which take memory
        arguments += ["--parallel", str(step.n_slots), "--kv-unified"]
    # A quoted NAME=value would be the name of a program; only the value may be quoted.
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), shlex.join(arguments)])


def stock_command(
    plan: Plan,
    operators: Sequence[Operator],
    all_tensor_names: Iterable[str],
    target: Target = "llama-server",
    plugin: Plugin | None = None,
    backend: Backend | None = None,
    counts: bool = False,
) -> tuple[dict[str, str], list[str]]:
    """(environment variables to set, arguments with the program first). They load the plan as a no_alloc load verified
    it (device/load_params.py). `--fit off` keeps llama.cpp from changing the placement.

    plan: with layouts that the CPU has (run/weight_places.py). plugin: required if needs_plugin. backend: of the plan's
    device, if the program lacks it. counts: the plugin counts expert uses. Raises PlanError for a device that other
    programs cannot use, and for a plan that a stock program cannot load.
    """
    device, spec = stock_device(plan), parse_device(plan.device)
    if split_names(plan, operators) and device == "none":
        raise PlanError("the plan splits operators, so it needs a device")
    if plugin is None and (counts or needs_plugin(plan, operators, target)):
        raise PlanError("the plan splits operators or names layouts of the CPU, so it needs the plugin")
    if target == "llama-bench" and (plan.draft is not None or (plan.stock and plan.stock.moe_cache_bytes)):
        raise PlanError("llama-bench has no drafts and no expert cache; use `oallama bench`")
    overridden, with_n_g = _overridden(plan, operators), devices_with_n_g(plan.split_settings)
    patterns = host_patterns(overridden, plan.operators, all_tensor_names, with_n_g, counts)
    if device == "none":  # llama.cpp places tensors without a named layout
        patterns = tuple(pattern for pattern in patterns if pattern[1] is not None)
    arguments = [target, "-m", plan.model_path, *_workload(plan, target), *_attention(plan.attention)]
    arguments += ["--rpc", ",".join(server.endpoint for server in spec.servers)] if spec.servers else []
    separator = "/" if target == "llama-bench" else ","  # llama-bench would run once for each value between commas
    # without layers there llama.cpp is not given the device, on which it would keep a compute buffer; the plugin opens
    # the device itself
    n_layers = 0 if device == "none" else plan.n_gpu_layers
    device_argument = device if n_layers or plan.stock else "none"
    arguments += ["--device", device_argument.replace(",", separator), "-ngl", str(n_layers)]
    if device_layers := plan.device_layers(operators, n_layer_of(operators)):
        arguments += ["-ts", separator.join(map(str, device_layers))]
    arguments += stock_arguments(plan.stock, target) if plan.stock is not None else []
    arguments += draft_arguments(plan.draft, device) if plan.draft is not None else []
    arguments += _overrides(patterns, target)
    arguments += [] if chooses_layouts(patterns) or target == "llama-bench" else ["--no-repack"]
    arguments += ["--load-mode", "none"] if reads_file(patterns) else []
    libraries, settings = _libraries(plugin, backend)
    if plugin is not None and split_names(plan, operators, counts):
        return {**libraries, PLAN_VARIABLE: plugin.plan_file, **settings}, [*arguments, *_SLEEPING_THREADS]
    return {**libraries, **settings}, arguments


def _libraries(plugin: Plugin | None, backend: Backend | None) -> tuple[dict[str, str], dict[str, str]]:
    """(variables that name libraries, variables that the user's back end reads)"""
    if backend is None:
        return ({} if plugin is None else {LIBRARY_VARIABLE: plugin.library}), {}
    if plugin is None:
        if ":" in backend.library:
            raise PlanError("llama.cpp's programs load one back end, and this plan needs two; drop --backend")
        return {LIBRARY_VARIABLE: backend.library}, dict(backend.settings)
    return {LIBRARY_VARIABLE: plugin.library, EXTRA_BACKENDS_VARIABLE: backend.library}, dict(backend.settings)


def stock_arguments(options: StockOptions, target: Target = "llama-server") -> list[str]:
    """Arguments of llama.cpp's programs for a stock configuration. With an expert cache the file is not mapped, as it
    copies from pinned memory."""
    arguments = ["-ncmoe", str(options.n_cpu_moe)] if options.n_cpu_moe else []
    if options.no_host:
        arguments += ["--no-host"] if target != "llama-bench" else ["--no-host", "1"]
    if options.moe_cache_bytes:
        arguments += ["--moe-cache-mib", str(options.moe_cache_bytes // MIB), "--load-mode", "none"]
    return arguments


def draft_arguments(draft: Draft, device: str) -> list[str]:
    """Arguments of llama.cpp's programs for drafts. device: its name in ggml."""
    arguments = ["--spec-type", draft.kind]
    if draft.kind == "draft-mtp":
        return [*arguments, "--spec-draft-n-max", str(draft.n_draft)]
    if not draft.model_path:
        return [*arguments, f"--spec-{draft.kind}-size-m", str(draft.n_draft)]
    placement = ["-devd", device, "-ngld", "all"] if draft.on_device else ["-devd", "none", "-ngld", "0"]
    return [*arguments, "-md", draft.model_path, *placement, "--spec-draft-n-max", str(draft.n_draft)]


def stock_flags(n_gpu_layers: int, options: StockOptions, n_ubatch: int = 0) -> str:
    """Options of stock llama.cpp as command-line arguments. n_gpu_layers below 0: all; n_ubatch 0: its default."""
    layers = ["-ngl", str(n_gpu_layers) if n_gpu_layers >= 0 else "all"]
    return " ".join((*layers, *stock_arguments(options), *(("-ub", str(n_ubatch)) if n_ubatch else ())))


def _overridden(plan: Plan, operators: Sequence[Operator]) -> Sequence[Operator]:
    """The operators that -ot places. In a stock configuration -ngl and -ncmoe place most of them."""
    if plan.stock is None:
        return operators
    n_layer = n_layer_of(operators)
    first_device_layer, n_cpu_moe = n_layer + 1 - plan.n_gpu_layers, plan.stock.n_cpu_moe
    return [
        operator for operator in operators
        if operator.layer_in(n_layer) >= first_device_layer
        and not (operator.routed and operator.layer is not None and operator.layer < n_cpu_moe)
    ]  # fmt: skip


def _workload(plan: Plan, target: Target) -> list[str]:
    workload = plan.workload
    batch = ["-ub", str(workload.n_ubatch)]
    if target == "llama-bench":  # makes its context as large as its prompts, and changes nothing by itself
        return [*batch, "-p", str(workload.n_prompt), "-n", str(workload.n_gen)]
    return ["-c", str(workload.n_ctx), *batch, "--fit", "off"]


def _attention(attention: Attention | None) -> list[str]:
    if attention is None:
        return []
    types = [("-ctk", attention.type_k), ("-ctv", attention.type_v)]
    return ["-fa", attention.flash_attn, *(word for flag, name in types if name != "f16" for word in (flag, name))]


def _buft(layout: str | None, target: Target) -> str:
    """The buffer type that `-ot` names for a layout. llama-bench lacks --no-repack, so its CPU may be repacked."""
    if layout == FORCED_PLAIN_LAYOUT or (layout == PLAIN_LAYOUT and target == "llama-bench"):
        return PLAIN_BUFT
    return layout or PLAIN_LAYOUT


def _overrides(patterns: Iterable[Pattern], target: Target) -> list[str]:
    """The `-ot` arguments, those of split operators first."""
    separators = ",=;" if target == "llama-bench" else ",="
    overrides: list[str] = []
    for pattern, layout in patterns:
        if any(character in pattern for character in separators):
            raise PlanError(f"{target} accepts no tensor name that contains {separators}: {pattern}")
        overrides.append(f"{pattern}={_buft(layout, target)}")
    if target == "llama-bench":  # a second -ot would be a second benchmark
        return ["-ot", ";".join(overrides)] if overrides else []
    return [word for override in overrides for word in ("-ot", override)]
