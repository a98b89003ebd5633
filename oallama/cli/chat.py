"""Whether `oallama run` chats or continues, and the tokens it then starts from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oallama.cli.default_model import FILE
from oallama.core.errors import UsageError

if TYPE_CHECKING:
    from oallama.core.types import ModelInfo
    from oallama.run.engine import Engine


def prompt_tokens(engine: Engine, model: ModelInfo, prompt: str, chat: bool | None) -> list[int]:
    """Token numbers of the prompt, in the model's chat template if `chat` (None: if it has one and is not ours).

    Raises UsageError for --chat without a template.
    """
    template = engine.chat_template
    if chat is None:
        chat = template is not None and Path(model.path).name != FILE
    if not chat:
        return engine.tokenize(prompt)
    if template is None:
        raise UsageError("this model has no chat template; use --no-chat to continue the prompt as it is")
    return engine.chat_tokens([{"role": "user", "content": prompt}])
