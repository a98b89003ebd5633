"""Reading and checking GGUF models, their hyperparameters, operators, memory and chat template."""
