"""MODEL of the command line as the path of a GGUF: a file, a model that was downloaded, or one of the hub."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

from oallama.cli.output import talk
from oallama.core.errors import UsageError
from oallama.core.units import format_bytes
from oallama.stores.hub_name import HubName, names_the_hub, parse_hub_name

if TYPE_CHECKING:
    from oallama.stores.stored import StoredModel


def is_file(word: str) -> bool:
    """Whether a word names a file, or a GGUF file that need not be there."""
    return word.endswith(".gguf") or os.path.isfile(word)  # noqa: PTH113 - Path.is_file raises where a name is too long


def model_file(model: str) -> str:
    """The path of MODEL. A name means a downloaded model before one of the hub, which is then downloaded; either is
    said. Raises UsageError for what is neither a file nor a name of one, ModelFileError, DownloadError."""
    if is_file(model) or os.path.exists(model):  # noqa: PTH110 - as in is_file
        return model
    from oallama.stores.find import find_model

    found = find_model(model)
    if found is not None:
        talk(f"note: {model} is {found.name} of {found.store}: {found.path}")
        return str(found.path)
    if names_the_hub(model):
        return str(pulled(hub_name(model)).path)
    from oallama.cli.near_models import near_text

    raise UsageError(f"{model}: there is no such file, nor a downloaded model of that name; {near_text(model)}")


def pulled(name: HubName) -> StoredModel:
    """A model of the hub, downloaded where it is not yet."""
    from oallama.stores.hub import download, look_up

    wanted = look_up(name)
    files = f", {len(wanted.sizes)} files" if len(wanted.sizes) > 1 else ""
    talk(f"{wanted.name}: {format_bytes(wanted.n_bytes)}{files}")
    return download(wanted)


def hub_name(text: str) -> HubName:
    """Of USER/REPO[:QUANT]. Raises UsageError."""
    try:
        return parse_hub_name(text)
    except ValueError as error:
        raise UsageError(str(error)) from None
