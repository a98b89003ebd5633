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

    found, faults = described(*stored_models())
    if as_json:
        emit_json(models_document(found, faults))
        return
    if found:
        show([models_table(found)])
    for fault in faults:
        log(f"warning: {printable(fault.why, 500)}")
    if not found:
        log("no models downloaded; `oallama pull USER/REPO` downloads one from Hugging Face")
