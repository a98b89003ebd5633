"""Stores of models: what Hugging Face's hub, llama.cpp and ollama have downloaded, by the names they go by there."""
