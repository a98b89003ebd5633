// What it costs to leave the CPU for a device and to come back, inside ggml's scheduler.

#include <set>

#include "session.h"

namespace bridge {

namespace {

constexpr int64_t max_excursions = 256;

// 16 MiB: up to some tenths of a millisecond
constexpr int64_t work_columns = 1024;
constexpr int64_t work_rows    = 4096;

// A chain of operations on one activation: the first on the CPU, then turns of device and CPU. Between two excursions
// the CPU has some tenths of a millisecond of work, as it has in a model: until then threads of a driver, or of a
// worker, have gone to sleep and must be woken again.
class Boundary : public gb_timer {
  public:
    Boundary(ggml_backend_dev_t device, int64_t n_bytes, int64_t n_excursions, bool on_cpu, int32_t n_threads)
        : session_(device, n_threads) {
        require(n_bytes > 0 && n_bytes <= int64_t{1} << 31, "an activation must be of 1 byte to 2 GiB");
        require(n_excursions > 0 && n_excursions <= max_excursions, "the number of excursions must be 1 to 256");
        require(!is_cpu(device), "the CPU has no boundary with itself");

        const int64_t n_elements = ceil_div(n_bytes, static_cast<int64_t>(sizeof(float)));
        leaf_ctx_                = new_context(3);
        ggml_tensor * leaf       = ggml_new_tensor_1d(leaf_ctx_.get(), GGML_TYPE_F32, n_elements);
        ggml_tensor * weight     = ggml_new_tensor_2d(leaf_ctx_.get(), GGML_TYPE_F32, work_columns, work_rows);
        ggml_tensor * input      = ggml_new_tensor_1d(leaf_ctx_.get(), GGML_TYPE_F32, work_columns);
        leaf_buffer_             = alloc_tensors(leaf_ctx_.get(), ggml_backend_dev_buffer_type(cpu_device()));
        ggml_backend_buffer_clear(leaf_buffer_.get(), 0);

        const int64_t n_nodes         = 2 + 3 * n_excursions;
        graph_ctx_                    = new_context(n_nodes, n_nodes);
        ggml_context *          ctx   = graph_ctx_.get();
        ggml_cgraph *           graph = new_graph(ctx, n_nodes);
        std::set<ggml_tensor *> there;
        ggml_tensor *           node = leaf;
        for (int64_t i = 0; i <= n_excursions; i++) {
            if (i > 0) {
                node = ggml_scale(ctx, node, 1.0F);
                there.insert(node);
            }
            node = ggml_scale(ctx, node, 1.0F);
            ggml_build_forward_expand(graph, node);
            if (i < n_excursions) {
                ggml_build_forward_expand(graph, ggml_mul_mat(ctx, weight, input));
            }
        }

        session_.set_graph(graph, [&](ggml_tensor * tensor) {
            return there.count(tensor) > 0 && !on_cpu ? session_.device_backend() : session_.cpu_backend();
        });
        session_.compute();
    }

    double  run_once() override { return session_.compute(); }
    int64_t n_splits() const { return session_.n_splits(); }

  private:
    ContextPtr leaf_ctx_;
    ContextPtr graph_ctx_;
    BufferPtr  leaf_buffer_;
    Session    session_;
};

} // namespace

} // namespace bridge

using namespace bridge;

//
// C interface
//

int gb_boundary_new(const char * device, int64_t n_bytes, int64_t n_excursions, int32_t on_cpu, int32_t n_threads,
                    int64_t * n_splits, gb_timer ** timer) {
    return new_timer(timer, [&] {
        auto made = std::make_unique<Boundary>(find_device(device), n_bytes, n_excursions, on_cpu != 0, n_threads);
        *n_splits = made->n_splits();
        return made.release();
    });
}
