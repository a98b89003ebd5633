"""Small arithmetic: questions with the right answer. Every number is between 0 and 40."""

from __future__ import annotations

from .derivation import Derivation, say
from .words import FOODS, NAMES

LARGEST_TERM = 20
LARGEST_FACTOR = 6
OPERATIONS = ("plus", "minus", "times", "more", "fewer")
WEIGHTS = (0.3, 0.25, 0.15, 0.15, 0.15)


def sum_question(d: Derivation) -> str:
    """Write a question; return its answer."""
    operation = d.pick(OPERATIONS, WEIGHTS)
    if operation == "plus":
        d.write("What is ")
        a = number(d, 0, LARGEST_TERM)
        d.write(" + ")
        b = number(d, 0, LARGEST_TERM)
        d.write("?")
        return f"{a} + {b} = {a + b}."
    if operation == "minus":
        d.write("What is ")
        a = number(d, 0, LARGEST_TERM)
        d.write(" - ")
        b = number(d, 0, a)
        d.write("?")
        return f"{a} - {b} = {a - b}."
    if operation == "times":
        d.write("What is ")
        a = number(d, 0, LARGEST_FACTOR)
        d.write(" times ")
        b = number(d, 0, LARGEST_FACTOR)
        d.write("?")
        return f"{a} times {b} is {a * b}."
    name = say(d, "{name} has ", name=NAMES)["name"]
    a = number(d, 3, LARGEST_TERM)
    food = say(d, " {food} and ", food=FOODS)["food"]
    verb = "gets" if operation == "more" else "eats"
    d.write(f"{verb} ")
    b = number(d, 1, LARGEST_TERM if operation == "more" else a - 2)
    d.write(f"{' more' if operation == 'more' else ''}. How many {food} does {name} have now?")
    result = a + b if operation == "more" else a - b
    return f"{name} has {result} {food} now."


def number(d: Derivation, low: int, high: int) -> int:
    """Write a uniform integer in [low, high] and return it."""
    value = d.pick(range(low, high + 1))
    d.write(str(value))
    return value
