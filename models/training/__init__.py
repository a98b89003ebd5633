"""Recipe of the small model that oallama ships: grammar, tokenizer, network and GGUF export."""
