"""`oallama inspect`: a model's header and operators, without loading it."""

from __future__ import annotations

import click

from oallama.cli.help import Command, option
from oallama.cli.options import json_option, model_argument
from oallama.cli.output import emit, emit_json, show


@click.command("inspect", cls=Command)
@model_argument
@option("--all", "every_row", is_flag=True, help="Print one line per operator instead of one per role.")
@json_option
def command(model: str, every_row: bool, as_json: bool) -> None:
    """Show a model's header and operators: each weight that a matrix multiplication of the graph reads.

    Reads only metadata: no weight is loaded, and no native code reads the file.
    """
    from oallama.placer import Placer
    from oallama.report.inspect import inspect_document, model_lines, operator_table

    placer = Placer.load(model, device="none")
    if as_json:
        emit_json(inspect_document(placer.model, placer.operators))
        return
    emit("\n".join(model_lines(placer.model)) + "\n")
    show([operator_table(placer.operators, every_row)])
