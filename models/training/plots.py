"""The plots of the stories. Each writes its sentences; returns the hero's friend and the facts to ask about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .derivation import Derivation, say
from .sums import number
from .words import (
    ANIMALS,
    COLOURS,
    FOODS,
    GIRLS,
    HELP,
    HIDING,
    NAMES,
    PLACES,
    SPOTS,
    THINGS,
    TIMES,
    TRAPS,
    WEATHER,
    Character,
    Fact,
    Thing,
)

Told = tuple[Character, tuple[Fact, ...]]


@dataclass(frozen=True)
class Plot:
    """A way a story can go; has_thing: it is about a thing, so a request can name that thing."""

    tell: Callable[[Derivation, Character, Thing | None], Told]
    has_thing: bool


def outing(d: Derivation, who: str) -> str:
    """One sunny day someone goes somewhere; return the place."""
    return say(
        d,
        f" One {{weather}} {{time}}, {who} went to the {{place}}.",
        f" On a {{weather}} {{time}} {who} walked to the {{place}}.",
        weather=WEATHER, time=TIMES, place=PLACES,
    )["place"]  # fmt: skip


def thing(d: Derivation, wish: Thing | None, other_than: Thing | None = None) -> Thing:
    """Write `colour noun`: the one wished for, or any but one."""
    chosen = wish
    if chosen is None:
        colour = d.pick([c for c in COLOURS if other_than is None or c != other_than.colour])
        d.write(f"{colour} ")
        noun = d.pick([n for n in THINGS if other_than is None or n != other_than.noun])
        d.write(noun)
        return Thing(colour, noun)
    d.write(chosen.full)
    return chosen


def friend_of(d: Derivation, hero: Character) -> Character:
    """Write `Name` or `a kind named Name` of someone else."""
    kind = d.pick(("friend", *ANIMALS), (float(len(ANIMALS)), *[1.0] * len(ANIMALS)))
    if kind != "friend":
        d.write(f"a {kind} named ")
    name = d.pick([n for n in NAMES if n != hero.name])
    d.write(name)
    return Character(name, kind if kind != "friend" else "girl" if name in GIRLS else "boy")


def find(d: Derivation, hero: Character, wish: Thing | None) -> Told:
    """The hero finds a thing and gives it back to its owner."""
    place = outing(d, hero.name)
    d.write(f" There {hero.he} saw a ")
    found = thing(d, wish)
    spot = say(d, " {spot}.", spot=SPOTS)["spot"]
    say(d, f" {hero.he.capitalize()} picked it up.", f' "What a nice {found.noun}!" said {hero.name}.',
        f" {hero.he.capitalize()} wanted to know whose {found.noun} it was.")  # fmt: skip
    say(d, " Then {hero} met ", " Soon {hero} saw ", " On the way home {hero} met ", hero=hero.name)
    owner = friend_of(d, hero)
    say(d, f'. {owner.name} was sad. "I have lost my {found.full}," said {owner.name}.',
        f'. "That is my {found.full}!" said {owner.name}.')  # fmt: skip
    d.write(f" {hero.name} gave the {found.noun} back to {owner.name}.")
    say(d, f" {owner.name} was so happy that {owner.he} danced.", f' "Thank you, {hero.name}!" said {owner.name}.')
    return owner, (
        Fact(f"Where did {hero.name} go?", f"{hero.name} went to the {place}."),
        Fact(f"What did {hero.name} find?", f"{hero.name} found a {found.full}."),
        Fact(f"What colour was the {found.noun}?", f"The {found.noun} was {found.colour}."),
        Fact(f"Where was the {found.noun}?", f"The {found.noun} was {spot}."),
        Fact(f"Whose {found.noun} was it?", f"It was the {found.noun} of {owner.name}."),
    )


def search(d: Derivation, hero: Character, wish: Thing | None) -> Told:
    """The hero has lost a thing and looks for it, place after place, until a friend helps."""
    d.write(f" {hero.name} had a ")
    lost = thing(d, wish)
    say(d, f". One {{time}} the {lost.noun} was gone.", f", but one {{time}} {hero.he} could not find it.", time=TIMES)
    left = list(HIDING)
    while True:
        spot = d.pick(left)
        left.remove(spot)
        d.write(f" {hero.name} looked {spot}, but the {lost.noun} was not there.")
        if len(left) == 3 or d.pick((True, False)):
            break
    d.write(" Then ")
    friend = friend_of(d, hero)
    d.write(" came to help. They looked ")
    place = d.pick(left)
    d.write(f"{place}, and there was the {lost.full}!")
    say(d, f' "Thank you, {friend.name}," said {hero.name}.', f" {hero.name} was very happy.",
        f' "Now we can play," said {friend.name}.')  # fmt: skip
    return friend, (
        Fact(f"What did {hero.name} lose?", f"{hero.name} lost a {lost.full}."),
        Fact(f"What colour was the {lost.noun}?", f"The {lost.noun} was {lost.colour}."),
        Fact(f"Where was the {lost.noun}?", f"The {lost.noun} was {place}."),
        Fact(f"Who helped {hero.name}?", f"{friend.name} helped {hero.name}."),
    )


def swap(d: Derivation, hero: Character, wish: Thing | None) -> Told:
    """Two friends swap their things."""
    d.write(f" {hero.name} had a ")
    mine = thing(d, wish)
    d.write(".")
    place = outing(d, hero.name)
    d.write(f" There {hero.he} met ")
    friend = friend_of(d, hero)
    d.write(", who had a ")
    yours = thing(d, None, other_than=mine)
    say(d, f'. "I like your {yours.noun}," said {hero.name}. "And I like your {mine.noun}," said {friend.name}.',
        f'. "Shall we swap?" said {friend.name}. "Yes, please!" said {hero.name}.')  # fmt: skip
    d.write(f" So {hero.name} gave {friend.name} the {mine.full}, and {friend.name} gave {hero.name} the {yours.full}.")
    say(d, f" Now {hero.name} had the {yours.noun} and {friend.name} had the {mine.noun}.", " Both were glad.",
        f" They played with the {mine.noun} and the {yours.noun} all day.")  # fmt: skip
    return friend, (
        Fact(f"Where did {hero.name} go?", f"{hero.name} went to the {place}."),
        Fact(f"Who has the {mine.noun} now?", f"{friend.name} has the {mine.full} now."),
        Fact(f"Who has the {yours.noun} now?", f"{hero.name} has the {yours.full} now."),
        Fact(f"What did {hero.name} give to {friend.name}?", f"{hero.name} gave {friend.name} the {mine.full}."),
    )


def picnic(d: Derivation, hero: Character, wish: Thing | None) -> Told:
    """Two friends put their food together, eat some of it, and count what is left."""
    place = outing(d, hero.name)
    d.write(f" {hero.he.capitalize()} had ")
    mine = number(d, 2, 9)
    food = say(d, " {food} in a basket.", food=FOODS)["food"]
    d.write(" There ")
    friend = friend_of(d, hero)
    d.write(" was waiting with ")
    yours = number(d, 2, 9)
    say(
        d,
        f" more {food}. They put all the {food} together and counted them.",
        f" {food}. They shared all their {food}.",
    )
    both = mine + yours
    say(d, f" Now they had {both} {food}.", f' "We have {both} {food}!" said {friend.name}.')
    d.write(" They ate ")
    eaten = number(d, 1, both - 2)
    say(d, f" of them, so there were {both - eaten} left.", f", and then {both - eaten} were left.")
    return friend, (
        Fact(f"Where did {hero.name} go?", f"{hero.name} went to the {place}."),
        Fact(f"How many {food} did {hero.name} have?", f"{hero.name} had {mine} {food}."),
        Fact(f"How many {food} did {friend.name} have?", f"{friend.name} had {yours} {food}."),
        Fact(f"How many {food} did they have together?", f"Together they had {both} {food}."),
        Fact(f"How many {food} were left?", f"There were {both - eaten} {food} left."),
    )


def rescue(d: Derivation, hero: Character, wish: Thing | None) -> Told:
    """The hero gets someone out of a trap."""
    place = outing(d, hero.name)
    d.write(" On the way ")
    friend = friend_of(d, hero)
    trap = say(d, " was stuck {trap}.", trap=TRAPS)["trap"]
    say(d, f' "Help!" said {friend.name}. "I cannot get out."', f' "Please help me, {hero.name}!" said {friend.name}.')
    say(d, f" {hero.name} was a little afraid, but {hero.he} did not run away.", f" {hero.name} thought for a while.")
    d.write(f" Then {hero.he} ran home and came back with ")
    tool = d.pick(HELP)
    d.write(f"{tool}.")
    say(d, f" {hero.he.capitalize()} pulled and pulled until {friend.name} was free.", f" Soon {friend.name} was free.")
    return friend, (
        Fact(f"Where did {hero.name} go?", f"{hero.name} went to the {place}."),
        Fact(f"Where was {friend.name} stuck?", f"{friend.name} was stuck {trap}."),
        Fact(f"Who was stuck {trap}?", f"{friend.name} was stuck {trap}."),
        Fact(f"How did {hero.name} help?", f"{hero.name} came back with {tool}."),
    )


def present(d: Derivation, hero: Character, wish: Thing | None) -> Told:
    """The hero gives a friend a thing as a present."""
    d.write(" Soon it was the birthday of ")
    friend = friend_of(d, hero)
    place = say(d, f". {hero.name} went to the {{place}} to look for a present.", place=PLACES)["place"]
    offer = f" A man wanted to sell {hero.him} {{food}}, but {friend.name} did not like {{food}}."
    disliked = say(d, offer, food=FOODS)["food"]
    d.write(f" Then {hero.name} saw a ")
    gift = thing(d, wish)
    say(d, f'. "This is what {friend.name} wants," said {hero.name}.', f". It was the best {gift.noun} of all.")
    say(d, f" {hero.he.capitalize()} bought the {gift.noun} and took it to {friend.name}.",
        f" {hero.he.capitalize()} paid for it and ran to the house of {friend.name}.")  # fmt: skip
    say(d, f' "A {gift.full}! Thank you!" said {friend.name}.', f" {friend.name} loved the {gift.full}.")
    return friend, (
        Fact(f"Where did {hero.name} go?", f"{hero.name} went to the {place}."),
        Fact(f"What did {hero.name} buy?", f"{hero.name} bought a {gift.full}."),
        Fact(f"What colour was the {gift.noun}?", f"The {gift.noun} was {gift.colour}."),
        Fact(f"What did {friend.name} not like?", f"{friend.name} did not like {disliked}."),
        Fact("Whose birthday was it?", f"It was the birthday of {friend.name}."),
    )


PLOTS = (
    Plot(find, has_thing=True),
    Plot(search, has_thing=True),
    Plot(swap, has_thing=True),
    Plot(picnic, has_thing=False),
    Plot(rescue, has_thing=False),
    Plot(present, has_thing=True),
)
