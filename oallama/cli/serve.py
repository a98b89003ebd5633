"""`oallama serve`: an OpenAI-compatible server over the placed model, and a page that shows the placement."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oallama.cli.options import (
    count,
    depth_option,
    idle_option,
    model_argument,
    n_gen_option,
    n_prompt_option,
    parsed,
)
from oallama.cli.output import talk
from oallama.cli.placement import PlacementOptions, expected, placement_options
from oallama.cli.projector import ProjectorOptions, projector_options
from oallama.cli.routing import learn_experts_option
from oallama.cli.tune import tune_command
from oallama.core.errors import OallamaError, UsageError

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.report.placement import Served
    from oallama.serve.supervisor import Launch

KEY_VARIABLE = "OALLAMA_API_KEY"
PROGRAM_VARIABLE = "OALLAMA_LLAMA_SERVER"
NEEDED = ("httptools", "starlette", "uvicorn")
POOLINGS = ("model", "mean", "cls", "last", "none")


def parse_key(text: str) -> str:
    """A key without blanks around it, which no header could bring. Raises ValueError for an empty one."""
    if not (key := text.strip()):
        raise ValueError("the API key is empty; give one, or leave --api-key out")
    return key


@click.command("serve")
@model_argument
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
              help="Address to listen at; one that other machines reach needs --api-key.")  # fmt: skip
@click.option("--port", type=count(0, 65535), default=8080, show_default=True, metavar="PORT",
              help="Port to listen at; 0: any that is free.")  # fmt: skip
@click.option("--api-key", type=parsed(parse_key), envvar=KEY_VARIABLE, metavar="KEY",
              help=f"Key that requests must bring; {KEY_VARIABLE} says it unseen by who lists processes.")  # fmt: skip
@click.option("-np", "--parallel", "n_parallel", type=count(1, 256), default=4, show_default=True, metavar="N",
              help="Requests computed at the same time; they share the context.")  # fmt: skip
@click.option("--pooling", type=click.Choice(POOLINGS), default="mean", show_default=True, metavar="|".join(POOLINGS),
              help="How /v1/embeddings makes one vector; model: as the GGUF says; none: not at all.")  # fmt: skip
@click.option("-cram", "--cache-ram", "cache_mib", type=count(-1), metavar="MIB",
              help="Host memory for prompts that no request uses now, so that they need not be evaluated again; 0: "
              "none, -1: any.  [default: 8192, or what the host has left beside the model]")  # fmt: skip
@click.option("--llama-server", "program", envvar=PROGRAM_VARIABLE, metavar="FILE",
              help="llama-server to run.  [default: what scripts/stock_binaries built, else that of PATH]")  # fmt: skip
@click.option("--log", "log_file", type=click.Path(dir_okay=False), metavar="FILE",
              help="Add what llama-server writes to this file.")  # fmt: skip
@placement_options(
    click.option("--tune", type=click.Choice(["before", "when-idle", "never"]), default="never", show_default=True,
                 metavar="before|when-idle|never", help="Policy auto, where nothing was measured yet: serve with stock "
                 "llama.cpp's own placement; or measure before; or when no request has come for a while, which one "
                 "that comes then waits for as long as the model takes to load."),
    (n_prompt_option, n_gen_option, depth_option),
)  # fmt: skip
@idle_option("a request")
@projector_options
@learn_experts_option
def command(
    model: str,
    host: str,
    port: int,
    api_key: str | None,
    n_parallel: int,
    pooling: str,
    cache_mib: int | None,
    program: str | None,
    log_file: str | None,
    asked: PlacementOptions,
    idle_s: int,
    pictures: ProjectorOptions,
    n_prompt: int,
    n_gen: int,
    n_depth: int | None,
    learn_experts: bool,
) -> None:
    """Run stock llama-server with the placement that `oallama run` would use, and keep it running:
    /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /health, /metrics and the rest of its API.
    GET /placement tells who computes what, /placement.html shows it.

    \b
      oallama serve model.gguf
      oallama serve model.gguf --device CUDA0 -c 16384 --port 9000
      OALLAMA_API_KEY=secret oallama serve model.gguf --host 0.0.0.0
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serve needs {', '.join(missing)}; install them: pip install 'oallama[serve]'")
    asked.check_depth(n_depth)
    from oallama.placer import Placer
    from oallama.serve.program import Settings, find_program, launch
    from oallama.serve.server import Placements, listen, serve
    from oallama.serve.tuning import Tune

    def load(placer: Placer) -> Workload:
        return placer.workload(n_prompt, n_gen, n_past=n_depth or 0)

    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listen(host, port, api_key))
        found = find_program(program)
        if (planned := asked.planned(model)) is not None:
            placer, plan = planned
            _check_device(placer)
            plan.check(placer.model, placer.operators)
            plan = placer.as_asked(plan)
            wanted = _timed(placer, plan, f"this is the plan of {asked.plan_file}, by policy {plan.policy}")
            unknown = False
        else:
            placer = asked.placer(model)
            _check_device(placer)
            if (roomy := pictures.keeping_room(placer, load(placer))) != placer.options:
                asked = replace(asked, options=roomy)
                placer = Placer.of_file(model, asked.options, asked.profile)
            wanted, unknown = _placed(placer, asked, load(placer), model)
        named, device_lost = stack.enter_context(_device(placer))
        projector = pictures.read()
        uses_file, learned = stack.enter_context(_learning(placer, learn_experts))

        def completed(served: Served) -> Served:
            """With the device's name, the experts that are used by now, and a note of the projector."""
            served = learned(named(served))
            if projector is None:
                return served
            return replace(
                served, plan=pictures.place(projector, served.plan, asked.plan_file is None).noted(served.plan)
            )

        wanted = completed(wanted)
        settings = Settings(
            n_parallel, placer.threads, placer.options.n_batch, Path(placer.model.path).name,
            None if pooling == "none" else pooling,
        )  # fmt: skip

        if projector is not None:
            talk(f"note: {wanted.plan.notes[-1]}")
        on_cpu, placers = _on_cpu(placer, wanted), [placer]
        on_cpu = None if on_cpu is None else completed(on_cpu)

        def placed_anew() -> Served | None:
            again = Placer.of_file(model, asked.options, asked.profile)
            placers.append(again)
            known = replace(asked, refresh_gate=False, tune="never")
            served, unsettled = _placed(again, known, load(again), model)
            return None if unsettled else completed(served)

        tunable = asked.plan_file is None and asked.gate and asked.policy.is_auto and asked.options.n_batch is None
        tune = Tune(
            tune_command(model, asked.options, n_prompt, n_gen, asked.profile, n_depth or 0), placed_anew,
            float(idle_s) if asked.tune == "when-idle" and unknown else None,
        )  # fmt: skip

        def started(served: Served, socket_path: Path) -> Launch:
            lost = served is on_cpu
            beside, limit = 0, cache_mib
            chosen = settings
            if projector is not None:
                at = pictures.place(projector, served.plan, asked.plan_file is None)
                chosen = replace(chosen, projector=projector.path, projector_on_device=at.on_device)
                beside = 0 if at.on_device else at.n_bytes
            if limit is None:
                limit = _cache_mib(placers[-1], wanted if lost else served, lost, beside)
            chosen = replace(chosen, cache_mib=limit)
            return launch(
                found, served.plan, placer.operators, placer.model.n_layer, placer.tensor_names, chosen, socket_path,
                os.environ, uses_file,
            )  # fmt: skip

        log = stack.enter_context(_log(log_file))
        talk(f"oallama: {wanted.said}")
        talk(f"oallama: {expected(placer, wanted.plan)}")
        placements = Placements(
            wanted, on_cpu, started, device_lost,
            tune if tunable and placer.has_device else None,
        )  # fmt: skip
        serve(sock, api_key, placements, lambda sentence: talk(sentence), log)
    talk("oallama: the server has ended")


def _cache_mib(placer: Placer, served: Served, device_lost: bool, beside: int) -> int | None:
    """What llama-server may keep of prompts beside the model; None where the model's own needs are not known. beside:
    bytes that are no plan's."""
    from oallama.serve.program import STOCK_CACHE_MIB, prompt_cache_mib

    try:
        mib = prompt_cache_mib(max(0, placer.host_left(served.plan, device_lost) - beside))
    except OallamaError:  # llama-server is about to say it better
        return None
    if mib < STOCK_CACHE_MIB and not device_lost:
        talk(f"note: llama-server keeps at most {mib} MiB of prompts, as the host has no more left (--cache-ram)")
    return mib


def _check_device(placer: Placer) -> None:
    if placer.device.is_emulated or placer.device.is_pair:
        raise UsageError(f"llama-server has no device {placer.device}; use a GPU, rpc://host:port, rpc-worker or none")


def _placed(placer: Placer, asked: PlacementOptions, load: Workload, model: str) -> tuple[Served, bool]:
    """What the policy makes, as `run` has it; and whether nothing was measured that it could follow."""
    asked = replace(asked, tune="before" if asked.tune == "before" else "after")
    plan, unknown = asked.made_plan(placer, load)
    return _timed(placer, plan, _said(placer, asked, plan, unknown, model)), unknown


def _said(placer: Placer, asked: PlacementOptions, plan: Plan, unknown: bool, model: str) -> str:
    """What is served and why."""
    if asked.policy.keeps_to_cpu(placer):
        why = "there is no device" if not placer.has_device else "that was asked for"
        return f"everything is on the CPU, as {why}"
    if unknown:
        return (
            f"this is stock llama.cpp's own placement, as nothing was measured yet; `oallama tune {model}` measures "
            "whether another one is faster"
        )
    if asked.gate and asked.policy.is_auto:
        return f"this is what the gate let through after measuring: {plan.policy}"
    return f"this is the placement of policy {plan.policy}, not measured against stock llama.cpp's"


def _timed(placer: Placer, plan: Plan, said: str) -> Served:
    """With predicted times, where the machine was measured."""
    from oallama.report.placement import Served, work_times

    served = Served(placer.model, placer.operators, plan, said)
    try:
        if placer.known_profile is None:
            return served
        simulation = placer.simulate(plan)
    except OallamaError:  # nothing is priced that the server does not need
        return served
    predicted = plan.predicted or simulation.predicted
    return replace(served, plan=replace(plan, predicted=predicted), times=work_times(simulation))


@contextlib.contextmanager
def _learning(placer: Placer, asked: bool) -> Iterator[tuple[Path | None, Callable[[Served], Served]]]:
    """Where llama-server's plug-in leaves the uses of hot experts, which are kept at the end; and what puts those that
    are used by what is known now into a placement."""
    from oallama.core.errors import ProfileError
    from oallama.profile.routing import unknown_routing
    from oallama.profile.routing_store import read_routing, write_routing
    from oallama.run.learned_experts import learned_plan
    from oallama.serve.uses import with_uses

    model = placer.model
    if not asked or not model.n_expert:
        yield None, lambda served: served
        return
    shape = (model.fingerprint, model.n_expert, model.n_expert_used)

    def learned(served: Served) -> Served:
        routing = read_routing(*shape) if any(p.hot_experts for p in served.plan.operators) else None
        if routing is None:
            return served
        return replace(served, plan=learned_plan(served.plan, placer.operators, routing))

    with tempfile.TemporaryDirectory(prefix="oallama-uses-") as folder:
        file = Path(folder) / "uses"
        try:
            yield file, learned
        finally:
            before = read_routing(*shape) or unknown_routing(*shape)
            after = with_uses(before, placer.operators, file)
            if after != before:
                try:
                    write_routing(after)
                except ProfileError as error:
                    talk(f"warning: {error}")


@contextlib.contextmanager
def _device(placer: Placer) -> Iterator[tuple[Callable[[Served], Served], Callable[[], str | None]]]:
    """What names the device of a placement as another program knows it, and why the device is known to be lost, if so.
    A worker runs for the block."""
    from oallama.device.rpc_worker import RpcWorker

    def of(device: str) -> Callable[[Served], Served]:
        def named(served: Served) -> Served:
            plan = served.plan
            uses = plan.device != "none" and (
                plan.n_gpu_layers > 0 or any(p.cc < 1 or p.hot_experts for p in plan.operators)
            )
            return replace(served, plan=replace(plan, device=device if uses else "none"))

        return named

    spec = placer.device
    if not spec.is_worker:
        yield of(str(placer.known_device.spec if spec.kind == "auto" else spec)), lambda: None
        return
    worker = RpcWorker(spec)
    if worker.warning:
        talk(f"warning: {worker.warning}")
    try:
        lost = "its worker process does not answer"
        yield of(f"rpc://{worker.endpoint}"), lambda: None if worker.alive() else lost
    finally:
        worker.kill()


def _on_cpu(placer: Placer, wanted: Served) -> Served | None:
    """The same model without its device; None where it has none."""
    from oallama.place.record import unmeasured_cpu_record
    from oallama.plan.plan import Plan

    if not placer.has_device:
        return None
    memory = wanted.plan.memory
    weights = memory.weights_gpu + memory.weights_host
    record = unmeasured_cpu_record(placer.model, placer.operators, wanted.plan.workload, weights)
    plan = Plan.of(replace(record, attention=wanted.plan.attention))
    return replace(wanted, plan=plan, said="everything is on the CPU, as the device was lost", times=())


@contextlib.contextmanager
def _log(path: str | None) -> Iterator[Callable[[bytes], None]]:
    """Where llama-server's lines go. Raises UsageError."""
    if path is None:
        yield lambda line: None
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write the log {path}: {error.strerror}") from None

    def write(line: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk does not end the server
            os.write(descriptor, line)

    try:
        yield write
    finally:
        os.close(descriptor)
