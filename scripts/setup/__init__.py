"""Set-up of the project's `.venv` on a bare machine. Standard library only: it runs before anything is installed."""
