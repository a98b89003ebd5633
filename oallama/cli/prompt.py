"""The arguments of `oallama run`: MODEL, PROMPT, and a prompt from stdin or a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from oallama.cli.model_file import is_file, looks_like_model, unknown_model
from oallama.cli.output import is_terminal
from oallama.core.errors import UsageError
from oallama.core.files import read_text
from oallama.core.text import is_text
from oallama.stores.hub_name import names_the_hub

MAX_PROMPT_BYTES = 64 * 1024 * 1024


def model_and_prompt(words: Sequence[str], model: str | None, prompt: str | None) -> tuple[str | None, str | None]:
    """Return (MODEL, PROMPT) from the positional arguments, -m and -p; None if not given.

    A single word is the model if it names one, else the prompt. With -m every word is the prompt; of two words the
    first is the model. Raises UsageError for a single word that looks like a missing model, as the built-in model
    would continue it.
    """
    if len(words) > 2 or (len(words) == 2 and model is not None):
        raise UsageError(
            f"{len(words)} arguments, but only MODEL and PROMPT are expected; quote a prompt of several words"
        )
    if len(words) == 2 and not is_model(words[0]):
        raise UsageError(f"{unknown_model(words[0])}; quote a prompt of several words")
    rest = list(words)
    if model is None and rest and is_model(rest[0]):
        model = rest.pop(0)
    if model is None and rest and looks_like_model(rest[0]):
        raise UsageError(f"{unknown_model(rest[0])}; if it is a prompt, use -p")
    if rest and prompt is not None:
        raise UsageError("the prompt is given twice: as an argument and with -p")
    return model, rest[0] if rest else prompt


def is_model(word: str) -> bool:
    """Whether a word names a model: a file, a name that ends in .gguf, a name of the hub (hf.co/…), or a downloaded
    model. Raises ModelFileError for an unusable downloaded model."""
    if is_file(word) or names_the_hub(word):
        return True
    from oallama.stores.find import find_model

    return find_model(word) is not None


def read_prompt(prompt: str | None, stdin: TextIO | None = None, of_file: bool = False) -> str:
    """Return the prompt: stdin, if it is a pipe or file, then the given prompt, with a blank between them, as in
    ollama. `-` means stdin alone; of_file: the prompt is from a file, and stdin is not read.

    Raises UsageError for a missing or empty prompt.
    """
    source = sys.stdin if stdin is None else stdin
    if prompt is None and is_terminal(source):
        raise UsageError('no prompt: give PROMPT or -p PROMPT, or pipe it in, e.g. oallama run "Once upon a time"')
    if prompt is None or (prompt == "-" and not of_file):
        prompt = _read(source).removesuffix("\n")
    elif not of_file and source is not None and not source.isatty():
        prompt = " ".join(filter(None, (_read(source), prompt)))
    if not prompt:
        raise UsageError("the prompt is empty; give PROMPT or -p PROMPT, or pipe it in")
    if not is_text(prompt):
        raise UsageError("the prompt is not UTF-8 text; convert it, e.g. with iconv")
    return prompt


def _read(stdin: TextIO | None) -> str:
    if stdin is None:
        return ""
    try:
        text = stdin.read(MAX_PROMPT_BYTES + 1)
    except UnicodeDecodeError:
        raise UsageError("the prompt on stdin is not UTF-8 text") from None
    if len(text) > MAX_PROMPT_BYTES:
        raise UsageError(f"the prompt on stdin is longer than {MAX_PROMPT_BYTES} characters")
    return text


def text_of_file(path: str, what: str) -> str:
    """Read a file of UTF-8 text. what: names it in errors. Raises UsageError."""
    try:
        return read_text(path)
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the {what} in {path} is not UTF-8 text") from None
