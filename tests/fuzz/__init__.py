"""Structured fuzzing: sound inputs, damaged where it hurts, for every reader of ours."""
