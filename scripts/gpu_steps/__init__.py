"""One run on a GPU: which steps, in which order, within which time, and what came of them."""
