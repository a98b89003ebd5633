// The report: what the back end of a stock program knows of its work, as a file for whoever started that program.
//
// One JSON object, in UTF-8, replaced whole. Seconds and bytes; counts are since the program loaded the library, what
// is held is held now.
//
//     oallama_report     1: the format's version; keys may come to it
//     pid                of the program
//     request            number of the last request that was answered; 0: none was
//     usable, problems   as oallama_plan_problems: whether what is loaded can compute, and sentences on what did not
//     come
//                        to lie as planned
//     slices             the plan's tensors that are loaded, as they came to lie: the fields of oallama_slice
//     memory, stats      the fields of oallama_memory and oallama_stats
//     single             those of stats, of batches of one token alone
//     blocks             for each block and class of batch sizes: name of its first weight, batch (tokens at most),
//                        n_runs, n_tokens, and seconds of the caller's thread: launch_s, host_s, wait_s, join_s
//     experts            where the plan counts: name of a tensor, batches ("single": of one token, "several"),
//     n_tokens,
//                        uses of each expert, and ranks: uses of the expert that was used most of late, the second, …;
//                        gaps: uses by tokens since the use before (uses.h)
//     emulated           the fields of emulated_stats, where the program computes on an emulated device; else null
//
// It is written once a second while blocks run, when a context or a model is freed, and on request: who writes a number
// and a line's end to the pipe PATH.ask finds it as `request` in the next report. A file that cannot be written costs
// nothing but itself.

#pragma once

#include <memory>
#include <string>

#include "plan.h"

namespace oallama {

// Begins to keep the report of a plan, once a process. path: %p stands for the process' number. beside: the back end
// that the library was asked to load; NULL: none.
void keep_report(const std::string & path, std::shared_ptr<LoadedPlan> plan, ggml_backend_reg_t beside);

// Writes the report, where one is kept: what it tells of is about to be freed. always: or where there is something new.
void write_report(bool always) noexcept;

} // namespace oallama
