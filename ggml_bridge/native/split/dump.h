// A program as text, for who wants to see what became of a sub-graph.

#pragma once

#include "program.h"

namespace oallama {

// Logs a program at debug level where OALLAMA_SPLIT_DEBUG is 1: a line for each of its segments; where it is 2: for
// each node of llama.cpp's too, with its state and what each side has of it. As GGML_SCHED_DEBUG does for ggml's
// scheduler.
void dump_program(const ggml_cgraph * graph, const Values & values, const Program & program);

} // namespace oallama
