// torch_quartz._C: the only Python binding. It forwards to libquartz.so and holds no state.
#include <ATen/ops/ones.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>
#include <thread>

#include "aten/alias.h"
#include "aten/kernel_support.h"
#include "aten/op_counts.h"
#include "aten/registration.h"
#include "runtime/generator.h"
#include "runtime/graph_host.h"
#include "runtime/guard.h"
#include "runtime/substrate.h"
#include "runtime/torch_version.h"

namespace py = pybind11;

void bind_compiled_call(py::module& m);         // compiled_call.cpp
void bind_accelerator_conflict(py::module& m);  // accelerator_conflict.cpp
void bind_engine(py::module& m);                // engine.cpp
void bind_graph(py::module& m);                 // graph.cpp

namespace {

using quartz::AliasKind;
using quartz::AliasScope;

c10::DeviceIndex checked_index(int64_t index) {
  if (index < 0) return quartz::current_device();
  TORCH_CHECK(index <= std::numeric_limits<c10::DeviceIndex>::max(), "quartz: invalid device ordinal ", index);
  quartz::check_device(static_cast<c10::DeviceIndex>(index));
  return static_cast<c10::DeviceIndex>(index);
}

// While somebody outside knows the memory under its native name, neither side resizes it (see unlock_twin).
void lock_memory(const at::Tensor& native) {
  if (native.has_storage()) native.storage().unsafeGetStorageImpl()->set_resizable(false);
}

// A graph holds operator calls on quartz tensors.
constexpr const char* kUnseen =
    "hands out native memory, and what is done with it would not be repeated by a replay; do it inside of a custom "
    "operator, or outside of the capture";

at::Tensor native_alias(const at::Tensor& tensor, bool lock) {
  TORCH_CHECK_VALUE(quartz::is_quartz(tensor), "quartz: native_alias: expected a quartz tensor, got one on ",
                    tensor.device());
  quartz::refuse_in_capture("native_alias", kUnseen);
  const c10::impl::ExcludeDispatchKeyGuard below(quartz::kAboveKernels);
  auto native = quartz::native_alias(tensor, AliasKind::kFull);
  if (lock) lock_memory(native);
  return native;
}

at::Tensor adopt(const at::Tensor& tensor, int64_t device_index, bool lock) {
  const auto native = quartz::substrate().native_type();
  TORCH_CHECK_VALUE(tensor.device().type() == native, "quartz: adopt: expected a tensor on ",
                    c10::DeviceTypeName(native, /*lower_case=*/true), ", got one on ", tensor.device());
  const bool cuda = quartz::substrate().is_cuda();
  const auto index = cuda ? tensor.device().index() : checked_index(device_index);
  TORCH_CHECK_VALUE(!cuda || device_index < 0 || device_index == index, "quartz: adopt: memory on ", tensor.device(),
                    " cannot become a tensor of device quartz:", device_index, " without a copy");
  const c10::impl::ExcludeDispatchKeyGuard below(quartz::kAboveKernels);
  AliasScope scope(c10::Device(quartz::kQuartz, index));
  if (lock) lock_memory(tensor);
  return scope.to_quartz(tensor);
}

py::dict build_info() {
  py::dict info;
  info["torch_version"] = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
#if QUARTZ_WITH_CUDA
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  info["compiler"] = QUARTZ_COMPILER;
  info["build_type"] = QUARTZ_BUILD_TYPE;
  return info;
}

// Exit barrier. The autograd engine's device thread drops the last GraphTask after backward() has returned, which needs
// the GIL; if Python is finalizing by then the process aborts. A backward from a fresh thread, whose thread-local state
// holds no Python object, returns only when the device thread has come to it, and so has finished the earlier tasks.
void drain_autograd() {
  const py::gil_scoped_release released;
  for (c10::DeviceIndex index = 0; index < quartz::device_count(); ++index) {
    if (!quartz::substrate().has_context(index)) continue;  // never used: no task, and a backward would create one
    std::thread([index] {
      try {
        const auto options = at::TensorOptions().device(c10::Device(quartz::kQuartz, index));
        auto x = at::ones({1}, options).set_requires_grad(true);
        x.mul(x).sum().backward();
      } catch (const std::exception&) {
        // The device cannot run anything any more (e.g. a CUDA error): there is nothing to wait for.
      }
    }).join();
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  quartz::initialize();
  // Asks torch.quartz._lazy_init again in a forked child, where CUDA cannot be used and Python says so.
  if (quartz::substrate().is_cuda()) torch::utils::register_fork_handler_for_device_init(quartz::kQuartz);
  m.def("substrate", [] { return quartz::substrate().name(); });
  m.def("substrate_reason", [] { return quartz::substrate_reason(); });
  m.def("build_info", &build_info);

  m.def("cpu_isa", &quartz::cpu_isa);
  m.def("limit_cpu_isa", &quartz::limit_cpu_isa);
  m.def("device_count", [] { return static_cast<int>(quartz::device_count()); });
  m.def("current_device", [] {
    quartz::substrate().initialize();
    return static_cast<int>(quartz::current_device());
  });
  m.def("set_device", [](int64_t index) {
    TORCH_CHECK(index >= 0 && index <= std::numeric_limits<c10::DeviceIndex>::max(), "quartz: invalid device ordinal ",
                index);
    quartz::set_device(static_cast<c10::DeviceIndex>(index));
  });
  m.def("exchange_device", [](int64_t index) {
    return static_cast<int>(quartz::exchange_device(index < 0 ? c10::DeviceIndex(-1) : checked_index(index)));
  });
  m.def("synchronize", [](int64_t index) {
    const auto device = checked_index(index);
    const py::gil_scoped_release released;
    quartz::substrate().guard().synchronizeDevice(device);
  });
  m.def("default_generator", [](int64_t index) { return quartz::default_generator(checked_index(index)); });
  m.def("native_generator",
        [](int64_t index) { return quartz::native_generator(quartz::default_generator(checked_index(index))); });
  m.def("default_stream", [](int64_t index) {
    const c10::Device device(quartz::kQuartz, checked_index(index));
    const auto stream = c10::impl::getDeviceGuardImpl(quartz::kQuartz)->getDefaultStream(device);
    return std::make_tuple(stream.id(), static_cast<int>(stream.device_index()),
                           static_cast<int>(stream.device_type()));
  });
  m.def("initialize", [] { quartz::substrate().initialize(); });
  m.def("is_initialized", [] { return quartz::substrate().initialized(); });
  m.def("in_bad_fork", [] { return quartz::substrate().in_bad_fork(); });
  m.def("host_memory", [] { return quartz::host_substrate().memory_info(0); });

  m.def("native_alias", &native_alias, py::arg("tensor"), py::arg("lock") = false);
  m.def("adopt", &adopt, py::arg("tensor"), py::arg("device_index") = -1, py::arg("lock") = false);
  m.def("op_counts", &quartz::op_counts);
  m.def("exact_op_counts", &quartz::exact_op_counts);
  m.def("reset_op_counts", &quartz::reset_op_counts);
  m.def("drain_autograd", &drain_autograd);

  bind_compiled_call(m);
  bind_accelerator_conflict(m);
  bind_engine(m);
  bind_graph(m);
}
