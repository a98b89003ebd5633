"""Models: from a GGUF file to the operators that a plan places.

The walk: `gguf_reader` opens the file, or all parts of a split one. `gguf_header` reads each part through the bounded
`gguf_cursor` into the records of `gguf_file`. `validate` refuses what llama.cpp would die of, with `validate_tokenizer`
and `validate_tensors`. `hyperparameters` and `operators` say what the graph multiplies by, by the names in `roles`;
`cut` says where a weight may be cut. `memory` makes no_alloc loads, in a child process since they may crash.
"""
