// Is the loaded ggml the one whose private interface ggml_backend_abi.h declares?

#pragma once

namespace oallama {

void check_ggml(); // throws OALLAMA_MISMATCH

} // namespace oallama
