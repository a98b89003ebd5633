"""Fair comparisons: each arm in its own process, interleaved samples, ratios with an interval."""
