"""The server: stock llama-server with a plan, kept running, and a page of the placement beside it."""
