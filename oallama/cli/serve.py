"""`oallama serve`: an OpenAI-compatible server over the placed model, and a page that shows the placement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oallama.cli import options as shared
from oallama.cli.help import Group, ServerCommand, passed_options
from oallama.cli.output import busy, log
from oallama.cli.placement_options import PlacementOptions, expected, placement_options
from oallama.cli.projector import ProjectorOptions, projector_options
from oallama.cli.records import as_record, count, option_field, parsed
from oallama.cli.routing import count_experts_option
from oallama.core.errors import UsageError
from oallama.core.files import owner_only
from oallama.run.program import PROGRAM_VARIABLE

if TYPE_CHECKING:
    from oallama.core.types import Workload
    from oallama.placer import Placer

KEY_VARIABLE = "OALLAMA_API_KEY"
POOLINGS = ("model", "mean", "cls", "last", "none")


def parse_key(text: str) -> str:
    """Strip blanks, which a header cannot contain. Raises ValueError for an empty key, and for a key that llama-server
    would read as several."""
    if not (key := text.strip()):
        raise ValueError("the API key is empty; give a key, or omit --api-key")
    if "," in key or '"' in key:
        raise ValueError("the API key must not contain a comma or a quotation mark: llama-server would split it")
    return key


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The address to listen at, and options of llama-server besides the placement. port, placement_port 0: any free
    port. program, cache_mib None: chosen by find_program and llama-server. log_file: for llama-server's lines."""

    host: str = option_field("--host", default="127.0.0.1", metavar="ADDRESS", group=Group.SERVER,
        help="Address to listen on.\f --api-key is required if other machines can reach it.")  # fmt: skip
    port: int = option_field("--port", type=count(0, 65535), default=8080, metavar="PORT",
        group=Group.SERVER, help="Port to listen on; 0: any free port.")  # fmt: skip
    placement_port: int = option_field("--placement-port", type=count(0, 65535), default=0, metavar="PORT",
        group=Group.SERVER, advanced=True, show_default="any free port",
        help="Port of the placement page, on 127.0.0.1.")  # fmt: skip
    api_key: str | None = option_field("--api-key", type=parsed(parse_key), envvar=KEY_VARIABLE, metavar="KEY",
        group=Group.SERVER,
        help=f"API key that requests must send.\f {KEY_VARIABLE} keeps it out of `ps`.")  # fmt: skip
    n_parallel: int = option_field("-np", "--parallel", type=count(1, 256), default=4, metavar="N",
        group=Group.SERVER, help="Number of requests computed at the same time; they share the context.")  # fmt: skip
    pooling: str = option_field("--pooling", type=click.Choice(POOLINGS), default="mean",
        metavar="|".join(POOLINGS), group=Group.SERVER, advanced=True,
        help="Pooling for /v1/embeddings; model: as in the GGUF; none: no embeddings.\f Embeddings need device memory; "
        "with a given or a measured plan they are offered only if it leaves enough.")  # fmt: skip
    cache_mib: int | None = option_field("-cram", "--cache-ram", type=count(-1), metavar="MIB", group=Group.SERVER,
        advanced=True, show_default="8192, or what the model leaves free in host memory",
        help="Host memory for the cache of earlier prompts; 0: none, -1: no limit.")  # fmt: skip
    program: str | None = option_field("--llama-server", envvar=PROGRAM_VARIABLE, metavar="FILE", group=Group.SERVER,
        advanced=True, show_default="the one from set-up, else from PATH", help="llama-server to run.")  # fmt: skip
    log_file: str | None = option_field("--log", type=click.Path(dir_okay=False), metavar="FILE", group=Group.SERVER,
        help="Append llama-server's log to this file.")  # fmt: skip


server_options = as_record("server", ServerOptions)
"""The command gets `server`, a ServerOptions."""


@click.command("serve", cls=ServerCommand)
@shared.model_argument
@server_options
@placement_options(shared.tune_first_option, (shared.n_prompt_option, shared.n_gen_option, shared.depth_option))
@projector_options
@count_experts_option
def command(
    model: str,
    server: ServerOptions,
    asked: PlacementOptions,
    pictures: ProjectorOptions,
    n_prompt: int,
    n_gen: int,
    n_depth: int | None,
    count_experts: bool,
) -> None:
    """Serve a model over OpenAI's API: run stock llama-server with the placement that `oallama run` would use.

    \b
      oallama serve model.gguf
      oallama serve model.gguf --device CUDA0 -c 16384 --port 9000
      OALLAMA_API_KEY=secret oallama serve model.gguf --host 0.0.0.0

    \f
    Restarts llama-server if it ends. Its API is complete: /v1/chat/completions, /v1/completions, /v1/embeddings,
    /v1/models, /health, /metrics and more. Its web page, if it was built with one, is at /. The placement page has its
    own port, which is printed; GET /placement there returns JSON.
    """
    asked.check_depth(n_depth)
    asked = asked.expecting(server.n_parallel)
    if server.port and server.port == server.placement_port:
        raise UsageError(f"--port and --placement-port are both {server.port}; give two ports")
    from oallama.cli.served import served_model
    from oallama.report.placement_page import request_tokens
    from oallama.run.address import reserved_address
    from oallama.run.program import ServerSettings, find_program
    from oallama.serve.server import Placements, serve

    embeds = server.pooling != "none"

    def workload_for(placer: Placer) -> Workload:
        workload = placer.workload(n_prompt, n_gen, n_past=n_depth or 0)
        return replace(workload, n_outputs=0) if embeds else workload

    with contextlib.ExitStack() as stack:
        address = stack.enter_context(reserved_address(server.host, server.port, server.api_key))
        if server.placement_port:
            stack.enter_context(reserved_address("127.0.0.1", server.placement_port, None, "--placement-port"))
        found = find_program(server.program)
        with busy("planning"):
            served = stack.enter_context(served_model(model, asked, workload_for, pictures, embeds, count_experts))
        placer = served.placer
        settings = ServerSettings(
            address, server.n_parallel, placer.threads, placer.options.n_batch, Path(placer.model.path).name,
            server.pooling if served.embeds else None, server.cache_mib, more=passed_options(),
        )  # fmt: skip
        server_log = stack.enter_context(_server_log(server.log_file))
        log(f"oallama: {served.wanted.reason}")
        log(f"oallama: {expected(placer, served.wanted.plan)}")
        n_ctx = served.wanted.plan.workload.n_ctx
        if (most := request_tokens(placer.model, n_ctx)) < n_ctx:
            log(f"note: a request may have {most} tokens, the model's trained context; all requests share -c {n_ctx}")
        launch = partial(served.launch, program=found, settings=settings)
        placements = Placements(served.wanted, served.fallback, launch, served.keep, served.server_gone)
        with _busy_until_told("starting llama-server") as tell:
            serve(address, placements, tell, server_log, server.placement_port)


@contextlib.contextmanager
def _busy_until_told(doing: str) -> Iterator[Callable[[str], None]]:
    """Show a status line until the function that this yields is first called, which prints a sentence."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(busy(doing))

        def tell(sentence: str) -> None:
            stack.close()
            log(sentence)

        yield tell


@contextlib.contextmanager
def _server_log(path: str | None) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes llama-server's lines to the log. Raises UsageError."""
    if path is None:
        yield lambda line: None
        return
    try:
        log_file = open(path, "ab", buffering=0, opener=owner_only)  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"cannot write the log {path}: {error.strerror}") from None

    def write(line: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the server
            log_file.write(line)

    with log_file:
        yield write
