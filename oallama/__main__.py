"""The command `oallama`, and `python -m oallama`."""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Until it handles signals there is nothing to keep, and Ctrl-C ends it without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from oallama.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
