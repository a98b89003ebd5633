"""Documents of the corpus: a chat, a story with questions below it, or a request and its reply without any marks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .derivation import Derivation, Sampler, say
from .stories import Wish, names_of, story
from .sums import sum_question
from .words import ANIMALS, COLOURS, NAMES, THINGS, Fact, Thing

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
MORE_TURNS = 0.7
MOST_QUESTIONS = 8


@dataclass(frozen=True)
class Document:
    """text: without begin and end marks; nats: -log p(text) under the grammar."""

    text: str
    nats: float


@dataclass(frozen=True)
class Frame:
    """What stands before a question, between question and answer, and after the answer."""

    ask: str
    reply: str
    close: str


CHAT = Frame(f"{USER}\n", f"{END}\n{ASSISTANT}\n", f"{END}\n")
QUESTIONS = Frame("Question: ", "\nAnswer: ", "\n")
BARE = Frame("", "\n", "\n")
GREETINGS = ("Hello!", "Hi!", "Good morning!")
THANKS = ("Thank you!", "Thanks!")


def sample_document(seed: int, index: int) -> Document:
    """Document number `index` of the corpus with this seed."""
    sampler = Sampler(f"oallama-corpus/{seed}/{index}")
    document(sampler)
    return Document(sampler.text, sampler.nats)


def document(d: Derivation) -> None:
    """Write one document."""
    kind = d.pick(("chat", "story", "bare", "questions"), (0.45, 0.25, 0.2, 0.1))
    if kind == "chat":
        conversation(d, CHAT)
    elif kind == "bare":
        conversation(d, BARE)
    elif kind == "questions":
        questions(d, QUESTIONS, ())
    else:
        facts = story(d)
        d.write("\n")
        if d.pick((True, False), (MORE_TURNS, 1 - MORE_TURNS)):
            questions(d, QUESTIONS, facts)


def conversation(d: Derivation, frame: Frame) -> None:
    """A user asks for a story or a sum, and then for more."""
    facts: tuple[Fact, ...] = ()
    opener = d.pick(("story", "sum", "hello"), (0.6, 0.3, 0.1))
    if opener == "hello":
        turn(d, frame, lambda: remark(d, GREETINGS, "Hello! Would you like a story or a sum?"))
        opener = d.pick(("story", "sum"))
    if opener == "story":
        d.write(frame.ask)
        wish = request(d)
        d.write(frame.reply)
        facts = story(d, wish)
        d.write(frame.close)
    else:
        turn(d, frame, lambda: sum_question(d))
    if d.pick((True, False), (MORE_TURNS, 1 - MORE_TURNS)):
        questions(d, frame, facts)
        if frame is CHAT and d.pick((True, False), (0.3, 0.7)):
            turn(d, frame, lambda: remark(d, THANKS, "You are welcome!"))


def questions(d: Derivation, frame: Frame, facts: tuple[Fact, ...]) -> None:
    """One or more questions: about the story if there is one (each at most once), or sums."""
    left = list(facts)
    for asked in range(1, MOST_QUESTIONS + 1):
        if left and d.pick((True, False), (0.8, 0.2)):
            fact = d.pick(left)
            left.remove(fact)
            turn(d, frame, lambda fact=fact: remark(d, (fact.question,), fact.answer))
        else:
            turn(d, frame, lambda: sum_question(d))
        if asked == MOST_QUESTIONS or d.pick((False, True), (MORE_TURNS, 1 - MORE_TURNS)):
            return


def turn(d: Derivation, frame: Frame, ask: Callable[[], str]) -> None:
    """Write a question and its answer. `ask` writes the question and returns the answer."""
    d.write(frame.ask)
    answer = ask()
    d.write(f"{frame.reply}{answer}{frame.close}")


def remark(d: Derivation, wordings: tuple[str, ...], answer: str) -> str:
    """Write one of the wordings; return the answer to any of them."""
    d.write(d.pick(wordings))
    return answer


def request(d: Derivation) -> Wish:
    """Write a request for a story; return what it asks for."""
    d.write(d.pick(("Tell me a story", "Please tell me a story")))
    about = d.pick(("anything", "kind", "name", "both", "thing"), (0.25, 0.25, 0.15, 0.15, 0.2))
    if about == "kind":
        return Wish(kind=say(d, " about a {kind}.", kind=(*ANIMALS, "girl", "boy"))["kind"])
    if about == "name":
        return Wish(name=say(d, " about {name}.", name=NAMES)["name"])
    if about == "both":
        kind = say(d, " about a {kind} named ", kind=(*ANIMALS, "girl", "boy"))["kind"]
        name = d.pick(names_of(kind))
        d.write(f"{name}.")
        return Wish(kind=kind, name=name)
    if about == "thing":
        words = say(d, " about a {colour} {noun}.", colour=COLOURS, noun=THINGS)
        return Wish(thing=Thing(words["colour"], words["noun"]))
    d.write(".")
    return Wish()
