"""Types that the tests of the bridge share."""

from __future__ import annotations

from typing import Any, Protocol


class RunHere(Protocol):
    """run_in_child for a module of this folder."""

    def __call__(self, module: str, request: dict[str, Any], **options: Any) -> dict[str, Any]: ...
