"""One machine's few rates, found from runs of stock llama.cpp, and what the cost model makes of them."""
