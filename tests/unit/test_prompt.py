"""Prompts: whether a run chats or continues, and how many tokens are planned for."""

import pytest
from gguf_factory import write_gguf

from oallama.core.errors import UsageError
from oallama.model.gguf_reader import read_gguf
from oallama.model.hyperparameters import model_info
from oallama.run.prompt import Prompt, likely_tokens, prompt_for
from oallama.stores.default_model import FILE

ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<answer>' if add_generation_prompt }}"
CHATS = Prompt("hi", chats=True, ends=True)


@pytest.mark.parametrize(
    ("file", "template", "chat", "system", "prompt"),
    [
        ("chatty.gguf", ROLES, None, None, CHATS),
        ("chatty.gguf", ROLES, True, None, CHATS),
        ("chatty.gguf", ROLES, False, None, Prompt("hi")),
        ("plain.gguf", None, None, None, Prompt("hi")),
        ("plain.gguf", None, False, None, Prompt("hi")),
        (FILE, ROLES, None, None, Prompt("hi", ends=True)),  # it tells stories
        (FILE, ROLES, True, None, CHATS),
        ("chatty.gguf", ROLES, None, "be brief", Prompt("hi", True, True, "be brief")),
        (FILE, ROLES, None, "be brief", Prompt("hi", True, True, "be brief")),
        ("plain.gguf", None, True, None, "no chat template; use --no-chat"),
        ("plain.gguf", None, None, "be brief", "no chat template"),
        ("chatty.gguf", ROLES, False, "be brief", "cannot be combined with --no-chat"),
    ],
)
def test_a_model_with_a_template_chats_unless_told_not_to(tmp_path, file, template, chat, system, prompt):
    model = model_info(read_gguf(write_gguf(tmp_path / file, "llama", chat_template=template)))
    assert model.chat_template == template
    if isinstance(prompt, Prompt):
        assert prompt_for(model, "hi", chat, system) == prompt
    else:
        with pytest.raises(UsageError, match=prompt):
            prompt_for(model, "hi", chat, system)


class Asked:
    """An engine that notes what is asked of it."""

    def __getattr__(self, name):
        return lambda *given, **more: (name, *given)


def test_it_is_asked_as_messages_or_continued():
    prompt = Prompt("hi", True, True, "be brief")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert prompt.generate(Asked(), None) == ("chat", messages, False, -1)
    assert prompt.stream(Asked(), 5, None, None) == ("chat", messages, True, 5)
    assert Prompt("hi").generate(Asked(), None) == ("generate", "hi", 128)
    assert Prompt("hi", ends=True).stream(Asked(), None, None, None) == ("stream", "hi", -1)


def test_tokens_are_counted_only_where_the_length_alone_does_not_tell(tmp_path):
    path = str(write_gguf(tmp_path / "model.gguf", "llama"))
    assert likely_tokens("no model is read", Prompt("x" * 400), None, 100) == 101
    assert likely_tokens("no model is read", Prompt("x" * 400), 512) == 101
    long = "once upon a time " * 400
    counted = likely_tokens(path, Prompt(long))
    assert len(long) // 8 < counted <= len(long) + 2
    assert likely_tokens(path, Prompt(long, chats=True, system="be brief")) > counted
    with pytest.raises(UsageError, match=rf"has {counted} tokens but the context holds 512"):
        likely_tokens(path, Prompt(long), 512)
