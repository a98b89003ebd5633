"""Results of `oallama tune`: the fastest plan for each class of prompts, and its measurements."""
