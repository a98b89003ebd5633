"""--count-experts: count how often answers use each expert of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from oallama.cli.help import Group, option
from oallama.cli.output import log
from oallama.core.errors import ProfileError, UsageError

if TYPE_CHECKING:
    from oallama.core.routing import ExpertCounts
    from oallama.placer import Placer

count_experts_option = option(
    "--count-experts", is_flag=True, group=Group.PLACEMENT, advanced=True,
    help="Count which experts of a mixture-of-experts model the answers use. The next load begins with the most used "
    "on the device, and plans use the counted hit rates. No text is kept.",
)  # fmt: skip
"""The command gets `count_experts`."""


@contextmanager
def counting(placer: Placer, wanted: bool) -> Iterator[Callable[[ExpertCounts], None] | None]:
    """Yield the function that counts an answer, and store the counts at the end; yield None if counting is off. Raises
    UsageError for a model without experts."""
    from oallama.profile.routing import counted, read_routing, unknown_routing, write_routing

    if not wanted:
        yield None
        return
    model = placer.model
    if not model.n_expert:
        raise UsageError(f"{model.path} has no experts; name a mixture-of-experts model or omit --count-experts")
    shape = model.fingerprint, model.n_expert, model.n_expert_used
    routing = read_routing(*shape) or unknown_routing(*shape)

    def count(expert_counts: ExpertCounts) -> None:
        nonlocal routing
        routing = counted(routing, expert_counts)

    try:
        yield count
    finally:
        try:
            write_routing(routing)
        except ProfileError as error:
            log(f"warning: {error}")
