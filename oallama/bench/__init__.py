"""Honest comparisons: every arm in a process of its own, samples interleaved, ratios with an interval."""
