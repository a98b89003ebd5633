"""`oallama profile`: time a model's mul-mats on this machine."""

from __future__ import annotations

import json

import click

from oallama.cli.help import Command, option
from oallama.cli.options import device_option, gathered, json_option, model_argument, threads_option
from oallama.cli.output import busy, emit_json, log, show, write_file
from oallama.cli.records import counts
from oallama.core.codec import to_json
from oallama.core.options import Options


@click.command("profile", cls=Command)
@model_argument
@gathered(device_option, threads_option)
@option(
    "--tokens",
    type=counts(1, 65536),
    default="1,32,512",
    show_default=True,
    metavar="LIST",
    advanced=True,
    help="Batch sizes to time, in tokens; 1 is decode. 2, 3, 4, 5 and 8 are always added between these.",
)
@option("--refresh", is_flag=True, help="Measure again, ignoring the cache.")
@option(
    "--export", "export", type=click.Path(), metavar="FILE",
    help="Also write the profile without personal data.\f It has no names, paths or addresses, so you can share it.",
)  # fmt: skip
@json_option
def command(
    model: str,
    options: Options,
    tokens: tuple[int, ...],
    refresh: bool,
    export: str | None,
    as_json: bool,
) -> None:
    """Time each distinct matrix multiplication of the model on the CPU and on the device, and the link between them.
    Takes a minute or two; the result is cached. Close other programs meanwhile.

    \f
    The CPU is timed in each weight layout. After an interruption it continues where it stopped.
    """
    from oallama.placer import Placer
    from oallama.profile.export import exported
    from oallama.report.profile import profile_tables
    from oallama.report.text import printable

    placer = Placer.of_file(model, options)
    if export is not None:
        placer.check_one_device("--export")
    with busy("timing this machine"):  # where there is no bar: behind another process that does
        profiles = [each.profile(True, refresh, sorted(tokens)) for each in placer.members or (placer,)]
    if export is not None:
        write_file(export, json.dumps(exported(profiles[0]), indent=1) + "\n")
        log(f"wrote {printable(export, 500)}: read it before you send it")
    if as_json:
        documents = [to_json(profile) for profile in profiles]
        emit_json(documents if placer.members else documents[0])
        return
    for profile in profiles:
        show(profile_tables(profile))
        for warning in profile.warnings:
            log(f"warning: {printable(warning, 500)}")
