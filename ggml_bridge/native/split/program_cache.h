// Programs that were prepared, to be used again: those used last, as many as there is room for.
//
// A server computes batches of ever new sizes, and each needs a program for each block.

#pragma once

#include <list>
#include <unordered_map>

#include "split_program.h"

namespace oallama {

class ProgramCache {
  public:
    ProgramCache() = default;

    ~ProgramCache() { clear(); }

    ProgramCache(const ProgramCache &)             = delete;
    ProgramCache & operator=(const ProgramCache &) = delete;

    // The program of a sub-graph, which is now the one used last; NULL: there is none.
    Program * find(const Signature & signature);

    // Where so much more may not be held, drops what was used longest ago, half of all at once: what was made at about
    // the same time lies together, so that memory is not full of small holes. Whether anything was dropped.
    bool make_room(size_t bytes);

    Program & add(std::unique_ptr<Program> program);

    void clear();

  private:
    using List = std::list<std::unique_ptr<Program>>;

    void drop_last();

    List                                              programs_; // used last first
    std::unordered_multimap<uint64_t, List::iterator> by_hash_;  // of the signature
    size_t                                            bytes_ = 0;
};

} // namespace oallama
