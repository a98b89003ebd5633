#include "plan.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <limits>
#include <numeric>
#include <sstream>

#include "times.h"
#include "weights.h"

namespace oallama {

namespace {

constexpr int64_t row_group   = 32;
constexpr int64_t tile_rows   = 128;              // of a tile of mul-mats by quantised weights on CUDA
constexpr int64_t long_rows   = 8192;             // from which on whole tiles are chosen
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
        if (!(stream_ >> word)) {
            fail(std::string("has no ") + what);
        }
        return word;
    }

    bool more() {
        stream_ >> std::ws;
        return !stream_.eof();
    }

    void end() {
        if (more()) {
            fail("has more words than it should");
        }
    }

    int64_t count(const std::string & text, const char * what) const {
        const bool digits = !text.empty() && text.size() <= 18 &&
                            std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
        if (!digits) {
            fail("has " + text + " for " + what + ", which is no count");
        }
        return std::stoll(text);
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

void read_shape(const std::string & text, SliceSpec & slice, const Line & line) {
    const size_t first  = text.find('x');
    const size_t second = first == std::string::npos ? first : text.find('x', first + 1);
    if (second == std::string::npos) {
        line.fail("has shape " + text + ", not KxNxE");
    }
    slice.k = line.count(text.substr(0, first), "K");
    slice.n = line.count(text.substr(first + 1, second - first - 1), "N");
    slice.e = line.count(text.substr(second + 1), "E");
    if (slice.k < 1 || slice.n < 1 || slice.e < 1) {
        line.fail("has an empty shape");
    }
    const int64_t max = std::numeric_limits<int64_t>::max() / 8; // bytes of an element: 8 at most
    if (slice.n > max / slice.k || slice.e > max / (slice.k * slice.n)) {
        line.fail("has a shape that no memory holds");
    }
    if (slice.k % ggml_blck_size(slice.type) != 0) {
        line.fail("has a K that is no multiple of the type's block");
    }
}

Axis axis_of(const std::string & name, const Line & line) {
    if (name == "rows") {
        return Axis::rows;
    }
    if (name == "cols") {
        return Axis::cols;
    }
    if (name == "halves") {
        return Axis::halves;
    }
    line.fail("names axis " + name + "; it is rows, cols or halves");
}

bool is_cut(const SliceSpec & slice, int64_t at) {
    return at == slice.extent() || at % granularity(slice.type, slice.axis) == 0;
}

void check_counts(const SliceSpec & slice, const Line & line) {
    const int64_t extent = slice.extent();
    if (slice.axis == Axis::halves && slice.n % 2 != 0) {
        line.fail("cuts an odd number of rows into halves");
    }
    if (slice.cc > extent || slice.cg > extent || slice.gg > extent || slice.cc + slice.cg + slice.gg != extent) {
        line.fail("has counts that do not add up to " + std::to_string(extent) + " for " + slice.name);
    }
    for (const int64_t cut : {slice.cc, slice.cc + slice.cg}) {
        if (!is_cut(slice, cut)) {
            line.fail("cuts " + slice.name + " at " + std::to_string(cut) + ", which is no multiple of " +
                      std::to_string(granularity(slice.type, slice.axis)));
        }
    }
}

int64_t read_chunk(const std::string & count, const Line & line) {
    const int64_t chunk = line.count(count, "the tokens of a chunk");
    if (chunk < 1 || chunk > max_tokens) {
        line.fail("has chunks of " + count + " tokens; 1 to " + std::to_string(max_tokens) + " are possible");
    }
    return chunk;
}

// Experts of which the device has a copy: hot=3,17,40.
std::vector<int32_t> read_hot(const std::string & list, const SliceSpec & slice, const Line & line) {
    std::vector<int32_t> hot;
    std::istringstream   words(list);
    std::string          word;
    while (std::getline(words, word, ',')) {
        const int64_t expert = line.count(word, "a hot expert");
        if (expert >= slice.e) {
            line.fail("has hot expert " + word + " of " + std::to_string(slice.e));
        }
        if (!hot.empty() && hot.back() >= expert) {
            line.fail("has hot experts that do not ascend");
        }
        hot.push_back(static_cast<int32_t>(expert));
    }
    if (hot.empty()) {
        line.fail("has no hot expert behind hot=");
    }
    return hot;
}

// Experts that are whole on the device cannot be cut too, and nothing of such a weight is streamed.
void check_hot(const SliceSpec & slice, const Line & line) {
    if (slice.hot.empty()) {
        return;
    }
    if (slice.e < 2 || slice.e > max_experts) {
        line.fail("has hot experts of " + slice.name + ", which has " + std::to_string(slice.e) + "; 2 to " +
                  std::to_string(max_experts) + " are possible");
    }
    if (slice.cc != slice.extent()) {
        line.fail("has hot experts and a cut through all experts of " + slice.name + "; one of the two is possible");
    }
}

SliceSpec read_slice(Line & line) {
    SliceSpec slice;
    slice.name = line.word("tensor name");
    slice.type = type_of(line.word("type"), line);
    read_shape(line.word("shape"), slice, line);
    slice.axis   = axis_of(line.word("axis"), line);
    slice.cc     = line.count(line.word("CC"), "CC");
    slice.cg     = line.count(line.word("CG"), "CG");
    slice.gg     = line.count(line.word("GG"), "GG");
    slice.layout = line.word("layout");
    while (line.more()) {
        const std::string word = line.word("word");
        if (word == "n_g=0" && slice.takes_n_g) {
            slice.takes_n_g = false;
        } else if (word == "resident" && !slice.resident) {
            slice.resident = true;
        } else if (word.rfind("chunk=", 0) == 0 && slice.chunk == 0) {
            slice.chunk = read_chunk(word.substr(6), line);
        } else if (word.rfind("hot=", 0) == 0 && slice.hot.empty()) {
            slice.hot       = read_hot(word.substr(4), slice, line);
            slice.takes_n_g = false;
        } else {
            line.fail("ends with " + word +
                      "; n_g=0, resident, chunk=TOKENS and hot=EXPERTS may follow the layout, each once, or "
                      "nothing");
        }
    }
    if (slice.name.size() >= OALLAMA_NAME_BYTES || slice.name.size() >= GGML_MAX_NAME) {
        line.fail("has a tensor name that is too long for ggml");
    }
    check_counts(slice, line);
    check_hot(slice, line);
    if (slice.chunk > 0 && (slice.e > 1 || slice.resident)) {
        line.fail("has chunks of " + slice.name + ", which is resident or a stack of matrices");
    }
    if ((slice.layout == "-") == (slice.cc > 0)) {
        line.fail("must name a host layout where CC is not 0, and - where it is");
    }
    return slice;
}

TokenSplit read_token_split(Line & line, const std::vector<TokenSplit> & before) {
    TokenSplit split = {};
    split.n_tokens   = line.count(line.word("number of tokens"), "the number of tokens");
    split.n_g        = line.count(line.word("n_g"), "n_g");
    if (split.n_tokens < 1 || split.n_tokens > max_tokens || split.n_g > split.n_tokens) {
        line.fail("has n_g " + std::to_string(split.n_g) + " of " + std::to_string(split.n_tokens) + " tokens");
    }
    if (!before.empty() && before.back().n_tokens >= split.n_tokens) {
        line.fail("has no more tokens than the tokens line before it");
    }
    return split;
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
    require(block > 0, "there is no ggml type " + std::to_string(static_cast<int32_t>(type)));
    return axis == Axis::cols ? std::lcm(block, row_group) : row_group;
}

int64_t cut_step(const SliceSpec & slice) {
    const bool whole_tiles = slice.axis != Axis::cols && slice.extent() >= long_rows && slice.extent() % tile_rows == 0;
    return whole_tiles && ggml_is_quantized(slice.type) ? tile_rows : granularity(slice.type, slice.axis);
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
        if (!started) {
            if (item != "oallama-plan" || line.word("version") != "1") {
                throw Error(OALLAMA_INVALID, "this is no plan of version 1: its first line must be oallama-plan 1");
            }
            started = true;
        } else if (item == "model") {
            if (!plan.model.empty()) {
                line.fail("names a second model");
            }
            plan.model = line.word("fingerprint");
        } else if (item == "device") {
            if (!plan.device.empty()) {
                line.fail("names a second device");
            }
            plan.device = line.word("device");
        } else if (item == "slots") {
            plan.stream.n_slots = line.count(line.word("number of slots"), "the number of slots");
            if (plan.stream.n_slots < 1 || plan.stream.n_slots > max_slots) {
                line.fail("asks for " + std::to_string(plan.stream.n_slots) + " slots; 1 to " +
                          std::to_string(max_slots) + " can be had");
            }
        } else if (item == "ring") {
            plan.stream.ring = line.count(line.word("bytes of the ring"), "the bytes of the ring");
        } else if (item == "staging") {
            plan.staging = line.count(line.word("staging bytes"), "the staging bytes");
        } else if (item == "prefetch") {
            const std::string mode = line.word("prefetch mode");
            if (mode != "ahead" && mode != "layer") {
                line.fail("asks for prefetch " + mode + "; it is ahead or layer");
            }
            plan.stream.ahead = mode == "ahead";
        } else if (item == "piece") {
            plan.stream.piece = line.count(line.word("bytes of a piece"), "the bytes of a piece");
            if (plan.stream.piece < min_piece) {
                line.fail("has pieces of " + std::to_string(plan.stream.piece) + " bytes; they have " +
                          std::to_string(min_piece) + " at least");
            }
        } else if (item == "link") {
            plan.stream.link_bytes_per_s = line.count(line.word("bytes per second"), "the link's bytes per second");
            if (plan.stream.link_bytes_per_s < 1) {
                line.fail("has a link that copies nothing");
            }
        } else if (item == "sum") {
            plan.sum_bytes = line.count(line.word("bytes of results"), "the bytes of results");
        } else if (item == "twice") {
            const int64_t twice = line.count(line.word("number"), "twice");
            if (twice > 1) {
                line.fail("has " + std::to_string(twice) + " for twice; it is 0 or 1");
            }
            plan.twice = twice == 1;
        } else if (item == "tokens") {
            plan.tokens.push_back(read_token_split(line, plan.tokens));
        } else if (item == "tensor") {
            SliceSpec slice = read_slice(line);
            if (!plan.by_name.emplace(slice.name, plan.slices.size()).second) {
                line.fail("names " + slice.name + " a second time");
            }
            plan.slices.push_back(std::move(slice));
        } else {
            line.fail("begins with " + item +
                      "; known are model, device, staging, slots, ring, prefetch, piece, link, sum, twice, tokens and "
                      "tensor");
        }
        line.end();
    }
    require(started, "the plan is empty: its first line must be oallama-plan 1");
    require(plan.tokens.empty() || !plan.device.empty(), "the plan gives tokens to the device but names no device");
    for (const SliceSpec & slice : plan.slices) {
        require(!slice.resident || !plan.device.empty(),
                "the plan says that " + slice.name + " is resident but names no device");
        require((slice.gg == 0 && slice.cg == 0 && slice.hot.empty()) || !plan.device.empty(),
                "the plan gives " + slice.name + " a part for the device but names no device");
    }
    return plan;
}

//
// plans in use
//

namespace {

oallama_slice as_planned(const SliceSpec & slice) {
    oallama_slice out = {};
    std::snprintf(out.name, sizeof out.name, "%s", slice.name.c_str());
    std::snprintf(out.layout, sizeof out.layout, "%s", slice.layout.c_str());
    out.axis       = static_cast<int32_t>(slice.axis);
    out.cc         = slice.cc;
    out.cg         = slice.cg;
    out.gg         = slice.gg;
    out.cc_planned = slice.cc;
    out.gg_planned = slice.gg;
    out.n_hot      = static_cast<int64_t>(slice.hot.size());
    return out;
}

void tell_loaded(const SplitWeight & weight, oallama_slice & out) {
    const SliceSpec & slice = weight.slice();
    out.loaded              = 1;
    out.cc                  = slice.cc;
    out.cg                  = slice.cg;
    out.gg                  = slice.gg;
    out.host_bytes          = weight.host_bytes();
    out.device_bytes        = weight.part_bytes(side_device);
    out.n_hot               = weight.n_slots();
    std::snprintf(out.layout, sizeof out.layout, "%s", slice.layout.c_str());
}

bool has_residents(const PlanSpec & spec) {
    return std::any_of(spec.slices.begin(), spec.slices.end(), [](const SliceSpec & slice) { return slice.resident; });
}

} // namespace

std::shared_ptr<LoadedPlan> LoadedPlan::make(PlanSpec spec, ggml_backend_dev_t owner) {
    return std::shared_ptr<LoadedPlan>(new LoadedPlan(std::move(spec), owner));
}

ggml_backend_dev_t LoadedPlan::device() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (device_ == nullptr && !spec_.device.empty()) {
        ggml_backend_dev_t device = ggml_backend_dev_by_name(spec_.device.c_str());
        if (device == nullptr) {
            std::string known;
            for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
                known += (known.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
            }
            throw Error(OALLAMA_INVALID, "the plan's device " + spec_.device + " is not here; devices are " + known);
        }
        require(device->iface.get_name != buft_.device->iface.get_name,
                "the plan's device " + spec_.device + " is the split backend itself; name a GPU");
        device_   = device;
        resident_ = add_device(device, has_residents(spec_)) ? device : nullptr;
    }
    return device_;
}

ggml_backend_dev_t LoadedPlan::memory_of(const SliceSpec & slice) const {
    return slice.resident && device() != nullptr ? resident_ : nullptr;
}

bool LoadedPlan::lacks_residents() const {
    return has_residents(spec_) && device() != nullptr && resident_ == nullptr &&
           !ggml_backend_buft_is_host(ggml_backend_dev_buffer_type(device()));
}

LoadedPlan::LoadedPlan(PlanSpec spec, ggml_backend_dev_t owner)
    : spec_(std::move(spec)), times_(std::make_shared<BlockTimes>()),
      buft_{ggml_backend_oallama_split_buffer_type_i, owner, this} {
    held_.resize(spec_.slices.size());
    placed_.reserve(spec_.slices.size());
    for (const SliceSpec & slice : spec_.slices) {
        placed_.push_back(as_planned(slice));
    }
}

LoadedPlan::~LoadedPlan() {
    if (device_ != nullptr) {
        remove_device(device_, resident_ != nullptr);
    }
}

SliceSpec LoadedPlan::slice_of(const ggml_tensor * tensor) const {
    const auto found = spec_.by_name.find(tensor->name);
    if (found == spec_.by_name.end()) {
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
    const SliceSpec & slice = spec_.slices[found->second];
    require(tensor->type == slice.type && tensor->ne[0] == slice.k && tensor->ne[1] == slice.n &&
                tensor->ne[2] == slice.e && tensor->ne[3] == 1,
            std::string("the plan is for another model: ") + tensor->name + " is " + ggml_type_name(tensor->type) +
                " " + std::to_string(tensor->ne[0]) + "x" + std::to_string(tensor->ne[1]) + "x" +
                std::to_string(tensor->ne[2]) + ", the plan says " + ggml_type_name(slice.type) + " " +
                std::to_string(slice.k) + "x" + std::to_string(slice.n) + "x" + std::to_string(slice.e));
    return slice;
}

uint64_t LoadedPlan::begin_load() {
    const std::lock_guard<std::mutex> lock(mutex_);
    problems_.erase(std::remove_if(problems_.begin(), problems_.end(),
                                   [this](const Problem & problem) { return loads_.count(problem.load) == 0; }),
                    problems_.end());
    loads_.insert(++n_loads_);
    return n_loads_;
}

void LoadedPlan::end_load(uint64_t load) {
    const std::lock_guard<std::mutex> lock(mutex_);
    loads_.erase(load);
}

void LoadedPlan::report(const SplitWeight & weight, bool loaded) {
    const auto found = spec_.by_name.find(weight.slice().name);
    if (found == spec_.by_name.end()) {
        return;
    }
    const std::lock_guard<std::mutex>  lock(mutex_);
    std::vector<const SplitWeight *> & held   = held_[found->second];
    oallama_slice &                    placed = placed_[found->second];
    held.erase(std::remove(held.begin(), held.end(), &weight), held.end());
    if (loaded) {
        held.push_back(&weight);
    }
    placed = as_planned(spec_.slices[found->second]);
    if (!held.empty()) { // of the model that was loaded last, of those that are left
        tell_loaded(*held.back(), placed);
    }
    if (!loaded && keeps_uses()) {
        weight.append_uses(uses_path_);
    }
}

void LoadedPlan::problem(uint64_t load, const std::string & sentence, bool usable) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool said = std::any_of(problems_.begin(), problems_.end(), [&](const Problem & problem) {
        return problem.load == load && problem.sentence == sentence;
    });
    if (!said) {
        problems_.push_back({load, sentence, usable});
    }
}

oallama_slice LoadedPlan::placed(size_t index) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return placed_.at(index);
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
