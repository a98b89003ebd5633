"""Beside oallama: what it is compared with, and finds by entry points; nothing in oallama imports this."""
