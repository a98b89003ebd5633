"""A chat: conversations, what is typed and what is said to it, with a model that says what it is told to say."""

import io
import json
from types import SimpleNamespace

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from oallama.cli.chat.commands import COMMANDS, PipedLines, is_command, message_of
from oallama.cli.chat.loop import HOW_TO_LEAVE, converse
from oallama.cli.chat.session import ChatSession
from oallama.cli.chat.settings import MEANINGS, ChatSettings
from oallama.cli.chat.terminal import Commands
from oallama.cli.placement_options import keep_block_times
from oallama.core.errors import DeviceError, UsageError
from oallama.core.types import Predicted
from oallama.run.answer import Generation, Stream
from oallama.run.conversation import Conversation, Message, fewest_dropped

# ---- what was said


def talk(n, system=None):
    made = Conversation(system)
    for i in range(n):
        made = made.with_message("user", f"q{i}").with_message("assistant", f"a{i}")
    return made


def contents(conversation):
    return [each.content for each in conversation.messages]


def test_a_template_gets_the_system_prompt_first_and_a_text_blanks_only_where_the_user_adds_words():
    assert talk(1, "be brief").for_template() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "q0"},
        {"role": "assistant", "content": "a0"},
    ]
    assert [each["role"] for each in talk(1).for_template()] == ["user", "assistant"]
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
        ("", "not a valid conversation"),
        ("[" * 100_000, "not a valid conversation"),
        ("3", 'needs a list "messages"'),
        ('{"messages": {}}', 'needs a list "messages"'),
        ('{"format": "oallama conversation", "version": 2, "messages": []}', "version 2; this oallama reads 1"),
        ('["hi"]', "message 1 must be an object"),
        ('[{"role": "tool", "content": ""}]', "message 1 has role 'tool'"),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', "message 2 must have text as content"),
        ('[{"role": "user", "content": "\\ud800"}]', "message 1 must have text as content"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]', "message 2 is a system prompt"),
    ],
)
def test_what_is_no_conversation_is_refused_in_a_sentence(text, said):
    with pytest.raises(UsageError, match=said) as refused:
        Conversation.from_json(text)
    assert len(str(refused.value).splitlines()) == 1


def test_turns_begin_with_the_user():
    greeted = Conversation("s", (Message("assistant", "hello"), *talk(3).messages, Message("assistant", "more")))
    assert greeted.n_turns == 3
    assert greeted.without_oldest(0) == greeted
    assert contents(greeted.without_oldest(1)) == ["q1", "a1", "q2", "a2", "more"]
    assert greeted.without_oldest(1).system == "s"
    assert contents(greeted.without_last()) == ["hello", "q0", "a0", "q1", "a1"]
    assert greeted.last_question.content == "q2"
    assert greeted.without_messages() == Conversation("s")


@pytest.mark.parametrize("n", [1, 2, 8, 13])
def test_as_few_of_the_oldest_are_dropped_as_must_be(n):
    made = talk(n).with_message("user", "last")
    for room in range(1, n + 2):  # turns that fit
        assert fewest_dropped(made, lambda shorter, room=room: shorter.n_turns <= room) == n + 1 - room
    assert fewest_dropped(made, lambda shorter: False) is None


# ---- a session


class Engine:
    """A token is a character. Answers are given out one after the other: a text, (text, why it ended), or its pieces;
    an exception among the pieces is raised."""

    def __init__(self, *answers, n_ctx=4096):
        self.plan = SimpleNamespace(predicted=Predicted(ttft_s=1, tpot_s=0.05, total_s=2), operators=())
        self.answers, self.n_ctx, self.asked, self.drawn = list(answers), n_ctx, [], []

    def tokenize(self, text, add_special=True):
        return [ord(character) for character in text]

    def prompt_tokens(self, messages):
        return len(rendered(messages))

    def stream(self, text, max_tokens, *, reuse, on_progress, **drawn):
        assert reuse
        return Stream(self._pieces(text, drawn))

    def chat(self, messages, stream, max_tokens, *, on_progress, on_reasoning, **drawn):
        assert stream
        return Stream(self._pieces(rendered(messages), drawn))

    def _pieces(self, text, drawn):
        self.asked.append(text)
        self.drawn.append(drawn)
        answer, end = self.answers.pop(0) if self.answers else "ok", "model"
        if isinstance(answer, tuple):
            answer, end = answer
        for piece in answer if isinstance(answer, list) else [answer]:
            if not isinstance(piece, str):
                raise piece("the device was lost; run again")
            yield piece
        return Generation("", (), len(text), 3, 0.5, 0.1, end, 2)


def rendered(messages):
    """As a template writes them."""
    return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>"


@pytest.fixture
def chat():
    """(session, say) on an engine with these answers."""

    def made(*answers, chats=True, system=None, n_ctx=4096):
        placer = SimpleNamespace(
            model=SimpleNamespace(name="tiny"),
            device=SimpleNamespace(is_emulated=True),
            token_seconds=lambda plan, depth: 0.05 + 1e-3 * depth,
        )
        session = ChatSession(placer, Engine(*answers, n_ctx=n_ctx), chats, Conversation(system), ChatSettings())

        def say(*messages, interactive=True):
            left = iter(messages)

            def read():
                message = next(left, None)
                if message is KeyboardInterrupt:
                    raise message
                return message

            converse(session, SimpleNamespace(read=read, interactive=interactive))

        return session, say

    return made


def test_without_a_template_it_is_one_text_that_enter_continues(chat, capsys):
    session, say = chat((" upon", "limit"), (" a time", "limit"), (" end.", "model"), " new", chats=False)
    say("", "Once", "", "The", "", "Another")
    assert session.engine.asked == ["Once", "Once upon", "Once upon a time The", "Another"]
    said = capsys.readouterr().err
    assert said.count("the model ended this text") == 2
    assert "no text to continue" not in said
    with pytest.raises(UsageError, match="no text to continue"):
        session.go_on()
    say("/set system be brief")
    assert "no chat template" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(chat, capsys):
    session, say = chat(["on", "e", KeyboardInterrupt], [KeyboardInterrupt], "two")
    say("a", KeyboardInterrupt, "taken back", "b")
    assert contents(session.conversation) == ["a", "one", "b", "two"]
    shown = capsys.readouterr()
    assert shown.out == "one\n\ntwo\n"
    assert shown.err.splitlines() == ["stopped", HOW_TO_LEAVE, "stopped"]


@pytest.mark.parametrize(
    ("stopped", "interactive"), [(KeyboardInterrupt, False), (DeviceError, False), (DeviceError, True)]
)
def test_a_lost_device_ends_it_and_in_a_pipe_ctrl_c(stopped, interactive, chat):
    _, say = chat([stopped])
    with pytest.raises(stopped):
        say("a", interactive=interactive)


def test_the_oldest_turns_are_dropped_but_saved(chat, capsys, tmp_path):
    session, say = chat(*["x" * 60] * 9, system="S" * 20, n_ctx=400)
    say(*(f"q{i}" for i in range(9)))
    assert all(asked.startswith("<system>" + "S" * 20) for asked in session.engine.asked)
    assert all(len(asked) <= 400 for asked in session.engine.asked)
    assert "q0" not in session.engine.asked[-1] and "q7" in session.engine.asked[-1]
    said = capsys.readouterr().err.splitlines()
    assert 1 <= len(said) < 6  # not with every message
    assert all("the context of 400 tokens is full" in line and "after the system prompt" in line for line in said)
    say(f"/save {tmp_path / 'all.json'}")
    assert "q0" in (tmp_path / "all.json").read_text()
    say(*["/undo"] * 8, "short")
    assert contents(session.conversation)[-2:] == ["short", "ok"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/sav x", "unknown command /sav; did you mean /save?"), ("/xyzzy", "unknown command /xyzzy; /? lists them"),
        ("/load", "/load needs the name of a file"), ("/save", "/save needs the name of a file"),
        ("/load none", "cannot read"), ("/load bad.json", "not a valid conversation"), ("/load bytes", "not UTF-8"),
        ("/save no/folder/x", "cannot write"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set temperature hot", "temperature: 'hot' is not a valid float"), ("/set temperature -1", "use 0 (greedy)"),
        ("/set top_k 1.5", "top_k: '1.5' is not a whole number"), ("/set top_p 2", "must be a probability"),
        ("/set n -2", "'-2' is not a whole number from -1"), ("/set n", "n_gen: '' is not"),
        ("/set seed x", "not a seed"), ("/set form xml", "unknown setting form"),
        ("/set json_schema {", "not valid JSON"),
        ("/set verbose maybe", "'maybe' is not a valid boolean"), ('/set stop "\\ud800"', "half a character"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_a_sentence_and_changes_nothing(chat, tmp_path, monkeypatch, capsys, typed, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bytes").write_bytes(b"\xff")
    session, say = chat("one")
    say("a", typed)
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert contents(session.conversation) == ["a", "one"] and session.settings == ChatSettings()


def test_what_is_no_command_goes_to_the_model(chat):
    session, say = chat()
    say("/etc/hosts is a file", " /bye")
    assert contents(session.conversation)[::2] == ["/etc/hosts is a file", " /bye"]
    assert is_command("/") and is_command("/?") and not is_command("/usr/bin") and not is_command("a /bye")


def test_every_command_is_in_the_help_and_bye_leaves(chat, capsys):
    session, say = chat()
    say("/?", "/set")
    said = capsys.readouterr().err
    assert all(name in said for name in (*COMMANDS, *MEANINGS, '"""', "Ctrl-C"))
    for name in ("/bye", "/exit", "/quit"):
        say(name, "not asked")
    assert not session.engine.asked


def test_retry_draws_anew_undo_takes_back_clear_forgets(chat, capsys):
    session, say = chat("one", "two", "three", "four", system="s")
    say("a", "/retry", "/retry")
    assert contents(session.conversation) == ["a", "three"]
    assert [drawn["seed"] for drawn in session.engine.drawn] == [0, 1, 2]
    assert len(set(session.engine.asked)) == 1
    say("b", "/undo")
    assert contents(session.conversation) == ["a", "three"]
    assert session.engine.drawn[-1]["seed"] == 0
    say("/clear", "/retry")
    assert session.conversation == Conversation("s") and "empty" in capsys.readouterr().err


def test_what_is_set_reaches_the_engine(chat, capsys):
    session, say = chat()
    say("/set temperature 0", "/set seed 7", '/set stop "\\n"', "/set stop END", "/set n 5", "hello")
    (drawn,) = session.engine.drawn
    assert (drawn["temperature"], drawn["seed"], drawn["stop"]) == (0, 7, ("\n", "END"))
    say("/set json_schema {}", "x", "/set json_schema none", "y")
    say("/set json_schema {}", '/set grammar root ::= "a"', "z")
    say("/set grammar none", "/set stop none", "w")
    grammars = [(drawn["grammar"], drawn["json_schema"]) for drawn in session.engine.drawn[1:]]
    assert grammars == [(None, "{}"), (None, None), ('root ::= "a"', None), (None, None)]
    assert session.engine.drawn[-1]["stop"] == ()
    say('/set system """be\nbrief"""', "v")
    assert session.engine.asked[-1].startswith("<system>be\nbrief<user>hello")
    say("/set system none", "/set")
    assert session.conversation.system is None
    assert "temperature     0 " in capsys.readouterr().err


def test_verbose_shows_the_rate_beside_the_predicted_one(chat, capsys):
    session, say = chat("one", "two")
    say("a")
    assert capsys.readouterr().err == ""
    say("/set verbose", "b", "/set verbose off", "c")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[1].endswith("tokens (2 cached), 0.50 s · answer 3 tokens, 10.0 tokens/s (11.1 predicted)")
    session.engine.plan.predicted = None
    assert session.figures(session.last).endswith("answer 3 tokens, 10.0 tokens/s")


def test_why_an_answer_ended_is_said(chat, capsys):
    _, say = chat(("one", "context"), ("two", "limit"), ("three", "model"), ("four", "stop"))
    say("/set n 5", "a", "b", "c", "d")
    assert capsys.readouterr().err.splitlines() == [
        "n: 5",
        "note: the context is full, so the answer ends here; raise -c for longer ones",
        "note: the answer was cut at 5 tokens; /set n changes the limit",
    ]


def test_what_runs_took_is_kept_unless_a_pipe_waits(capsys, monkeypatch):
    def full(*_):
        raise DeviceError("no room")

    engine, kept = SimpleNamespace(plan="plan", runs=lambda: ["run"], drafts=lambda: "drafts"), []
    placer = SimpleNamespace(
        keep_block_times=lambda *seen: kept.append(seen), keep_drafts=lambda *seen: kept.append(seen)
    )
    placer.on_devices_of = lambda plan: placer
    keep_block_times(placer, engine)
    assert kept == []
    monkeypatch.setattr("oallama.cli.placement_options.is_interactive", lambda: True)
    keep_block_times(placer, engine)
    assert kept == [("plan", ["run"]), ("plan", "drafts")]
    placer.keep_block_times = full
    keep_block_times(placer, engine)
    assert "this run's times were not saved: no room" in capsys.readouterr().err


# ---- what is typed


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("/s", ["/set", "/show", "/save"]), ("/set te", ["temperature"]), ("/show p", []),
        ("/set temperature 0", []), ("hello /s", []), ("/bye ", []), ("/load FOLDER/tal", ["k.json"]),
    ],
)  # fmt: skip
def test_commands_settings_and_files_are_completed(typed, offered, tmp_path):
    (tmp_path / "talk.json").write_text("")
    text = typed.replace("FOLDER", str(tmp_path))
    found = Commands().get_completions(Document(text, len(text)), CompleteEvent())
    assert [completion.text for completion in found] == offered


@pytest.mark.parametrize(
    ("typed", "message", "at_end"),
    [
        ("hello", "hello", "hello"),
        ("", "", ""),
        ("two\nlines", "two\nlines", "two\nlines"),  # pasted
        ('"""one line"""', "one line", "one line"),
        ('"""\nfirst\nsecond\n"""', "first\nsecond", "first\nsecond"),
        ('  """first\nsecond"""  ', "first\nsecond", "first\nsecond"),
        ('"""first\nsecond', None, "first\nsecond"),
        ('"""', None, ""),
        ('""""""', "", ""),
        ("first\\", None, "first"),
        ("first\\\nsecond", "first\nsecond", "first\nsecond"),
        ("first\\\nsecond\\", None, "first\nsecond"),
        ('not at the """ beginning', 'not at the """ beginning', 'not at the """ beginning'),
        ('/set system """a\nb', None, '/set system """a\nb'),
        ('/set system """a\nb"""', '/set system """a\nb"""', '/set system """a\nb"""'),
    ],
)
def test_lines_of_a_message_and_at_the_end_of_the_input_nothing_is_waited_for(typed, message, at_end):
    assert (message_of(typed), message_of(typed, at_end=True)) == (message, at_end)


def test_a_pipe_is_read_line_by_line():
    lines = PipedLines(io.StringIO('one\n\n"""two\nthree"""\nfour\\\nfive\n"""six'))
    assert [lines.read() for _ in range(7)] == ["one", "", "two\nthree", "four\nfive", "six", None, None]
    for errors in ("strict", "surrogateescape"):
        with pytest.raises(UsageError, match="not UTF-8"):
            PipedLines(io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "utf-8", errors)).read()
