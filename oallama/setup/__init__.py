"""Installing llama.cpp: compiled for this machine, or prebuilt. Runs in any Python without packages, so that it can
set up a checkout."""
