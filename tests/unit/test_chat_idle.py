"""Measuring while nobody types into a chat: begun by itself, ended by a key, and used for the next answer."""

import asyncio
import contextlib
import sys
import types

import pytest
from idle_cases import MEASURES
from processes import children_with

from oallama.cli.chat import model as chat_model
from oallama.cli.chat.idle import IdleTune
from oallama.cli.chat.model import ChatModel
from oallama.core.errors import DeviceError

IDLE_S = 0.1


class Prompt:
    """At which nobody types until `press`."""

    def __init__(self, folder, make_room=lambda: None):
        self.folder, self.said = folder, []
        self.idle = IdleTune((sys.executable, "-c", MEASURES, str(folder)), IDLE_S, make_room)

    @contextlib.asynccontextmanager
    async def shown(self):
        self._pressed = asyncio.Event()
        watching = asyncio.create_task(self.idle.watch(self._pressed, self._say))
        try:
            yield watching
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    def press(self):
        self._pressed.set()

    async def began(self, times=1):
        began = self.folder / "began"
        while not began.exists() or len(began.read_text()) < times:
            await asyncio.sleep(0.01)

    async def _say(self, sentence):
        self.said.append(sentence)


def left():
    return children_with(MEASURES)


def test_it_measures_when_nobody_types_and_says_so_in_one_line(tmp_path):
    async def run():
        prompt = Prompt(tmp_path, lambda: prompt.said.append("made room"))
        async with prompt.shown() as watching:
            await prompt.began()
            (tmp_path / "enough").touch()
            await asyncio.wait_for(watching, 60)
        return prompt

    prompt = asyncio.run(run())
    first, room, last = prompt.said
    assert "no input for 0.1 s" in first and "any key ends it" in first and room == "made room"
    assert "the next message is answered with what won" in last
    assert not prompt.idle.wanted  # once is enough
    assert prompt.idle.end() and not prompt.idle.end()


def test_a_key_ends_it_at_once_and_it_waits_longer_the_next_time(tmp_path):
    async def run():
        prompt = Prompt(tmp_path)
        async with prompt.shown():
            await prompt.began()
            prompt.press()
            await prompt.began(2)
        ended = prompt.idle.end()
        return prompt, ended

    prompt, ended = asyncio.run(run())
    assert (tmp_path / "kept").exists() and not ended
    assert "no input for 0.2 s" in prompt.said[1]
    assert prompt.idle.wanted and not left()


def test_keys_hold_it_off(tmp_path):
    async def run():
        prompt = Prompt(tmp_path)
        prompt.idle.seconds = 3600.0
        async with prompt.shown():
            for _ in range(5):
                prompt.press()
                await asyncio.sleep(0.01)
        return prompt

    prompt = asyncio.run(run())
    assert prompt.said == [] and prompt.idle.wanted and not prompt.idle.end()


def test_a_failure_is_said_and_it_is_not_tried_again(tmp_path):
    async def run():
        prompt = Prompt(tmp_path)
        (tmp_path / "enough").write_text("1")
        async with prompt.shown() as watching:
            await asyncio.wait_for(watching, 60)
        return prompt

    prompt = asyncio.run(run())
    assert "exit code 1" in prompt.said[-1]
    assert not prompt.idle.wanted and not prompt.idle.end()


#
# the model of a chat
#


class Engine:
    warnings = ()

    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


def chat_of(folder, monkeypatch, plans):
    """A model that is loaded by name of its plan, and what was loaded. plans: what measuring leads to."""
    loaded = []

    def opened(placer, plan):
        loaded.append((plan, Engine()))
        return loaded[-1][1]

    def at_once(placer, load):
        plan = plans.pop(0)
        if isinstance(plan, Exception):
            raise plan
        return plan, plan == "stock"

    monkeypatch.setattr(chat_model, "at_once", at_once)
    placer = types.SimpleNamespace(device=types.SimpleNamespace(emulated=None))
    model = ChatModel(placer, "stock", None, False, "", opened)
    idle = model.tune_when_idle((sys.executable, "-c", MEASURES, str(folder)), IDLE_S)
    return model, idle, loaded


async def at_prompt(idle, enough):
    """One at which nobody types. enough: until it has ended by itself."""
    pressed = asyncio.Event()

    async def say(sentence):
        pass

    watching = asyncio.create_task(idle.watch(pressed, say))
    while enough.parent.joinpath("began").exists() is False:
        await asyncio.sleep(0.01)
    if enough.exists():
        await asyncio.wait_for(watching, 60)
    else:
        pressed.set()
        watching.cancel()
        await asyncio.wait({watching})


@pytest.mark.parametrize("plan", ["won", DeviceError("the device is away")])
def test_the_next_answer_comes_from_what_won(tmp_path, monkeypatch, capsys, plan):
    model, idle, loaded = chat_of(tmp_path, monkeypatch, [plan])
    first = model.engine
    (tmp_path / "enough").touch()
    asyncio.run(at_prompt(idle, tmp_path / "enough"))
    assert first.closed  # measuring needs its memory
    assert model.engine is not first
    assert [each for each, _ in loaded] == ["stock", "won" if plan == "won" else "stock"]
    assert plan == "won" or "the placement stays as it was: the device is away" in capsys.readouterr().err
    assert model.engine is loaded[-1][1]  # not again
    model.leave(True)


def test_where_nothing_is_settled_a_later_pause_measures_on(tmp_path, monkeypatch, capsys):
    model, idle, loaded = chat_of(tmp_path, monkeypatch, ["stock", "won"])
    (tmp_path / "enough").touch()
    asyncio.run(at_prompt(idle, tmp_path / "enough"))
    assert model.engine and "nothing has won yet" in capsys.readouterr().err
    assert idle.wanted and idle.seconds == 2 * IDLE_S
    asyncio.run(at_prompt(idle, tmp_path / "enough"))
    assert model.engine and not idle.wanted
    assert [each for each, _ in loaded] == ["stock", "won"]
    model.leave(True)


def test_after_an_interruption_the_placement_is_the_one_before(tmp_path, monkeypatch):
    model, idle, loaded = chat_of(tmp_path, monkeypatch, [])
    assert not model.engine.closed
    asyncio.run(at_prompt(idle, tmp_path / "enough"))
    assert model.engine is loaded[-1][1]
    assert [each for each, _ in loaded] == ["stock", "stock"] and not left()


def test_leaving_ends_it_and_keeps_what_is_done(tmp_path, monkeypatch):
    model, idle, loaded = chat_of(tmp_path, monkeypatch, [])
    asyncio.run(at_prompt(idle, tmp_path / "enough"))
    model.leave(True)
    assert (tmp_path / "kept").exists() and not left() and not loaded
