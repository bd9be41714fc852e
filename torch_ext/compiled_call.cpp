// _C.call_on_aliases: how a graph compiled for the native device is run with quartz tensors (integrations/inductor.py).
#include "aten/compiled_call.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "runtime/graph_host.h"

namespace py = pybind11;

namespace {

// Calls `function(list)`, a function of PyTorch's boxed calling convention, with native aliases in place of the quartz
// tensors of `arguments`, which is emptied so that the function can free its inputs early.
//
// `devices` holds for each output the index of its quartz device, or None for one that stays as it is. Without it every
// output on the native device becomes a quartz tensor on the device of the first quartz argument.
py::list call_on_aliases(const py::object& function, const py::list& arguments, const py::object& devices) {
  quartz::refuse_in_capture("a function that torch.compile has compiled",
                            "runs native code that a graph of the host substrate does not see; capture it uncompiled");
  quartz::CompiledCall call;
  py::list natives;
  for (auto argument : arguments) {
    if (THPVariable_Check(argument.ptr())) {
      natives.append(py::cast(call.to_native(THPVariable_Unpack(argument.ptr()))));
    } else {
      natives.append(argument);
    }
  }
  arguments.attr("clear")();
  const py::list outputs(function(std::move(natives)));
  call.follow_resized_inputs();

  const auto count = outputs.size();
  std::vector<std::optional<c10::DeviceIndex>> wanted(count, call.device());
  if (!devices.is_none()) {
    const py::sequence given(devices);
    TORCH_CHECK_VALUE(given.size() == count, "quartz: call_on_aliases: the function returned ", count,
                      " outputs, but devices names ", given.size());
    for (std::size_t i = 0; i < count; i++) wanted[i] = py::cast<std::optional<c10::DeviceIndex>>(given[i]);
  }
  py::list results(count);
  // Outputs on quartz first: one that stays native must not share their memory.
  for (const bool on_quartz : {true, false}) {
    for (std::size_t i = 0; i < count; i++) {
      if (wanted[i].has_value() != on_quartz) continue;
      const py::object output = outputs[i];
      if (!THPVariable_Check(output.ptr())) {
        results[i] = output;
        continue;
      }
      const at::Tensor& tensor = THPVariable_Unpack(output.ptr());
      results[i] = py::cast(on_quartz ? call.to_quartz(tensor, *wanted[i]) : call.keep_native(tensor));
    }
  }
  return results;
}

}  // namespace

void bind_compiled_call(py::module& m) {
  m.def("call_on_aliases", &call_on_aliases, py::arg("function"), py::arg("arguments"),
        py::arg("devices") = py::none());
}
