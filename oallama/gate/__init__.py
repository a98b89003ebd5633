"""The gate: a plan is used only where it was measured to be faster than stock llama.cpp."""
