"""The server: stock llama-server with a plan, supervised, behind an ASGI app of ours that adds the placement."""
