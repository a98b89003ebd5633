"""The server: keeps stock llama-server running with a plan, and serves the placement page."""
