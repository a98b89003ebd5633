"""llama.cpp for CUDA, compiled without a GPU and packed for a machine without a network."""
