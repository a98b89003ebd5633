"""Stores of models: downloads of huggingface_hub, llama.cpp and ollama, by their names there."""
