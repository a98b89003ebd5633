#!/usr/bin/env python3
"""Set up `.venv` in the project root; scripts/demo and scripts/test call this. See docs/install.md.

Kept to what any Python 3 can read: an older python3 hands over to a newer one, or says what is missing.
"""

import os
import shutil
import sys
from pathlib import Path

NEWER = ["python3." + str(minor) for minor in range(14, 9, -1)]

if sys.version_info < (3, 10):  # noqa: UP036  it is here for the older ones
    for name in NEWER:
        found = shutil.which(name)
        if found:
            os.execv(found, [found, *sys.argv])
    version = ".".join(map(str, sys.version_info[:3]))
    sys.exit("error: oallama needs Python 3.10 or later and this is " + version + ": install a newer python3")

if __name__ == "__main__":
    from setup.main import main

    sys.exit(main(Path(__file__).resolve().parent.parent, sys.argv[1:]))
