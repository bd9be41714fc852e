// _C.HostGraph: graphs of the host substrate (python/torch_quartz/device/graphs.py).
#include <torch/csrc/utils/pybind.h>

#include "runtime/graph_host.h"

namespace py = pybind11;

void bind_graph(py::module& m) {
  using quartz::CaptureMode;
  using quartz::HostGraph;
  // A replay needs no Python unless an operator is written in it, and that operator takes the GIL itself.
  const py::call_guard<py::gil_scoped_release> released;
  py::class_<HostGraph>(m, "HostGraph")
      .def(py::init<bool>(), py::arg("keep_graph"))
      .def(
          "capture_begin",
          [](HostGraph& graph, quartz::GraphPool pool, bool relaxed) {
            graph.capture_begin(pool, relaxed ? CaptureMode::kRelaxed : CaptureMode::kStrict);
          },
          py::arg("pool"), py::arg("relaxed"))
      .def("capture_end", &HostGraph::capture_end, released)
      .def("capture_abort", &HostGraph::capture_abort, released)
      .def("instantiate", &HostGraph::instantiate)
      .def("replay", &HostGraph::replay, released)
      .def("reset", &HostGraph::reset, released)
      .def("pool", &HostGraph::pool)
      .def("debug_dump", &HostGraph::debug_dump, py::arg("path"));
  m.def("new_graph_pool", &quartz::new_graph_pool);
  m.def("capturing_on_host", &quartz::capturing_on_host);
}
