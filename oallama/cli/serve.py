"""`oallama serve`: an OpenAI-compatible server over the placed model, and a page that shows the placement."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from oallama.cli.options import (
    as_record,
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
from oallama.cli.routing import count_experts_option
from oallama.cli.tune import tune_command
from oallama.core.errors import UsageError

KEY_VARIABLE = "OALLAMA_API_KEY"
PROGRAM_VARIABLE = "OALLAMA_LLAMA_SERVER"
NEEDED = ("httptools", "starlette", "uvicorn")
POOLINGS = ("model", "mean", "cls", "last", "none")


def parse_key(text: str) -> str:
    """A key without blanks around it, which no header could bring. Raises ValueError for an empty one."""
    if not (key := text.strip()):
        raise ValueError("the API key is empty; give one, or leave --api-key out")
    return key


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, and what llama-server is told besides the placement. port 0: any that is free. program,
    cache_mib: None: as find_program and llama-server choose. log_file: of llama-server's lines."""

    host: str
    port: int
    api_key: str | None
    n_parallel: int
    pooling: str
    cache_mib: int | None
    program: str | None
    log_file: str | None


server_options = as_record(
    "server",
    ServerOptions,
    click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
                 help="Address to listen at; one that other machines reach needs --api-key."),
    click.option("--port", type=count(0, 65535), default=8080, show_default=True, metavar="PORT",
                 help="Port to listen at; 0: any that is free."),
    click.option("--api-key", type=parsed(parse_key), envvar=KEY_VARIABLE, metavar="KEY",
                 help=f"Key that requests must bring; {KEY_VARIABLE} says it unseen by who lists processes."),
    click.option("-np", "--parallel", "n_parallel", type=count(1, 256), default=4, show_default=True, metavar="N",
                 help="Requests computed at the same time; they share the context."),
    click.option("--pooling", type=click.Choice(POOLINGS), default="mean", show_default=True,
                 metavar="|".join(POOLINGS),
                 help="How /v1/embeddings makes one vector; model: as the GGUF says; none: not at all."),
    click.option("-cram", "--cache-ram", "cache_mib", type=count(-1), metavar="MIB",
                 help="Host memory for prompts that no request uses now, so that they need not be evaluated again; 0: "
                 "none, -1: any.  [default: 8192, or what the host has left beside the model]"),
    click.option("--llama-server", "program", envvar=PROGRAM_VARIABLE, metavar="FILE",
                 help="llama-server to run.  [default: what scripts/stock_binaries built, else that of PATH]"),
    click.option("--log", "log_file", type=click.Path(dir_okay=False), metavar="FILE",
                 help="Add what llama-server writes to this file."),
)  # fmt: skip
"""The command gets `server`, a ServerOptions."""


@click.command("serve")
@model_argument
@server_options
@placement_options(
    click.option("--tune", type=click.Choice(["before", "when-idle", "never"]), default="never", show_default=True,
                 metavar="before|when-idle|never", help="Policy auto, where nothing was measured yet: serve with stock "
                 "llama.cpp's own placement; or measure before; or when no request has come for a while, which one "
                 "that comes then waits for as long as the model takes to load."),
    (n_prompt_option, n_gen_option, depth_option),
)  # fmt: skip
@idle_option("a request")
@projector_options
@count_experts_option
def command(
    model: str,
    server: ServerOptions,
    asked: PlacementOptions,
    idle_s: int,
    pictures: ProjectorOptions,
    n_prompt: int,
    n_gen: int,
    n_depth: int | None,
    count_experts: bool,
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
    from oallama.cli.served import PlacementRequest, served_model
    from oallama.serve.program import ServerSettings, find_program
    from oallama.serve.server import Placements, listen, serve
    from oallama.serve.tuning import Tune

    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(listen(server.host, server.port, server.api_key))
        found = find_program(server.program)
        served = stack.enter_context(
            served_model(PlacementRequest(model, asked, pictures, n_prompt, n_gen, n_depth or 0, count_experts))
        )
        placer = served.placer
        settings = ServerSettings(
            server.n_parallel, placer.threads, placer.options.n_batch, Path(placer.model.path).name,
            None if server.pooling == "none" else server.pooling, server.cache_mib,
        )  # fmt: skip
        tune = Tune(
            tune_command(model, served.options, n_prompt, n_gen, asked.profile, n_depth or 0), served.found_anew,
            float(idle_s) if asked.tune == "when-idle" and served.is_unknown else None,
        )  # fmt: skip
        log = stack.enter_context(_log(server.log_file))
        talk(f"oallama: {served.wanted.reason}")
        talk(f"oallama: {expected(placer, served.wanted.plan)}")
        offered = Placements(
            served.wanted, served.on_cpu, partial(served.launch, program=found, settings=settings), served.device_lost,
            tune if served.is_tunable else None,
        )  # fmt: skip
        serve(sock, server.api_key, offered, talk, log)
    talk("oallama: the server has ended")


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
