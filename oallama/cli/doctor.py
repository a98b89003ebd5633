"""`oallama doctor`: check everything that oallama builds on."""

from __future__ import annotations

from dataclasses import asdict

import click

from oallama.cli.help import Command
from oallama.cli.options import json_option
from oallama.cli.output import emit, emit_json, styled


@click.command("doctor", cls=Command)
@json_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Check the installation: versions, native libraries, devices, the CPU's weight layouts, test runs on the CPU and
    with the split back end, and the cache. Prints a remedy for each failure, and then exits with 1.
    """
    from oallama.cli.checks import outcomes
    from oallama.report.text import printable

    done = []
    for outcome in outcomes():
        done.append(outcome)
        if as_json:
            continue
        state = styled("ok    ", fg="green") if outcome.ok else styled("failed", fg="red", bold=True)
        emit(f"{state}  {outcome.name:<16}  {printable(outcome.detail, 1000)}")
        if not outcome.ok:
            emit(f"{'':24}  do: {outcome.remedy}")
    failed = sum(not outcome.ok for outcome in done)
    if as_json:
        emit_json({"ok": not failed, "checks": [asdict(outcome) for outcome in done]})
    else:
        emit(f"{failed} of {len(done)} checks failed" if failed else f"all {len(done)} checks passed")
    context.exit(1 if failed else 0)
