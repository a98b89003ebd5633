#include "exchange.h"

#include <algorithm>
#include <iterator>

namespace oallama {

namespace {

size_t bytes_of(const SplitWeight & weight) {
    return static_cast<size_t>(weight.part_bytes(side_device) / weight.n_slots());
}

size_t bytes_of(const ExpertTable & table) {
    size_t bytes = 0;
    for (const SplitWeight * weight : table.weights()) {
        bytes += bytes_of(*weight);
    }
    return bytes;
}

} // namespace

// Nothing is on its way any more when its slots are given up.
Exchange::~Exchange() {
    stream_.synchronize();
    cancel();
    for (const std::vector<Copy> * copies : {&going_, &coming_}) {
        for (const Copy & copy : *copies) {
            copy.table->drop(copy.move);
        }
    }
    for (const std::shared_ptr<ExpertTable> & table : claimed_) {
        table->release(this);
    }
}

EventPtr Exchange::new_event() {
    if (events_.empty()) {
        return EventPtr(stream_.has_events() ? ggml_backend_event_new(stream_.device()) : nullptr);
    }
    EventPtr event = std::move(events_.back());
    events_.pop_back();
    return event;
}

Exchange::Copy Exchange::new_copy(const std::shared_ptr<ExpertTable> & table, ExpertTable::Move move) {
    Copy copy;
    copy.table = table;
    copy.move  = move;
    copy.event = new_event();
    return copy;
}

// Asks for what is missing of a copy, as far as the link can have copied it until then; whether that is all of it.
// whole: not in pieces.
bool Exchange::ask(Copy & copy, Time until, bool whole) {
    const std::vector<const SplitWeight *> weights = copy.table->weights();
    int64_t                                asked   = 0;
    while (copy.weight < weights.size()) {
        const SplitWeight & weight = *weights[copy.weight];
        const size_t        all    = bytes_of(weight);
        const size_t        next   = std::min(all - copy.at, whole ? all : stream_.allowed(until));
        if (next == 0) {
            break;
        }
        const auto * from = static_cast<const char *>(weight.part(side_prime).tensor->data) +
                            static_cast<size_t>(copy.move.expert) * all;
        stream_.copy_to(weight.part(side_device).tensor, from + copy.at,
                        static_cast<size_t>(copy.move.slot) * all + copy.at, next);
        asked += static_cast<int64_t>(next);
        copy.at += next;
        if (copy.at == all) {
            copy.weight++;
            copy.at = 0;
        }
    }
    stats().bytes_exchanged.fetch_add(asked, std::memory_order_relaxed);
    if (copy.weight < weights.size()) {
        return false;
    }
    stream_.mark(copy.event.get());
    copy.ends = eager_ ? Time::min() : stream_.idle();
    return true;
}

//
// what a batch needs
//

// Whether a table's experts are this context's to move.
bool Exchange::may_move(const std::shared_ptr<ExpertTable> & table) {
    if (!table->claim(this)) {
        return false;
    }
    if (std::find(claimed_.begin(), claimed_.end(), table) == claimed_.end()) {
        claimed_.push_back(table);
    }
    return true;
}

void Exchange::receive(const std::shared_ptr<ExpertTable> & table) {
    // no slot that is computed with is overwritten
    due_.erase(std::remove(due_.begin(), due_.end(), table), due_.end());
    for (size_t i = 0; i < coming_.size();) {
        Copy & copy = coming_[i];
        if (copy.table != table || Clock::now() < copy.ends) {
            i++;
            continue;
        }
        table->put(copy.move);
        received_.push_back(std::move(copy));
        coming_.erase(coming_.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

// As many, those with the most rows first, that the link and the device behind it end together with the host.
std::vector<ExpertTable::Move> Exchange::choose_fetched(const std::shared_ptr<ExpertTable> & table,
                                                        const std::vector<int32_t> & chosen, double host_row_s,
                                                        double device_row_s, int64_t n_rows, bool in_turns) {
    chosen_at_             = Clock::now();
    const double fetched_s = stream_.seconds(bytes_of(*table));
    if (!may_move(table) || host_row_s == 0.0 || fetched_s == 0.0) {
        return {};
    }
    std::vector<std::pair<int64_t, int32_t>> missed; // rows, and the expert
    for (const int32_t expert : table->missed()) {
        missed.emplace_back(std::count(chosen.begin(), chosen.end(), expert), expert);
    }
    std::stable_sort(missed.begin(), missed.end(), [](const auto & a, const auto & b) { return a.first > b.first; });
    std::vector<int64_t> rows = {0}; // of the first n of these
    for (const auto & [n, expert] : missed) {
        rows.push_back(rows.back() + n);
    }
    const auto   n_chosen = static_cast<int64_t>(chosen.size());
    const auto   n_slots  = table->n_slots();
    const double idle_s   = std::chrono::duration<double>(stream_.idle() - chosen_at_).count();
    double       least_s  = 0.0;
    size_t       n        = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        const int64_t n_host = rows.back() - rows[i];
        // the last launch waits for the last copies: the rows of half of the slots (route_packed)
        const size_t  in_last = std::min(i, std::max<size_t>(1, std::min(i, n_slots) / 2));
        const int64_t n_last  = n_rows > 0 ? n_rows : rows[in_last];
        const int64_t n_first = n_rows > 0 ? 0 : n_chosen - n_host - n_last;
        const double  link_s  = i > 0 ? idle_s + static_cast<double>(i) * fetched_s : 0.0;
        const double  device_s =
            std::max(link_s, static_cast<double>(n_first) * device_row_s) + static_cast<double>(n_last) * device_row_s;
        const double host_s = static_cast<double>(i) * request_s_ + static_cast<double>(n_host) * host_row_s;
        const double both_s = std::max(device_s, host_s);
        if (i == 0 || both_s < least_s) {
            least_s = both_s;
            n       = i;
        }
    }
    std::vector<int32_t> fetched;
    for (size_t i = 0; i < n; i++) {
        fetched.push_back(missed[i].second);
    }
    if (in_turns) {
        std::reverse(fetched.begin(), fetched.end()); // those that stay are used most
    }
    std::vector<ExpertTable::Move> moves = table->take(fetched, in_turns);
    for (const ExpertTable::Move & move : moves) {
        chosen_.push_back(new_copy(table, move));
    }
    return moves;
}

void Exchange::fetch(ggml_backend_t compute, size_t n, size_t after) {
    ready_ = Clock::now();
    GGML_ASSERT(n <= chosen_.size() && after <= marks_.size());
    if (after > 0 && marks_[after - 1]) {
        stream_.await(marks_[after - 1].get());
    }
    for (size_t i = 0; i < n; i++) {
        Copy & copy = chosen_.front();
        ask(copy, Time::max(), /*whole=*/true);
        stats().n_fetched++;
        received_.push_back(std::move(copy));
        chosen_.pop_front();
    }
    if (n > 0) {
        const double request_s = std::chrono::duration<double>(Clock::now() - ready_).count() / static_cast<double>(n);
        remember(request_s_, request_s);
        ready_ = stream_.idle();
    }
    for (Copy & copy : received_) {
        if (copy.event) {
            ggml_backend_event_wait(compute, copy.event.get());
            events_.push_back(std::move(copy.event));
        }
    }
    received_.clear();
}

void Exchange::mark(ggml_backend_t compute) {
    if (!stream_.has_events()) {
        return; // no slot takes turns
    }
    marks_.push_back(new_event());
    if (marks_.back()) {
        ggml_backend_event_record(marks_.back().get(), compute);
    } else {
        ggml_backend_synchronize(compute);
    }
}

void Exchange::forget_marks() {
    std::copy_if(std::make_move_iterator(marks_.begin()), std::make_move_iterator(marks_.end()),
                 std::back_inserter(events_), [](const EventPtr & event) { return event != nullptr; });
    marks_.clear();
}

void Exchange::cancel() {
    for (const Copy & copy : chosen_) {
        copy.table->drop(copy.move);
    }
    chosen_.clear();
}

//
// what follows the conversation
//

void Exchange::computed(const std::shared_ptr<ExpertTable> & table) {
    if (std::find(due_.begin(), due_.end(), table) == due_.end()) {
        due_.push_back(table);
    }
}

// Begins with the next move that is due; false: there is none.
bool Exchange::begin() {
    while (!due_.empty()) {
        const std::shared_ptr<ExpertTable> table = due_.front();
        due_.pop_front();
        const ExpertTable::Move move = may_move(table) ? table->next() : ExpertTable::Move{};
        if (move.expert >= 0) {
            going_.push_back(new_copy(table, move));
            return true;
        }
    }
    return false;
}

void Exchange::go_on(Time until) {
    if (!eager_ && until == Time::max()) {
        return; // when the next activation is due is not known yet
    }
    // nothing is begun that no byte may be asked for: until then a token finds the old expert
    while (!going_.empty() || ((eager_ || stream_.allowed(until) > 0) && begin())) {
        Copy & copy = going_.back();
        if (!ask(copy, eager_ ? Time::max() : until, /*whole=*/false)) {
            return;
        }
        stats().n_exchanged++;
        coming_.push_back(std::move(copy));
        going_.clear();
    }
}

} // namespace oallama
