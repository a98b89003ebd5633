"""Words of the grammar, and the records that a story keeps about its characters and things."""

from __future__ import annotations

from dataclasses import dataclass

GIRLS = ("Mia", "Ana", "Lily", "Nora", "Emma", "Zoe", "Ruth", "Ivy")
BOYS = ("Tom", "Ben", "Max", "Leo", "Sam", "Finn", "Jack", "Omar")
NAMES = GIRLS + BOYS
ANIMALS = ("fox", "bear", "rabbit", "mouse", "cat", "dog", "frog", "duck")
NATURES = ("little", "brave", "kind", "clever", "shy", "happy", "curious", "quiet")
COLOURS = ("red", "blue", "green", "yellow", "white", "brown", "pink", "golden")
THINGS = ("ball", "kite", "book", "hat", "box", "drum", "key", "bell", "cup", "lamp", "boat", "ring")
FOODS = ("apples", "pears", "nuts", "cakes", "plums", "berries", "cookies", "carrots")
HOMES = (
    "in a small house by the sea",
    "in an old tree in the forest",
    "on a farm near the river",
    "at the end of the village",
    "on top of a green hill",
    "in a tall tower",
)
HOBBIES = ("to sing", "to swim", "to read", "to climb trees", "to paint", "to dance", "to run", "to look at the stars")
WEATHER = ("sunny", "rainy", "windy", "cold", "warm", "snowy")
TIMES = ("morning", "afternoon", "evening", "day")
PLACES = ("forest", "market", "river", "park", "beach", "garden", "mill", "lake")
SPOTS = ("under a tree", "behind a rock", "in the grass", "near the gate", "on a bench", "beside the path")
HIDING = ("under the bed", "behind the door", "in the basket", "on the shelf", "under the table", "near the window")
TRAPS = ("in a deep hole", "on a high wall", "in the mud", "at the top of a tree")
HELP = ("a long rope", "a strong stick", "a tall ladder", "an old blanket")


@dataclass(frozen=True)
class Character:
    """Someone in a story; pronouns follow the name."""

    name: str
    kind: str

    @property
    def he(self) -> str:
        return "she" if self.name in GIRLS else "he"

    @property
    def him(self) -> str:
        return "her" if self.name in GIRLS else "him"


@dataclass(frozen=True)
class Thing:
    """Something with a colour."""

    colour: str
    noun: str

    @property
    def full(self) -> str:
        return f"{self.colour} {self.noun}"


@dataclass(frozen=True)
class Fact:
    """A question about a story and its one right answer."""

    question: str
    answer: str
