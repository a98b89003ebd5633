"""--policy: the placement policies of this version, and when the others come."""

from __future__ import annotations

import click

from oallama import __version__
from oallama.core.errors import UsageError

POLICIES = ("auto", "oato", "layers", "cpu")
LATER_POLICIES = {
    "scheinfer": "streaming of weights (issue 5)",
    "hetegen": "streaming of weights (issue 5)",
    "twinpilots": "streaming of weights (issue 5)",
    "flexgen": "streaming of weights (issue 5)",
    "fiddler": "the comparison of policies (issue 6)",
    "fit": "the comparison with stock llama.cpp (issue 6)",
}
"""Policies of the contract that this version lacks, and what brings them."""


def _check_policy(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if value in LATER_POLICIES:
        raise UsageError(
            f"policy {value} is not in oallama {__version__}, it comes with {LATER_POLICIES[value]}; "
            f"choose one of {', '.join(POLICIES)}"
        )
    return value


policy_option = click.option(
    "--policy", type=click.Choice([*POLICIES, *LATER_POLICIES]), default="auto", show_default=True, metavar="POLICY",
    callback=_check_policy,
    help="oato: operators by GPU affinity; layers: whole layers, as llama.cpp's -ngl; cpu: nothing on the device; "
    "auto: whichever should be fastest.",
)  # fmt: skip
