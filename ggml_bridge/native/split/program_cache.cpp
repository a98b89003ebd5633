#include "program_cache.h"

#include "stats.h"

namespace oallama {

namespace {

// Some 3,000 programs: of a model of 32 layers with three blocks each, those of thirty batch sizes.
constexpr size_t max_bytes = size_t{16} << 20U;

} // namespace

Program * ProgramCache::find(const Signature & signature) {
    const auto [begin, end] = by_hash_.equal_range(hash_of(signature));
    for (auto found = begin; found != end; found++) {
        const List::iterator program = found->second;
        if ((*program)->signature == signature) {
            programs_.splice(programs_.begin(), programs_, program);
            return program->get();
        }
    }
    return nullptr;
}

bool ProgramCache::make_room(size_t bytes) {
    if (bytes_ + bytes <= max_bytes) {
        return false;
    }
    while (!programs_.empty() && bytes_ + bytes > max_bytes / 2) {
        drop_last();
    }
    return true;
}

Program & ProgramCache::add(std::unique_ptr<Program> program) {
    programs_.push_front(std::move(program));
    Program & added = *programs_.front();
    try {
        by_hash_.emplace(hash_of(added.signature), programs_.begin());
    } catch (...) {
        programs_.pop_front();
        throw;
    }
    bytes_ += added.bytes;
    counters().n_programs++;
    counters().program_bytes += static_cast<int64_t>(added.bytes);
    return added;
}

void ProgramCache::clear() {
    while (!programs_.empty()) {
        drop_last();
    }
}

void ProgramCache::drop_last() {
    const Program & last    = *programs_.back();
    const auto [begin, end] = by_hash_.equal_range(hash_of(last.signature));
    for (auto found = begin; found != end; found++) {
        if (found->second->get() == &last) {
            by_hash_.erase(found);
            break;
        }
    }
    bytes_ -= last.bytes;
    counters().n_programs--;
    counters().program_bytes -= static_cast<int64_t>(last.bytes);
    programs_.pop_back();
}

} // namespace oallama
