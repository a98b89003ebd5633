#include "dump.h"

#include <cstdio>
#include <cstdlib>

namespace oallama {

namespace {

const char * name_of(State state) {
    switch (state) {
        case State::mirrored: return "MIRRORED";
        case State::axis_0: return "AXIS_0";
        case State::partial: return "PARTIAL";
        case State::routed: return "ROUTED";
        case State::term: return "TERM";
        case State::sum: return "SUM";
    }
    GGML_ABORT("a state without a name");
}

template <typename... Arguments> std::string format(const char * text, Arguments... arguments) {
    char line[512];
    std::snprintf(line, sizeof line, text, arguments...);
    return line;
}

template <typename Copies, typename BytesOf> std::string copies(const Copies & list, const BytesOf & bytes_of) {
    int64_t bytes = 0;
    for (const auto & copy : list) {
        bytes += static_cast<int64_t>(bytes_of(copy));
    }
    return format("%zu (%lld bytes)", list.size(), static_cast<long long>(bytes));
}

std::string dump_segment(size_t number, const Segment & segment) {
    const auto n_join = segment.device_end - segment.join_begin;
    return format("segment %zu: ", number) + "inputs " +
           copies(segment.inputs, [](const Input & copy) { return copy.bytes; }) + ", uploads " +
           copies(segment.uploads, [](const Upload & copy) { return ggml_nbytes(copy.tensor); }) + ", streamed " +
           copies(segment.streamed, [](const Streamed & copy) { return ggml_nbytes(copy.tensor); }) +
           format(", host nodes %d, device nodes %d + %d routed + %d streamed + %d join, ",
                  segment.host_end - segment.host_begin, segment.launches_begin - segment.device_begin,
                  segment.stream_begin - segment.launches_begin, segment.join_begin - segment.stream_begin, n_join) +
           "downloads " + copies(segment.downloads, [](const Download & copy) { return ggml_nbytes(copy.tensor); }) +
           ", host results " +
           copies(segment.host_results, [](const HostResult & copy) { return ggml_nbytes(copy.to); }) + "\n";
}

std::string dump_node(int number, const ggml_tensor * node, const Value & v) {
    const bool cut = v.state == State::axis_0 || v.state == State::partial;
    return format("node #%3d (%10.10s): %20.20s [%8s] segment %d%s", number, ggml_op_desc(node), node->name,
                  name_of(v.state), v.segment, v.wanted ? " wanted" : "") +
           (cut ? format(" cc %lld cg %lld of %lld, n_g %lld", static_cast<long long>(v.cc),
                         static_cast<long long>(v.cg), static_cast<long long>(v.extent), static_cast<long long>(v.n_g))
                : "") +
           "\n";
}

} // namespace

void dump_program(const ggml_cgraph * graph, const Values & values, const Program & program) {
    const char * set   = std::getenv("OALLAMA_SPLIT_DEBUG");
    const int    level = set == nullptr ? 0 : std::atoi(set);
    if (level < 1) {
        return;
    }
    std::string text = format("## PROGRAM of %d nodes, %lld tokens, device %s%s\n", graph->n_nodes,
                              static_cast<long long>(program.n_tokens),
                              program.device == nullptr ? "none" : ggml_backend_dev_name(program.device),
                              program.resident ? ", resident" : "");
    for (size_t i = 0; i < program.segments.size(); i++) {
        text += dump_segment(i, program.segments[i]);
    }
    for (int i = 0; level > 1 && i < graph->n_nodes; i++) {
        if (!is_view(graph->nodes[i]->op)) {
            text += dump_node(i, graph->nodes[i], values.nodes[static_cast<size_t>(i)]);
        }
    }
    log(GGML_LOG_LEVEL_DEBUG, text.c_str());
}

} // namespace oallama
