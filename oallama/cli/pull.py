"""`oallama pull`: a model of the Hugging Face hub."""

from __future__ import annotations

import click

from oallama.cli.help import Command
from oallama.cli.model_file import hub_name, pulled, unknown_model
from oallama.cli.options import json_option
from oallama.cli.output import emit, emit_json
from oallama.core.errors import UsageError


@click.command("pull", cls=Command)
@click.argument("name", metavar="USER/REPO[:QUANT]")
@json_option
def command(name: str, as_json: bool) -> None:
    """Download a model from the Hugging Face hub, and print the path of its GGUF.

    \b
      oallama pull ggml-org/gemma-3-4b-it-GGUF
      oallama run -hf ggml-org/gemma-3-4b-it-GGUF "Why is the sky blue?"

    The file goes to Hugging Face's cache, which other programs share; a cached file is not downloaded again. QUANT is
    the quantisation, such as Q4_K_M or Q8_0, in any case. The default is llama.cpp's choice: Q4_K_M, else Q8_0, else
    the first file. All parts of a split model are downloaded, but no vision projector (mmproj).
    """
    from oallama.stores.find import find_model

    stored = pulled(hub_name(name)) if "/" in name else find_model(name)
    if stored is None:
        raise UsageError(unknown_model(name))
    if as_json:
        emit_json({"name": stored.name, "path": str(stored.path), "files": [str(file) for file in stored.files]})
    else:
        emit(str(stored.path))
