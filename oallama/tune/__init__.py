"""Tuning: a plan is used only if it was measured to be faster than stock llama.cpp."""
