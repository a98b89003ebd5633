"""`oallama list`: list downloaded models."""

from __future__ import annotations

import click

from oallama.cli.help import Command
from oallama.cli.options import json_option
from oallama.cli.output import emit_json, log, show


@click.command("list", cls=Command)
@json_option
def command(as_json: bool) -> None:
    """List the GGUF models that huggingface_hub (`oallama pull`), llama.cpp and ollama have downloaded. Use any of
    these names as MODEL. Their folders are only read.
    """
    from oallama.report.inspect import models_document, models_table
    from oallama.report.text import printable
    from oallama.stores.find import stored_models
    from oallama.stores.stored import described

    models, faults = described(*stored_models())
    if as_json:
        emit_json(models_document(models, faults))
        return
    if models:
        show([models_table(models)])
    for fault in faults:
        log(f"warning: {printable(fault.why, 500)}")
    if not models:
        log("no models downloaded; `oallama pull USER/REPO` downloads one from Hugging Face")
