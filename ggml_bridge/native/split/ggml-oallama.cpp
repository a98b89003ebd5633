// Registration: the devices that ggml sees, and the C interface to begin with.
//
// Three devices are registered, once and for good: ggml's registry has no lock. OALLAMA computes; its buffer type is
// plain host memory, so results lie where llama.cpp's CPU backend reads them. OALLAMA_Split computes nothing: it only
// makes the split buffer type known by name, because `-ot` looks among the default buffer types of devices.
// OALLAMA_Resident computes as OALLAMA does while a plan has blocks that live on a device, but its results lie where
// that device computes what comes next; without such a plan it computes nothing.

#include "ggml-oallama.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "abi_check.h"
#include "backend.h"
#include "device.h"
#include "resident_buft.h"
#include "times_file.h"

using namespace oallama;

namespace {

enum DeviceIndex { device_compute = 0, device_split = 1, device_resident = 2, n_devices = 3 };

ggml_backend_dev_t device_at(size_t index);

// What `-ot` finds by name: the plan of OALLAMA_PLAN, or an empty one.
std::shared_ptr<LoadedPlan> & default_plan() {
    static std::shared_ptr<LoadedPlan> plan;
    return plan;
}

//
// registration interface
//

const char * oallama_reg_get_name(ggml_backend_reg_t /*reg*/) {
    return "OALLAMA";
}

size_t oallama_reg_get_device_count(ggml_backend_reg_t /*reg*/) {
    return n_devices;
}

ggml_backend_dev_t oallama_reg_get_device(ggml_backend_reg_t /*reg*/, size_t index) {
    return index < n_devices ? device_at(index) : nullptr;
}

void * oallama_reg_get_proc_address(ggml_backend_reg_t /*reg*/, const char * name) {
    return backend_proc_address(name);
}

ggml_backend_reg the_reg = {
    /* .api_version = */ GGML_BACKEND_API_VERSION,
    /* .iface       = */
    {
        /* .get_name         = */ oallama_reg_get_name,
        /* .get_device_count = */ oallama_reg_get_device_count,
        /* .get_device       = */ oallama_reg_get_device,
        /* .get_proc_address = */ oallama_reg_get_proc_address,
    },
    /* .context     = */ nullptr,
};

DeviceContext device_contexts[n_devices] = {
    {"OALLAMA", "CPU and a partner device computing one operator together"},
    {"OALLAMA_Split", "names the split buffer type; computes nothing"},
    {"OALLAMA_Resident", "the same as OALLAMA, with inputs and results in a device's memory", /*resident=*/true},
};

ggml_backend_device devices[n_devices] = {
    {oallama_device_i, &the_reg, &device_contexts[device_compute]},
    {oallama_device_i, &the_reg, &device_contexts[device_split]},
    {oallama_device_i, &the_reg, &device_contexts[device_resident]},
};

ggml_backend_dev_t device_at(size_t index) {
    return &devices[index];
}

std::string read_file(const char * path) {
    const std::ifstream file(path, std::ios::binary);
    std::ostringstream  text;
    text << file.rdbuf();
    require(file.good() && text.good(), std::string("OALLAMA_PLAN names ") + path + ", which cannot be read");
    return text.str();
}

std::mutex registering;
bool       registered = false;

int n_resident_plans = 0; // that have blocks in the memory of OALLAMA_Resident

// What both ways in do first.
void start(const char * plan_path) {
    check_ggml();
    if (default_plan() == nullptr) {
        PlanSpec spec  = plan_path == nullptr || plan_path[0] == '\0' ? PlanSpec{} : parse_plan(read_file(plan_path));
        default_plan() = LoadedPlan::make(std::move(spec), device_at(device_split));

        device_contexts[device_split].named = default_plan()->buft();
    }
}

} // namespace

// A plan at a time decides whose memory it is, and those for the same device share it.
bool oallama::use_resident_device(ggml_backend_dev_t memory) {
    DeviceContext &                   resident = device_contexts[device_resident];
    const std::lock_guard<std::mutex> lock(registering);
    if (resident_buft(memory) == nullptr || (n_resident_plans > 0 && resident.memory != memory)) {
        return false;
    }
    n_resident_plans++;
    resident.memory = memory;
    return true;
}

void oallama::leave_resident_device() {
    const std::lock_guard<std::mutex> lock(registering);
    if (--n_resident_plans == 0) {
        device_contexts[device_resident].memory = nullptr;
    }
}

ggml_backend_dev_t oallama::owner_of_plans() {
    const std::lock_guard<std::mutex> lock(registering);
    require(registered, "the backend is not registered yet; call oallama_register first");
    return device_at(device_split);
}

//
// C interface
//

void * ggml_backend_init(void) {
    void *    reg    = nullptr;
    const int status = guarded([&] {
        const std::lock_guard<std::mutex> lock(registering);
        require(!registered, "this process has registered the back end already; it is not added a second time");
        start(std::getenv("OALLAMA_PLAN"));
        if (const char * path = std::getenv("OALLAMA_USES"); path != nullptr) {
            default_plan()->keep_uses(path);
        }
        if (const char * path = std::getenv("OALLAMA_TIMES"); path != nullptr) {
            write_times(default_plan()->times(), path);
        }
        registered = true; // ggml adds what is returned
        reg        = &the_reg;
    });
    if (status != OALLAMA_OK) {
        std::fprintf(stderr, "oallama: %s\n", last_error());
    }
    return reg;
}

int oallama_abi(void) {
    return OALLAMA_ABI;
}

const char * oallama_last_error(void) {
    return last_error();
}

int oallama_check(void) {
    return guarded(check_ggml);
}

int oallama_register(void) {
    return guarded([] {
        const std::lock_guard<std::mutex> lock(registering);
        if (registered) {
            return;
        }
        start(nullptr);
        ggml_backend_register(&the_reg);
        registered = true;
    });
}
