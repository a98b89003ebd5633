"""llama.cpp for the engine: compiled for this machine, or taken as somebody built it. Runs in any Python without
packages, so that a checkout can be set up by it."""
