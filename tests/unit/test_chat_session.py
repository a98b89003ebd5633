"""Lines, settings, commands and answers of a chat, with a model that says what it is told to say."""

import io
import types

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from oallama.cli.chat.commands import COMMANDS, Leave, PipedLines, is_command, message_of, obey
from oallama.cli.chat.loop import HOW_TO_LEAVE, converse
from oallama.cli.chat.session import ChatSession
from oallama.cli.chat.settings import MEANINGS, ChatSettings, changed
from oallama.cli.chat.terminal import Commands
from oallama.cli.placement import keep_runs
from oallama.core.errors import DeviceError, UsageError
from oallama.core.types import Predicted
from oallama.run.conversation import Conversation
from oallama.run.generate import Generation
from oallama.run.stream import Stream
from oallama.run.template import Template

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class Engine:
    """A token is a character. Answers are given out one after the other; an exception among them is raised."""

    def __init__(self, *answers, n_ctx=4096):
        self.plan = types.SimpleNamespace(predicted=Predicted(ttft_s=1, tpot_s=0.05, total_s=2), operators=())
        self.answers, self.n_ctx, self.asked, self.drawn = list(answers), n_ctx, [], []

    def tokenize(self, text, add_special=True):
        return [ord(character) for character in text]

    def stream(self, tokens, max_tokens, *, reuse, **drawn):
        assert reuse
        return Stream(self._pieces(tokens, drawn))

    def _pieces(self, tokens, drawn):
        self.asked.append("".join(map(chr, tokens)))
        self.drawn.append(drawn)
        answer, end = self.answers.pop(0) if self.answers else "ok", "model"
        if isinstance(answer, tuple):
            answer, end = answer
        for piece in answer if isinstance(answer, list) else [answer]:
            if isinstance(piece, type) and issubclass(piece, BaseException):
                raise piece("the device was lost; run again")
            yield piece
        return Generation("", (), len(tokens), 3, 0.5, 0.1, end, 2)


class TinyPlacer:
    model = types.SimpleNamespace(name="tiny")
    device = types.SimpleNamespace(is_emulated=True)

    def token_seconds(self, plan, depth):
        return 0.05 + 1e-3 * depth


class Typed:
    """Messages that somebody types; an exception among them is raised."""

    def __init__(self, *messages, interactive=True):
        self.messages, self.interactive = list(messages), interactive

    def read(self):
        message = self.messages.pop(0) if self.messages else None
        if message is KeyboardInterrupt:
            raise KeyboardInterrupt
        return message


class Rendered(Template):
    """Without a child process for each."""

    def prompt(self, messages):
        from oallama.run.template import Prompt

        return Prompt("".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>")


@pytest.fixture
def chat():
    """(session, say) on an engine with these answers."""

    def made(*answers, chats=True, system=None, n_ctx=4096):
        template = Rendered(TEMPLATE, "", "") if chats else None
        engine = Engine(*answers, n_ctx=n_ctx)
        session = ChatSession(TinyPlacer(), engine, template, Conversation(system), ChatSettings())
        return session, lambda *messages, **typed: converse(session, Typed(*messages, **typed))

    return made


def contents(session):
    return [each.content for each in session.conversation.messages]


def test_without_a_template_it_is_one_text_that_enter_continues(chat, capsys):
    session, say = chat((" upon", "limit"), (" a time", "limit"), (" end.", "model"), " new", chats=False)
    say("", "Once", "", "The", "", "Another")
    assert session.engine.asked == ["Once", "Once upon", "Once upon a time The", "Another"]
    said = capsys.readouterr().err
    assert said.count("the model has ended this text") == 2
    assert "no text to go on" not in said
    with pytest.raises(UsageError, match="no text to go on"):
        session.go_on()
    with pytest.raises(UsageError, match="no chat template"):
        obey(session, "/set system be brief")


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(chat, capsys):
    session, say = chat(["on", "e", KeyboardInterrupt], "two")
    say("a", KeyboardInterrupt, "b")
    assert contents(session) == ["a", "one", "b", "two"]
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\n"
    assert shown.err.splitlines() == ["stopped", HOW_TO_LEAVE]


def test_ctrl_c_before_the_first_word_takes_the_question_back(chat):
    session, say = chat([KeyboardInterrupt], "two")
    say("a", "b")
    assert contents(session) == ["b", "two"]


@pytest.mark.parametrize(
    ("stopped", "interactive"), [(KeyboardInterrupt, False), (DeviceError, False), (DeviceError, True)]
)
def test_a_lost_device_ends_it_and_in_a_pipe_ctrl_c(stopped, interactive, chat):
    _, say = chat([stopped])
    with pytest.raises(stopped):
        say("a", interactive=interactive)


def test_the_oldest_exchanges_are_dropped_but_saved(chat, capsys, tmp_path):
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
    say("/undo", "/undo", "/undo", "/undo", "/undo", "/undo", "/undo", "/undo", "short")
    assert contents(session)[-2:] == ["short", "ok"]


def test_a_bad_file_is_a_sentence_and_the_conversation_stays(chat, tmp_path, capsys):
    session, say = chat("one")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bytes").write_bytes(b"\xff")
    say("a", "/load", "/save", *(f"/load {tmp_path / name}" for name in ("none", "bad.json", "bytes", "")))
    say(f"/save {tmp_path / 'no folder' / 'x'}")
    assert contents(session) == ["a", "one"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7
    assert "no JSON" in lines[3] and "cannot read" in lines[2] and "cannot write" in lines[6]


def test_commands_that_are_none(chat, capsys):
    session, say = chat()
    say("/sav x", "/xyzzy", "/etc/hosts is a file", " /bye")
    lines = capsys.readouterr().err.splitlines()
    assert "no command /sav; did you mean /save?" in lines[0]
    assert "no command /xyzzy; /? lists them" in lines[1]
    assert contents(session)[::2] == ["/etc/hosts is a file", " /bye"]
    assert is_command("/") and is_command("/?") and not is_command("/usr/bin") and not is_command("a /bye")


def test_every_command_is_in_the_help_and_bye_leaves(chat, capsys):
    session, say = chat()
    say("/?", "/? set", "/? show")
    said = capsys.readouterr().err
    assert all(name in said for name in (*COMMANDS, *MEANINGS, "conversation", '"""', "Ctrl-C"))
    for name in ("/bye", "/exit", "/quit"):
        with pytest.raises(Leave):
            obey(session, name)
        say(name, "not asked")
    assert not session.engine.asked


def test_retry_draws_anew_undo_takes_back_clear_forgets(chat):
    session, say = chat("one", "two", "three", "four", system="s")
    say("a", "/retry", "/retry")
    assert contents(session) == ["a", "three"]
    assert [drawn["seed"] for drawn in session.engine.drawn] == [0, 1, 2]
    assert len(set(session.engine.asked)) == 1
    say("b", "/undo")
    assert contents(session) == ["a", "three"]
    assert session.engine.drawn[-1]["seed"] == 0
    say("/clear")
    assert session.conversation == Conversation("s")
    with pytest.raises(UsageError, match="empty"):
        session.retry()


def test_what_is_set_reaches_the_engine(chat, capsys):
    session, say = chat()
    say("/set temperature 0", "/set parameter seed 7", '/set stop "\\n"', "/set stop END", "/set n 5", "hello")
    drawn = session.engine.drawn[0]
    assert (drawn["temperature"], drawn["seed"], drawn["stop"]) == (0, 7, ("\n", "END"))
    say(
        "/set format json",
        "x",
        "/set noformat",
        "y",
        '/set grammar root ::= "a"',
        "z",
        "/set grammar none",
        "/set stop none",
        "w",
    )
    grammars = [drawn["grammar"] for drawn in session.engine.drawn[1:]]
    assert grammars[0].count("root") and grammars[1:] == [None, 'root ::= "a"', None]
    assert session.engine.drawn[-1]["stop"] == ()
    say('/set system """be\nbrief"""', "v")
    assert session.engine.asked[-1].startswith("<system>be\nbrief<user>hello")
    say("/set system none")
    assert session.conversation.system is None
    say("/set", "/show settings")
    assert capsys.readouterr().err.count("temperature     0 ") == 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", "hot", "temperature is a number, not hot"),
        ("temperature", "-1", "no temperature"),
        ("top_k", "1.5", "top_k is a whole number, not 1.5"),
        ("top_p", "2", "no probability"),
        ("n", "-2", "n is a whole number from -1 on, not -2"),
        ("seed", "x", "not a seed"),
        ("format", "xml", "xml is no format"),
        ("format", "{", "not JSON"),
        ("verbose", "maybe", "on or off"),
        ("n", "", "not empty"),
    ],
)
def test_a_bad_value_changes_nothing(name, value, said):
    with pytest.raises(UsageError, match=said):
        changed(ChatSettings(), name, value)


def test_verbose_shows_the_rate_beside_the_predicted_one(chat, capsys):
    session, say = chat("one", "two")
    say("a")
    assert capsys.readouterr().err == ""
    say("/set verbose", "b", "/set quiet", "/show speeds")
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].endswith("2 known, 3 written · TTFT 500 ms · 10.0 tokens/s (predicted 11.1)")
    assert lines[3] == "last answer: " + lines[1]
    session.engine.plan.predicted = None
    assert "nothing predicted" in session.figures(session.last)


def test_why_an_answer_ended_is_said(chat, capsys):
    _, say = chat(("one", "context"), ("two", "limit"), ("three", "model"), ("four", "stop"))
    say("/set n 5", "a", "b", "c", "d")
    assert capsys.readouterr().err.splitlines() == [
        "n: 5",
        "note: the context is full, so the answer ends here; a larger -c holds more",
        "note: the answer was cut at 5 tokens; /set n changes that",
    ]


def test_what_runs_took_is_kept_unless_a_pipe_waits(capsys, monkeypatch):
    engine = types.SimpleNamespace(plan="plan", take_runs=lambda: ["run"])
    kept = []
    placer = types.SimpleNamespace(keep_runs=lambda plan, runs: kept.append((plan, runs)))
    keep_runs(placer, engine)
    assert kept == []
    monkeypatch.setattr("oallama.cli.placement.somebody_watches", lambda: True)
    keep_runs(placer, engine)
    assert kept == [("plan", ["run"])]
    placer.keep_runs = lambda *_: (_ for _ in ()).throw(DeviceError("no room"))
    keep_runs(placer, engine)
    assert "what this run took is not kept: no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("/s", ["/set", "/show", "/save"]),
        ("/set te", ["temperature"]),
        ("/show p", ["placement"]),
        ("/set temperature 0", []),
        ("hello /s", []),
        ("/bye ", []),
        ("/load FOLDER/tal", ["k.json"]),
    ],
)
def test_commands_settings_and_files_are_completed(typed, offered, tmp_path):
    (tmp_path / "talk.json").write_text("")
    text = typed.replace("FOLDER", str(tmp_path))
    found = Commands().get_completions(Document(text, len(text)), CompleteEvent())
    assert [completion.text for completion in found] == offered


#
# lines of a message
#


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("hello", "hello"),
        ("", ""),
        ("two\nlines", "two\nlines"),  # pasted
        ('"""one line"""', "one line"),
        ('"""\nfirst\nsecond\n"""', "first\nsecond"),
        ('  """first\nsecond"""  ', "first\nsecond"),
        ('"""', None),
        ('"""first\nsecond', None),
        ('""""""', ""),
        ("first\\", None),
        ("first\\\nsecond", "first\nsecond"),
        ("first\\\nsecond\\", None),
        ('not at the """ beginning', 'not at the """ beginning'),
        ('/set system """a\nb', None),
        ('/set system """a\nb"""', '/set system """a\nb"""'),
    ],
)
def test_lines_of_a_message(typed, message):
    assert message_of(typed) == message


@pytest.mark.parametrize(
    ("typed", "message"),
    [('"""first\nsecond', "first\nsecond"), ("first\\", "first"), ('/set system """a', '/set system """a')],
)
def test_at_the_end_of_the_input_nothing_is_waited_for(typed, message):
    assert message_of(typed, at_end=True) == message


def test_a_pipe_is_read_line_by_line():
    lines = PipedLines(io.StringIO('one\n\n"""two\nthree"""\nfour\\\nfive\n"""six'))
    assert [lines.read() for _ in range(7)] == ["one", "", "two\nthree", "four\nfive", "six", None, None]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_what_is_no_text_is_said(errors):
    with pytest.raises(UsageError, match="not UTF-8"):
        PipedLines(io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "utf-8", errors)).read()
