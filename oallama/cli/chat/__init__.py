"""`oallama chat`: a session with a model, in the terminal or through a pipe."""

from oallama.cli.chat.command import command

__all__ = ["command"]
