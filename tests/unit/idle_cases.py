"""A program in the place of one that measures while nobody asks for anything."""

MEASURES = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def ended(*_):
    (folder / "kept").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, ended)
with open(folder / "began", "a") as began:
    began.write("x")
while not (folder / "enough").exists():
    time.sleep(0.01)
sys.exit(int((folder / "enough").read_text() or 0))
"""
"""Measures until there is a file `enough`, whose number is its exit code (empty: 0); interrupted, it
keeps what it has in a file `kept`."""
