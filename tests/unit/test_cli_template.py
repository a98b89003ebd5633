"""Whether a run chats or continues, and what the engine is given then."""

import pytest
from gguf_factory.write import write_gguf

from oallama.core.errors import ModelFileError, UsageError
from oallama.run.template import prompt_of, template_of
from oallama.stores.default_model import FILE

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<answer>' if add_generation_prompt }}"


class Recorder:
    """Stands for the engine's tokenizer: what it was asked comes back in place of tokens."""

    def tokenize(self, text, add_special=True):
        return [text, add_special]


def asked(path, chat):
    return prompt_of(str(path), "hi", chat).tokens(Recorder())


@pytest.fixture
def chatty(tmp_path):
    return write_gguf(tmp_path / "chatty.gguf", "llama", chat_template=TEMPLATE)


def test_a_model_with_a_template_chats_unless_told_not_to(chatty):
    assert asked(chatty, None) == asked(chatty, True) == ["<user>hi<answer>", True]
    assert asked(chatty, False) == ["hi", True]


def test_a_model_without_a_template_continues_and_cannot_chat(tmp_path):
    plain = write_gguf(tmp_path / "plain.gguf", "llama")
    assert asked(plain, None) == asked(plain, False) == ["hi", True]
    with pytest.raises(UsageError, match="no chat template; use --no-chat"):
        asked(plain, True)


def test_the_default_model_tells_stories_unless_asked_to_chat(tmp_path):
    path = write_gguf(tmp_path / FILE, "llama", chat_template=TEMPLATE)
    assert asked(path, None) == ["hi", True]
    assert asked(path, True) == ["<user>hi<answer>", True]


def test_a_system_message_comes_first_and_needs_a_template(chatty, tmp_path):
    def told(path, chat):
        return prompt_of(str(path), "hi", chat, "be brief").tokens(Recorder())

    assert told(chatty, None) == told(chatty, True) == ["<system>be brief<user>hi<answer>", True]
    ours = write_gguf(tmp_path / FILE, "llama", chat_template=TEMPLATE)
    assert told(ours, None) == ["<system>be brief<user>hi<answer>", True]
    with pytest.raises(UsageError, match="does not go with --no-chat"):
        told(chatty, False)
    with pytest.raises(UsageError, match="no chat template"):
        told(write_gguf(tmp_path / "plain.gguf", "llama"), None)


def test_the_begin_token_is_not_added_to_a_template_that_writes_it(tmp_path):
    path = write_gguf(
        tmp_path / "bos.gguf",
        "llama",
        chat_template="{{ bos_token }}" + TEMPLATE,
        metadata={"tokenizer.ggml.bos_token_id": 7},
    )
    template, bos, _ = template_of(str(path))
    assert template.startswith("{{ bos_token }}")
    assert bos
    assert asked(path, True) == [f"{bos}<user>hi<answer>", False]


def test_a_template_that_cannot_be_used_names_the_way_around(tmp_path):
    path = write_gguf(tmp_path / "bad.gguf", "llama", chat_template="{{ messages.append(1) }}")
    with pytest.raises(ModelFileError, match="use --no-chat"):
        asked(path, None)
