"""Short stories: an opening, one of six plots, an ending. Names, things, colours and places stay the same."""

from __future__ import annotations

from dataclasses import dataclass

from .derivation import Derivation, say
from .plots import PLOTS, Plot
from .words import ANIMALS, BOYS, GIRLS, HOBBIES, HOMES, NATURES, Character, Fact, Thing


@dataclass(frozen=True)
class Wish:
    """What a request asks the story to be about; None leaves it to the grammar."""

    kind: str | None = None
    name: str | None = None
    thing: Thing | None = None


def story(d: Derivation, wish: Wish = Wish()) -> tuple[Fact, ...]:
    """Write a story that grants the wish; return what can be asked about it, each question once."""
    hero, facts = opening(d, wish)
    plot: Plot = d.pick([p for p in PLOTS if wish.thing is None or p.has_thing])
    friend, more = plot.tell(d, hero, wish.thing)
    ending(d, hero, friend)
    return tuple(facts) + more


def opening(d: Derivation, wish: Wish) -> tuple[Character, list[Fact]]:
    """Introduce the hero."""
    first = d.pick(("Once upon a time there was a ", "There once was a ", "A "), (0.6, 0.2, 0.2))
    d.write(first)
    nature = d.pick(NATURES)
    d.write(f"{nature} ")
    hero = character(d, wish)
    home = d.pick(HOMES)
    if first == "A ":
        d.write(f" lived {home}.")
    else:
        d.write(f". {hero.name} lived {home}.")
    facts = [
        Fact(f"Who was {hero.name}?", f"{hero.name} was a {nature} {hero.kind}."),
        Fact(f"Where did {hero.name} live?", f"{hero.name} lived {home}."),
    ]
    if d.pick((True, False), (0.6, 0.4)):
        liking = f" {hero.he.capitalize()} loved {{hobby}}.", f" Every day {hero.name} liked {{hobby}}."
        hobby = say(d, *liking, hobby=HOBBIES)["hobby"]
        facts.append(Fact(f"What did {hero.name} love?", f"{hero.name} loved {hobby}."))
    return hero, facts


def character(d: Derivation, wish: Wish) -> Character:
    """Write `kind named Name`; kind and name agree (a girl has a girl's name)."""
    kinds = ("girl", "boy", *ANIMALS)
    weights = [3.0, 3.0] + [1.0] * len(ANIMALS)
    if wish.name is not None:
        weights[kinds.index("boy" if wish.name in GIRLS else "girl")] = 0.0
    kind = wish.kind or d.pick(kinds, weights)
    d.write(f"{kind} named ")
    name = wish.name or d.pick(names_of(kind))
    d.write(name)
    return Character(name, kind)


def names_of(kind: str) -> tuple[str, ...]:
    """Names that a kind of character may have."""
    return {"girl": GIRLS, "boy": BOYS}.get(kind, GIRLS + BOYS)


def ending(d: Derivation, hero: Character, friend: Character) -> None:
    """Close the story."""
    say(
        d,
        f" From that day on {hero.name} and {friend.name} were the best of friends.",
        f" {hero.name} and {friend.name} laughed and walked home together.",
        f" That night {hero.name} slept well and had a good dream.",
        f" {hero.name} never forgot that day.",
        f" Before they said goodbye, {hero.name} gave {friend.name} a big hug.",
    )
    d.write(d.pick((" The end.", ""), (0.7, 0.3)))
