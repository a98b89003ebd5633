// A file that tells how long blocks took, for whoever watches a stock program that runs a plan.

#pragma once

#include <memory>
#include <string>

#include "block_times.h"

namespace oallama {

// Begins to replace the file whole, once a second while blocks run, until the process ends. A line a block and class of
// batch sizes, counted since the beginning:
//
//     TOKENS-AT-MOST RUNS TOKENS LAUNCH-NS HOST-NS WAIT-NS JOIN-NS NAME
//
// All of it happens in a thread of its own, and nothing that computes waits for it: a file that cannot be written is
// tried again a second later, and no thread means no file.
void write_times(std::shared_ptr<BlockTimes> times, const std::string & path) noexcept;

} // namespace oallama
