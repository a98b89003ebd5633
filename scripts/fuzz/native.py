"""Native targets, built and run."""

TARGETS: dict[str, str] = {}


def run(*a):
    return 2
