// Proves that the loaded ggml is laid out as the headers that this library was compiled with say.

#pragma once

namespace oallama {

// Throws OALLAMA_MISMATCH: the loaded ggml has another API version, other numbers of operations or types, or other
// structures. The version that ggml calls itself decides nothing: its API changed twice under one version.
void check_ggml();

} // namespace oallama
