#include "runtime/process_cuda.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "runtime/environment.h"

namespace quartz {
namespace {

constexpr int kSuccess = 0;         // CUDA_SUCCESS and NVML_SUCCESS
constexpr int kNotInitialized = 3;  // CUDA_ERROR_NOT_INITIALIZED

template <class Function>
Function* symbol(void* library, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

// Whether CUDA_VISIBLE_DEVICES surely leaves one of `count` devices: CUDA takes the entries before the first wrong one.
// Names (GPU-..., MIG-...) are not looked up here.
bool surely_visible(int count) {
  const auto& devices = environment().cuda_visible_devices;
  if (!devices) return count > 0;
  const char* variable = devices->c_str();
  char* end = nullptr;
  const long first = std::strtol(variable, &end, 10);
  return end != variable && (*end == '\0' || *end == ',') && first >= 0 && first < count;
}

// What NVML says: the driver is new enough for the CUDA runtime of this build, and there is a visible device.
bool management_library_sees_device() {
  void* library = ::dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return false;
  auto* initialize = symbol<int()>(library, "nvmlInit_v2");
  auto* shut_down = symbol<int()>(library, "nvmlShutdown");
  auto* driver_version = symbol<int(int*)>(library, "nvmlSystemGetCudaDriverVersion_v2");
  auto* device_count = symbol<int(unsigned*)>(library, "nvmlDeviceGetCount_v2");
  bool seen = false;
  if (initialize != nullptr && shut_down != nullptr && driver_version != nullptr && device_count != nullptr &&
      initialize() == kSuccess) {
    int version = 0;  // 1000 * major + 10 * minor, as CUDART_VERSION
    unsigned count = 0;
    seen = driver_version(&version) == kSuccess && version / 1000 >= CUDART_VERSION / 1000 &&
           device_count(&count) == kSuccess && surely_visible(static_cast<int>(count));
    shut_down();
  }
  ::dlclose(library);
  return seen;
}

std::atomic<bool> in_bad_fork{false};

bool started() {
  void* library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return false;
  auto* current_context = symbol<int(void**)>(library, "cuCtxGetCurrent");
  void* context = nullptr;
  const bool answers = current_context != nullptr && current_context(&context) != kNotInitialized;
  ::dlclose(library);  // it stays loaded: whoever loaded it holds it
  return answers;
}

std::atomic<bool> started_before_fork{false};

void watch_forks() {
  static const int error = ::pthread_atfork([] { started_before_fork.store(started()); }, nullptr,
                                            [] { in_bad_fork.store(in_bad_fork || started_before_fork); });
  TORCH_CHECK(error == 0, "quartz: a handler of forks cannot be registered: ", std::strerror(error));
}

}  // namespace

std::string cuda_unavailable_reason() {
  watch_forks();
  if (management_library_sees_device()) return "";
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();  // clear it: it is not the program's error
    return std::string("the CUDA half found no usable NVIDIA driver or device (") + cudaGetErrorString(error) + ")";
  }
  if (count == 0) return "the CUDA half found no CUDA device";
  return "";
}

bool cuda_in_bad_fork() { return in_bad_fork.load(std::memory_order_relaxed); }

}  // namespace quartz
