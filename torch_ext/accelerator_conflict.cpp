// _C.redirect_accelerator and friends: see csrc/runtime/accelerator_conflict.h. Python half:
// integrations/cuda_backward.py.
#include "runtime/accelerator_conflict.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace {

py::tuple graph_accelerators(const std::vector<at::Tensor>& outputs, const std::string& native, bool whole) {
  std::vector<torch::autograd::Edge> edges;  // keeps the gradient accumulators of leaves alive
  std::vector<const torch::autograd::Node*> roots;
  for (const auto& output : outputs) {
    if (!output.requires_grad()) continue;
    edges.push_back(torch::autograd::impl::gradient_edge(output));
    roots.push_back(edges.back().function.get());
  }
  const auto found = quartz::graph_accelerators(roots, at::Device(native).type(), whole);
  return py::make_tuple(found.quartz, found.native);
}

py::object call_with_accelerator(const std::string& type, const py::object& function, const py::tuple& args,
                                 const py::dict& kwargs) {
  quartz::AcceleratorScope scope(at::Device(type).type());
  return function(*args, **kwargs);
}

py::object scoped_accelerator() {
  const auto type = quartz::scoped_accelerator();
  if (!type.has_value()) return py::none();
  return py::str(c10::DeviceTypeName(*type, /*lower_case=*/true));
}

}  // namespace

void bind_accelerator_conflict(py::module& m) {
  m.def("redirect_accelerator", &quartz::redirect_accelerator,
        "Make the autograd engine's accelerator depend on the scope; RuntimeError where that is impossible.");
  m.def("restore_accelerator", &quartz::restore_accelerator, "Take the redirection back.");
  m.def("accelerator_is_redirected", &quartz::accelerator_is_redirected);
  m.def("call_with_accelerator", &call_with_accelerator, py::arg("type"), py::arg("function"), py::arg("args"),
        py::arg("kwargs"),
        "Call function(*args, **kwargs) with devices of `type` as the autograd engine's accelerator.");
  m.def("scoped_accelerator", &scoped_accelerator, "Device type of the innermost scope of this thread, or None.");
  m.def("graph_accelerators", &graph_accelerators, py::arg("outputs"), py::arg("native"), py::arg("whole") = false,
        "(quartz, native): whether the graph below the outputs has a node on each; stops at the first unless `whole`.");
}
