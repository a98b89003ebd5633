"""What `oallama tune` found: which plan is the fastest for which class of prompts, and the measurements behind it."""
