#include "parameters.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "../split/util.h"

namespace emulated {

namespace {

using oallama::require;

constexpr int64_t      max_cpus    = 1 << 16;
constexpr const char * next_device = "---"; // the line between two devices

class Reader {
  public:
    Reader(const std::string & line, int number) : words_(line), where_("parameter line " + std::to_string(number)) {}

    std::string word() {
        std::string text;
        words_ >> text;
        require(!text.empty(), where_ + ": a word is missing");
        return text;
    }

    std::string rest() {
        std::string text;
        std::getline(words_ >> std::ws, text);
        return text;
    }

    double positive() {
        const double value = number();
        require(value > 0.0, where_ + ": must be above 0");
        return value;
    }

    double not_negative() {
        const double value = number();
        require(value >= 0.0, where_ + ": must not be negative");
        return value;
    }

    int64_t count() {
        const double value = number();
        require(value >= -1.0 && value < 9e18 && value == std::floor(value), where_ + ": must be a whole number");
        return static_cast<int64_t>(value);
    }

    template <typename T> T one_of(std::initializer_list<std::pair<const char *, T>> choices) {
        const std::string text = word();
        for (const auto & [name, value] : choices) {
            if (text == name) {
                return value;
            }
        }
        throw oallama::Error(OALLAMA_INVALID, where_ + ": unknown choice " + text);
    }

    ggml_type type() {
        std::string text = word();
        std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
        for (int i = 0; i < GGML_TYPE_COUNT; i++) {
            const char * name = ggml_type_name(static_cast<ggml_type>(i));
            std::string  known(name == nullptr ? "" : name);
            std::transform(known.begin(), known.end(), known.begin(), [](unsigned char c) { return std::tolower(c); });
            if (known == text) {
                return static_cast<ggml_type>(i);
            }
        }
        throw oallama::Error(OALLAMA_INVALID, where_ + ": unknown type " + text);
    }

    std::array<int64_t, 3> shape() {
        std::string text = word();
        std::replace(text.begin(), text.end(), 'x', ' ');
        std::istringstream     parts(text);
        std::array<int64_t, 3> found = {};
        parts >> found[0] >> found[1] >> found[2];
        require(!parts.fail() && found[0] > 0 && found[1] > 0 && found[2] > 0, where_ + ": a shape is KxNxE");
        return found;
    }

    const std::string & where() const { return where_; }

  private:
    double number() {
        const std::string text  = word();
        size_t            used  = 0;
        double            value = 0.0;
        try {
            value = std::stod(text, &used);
        } catch (const std::exception &) {
            used = 0;
        }
        require(used == text.size() && std::isfinite(value), where_ + ": " + text + " is no number");
        return value;
    }

    std::istringstream words_;
    std::string        where_;
};

std::map<int, std::vector<std::vector<int32_t>>> read_routing(const std::string & path) {
    std::ifstream file(path);
    require(file.good(), "the routing file " + path + " cannot be read");
    std::map<int, std::vector<std::vector<int32_t>>> rows;
    std::string                                      line;
    for (int number = 1; std::getline(file, line); number++) {
        const size_t begin = line.find_first_not_of(" \t\r");
        if (begin == std::string::npos || line[begin] == '#') {
            continue;
        }
        std::istringstream   words(line);
        std::vector<int32_t> ids;
        int                  layer = -1;
        words >> layer;
        for (int32_t id = 0; words >> id;) {
            require(id >= 0 && std::find(ids.begin(), ids.end(), id) == ids.end(),
                    "the routing file " + path + " repeats an expert in a row, or has a negative one");
            ids.push_back(id);
        }
        require(words.eof() && layer >= 0 && !ids.empty(),
                "line " + std::to_string(number) + " of the routing file " + path + " is not LAYER ID ID ...");
        rows[layer].push_back(std::move(ids));
    }
    require(!rows.empty(), "the routing file " + path + " has no rows");
    return rows;
}

// The parameters of one device, which `lines` has up to its end or to a line `---`. number: of the last line before.
Parameters parse_device(std::istringstream & lines, int & number) {
    Parameters          parameters;
    double              pinned = 0.0, pageable = 0.0, copy_s = 0.0;
    std::array<bool, 4> given = {};
    std::string         line;
    while (std::getline(lines, line) && line != next_device) {
        Reader read(line, ++number);
        if (line.find_first_not_of(" \t\r") == std::string::npos || line[line.find_first_not_of(" \t\r")] == '#') {
            continue;
        }
        const std::string                     name      = read.word();
        const std::map<std::string, double *> rates     = {{"bytes_per_s", &parameters.bytes_per_s},
                                                           {"flops_per_s", &parameters.flops_per_s},
                                                           {"flops_float_per_s", &parameters.flops_float_per_s},
                                                           {"pinned_bytes_per_s", &pinned},
                                                           {"pageable_bytes_per_s", &pageable}};
        const std::map<std::string, double *> latencies = {{"kernel_s", &parameters.kernel_s},
                                                           {"launch_s", &parameters.launch_s},
                                                           {"launch_node_s", &parameters.launch_node_s},
                                                           {"uncaptured_node_s", &parameters.uncaptured_node_s},
                                                           {"copy_s", &copy_s},
                                                           {"copy_issue_s", &parameters.copy_issue_s},
                                                           {"synchronize_s", &parameters.synchronize_s}};
        if (rates.count(name) > 0) {
            *rates.at(name) = read.positive();
        } else if (latencies.count(name) > 0) {
            *latencies.at(name) = read.not_negative();
        } else if (name == "name") {
            parameters.name = read.word();
        } else if (name == "description") {
            parameters.description = read.rest();
        } else if (name == "memory_bytes") {
            parameters.memory_bytes = read.count();
        } else if (name == "pinned_bytes") {
            parameters.pinned_bytes = read.count();
        } else if (name == "knows_buffers_by") {
            parameters.by_address = read.one_of<bool>({{"name", false}, {"address", true}});
        } else if (name == "values") {
            parameters.real_values = read.one_of<bool>({{"real", true}, {"drawn", false}});
        } else if (name == "cpu") {
            const int64_t cpu = read.count();
            require(cpu < max_cpus, read.where() + ": unknown CPU");
            parameters.cpu = static_cast<int>(cpu);
        } else if (name == "seed") {
            parameters.seed = static_cast<uint64_t>(read.count());
        } else if (name == "lost_after") {
            parameters.lost_after = read.count();
        } else if (name == "fail_alloc") {
            parameters.fail_alloc = read.count();
        } else if (name == "routing") {
            parameters.routing = read_routing(read.rest());
        } else if (name == "copy") {
            const auto   out        = read.one_of<size_t>({{"in", 0}, {"out", 2}});
            const auto   slot       = out + read.one_of<size_t>({{"pinned", 0}, {"pageable", 1}});
            const double a          = read.not_negative();
            parameters.copies[slot] = {a, read.positive()};
            given[slot]             = true;
        } else if (name == "kernel") {
            const std::string op     = read.word();
            const ggml_type   type   = read.type();
            const auto        shape  = read.shape();
            const int64_t     used   = read.count();
            const int64_t     tokens = read.count();
            require(used >= 0 && tokens > 0,
                    read.where() + ": a kernel is of some tokens, and of no less than 0 experts");
            parameters.kernels[{op, type, shape[0], shape[1], shape[2], used}].emplace_back(tokens, read.positive());
        } else {
            throw oallama::Error(OALLAMA_INVALID, read.where() + ": unknown parameter " + name);
        }
    }
    require(parameters.memory_bytes > 0 && parameters.bytes_per_s > 0.0 && parameters.flops_per_s > 0.0 &&
                parameters.flops_float_per_s > 0.0,
            "an emulated device needs memory_bytes, bytes_per_s, flops_per_s and flops_float_per_s");
    require(parameters.real_values || parameters.cpu >= 0,
            "an emulated device that keeps time needs a core of its own: cpu");
    for (size_t slot = 0; slot < given.size(); slot++) {
        if (!given[slot]) {
            const double rate = slot % 2 == 0 ? pinned : pageable;
            require(rate > 0.0, "an emulated device needs pinned_bytes_per_s and pageable_bytes_per_s");
            parameters.copies[slot] = {copy_s, 1.0 / rate};
        }
    }
    for (auto & [signature, curve] : parameters.kernels) {
        std::sort(curve.begin(), curve.end());
        const auto again = [](const auto & a, const auto & b) { return a.first == b.first; };
        curve.erase(std::unique(curve.begin(), curve.end(), again), curve.end()); // the least of several times counts
    }
    return parameters;
}

} // namespace

std::vector<Parameters> parse_parameters(const std::string & text) {
    std::vector<Parameters> devices;
    std::istringstream      lines(text);
    for (int number = 0; devices.empty() || lines; number++) {
        devices.push_back(parse_device(lines, number));
        const Parameters & last = devices.back();
        require(last.cpu == devices.front().cpu,
                "emulated devices of one process share one core: cpu must be the same");
        require(std::count_if(devices.begin(), devices.end(),
                              [&](const auto & device) { return device.name == last.name; }) == 1,
                "two emulated devices are called " + last.name);
        require(devices.size() <= most_devices,
                "at most " + std::to_string(most_devices) + " emulated devices are possible");
    }
    return devices;
}

} // namespace emulated
