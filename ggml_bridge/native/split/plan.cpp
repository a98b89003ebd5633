#include "plan.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

#include "times.h"
#include "weights.h"

namespace oallama {

namespace {

constexpr int64_t row_group   = 32;
constexpr int64_t max_tokens  = int64_t{1} << 31; // of a batch
constexpr int64_t max_experts = int64_t{1} << 16;
constexpr int64_t min_piece   = 4096; // bytes: asking for less takes longer than copying it

// One line of the text, with its number for messages.
class Line {
  public:
    Line(const std::string & text, int64_t number) : stream_(text), number_(number) {}

    // The next word; what: what it should be.
    std::string word(const char * what) {
        std::string word;
        check(static_cast<bool>(stream_ >> word), std::string("has no ") + what);
        return word;
    }

    // The next word as a number.
    int64_t count(const char * what) { return count(word(what), what); }

    int64_t count(const std::string & text, const char * what) const {
        const bool digits = !text.empty() && text.size() <= 18 &&
                            std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
        check(digits, "has " + text + " for " + what + ", which is no count");
        return std::stoll(text);
    }

    bool more() {
        stream_ >> std::ws;
        return !stream_.eof();
    }

    void check(bool condition, const std::string & otherwise) const {
        if (!condition) {
            fail(otherwise);
        }
    }

    [[noreturn]] void fail(const std::string & what) const {
        throw Error(OALLAMA_INVALID, "line " + std::to_string(number_) + " of the plan " + what);
    }

  private:
    std::istringstream stream_;
    int64_t            number_;
};

ggml_type type_of(const std::string & name, const Line & line) {
    for (int32_t number = 0; number < GGML_TYPE_COUNT; number++) {
        const auto  type  = static_cast<ggml_type>(number);
        std::string known = ggml_type_name(type) == nullptr ? "" : ggml_type_name(type);
        std::transform(known.begin(), known.end(), known.begin(), [](unsigned char c) { return std::toupper(c); });
        if (known == name && ggml_blck_size(type) > 0 && ggml_type_size(type) > 0) {
            return type;
        }
    }
    line.fail("names type " + name + ", which this ggml does not have");
}

Axis axis_of(const std::string & name, const Line & line) {
    line.check(name == "rows" || name == "cols" || name == "halves",
               "names axis " + name + "; it is rows, cols or halves");
    return name == "rows" ? Axis::rows : name == "cols" ? Axis::cols : Axis::halves;
}

void read_shape(const std::string & text, SliceSpec & slice, const Line & line) {
    const size_t first  = text.find('x');
    const size_t second = first == std::string::npos ? first : text.find('x', first + 1);
    line.check(second != std::string::npos, "has shape " + text + ", not KxNxE");
    slice.k = line.count(text.substr(0, first), "K");
    slice.n = line.count(text.substr(first + 1, second - first - 1), "N");
    slice.e = line.count(text.substr(second + 1), "E");
    line.check(slice.k >= 1 && slice.n >= 1 && slice.e >= 1, "has an empty shape");
    const int64_t max = std::numeric_limits<int64_t>::max() / 8; // bytes of an element: 8 at most
    line.check(slice.n <= max / slice.k && slice.e <= max / (slice.k * slice.n), "has a shape that no memory holds");
    line.check(slice.k % ggml_blck_size(slice.type) == 0, "has a K that is no multiple of the type's block");
}

void check_counts(const SliceSpec & slice, const Line & line) {
    const int64_t extent = slice.extent();
    line.check(slice.axis != Axis::halves || slice.n % 2 == 0, "cuts an odd number of rows into halves");
    line.check(slice.cc <= extent && slice.cg <= extent && slice.gg <= extent &&
                   slice.cc + slice.cg + slice.gg == extent,
               "has counts that do not add up to " + std::to_string(extent) + " for " + slice.name);
    const int64_t step = granularity(slice.type, slice.axis);
    for (const int64_t cut : {slice.cc, slice.cc + slice.cg}) {
        line.check(cut == extent || cut % step == 0, "cuts " + slice.name + " at " + std::to_string(cut) +
                                                         ", which is no multiple of " + std::to_string(step));
    }
}

int64_t read_chunk(const std::string & count, const Line & line) {
    const int64_t chunk = line.count(count, "the tokens of a chunk");
    line.check(chunk >= 1 && chunk <= max_tokens,
               "has chunks of " + count + " tokens; 1 to " + std::to_string(max_tokens) + " are possible");
    return chunk;
}

// Experts of which the device has a copy: hot=3,17,40.
std::vector<int32_t> read_hot(const std::string & list, const SliceSpec & slice, const Line & line) {
    std::vector<int32_t> hot;
    std::istringstream   words(list);
    std::string          word;
    while (std::getline(words, word, ',')) {
        const int64_t expert = line.count(word, "a hot expert");
        line.check(expert < slice.e, "has hot expert " + word + " of " + std::to_string(slice.e));
        line.check(hot.empty() || hot.back() < expert, "has hot experts that do not ascend");
        hot.push_back(static_cast<int32_t>(expert));
    }
    line.check(!hot.empty(), "has no hot expert behind hot=");
    return hot;
}

SliceSpec read_slice(Line & line) {
    SliceSpec slice;
    slice.name = line.word("tensor name");
    slice.type = type_of(line.word("type"), line);
    read_shape(line.word("shape"), slice, line);
    slice.axis   = axis_of(line.word("axis"), line);
    slice.cc     = line.count("CC");
    slice.cg     = line.count("CG");
    slice.gg     = line.count("GG");
    slice.layout = line.word("layout");
    while (line.more()) {
        const std::string word = line.word("word");
        if (word == "n_g=0" && slice.takes_n_g) {
            slice.takes_n_g = false;
        } else if (word == "resident" && !slice.resident) {
            slice.resident = true;
        } else if (word == "input=F32" && !slice.input_f32) {
            slice.input_f32 = true;
        } else if (word.rfind("chunk=", 0) == 0 && slice.chunk == 0) {
            slice.chunk = read_chunk(word.substr(6), line);
        } else if (word.rfind("hot=", 0) == 0 && slice.hot.empty()) {
            slice.hot       = read_hot(word.substr(4), slice, line);
            slice.takes_n_g = false;
        } else {
            line.fail("ends with " + word +
                      "; n_g=0, resident, input=F32, chunk=TOKENS and hot=EXPERTS may follow the layout, each "
                      "once, or nothing");
        }
    }
    line.check(slice.name.size() < OALLAMA_NAME_BYTES && slice.name.size() < GGML_MAX_NAME,
               "has a tensor name that is too long for ggml");
    check_counts(slice, line);
    // experts that are whole on the device cannot be cut too, and nothing of such a weight is streamed
    line.check(slice.hot.empty() || (slice.e >= 2 && slice.e <= max_experts),
               "has hot experts of " + slice.name + ", which has " + std::to_string(slice.e) + "; 2 to " +
                   std::to_string(max_experts) + " are possible");
    line.check(slice.hot.empty() || slice.cc == slice.extent(),
               "has hot experts and a cut through all experts of " + slice.name + "; one of the two is possible");
    line.check(slice.chunk == 0 || (slice.e == 1 && !slice.resident),
               "has chunks of " + slice.name + ", which is resident or a stack of matrices");
    line.check((slice.layout == "-") == (slice.cc == 0),
               "must name a host layout where CC is not 0, and - where it is");
    return slice;
}

TokenSplit read_token_split(Line & line, const std::vector<TokenSplit> & before) {
    TokenSplit split = {};
    split.n_tokens   = line.count("the number of tokens");
    split.n_g        = line.count("n_g");
    line.check(split.n_tokens >= 1 && split.n_tokens <= max_tokens && split.n_g <= split.n_tokens,
               "has n_g " + std::to_string(split.n_g) + " of " + std::to_string(split.n_tokens) + " tokens");
    line.check(before.empty() || before.back().n_tokens < split.n_tokens,
               "has no more tokens than the tokens line before it");
    return split;
}

// Any line behind the first.
void read_item(const std::string & item, Line & line, PlanSpec & plan) {
    if (item == "device" && !plan.devices.back().name.empty()) {
        plan.devices.emplace_back();
    }
    DeviceSpec & device = plan.devices.back();
    StreamSpec & stream = device.stream;
    if (item == "model") {
        line.word("fingerprint"); // for the reader
    } else if (item == "device") {
        const std::string name = line.word("device");
        line.check(std::none_of(plan.devices.begin(), plan.devices.end(),
                                [&](const DeviceSpec & other) { return other.name == name; }),
                   "names device " + name + " a second time");
        device.name = name;
    } else if (item == "slots") {
        stream.n_slots = line.count("the number of slots");
        line.check(stream.n_slots >= 1 && stream.n_slots <= max_slots, "asks for " + std::to_string(stream.n_slots) +
                                                                           " slots; 1 to " + std::to_string(max_slots) +
                                                                           " can be had");
    } else if (item == "ring") {
        stream.ring = line.count("the bytes of the ring");
    } else if (item == "staging") {
        device.staging = line.count("the staging bytes");
    } else if (item == "prefetch") {
        const std::string mode = line.word("prefetch mode");
        line.check(mode == "ahead" || mode == "layer", "asks for prefetch " + mode + "; it is ahead or layer");
        stream.ahead = mode == "ahead";
    } else if (item == "exchange") {
        const std::string mode = line.word("mode of exchanging");
        line.check(mode == "off" || mode == "idle" || mode == "eager",
                   "asks for exchange " + mode + "; it is off, idle or eager");
        device.exchange = mode == "off" ? ExchangeMode::off : mode == "idle" ? ExchangeMode::idle : ExchangeMode::eager;
    } else if (item == "piece") {
        stream.piece = line.count("the bytes of a piece");
        line.check(stream.piece >= min_piece, "has pieces of " + std::to_string(stream.piece) + " bytes; they have " +
                                                  std::to_string(min_piece) + " at least");
    } else if (item == "link") {
        stream.link_bytes_per_s = line.count("the link's bytes per second");
        line.check(stream.link_bytes_per_s >= 1, "has a link that copies nothing");
    } else if (item == "sum") {
        plan.sum_bytes = line.count("the bytes of results");
    } else if (item == "twice") {
        const int64_t twice = line.count("twice");
        line.check(twice <= 1, "has " + std::to_string(twice) + " for twice; it is 0 or 1");
        device.twice = twice == 1;
    } else if (item == "count") {
        const int64_t counts = line.count("count");
        line.check(counts <= 1, "has " + std::to_string(counts) + " for count; it is 0 or 1");
        plan.counts = counts == 1;
    } else if (item == "tokens") {
        device.tokens.push_back(read_token_split(line, device.tokens));
    } else if (item == "tensor") {
        SliceSpec slice = read_slice(line);
        slice.device    = plan.devices.size() - 1;
        line.check(plan.by_name.emplace(slice.name, plan.slices.size()).second,
                   "names " + slice.name + " a second time");
        plan.slices.push_back(std::move(slice));
    } else {
        line.fail("begins with " + item +
                  "; known are model, device, staging, slots, ring, prefetch, exchange, piece, link, sum, twice, "
                  "count, tokens and tensor");
    }
}

// Rows that ggml's repacked kernels multiply at a time. What is left of a batch goes row by row, each nearly as long as
// a batch of one.
constexpr int64_t rows_at_once = 4;

// 0 below the first entry, linear between two (rounded, a half up), the same share above the last.
int64_t linear_n_g(const std::vector<TokenSplit> & tokens, int64_t n_tokens) {
    if (tokens.empty() || n_tokens < tokens.front().n_tokens) {
        return 0;
    }
    for (size_t i = 1; i < tokens.size(); i++) {
        const TokenSplit & low  = tokens[i - 1];
        const TokenSplit & high = tokens[i];
        if (n_tokens <= high.n_tokens) {
            // a half up, in whole numbers: max_tokens keeps them inside of int64_t
            const int64_t span  = high.n_tokens - low.n_tokens;
            const int64_t twice = 2 * (low.n_g * (high.n_tokens - n_tokens) + high.n_g * (n_tokens - low.n_tokens));
            return (twice + span) / (2 * span);
        }
    }
    return tokens.back().n_g * n_tokens / tokens.back().n_tokens;
}

// So many of a batch's tokens or up to three more, such that the host's kernels leave no row over.
int64_t in_groups(int64_t n_host, int64_t n_tokens) {
    return n_host <= 1 ? n_host : std::min((n_host + rows_at_once - 1) / rows_at_once * rows_at_once, n_tokens);
}

} // namespace

int64_t granularity(ggml_type type, Axis axis) {
    const int64_t block = ggml_blck_size(type);
    require(block > 0, "unknown ggml type " + std::to_string(static_cast<int32_t>(type)));
    return axis == Axis::cols ? std::lcm(block, row_group) : row_group;
}

int64_t n_g_at(const std::vector<TokenSplit> & tokens, int64_t n_tokens) {
    for (const TokenSplit & split : tokens) {
        if (split.n_tokens == n_tokens) {
            return split.n_g;
        }
    }
    return n_tokens - in_groups(n_tokens - linear_n_g(tokens, n_tokens), n_tokens);
}

PlanSpec parse_plan(const std::string & text) {
    PlanSpec           plan;
    std::istringstream lines(text);
    std::string        content;
    bool               started = false;
    for (int64_t number = 1; std::getline(lines, content); number++) {
        Line line(content, number);
        if (!line.more() || content[content.find_first_not_of(" \t\r")] == '#') {
            continue;
        }
        const std::string item = line.word("word");
        if (started) {
            read_item(item, line, plan);
        } else if (item != "oallama-plan" || line.word("version") != "1") {
            throw Error(OALLAMA_INVALID, "this is no plan of version 1: its first line must be oallama-plan 1");
        }
        started = true;
        line.check(!line.more(), "has more words than it should");
    }
    require(started, "the plan is empty: its first line must be oallama-plan 1");
    const bool named = !plan.devices.front().name.empty();
    require(plan.devices.front().tokens.empty() || named, "the plan gives tokens to the device but names no device");
    for (const SliceSpec & slice : plan.slices) {
        require(!slice.resident || named, "the plan says that " + slice.name + " is resident but names no device");
        require((slice.gg == 0 && slice.cg == 0 && slice.hot.empty()) || named,
                "the plan gives " + slice.name + " a part for the device but names no device");
    }
    return plan;
}

//
// plans in use
//

bool LoadedPlan::has_residents(size_t number) const {
    return std::any_of(spec_.slices.begin(), spec_.slices.end(),
                       [&](const SliceSpec & slice) { return slice.device == number && slice.resident; });
}

ggml_backend_dev_t LoadedPlan::device(size_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::string &               name  = spec_.devices.at(number).name;
    Found &                           found = found_.at(number);
    if (found.device == nullptr && !name.empty()) {
        ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
        if (device == nullptr) {
            std::string known;
            for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
                known += (known.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
            }
            throw Error(OALLAMA_INVALID, "the plan's device " + name + " is not here; devices are " + known);
        }
        require(std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), "OALLAMA") != 0,
                "the plan's device " + name + " is the split backend itself; name a GPU");
        found = {device, add_device(device, has_residents(number)) ? device : nullptr};
    }
    return found.device;
}

void LoadedPlan::find_devices() const {
    for (size_t number = 0; number < spec_.devices.size(); number++) {
        device(number);
    }
}

ggml_backend_dev_t LoadedPlan::memory_of(const SliceSpec & slice) const {
    return slice.resident && device(slice.device) != nullptr ? found_[slice.device].resident : nullptr;
}

bool LoadedPlan::lacks_residents(size_t number) const {
    ggml_backend_dev_t on = device(number);
    return on != nullptr && has_residents(number) && found_[number].resident == nullptr &&
           !ggml_backend_buft_is_host(ggml_backend_dev_buffer_type(on));
}

LoadedPlan::LoadedPlan(PlanSpec spec, ggml_backend_dev_t owner)
    : spec_(std::move(spec)), buft_({ggml_backend_oallama_split_buffer_type_i, owner, this}),
      found_(spec_.devices.size()) {
    held_.resize(spec_.slices.size());
}

LoadedPlan::~LoadedPlan() {
    for (const Found & found : found_) {
        if (found.device != nullptr) {
            remove_device(found.device, found.resident != nullptr);
        }
    }
}

SliceSpec LoadedPlan::slice_of(const ggml_tensor * tensor) const {
    const SliceSpec * found = spec_.find(tensor->name);
    if (found == nullptr) {
        SliceSpec whole;
        whole.name   = tensor->name;
        whole.type   = tensor->type;
        whole.k      = tensor->ne[0];
        whole.n      = tensor->ne[1];
        whole.e      = tensor->ne[2] * tensor->ne[3];
        whole.cc     = whole.n;
        whole.layout = plain_layout;
        return whole;
    }
    const SliceSpec & slice = *found;
    require(tensor->type == slice.type && tensor->ne[0] == slice.k && tensor->ne[1] == slice.n &&
                tensor->ne[2] == slice.e && tensor->ne[3] == 1,
            std::string("the plan is for another model: ") + tensor->name + " is " + ggml_type_name(tensor->type) +
                " " + std::to_string(tensor->ne[0]) + "x" + std::to_string(tensor->ne[1]) + "x" +
                std::to_string(tensor->ne[2]) + ", the plan says " + ggml_type_name(slice.type) + " " +
                std::to_string(slice.k) + "x" + std::to_string(slice.n) + "x" + std::to_string(slice.e));
    return slice;
}

void LoadedPlan::begin_load() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (n_loads_++ == 0) {
        problems_.clear();
    }
}

void LoadedPlan::end_load() {
    const std::lock_guard<std::mutex> lock(mutex_);
    n_loads_--;
}

void LoadedPlan::report(const SplitWeight & weight, bool loaded) {
    const SliceSpec * slice = spec_.find(weight.slice().name);
    if (slice == nullptr) {
        return;
    }
    const std::lock_guard<std::mutex>  lock(mutex_);
    std::vector<const SplitWeight *> & held = held_[static_cast<size_t>(slice - spec_.slices.data())];
    held.erase(std::remove(held.begin(), held.end(), &weight), held.end());
    if (loaded) {
        held.push_back(&weight);
    }
}

ExpertUses * LoadedPlan::uses_of(const SliceSpec & slice) {
    if (!spec_.counts || slice.e < 2 || spec_.find(slice.name) == nullptr) {
        return nullptr;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    return &uses_.try_emplace(slice.name, slice.e).first->second;
}

std::vector<std::pair<std::string, ExpertUses::Totals>> LoadedPlan::uses() const {
    const std::lock_guard<std::mutex>                       lock(mutex_);
    std::vector<std::pair<std::string, ExpertUses::Totals>> found;
    for (const auto & [name, uses] : uses_) {
        found.emplace_back(name, uses.totals());
    }
    return found;
}

void LoadedPlan::problem(const std::string & sentence, bool usable) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto                        is_known = [&](const Problem & known) { return known.sentence == sentence; };
    if (std::none_of(problems_.begin(), problems_.end(), is_known)) {
        problems_.push_back({sentence, usable});
    }
}

oallama_slice LoadedPlan::placed(size_t index) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const SliceSpec &                 planned = spec_.slices.at(index);
    const SplitWeight *               weight  = held_[index].empty() ? nullptr : held_[index].back();
    const SliceSpec &                 now     = weight == nullptr ? planned : weight->slice();
    oallama_slice                     out     = {};
    std::snprintf(out.name, sizeof out.name, "%s", planned.name.c_str());
    std::snprintf(out.layout, sizeof out.layout, "%s", now.layout.c_str());
    out.axis  = static_cast<int32_t>(planned.axis);
    out.cc    = now.cc;
    out.cg    = now.cg;
    out.gg    = now.gg;
    out.n_hot = static_cast<int64_t>(now.hot.size());
    if (weight != nullptr) {
        out.loaded       = 1;
        out.host_bytes   = weight->host_bytes();
        out.device_bytes = weight->part_bytes(side_device);
    }
    return out;
}

std::vector<std::string> LoadedPlan::problems(bool * usable) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string>          sentences;
    *usable = true;
    for (const Problem & problem : problems_) {
        sentences.push_back(problem.sentence);
        *usable = *usable && problem.usable;
    }
    return sentences;
}

} // namespace oallama
