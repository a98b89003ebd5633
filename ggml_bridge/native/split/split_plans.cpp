// The C interface to plans.

#include "ggml-oallama.h"

#include <cstdio>

#include "loaded_plan.h"

using namespace oallama;

struct oallama_plan {
    std::shared_ptr<LoadedPlan> loaded;
};

namespace {

const LoadedPlan & loaded_of(const oallama_plan * plan) {
    require(plan != nullptr && plan->loaded != nullptr, "a plan is needed");
    return *plan->loaded;
}

} // namespace

int oallama_granularity(int32_t type, int32_t axis, int64_t * elements) {
    return guarded([&] {
        require(elements != nullptr, "room for the result is needed");
        require(type >= 0 && type < GGML_TYPE_COUNT && axis >= OALLAMA_ROWS && axis <= OALLAMA_HALVES,
                "there is no such ggml type or axis");
        *elements = granularity(static_cast<ggml_type>(type), static_cast<Axis>(axis));
    });
}

int oallama_plan_new(const char * text, oallama_plan ** plan) {
    return guarded([&] {
        require(text != nullptr && plan != nullptr, "a plan text and room for the plan are needed");
        ggml_backend_dev_t owner = owner_of_plans();
        auto               made  = std::make_unique<oallama_plan>();
        made->loaded             = LoadedPlan::make(parse_plan(text), owner);
        made->loaded->device(); // a missing one is an error now, not when a model is loaded
        *plan = made.release();
    });
}

void oallama_plan_free(oallama_plan * plan) {
    delete plan;
}

int oallama_plan_buft(oallama_plan * plan, void ** buft) {
    return guarded([&] {
        require(plan != nullptr && buft != nullptr, "a plan and room for the result are needed");
        *buft = plan->loaded->buft();
    });
}

int oallama_plan_count(const oallama_plan * plan, int64_t * n_slices) {
    return guarded([&] {
        require(n_slices != nullptr, "room for the result is needed");
        *n_slices = static_cast<int64_t>(loaded_of(plan).spec().slices.size());
    });
}

int oallama_plan_slice(const oallama_plan * plan, int64_t index, oallama_slice * slice) {
    return guarded([&] {
        require(slice != nullptr, "room for the result is needed");
        require(index >= 0 && index < static_cast<int64_t>(loaded_of(plan).spec().slices.size()),
                "the plan has no slice of this number");
        *slice = loaded_of(plan).placed(static_cast<size_t>(index));
    });
}

int oallama_plan_problems(const oallama_plan * plan, int32_t * usable, char * text, int64_t capacity) {
    return guarded([&] {
        require(usable != nullptr && text != nullptr && capacity > 0, "room for the results is needed");
        bool        is_usable = true;
        std::string lines;
        for (const std::string & problem : loaded_of(plan).problems(&is_usable)) {
            lines += (lines.empty() ? "" : "\n") + problem;
        }
        *usable = is_usable ? 1 : 0;
        std::snprintf(text, static_cast<size_t>(capacity), "%s", lines.c_str());
    });
}

int oallama_plan_take_times(oallama_plan * plan, oallama_block_times * times, int64_t capacity, int64_t * n) {
    return guarded([&] {
        require(plan != nullptr && times != nullptr && capacity >= 0 && n != nullptr,
                "a plan and room for the times are needed");
        *n = plan->loaded->times()->take(times, capacity);
    });
}
