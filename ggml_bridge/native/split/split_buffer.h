// The split buffer type: one per plan, so that two models with two plans can be loaded at once.

#pragma once

#include "loaded_plan.h"

namespace oallama {

extern const ggml_backend_buffer_type_i split_buft_i;

bool is_split_buft(ggml_backend_buffer_type_t buft);

// The plan of a tensor in a split buffer; NULL for any other tensor. Views of one are not in it themselves.
LoadedPlan * plan_of(const ggml_tensor * tensor);

// The weight behind a tensor in a split buffer; NULL for any other, and before it was allocated.
SplitWeight * weight_of(const ggml_tensor * tensor);

// Gives a weight's parts their memory if that has not been done; false where that failed.
bool ensure_placed(const ggml_tensor * tensor);

// Whether nothing has gone wrong with what a tensor's buffer holds; true for any other tensor.
bool is_sound(const ggml_tensor * tensor);

// Says something of the load of a tensor in a split buffer that its plan did not ask for, once.
void note(const ggml_tensor * tensor, const std::string & sentence);

} // namespace oallama
