"""What was said, as JSON and back, as a template and as a text take it, and shorter."""

import json

import pytest

from oallama.core.errors import UsageError
from oallama.run.conversation import Conversation, Message, fewest_dropped


def talk(n, system=None):
    made = Conversation(system)
    for i in range(n):
        made = made.with_message("user", f"q{i}").with_message("assistant", f"a{i}")
    return made


def contents(conversation):
    return [each.content for each in conversation.messages]


def test_a_template_gets_the_system_prompt_first():
    assert talk(1, "be brief").for_template() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "q0"},
        {"role": "assistant", "content": "a0"},
    ]
    assert [each["role"] for each in talk(1).for_template()] == ["user", "assistant"]


def test_a_text_has_blanks_only_where_the_user_adds_words():
    text = Conversation().with_message("user", "Once").with_message("assistant", " upon a time.")
    assert text.with_message("user", "Then").as_text() == "Once upon a time. Then"
    assert text.with_message("user", "\nThen").as_text() == "Once upon a time.\nThen"
    assert text.with_message("assistant", " And").as_text() == "Once upon a time. And"
    assert Conversation().as_text() == ""


@pytest.mark.parametrize("system", [None, 'be brief\nand "kind" \u20ac'])
def test_json_goes_there_and_back(system):
    made = talk(3, system).with_message("user", "three\nlines\n\N{GRINNING FACE}")
    document = json.loads(made.to_json("tiny"))
    assert (document["version"], document["model"]) == (1, "tiny")
    assert Conversation.from_json(made.to_json("tiny")) == made
    assert Conversation.from_json(json.dumps(document["messages"])) == made  # as other programs write them
    assert made.to_json().isascii()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("3", 'needs a list "messages"'),
        ('{"messages": {}}', 'needs a list "messages"'),
        ('{"format": "oallama conversation", "version": 2, "messages": []}', "version 2; this oallama reads 1"),
        ('["hi"]', "message 1 is no object"),
        ('[{"role": "tool", "content": ""}]', "message 1 has the role 'tool'"),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', "message 2 has no content"),
        ('[{"role": "user", "content": "\\ud800"}]', "message 1 has no content"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]', "message 2 is a system prompt"),
    ],
)
def test_what_is_no_conversation_is_refused_in_a_sentence(text, said):
    with pytest.raises(UsageError, match=said) as refused:
        Conversation.from_json(text)
    assert len(str(refused.value).splitlines()) == 1


def test_exchanges_begin_with_the_user():
    greeted = Conversation("s", (Message("assistant", "hello"), *talk(3).messages, Message("assistant", "more")))
    assert greeted.n_exchanges == 3
    assert greeted.without_oldest(0) == greeted
    assert contents(greeted.without_oldest(1)) == ["q1", "a1", "q2", "a2", "more"]
    assert greeted.without_oldest(1).system == "s"
    assert contents(greeted.without_last()) == ["hello", "q0", "a0", "q1", "a1"]
    assert greeted.last_question == "q2"
    assert greeted.without_messages() == Conversation("s")


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13])
def test_as_few_of_the_oldest_are_dropped_as_must_be(n):
    made = talk(n).with_message("user", "last")
    for room in range(1, n + 2):  # exchanges that fit
        assert fewest_dropped(made, lambda shorter, room=room: shorter.n_exchanges <= room) == n + 1 - room
