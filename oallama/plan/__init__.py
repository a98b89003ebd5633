"""Plans as files and as llama.cpp options.

`plan` reads, checks and writes them. `split` turns fractions into whole elements, `patterns` names tensors that stay
in host memory. `export` writes the command line of stock llama.cpp, `plugin_text` the file of the split back end.
"""
