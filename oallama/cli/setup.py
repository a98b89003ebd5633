"""`oallama setup`: install llama.cpp in the current environment."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from oallama.cli.help import Command, option
from oallama.cli.output import emit
from oallama.core.errors import UsageError
from oallama.core.files import cache_folder


@click.command("setup", cls=Command)
@option("--llama-cpp", metavar="WHAT", help="Install this build: a folder, an archive (.tar.gz) or its address.")
@option("--sha256", metavar="HEX", help="SHA-256 of the archive; required with an address.")
@option("--refresh", is_flag=True, help="Look for GPUs, compile and test again, even if nothing changed.")
@option("--programs", is_flag=True, help="Only print the folder of llama.cpp's programs.")
@click.pass_context
def command(context: click.Context, llama_cpp: str | None, sha256: str | None, refresh: bool, programs: bool) -> None:
    """Install llama.cpp and its programs (llama-server, llama-cli, llama-bench) in this environment. Without options,
    compile it for this machine's CPU and GPU, once, and cache it; a build chosen with --llama-cpp stays in use. A
    prebuilt llama.cpp must be of the release that oallama works with. OALLAMA_BACKEND and CMAKE_ARGS choose what is
    compiled.
    """
    from oallama.core.units import format_seconds
    from oallama.setup.console import Console, guarded, lock
    from oallama.setup.gpu import asked_backend
    from oallama.setup.install import Installer

    env, start_s = {"PATH": os.defpath, **os.environ}, time.monotonic()
    console = Console(sys.stderr, cache_folder(env) / "setup.log")
    installer = Installer(console, Path(sys.prefix), env, asked_backend(env))
    if sha256 is not None and llama_cpp is None:
        raise UsageError("--sha256 needs --llama-cpp; name the archive")
    if programs:
        emit(str(installer.libraries()))
        return

    def job() -> int:
        with lock(cache_folder(env) / "install.lock", console):
            console.open_log()
            installed = installer.run(llama_cpp, sha256, refresh)
            for note in installed.notes:
                console.say(f"  note: {note}")
            console.say(f"llama.cpp: {installed.backend}, {', '.join(installed.layouts)} "
                        f"({format_seconds(time.monotonic() - start_s)})")  # fmt: skip
        return 0

    context.exit(guarded(console, "set-up", job))
