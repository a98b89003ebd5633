// Harness of split_test: sub-graphs as llama.cpp builds them (blocks), weights of any type, loading them whole or cut,
// and running them through ggml's scheduler.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "async_device.h"
#include "ggml-oallama.h"
#include "refused_memory.h"
#include "split/util.h"
#include "support.h"

namespace split_test {

//
// checks
//

extern int n_threads; // that the CPU may use; 1 under the thread sanitizer, where OpenMP is unknown

void check(bool condition, const std::string & what); // prints what fails
void check_ok(int status, const std::string & what);  // an oallama_status

//
// owners
//

using oallama::BackendPtr;
using oallama::BufferPtr;
using oallama::ContextPtr;
using oallama::SchedPtr;
using PlanPtr = std::unique_ptr<oallama_plan, oallama::Deleter<oallama_plan_free>>;

//
// blocks
//

constexpr ggml_type q4_0 = static_cast<ggml_type>(2);

struct Weight {
    std::string  name;
    ggml_type    type;
    int64_t      k, n, e;
    oallama_axis axis;
    int64_t      chunk     = 0;     // tokens; 0: none
    bool         input_f32 = false; // told by the plan

    int64_t extent() const { return axis == OALLAMA_COLS ? k : axis == OALLAMA_ROWS ? n : n / 2; }

    int64_t bytes() const { return static_cast<int64_t>(ggml_row_size(type, k)) * n * e; }

    bool is_routed() const { return name.find("_exps") != std::string::npos; }
};

struct Extra { // a bias, a scale, a router: F32 in plain host memory, never cut
    std::string          name;
    std::vector<int64_t> ne;
};

class Graph {
  public:
    ggml_context * ctx      = nullptr;
    ggml_cgraph *  gf       = nullptr;
    ggml_tensor *  x        = nullptr; // F32 [n_embd, n_tokens]
    int64_t        n_tokens = 0;

    std::map<std::string, ggml_tensor *> tensors; // weights and extras
    std::vector<ggml_tensor *>           outputs; // F32, contiguous

    ggml_tensor * operator[](const char * name) const { return tensors.at(name); }

    ggml_tensor * norm() const { return ggml_rms_norm(ctx, x, 1e-5F); }

    ggml_tensor * mul_mat(const char * weight, ggml_tensor * src1) const {
        return ggml_mul_mat(ctx, tensors.at(weight), src1);
    }

    void output(ggml_tensor * tensor);
};

struct Block {
    std::string                  name;
    int64_t                      n_embd = 0;
    std::vector<Weight>          weights;
    std::vector<Extra>           extras;
    std::function<void(Graph &)> build;
    bool                         together = false; // the weights are one FFN, cut at the same element
};

enum class Ffn { silu, gelu, relu, relu_sqr, swiglu_clamped, swiglu_oai, swiglu_limited };
enum class Gate { none, par, seq, fused };

struct FfnOptions {
    Ffn  op     = Ffn::silu;
    Gate gate   = Gate::par;
    bool bias   = false;
    bool scales = false;
    bool watch  = false; // gate, up and the activation are outputs too
};

// Shapes follow the types: n_ff is a multiple of every block, and K of every weight too.
Block ffn_block(ggml_type up, ggml_type down, const FfnOptions & options = {});
Block lone_block(ggml_type type, ggml_type src1 = GGML_TYPE_F32);
Block qkv_block(ggml_type type, bool in_one = true); // in_one: nothing of others between them

struct MoeOptions {
    Ffn  op       = Ffn::silu;
    Gate gate     = Gate::par; // par, fused, none
    bool bias     = false;
    bool before   = false; // expert weights are multiplied before, as llama4 does
    int  n_used   = 2;
    int  n_expert = 4;
    bool f32      = false; // down's input is read in F32, as Mistral-4 has it
};

Block moe_block(ggml_type up, ggml_type down, const MoeOptions & options = {});
Block shared_expert_block(ggml_type type);
Block beside_dense_block(ggml_type type, bool dense_first);
Block chain_block(const Block & inner);
Block read_again_block(ggml_type type);
Block views_block(ggml_type type, bridge::Random & random);

std::string            type_name(ggml_type type); // as GGUF writes it
std::vector<ggml_type> mul_mat_types();           // that the CPU can multiply by
int64_t                granularity(ggml_type type, oallama_axis axis);
int64_t                granularity(const Block & block); // at which all of its weights can be cut

//
// plans
//

enum class Cut { none, one, half, most, all }; // how much of each weight is GG

// How much of the device's part is streamed (CG) in every plan, and through how many slots of a ring.
enum class Streamed { none, half, all };

// Options of the plans that follow.
extern Streamed streamed;
extern bool     late;     // n_g: of a batch of several tokens, the device computes CC as well for half of them (CG')
extern bool     resident; // where one names TEST0: blocks live there, and in sessions so does what is around them
extern int      n_slots;

// Such a setting, while this lives.
template <typename T> class Setting {
  public:
    Setting(T & setting, T value) : setting_(setting), kept_(std::exchange(setting, value)) {}
    Setting(const Setting &)             = delete;
    Setting & operator=(const Setting &) = delete;
    ~Setting() { setting_ = kept_; }

  private:
    T & setting_;
    T   kept_;
};

// Options of TEST0, while this lives.
class DeviceOptions : public async_device::Options {
  public:
    explicit DeviceOptions(const async_device::Options & options = {}) : async_device::Options(options) {}
    DeviceOptions(const DeviceOptions &)             = delete;
    DeviceOptions & operator=(const DeviceOptions &) = delete;
    ~DeviceOptions() { async_device::set_options({}); }

    void set() const { async_device::set_options(*this); }
};

extern uint64_t random_seed; // of the random cuts: the seed, how many cases, and the first of them
extern int64_t  random_cases;
extern int64_t  random_first;

std::string cut_name(Cut cut);

// A weight's line of a plan, without its end; the layout is CPU where it cannot hold the slice.
std::string tensor_line(const Weight & weight, int64_t cc, int64_t cg, const std::string & layout);

// A plan for the blocks, with more lines before the tensors; extra tensors are not in it.
std::string plan_text(const std::vector<const Block *> & blocks, Cut cut, const std::string & lines = "",
                      const std::string & device = async_device::device_name, const std::string & layout = "CPU");
PlanPtr     new_plan(const std::string & text); // ends the program where it is refused
PlanPtr     plan_of(const Block & block, Cut cut, const std::string & lines = "",
                    const std::string & device = async_device::device_name, const std::string & layout = "CPU");

ggml_backend_buffer_type_t buft_of(oallama_plan * plan);

struct Told {                     // what a plan says of itself
    bool        usable = false;   // what was loaded can compute
    std::string problems;         // one a line
    int64_t     gg           = 0; // elements of all slices
    int64_t     device_bytes = 0;
};

Told told(const oallama_plan * plan);

//
// models
//

// The same, but a layout that cannot hold a weight of this shape is replaced by plain memory.
std::vector<ggml_backend_buffer_type_t> host_layouts();
ggml_backend_buffer_type_t              find_layout(const std::string & name);
bool                                    layout_holds(ggml_backend_buffer_type_t buft, const Weight & weight);

using Data = std::map<std::string, std::vector<uint8_t>>;

Data make_data(const Block & block, uint64_t seed = 7);

class Model {
  public:
    // Weights whole in a host buffer type, or in plain memory where that cannot hold them.
    Model(const Block & block, const Data & data, ggml_backend_buffer_type_t layout);

    // Weights in the plan's buffer type; a failed check when that cannot be had.
    Model(const Block & block, const Data & data, oallama_plan * plan);
    Model(const Block & block, oallama_plan * plan) : Model(block, make_data(block), plan) {}

    const Block & block() const { return block_; }

    const Data & data() const { return data_; }

    bool loaded() const { return loaded_; }

    const std::map<std::string, ggml_tensor *> & tensors() const { return tensors_; }

  private:
    void new_extras();
    void load();
    void place(ggml_context * ctx, ggml_backend_buffer_type_t buft);

    Block                                block_;
    Data                                 data_;
    std::vector<ContextPtr>              contexts_;
    std::vector<BufferPtr>               buffers_;
    std::map<std::string, ggml_tensor *> tensors_;
    bool                                 loaded_ = true;
};

//
// sessions: what a llama_context is
//

using Outputs = std::vector<std::vector<float>>;

// Computes a model's block on the CPU without splitting it.
Outputs on_cpu(const Model & model, int64_t n_tokens, uint64_t seed = 1);

// A block's graph for one batch, which our back end computes alone.
class LonePass {
  public:
    LonePass(const Model & model, int64_t n_tokens);

    // Computes it; calls `on_host_node` before the host computes a node, and where that returns true the graph ends.
    ggml_status compute(const std::function<bool()> & on_host_node) const;

    Outputs outputs() const;

  private:
    BackendPtr backend_;
    ContextPtr ctx_;
    Graph      graph_;
    BufferPtr  buffer_;
};

struct SessionOptions {
    bool split = true;  // the ACCEL devices' backends, as llama.cpp makes them
    bool gpu   = false; // TEST0's too, first
    bool reuse = false; // every graph is computed twice, with other inputs first
};

class Session {
  public:
    explicit Session(const SessionOptions & options = {});

    // One ubatch of random tokens through a new graph; empty when it failed.
    Outputs compute(const Model & model, int64_t n_tokens, uint64_t seed = 1);

    // Whether it fails so.
    bool fails(ggml_status status, const Model & model, int64_t n_tokens) {
        return compute(model, n_tokens).empty() && status_ == status;
    }

    ggml_status status() const { return status_; }

    // Asks for the nodes that `wants` chooses, and hands each to `gets` when it is computed.
    void watch(std::function<bool(const ggml_tensor *)> wants, std::function<void(const ggml_tensor *)> gets);

  private:
    static bool on_node(ggml_tensor * tensor, bool ask, void * self);

    bool                                     reuse_;
    ggml_backend_t                           gpu_ = nullptr; // TEST0's, where it is one of them
    std::vector<BackendPtr>                  backends_;
    SchedPtr                                 sched_;
    ggml_status                              status_ = GGML_STATUS_SUCCESS;
    std::function<bool(const ggml_tensor *)> wants_;
    std::function<void(const ggml_tensor *)> gets_;
};

//
// comparisons
//

// The NMSE that adding up in another order may make. The products are the same, as TEST0 and the CPU device compute
// with ggml's CPU kernels. Two partial sums are added last instead of somewhere in the middle: a rounding of F32,
// 2^-24, times the cancellation among what is added. An NMSE of about 4e-15 is usual; types with a minimum in every
// block (Q4_K) cancel up to 30 times in decode: 4e-12 was seen. This is a cancellation of 100. A single activation
// quantised to the next step is some 1e-6 of its token, a single wrong element 1e-3 or more.
constexpr double summation_bound = 1e-10;

// Sum of squared differences over the sum of squares, over all outputs; huge when one is not finite.
double      nmse(const Outputs & reference, const Outputs & result);
std::string text(double number); // 1.2e-15

// That a batch is computed, and as the unsplit CPU does.
bool is_right(Session & session, const Model & model, int64_t n_tokens, uint64_t seed = 1);
void check_right(Session & session, const Model & model, int64_t n_tokens, const std::string & when, uint64_t seed = 1);

oallama_memory memory();
oallama_stats  stats();
void           reset_stats();
oallama_stats  stats_of_known(const Model & model,
                              int64_t       n_tokens); // of the last of three batches alike: a ring has two slots
void           check_nothing_held(const std::string & when);

//
// the tests, by their names on the command line
//

void test_device();
void test_plan();
void test_random();
void test_graphs();
void test_stream();
void test_tokens();
void test_times();
void test_loading();
void test_memory();
void test_programs();
void test_faults();
void test_resident();
void test_hot();
void test_report();
void test_threads();

} // namespace split_test
