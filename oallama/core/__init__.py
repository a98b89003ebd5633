"""Records, units and errors that every other room shares; imports nothing of ours."""
