"""Profiles: the cost of a model's operators on this machine, measured once and cached.

`profiler` is the way in: it reads the stored profile (`store`) of this `machine`, or starts a measuring process
(`child`). `wanted` says what a model needs, `merge` what a profile lacks of it; `tasks` and `link` measure that, each
as often as `timing` says, and `fit` draws lines through copies. `described` makes a profile from a card's rates,
`emulate` a card from a profile; `export` leaves out what is personal.
"""
