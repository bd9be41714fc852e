// LSTM, GRU and RNN of the cuda substrate by cuDNN. PyTorch's composites (ATen/native/RNN.cpp) take cuDNN where the
// device says "cuda" and run cells one step at a time elsewhere; these give _cudnn_rnn, which the fallback runs, the
// same arguments. Dropout between layers differs: cuDNN draws it from a state of its own that manual_seed does not
// reach, so here layers run one by one with PyTorch's dropout, from the device's generator, between them.
#include <ATen/CompositeImplicitAutogradFunctions.h>
#include <ATen/Context.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cudnn_is_acceptable.h>
#include <ATen/ops/dropout.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "aten/alias.h"
#include "aten/registration.h"

namespace quartz {
namespace {

using at::Tensor;
using at::TensorList;

// cuDNN's numbers for its modes (cudnnRNNMode_t).
enum Mode : int64_t { kRelu = 0, kTanh = 1, kLstm = 2, kGru = 3 };

struct Network {
  Mode mode;
  bool has_biases;
  int64_t layers;
  double dropout;
  bool train, bidirectional, batch_first;
  std::vector<int64_t> batch_sizes;  // of packed sequences

  int64_t directions() const { return bidirectional ? 2 : 1; }
};

// Parameters of PyTorch's modules lie where they were made, not in one buffer: _cudnn_rnn copies them, as it should,
// and warns on every call that flatten_parameters() would help, which does nothing on this device.
class WithoutFormatWarning final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("single contiguous chunk") == std::string::npos) outer_->process(warning);
  }

 private:
  c10::WarningHandler* outer_ = c10::WarningUtils::get_warning_handler();
};

// Fake tensors have no native alias: a graph is traced with the cells, which every compiler can take apart.
bool acceptable(const Tensor& input) {
  if (input.key_set().has_any(c10::python_ks)) return false;
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  return input.layout() == at::kStrided && input.device().type() == at::kPrivateUse1 &&
         at::cudnn_is_acceptable(scope.to_native(input));
}

struct Output {
  Tensor sequence, h, c;
};

Output run(const Tensor& input, const Tensor& hx, const Tensor& cx, TensorList params, const Network& net,
           int64_t layers) {
  WithoutFormatWarning handler;
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  const bool projected = cx.defined() && cx.sym_size(2) != hx.sym_size(2);
  const auto hidden = (cx.defined() ? cx : hx).sym_size(2);
  const auto projection = projected ? hx.sym_size(2) : c10::SymInt(0);
  const int64_t per_direction = (net.has_biases ? 4 : 2) + (projected ? 1 : 0);
  auto result = at::_cudnn_rnn_symint(input, params, per_direction, std::nullopt, hx.contiguous(),
                                      cx.defined() ? std::optional(cx.contiguous()) : std::nullopt, net.mode, hidden,
                                      projection, layers, net.batch_first, /*dropout=*/0., net.train, net.bidirectional,
                                      c10::fromIntArrayRefSlow(net.batch_sizes), std::nullopt);
  return {std::get<0>(result), std::get<1>(result), std::get<2>(result)};
}

Output run_layers(const Tensor& input, const Tensor& hx, const Tensor& cx, TensorList params, const Network& net) {
  if (!net.train || net.dropout == 0. || net.layers == 1) return run(input, hx, cx, params, net, net.layers);
  TORCH_CHECK(params.size() % static_cast<size_t>(net.layers) == 0, "a recurrent network of ", net.layers,
              " layers cannot have ", params.size(), " parameters");
  const auto per_layer = params.size() / static_cast<size_t>(net.layers);
  Output output{input, {}, {}};
  std::vector<Tensor> h, c;
  for (int64_t i = 0; i < net.layers; ++i) {
    if (i > 0) output.sequence = at::dropout(output.sequence, net.dropout, /*train=*/true);
    const auto first = i * net.directions();
    output = run(output.sequence, hx.narrow(0, first, net.directions()),
                 cx.defined() ? cx.narrow(0, first, net.directions()) : cx,
                 params.slice(static_cast<size_t>(i) * per_layer, per_layer), net, 1);
    h.push_back(output.h);
    c.push_back(output.c);
  }
  return {output.sequence, at::cat(h), cx.defined() ? at::cat(c) : Tensor()};
}

std::vector<int64_t> sizes_of(const Tensor& batch_sizes) {
  TORCH_CHECK(batch_sizes.is_cpu() && batch_sizes.scalar_type() == at::kLong && batch_sizes.dim() == 1,
              "batch_sizes must be a one-dimensional int64 tensor on the CPU, got ", batch_sizes.toString(), " of ",
              batch_sizes.dim(), " dimensions on ", batch_sizes.device());
  const auto sizes = batch_sizes.contiguous();
  return {sizes.const_data_ptr<int64_t>(), sizes.const_data_ptr<int64_t>() + sizes.numel()};
}

using LstmResult = std::tuple<Tensor, Tensor, Tensor>;
using RnnResult = std::tuple<Tensor, Tensor>;

LstmResult run_lstm(const Tensor& input, TensorList hx, TensorList params, const Network& net) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states, got ", hx.size());
  const auto out = run_layers(input, hx[0], hx[1], params, net);
  return {out.sequence, out.h, out.c};
}

LstmResult lstm(const Tensor& input, TensorList hx, TensorList params, bool has_biases, int64_t layers, double dropout,
                bool train, bool bidirectional, bool batch_first) {
  if (!acceptable(input)) {
    return at::compositeimplicitautograd::lstm(input, hx, params, has_biases, layers, dropout, train, bidirectional,
                                               batch_first);
  }
  return run_lstm(input, hx, params, {kLstm, has_biases, layers, dropout, train, bidirectional, batch_first, {}});
}

LstmResult lstm_packed(const Tensor& data, const Tensor& batch_sizes, TensorList hx, TensorList params, bool has_biases,
                       int64_t layers, double dropout, bool train, bool bidirectional) {
  if (!acceptable(data)) {
    return at::compositeimplicitautograd::lstm(data, batch_sizes, hx, params, has_biases, layers, dropout, train,
                                               bidirectional);
  }
  return run_lstm(data, hx, params,
                  {kLstm, has_biases, layers, dropout, train, bidirectional, false, sizes_of(batch_sizes)});
}

template <Mode kMode, auto Composite>
RnnResult rnn(const Tensor& input, const Tensor& hx, TensorList params, bool has_biases, int64_t layers, double dropout,
              bool train, bool bidirectional, bool batch_first) {
  if (!acceptable(input)) {
    return Composite(input, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first);
  }
  const auto out =
      run_layers(input, hx, {}, params, {kMode, has_biases, layers, dropout, train, bidirectional, batch_first, {}});
  return {out.sequence, out.h};
}

template <Mode kMode, auto Composite>
RnnResult rnn_packed(const Tensor& data, const Tensor& batch_sizes, const Tensor& hx, TensorList params,
                     bool has_biases, int64_t layers, double dropout, bool train, bool bidirectional) {
  if (!acceptable(data)) {
    return Composite(data, batch_sizes, hx, params, has_biases, layers, dropout, train, bidirectional);
  }
  const auto out = run_layers(data, hx, {}, params,
                              {kMode, has_biases, layers, dropout, train, bidirectional, false, sizes_of(batch_sizes)});
  return {out.sequence, out.h};
}

using Plain = RnnResult (*)(const Tensor&, const Tensor&, TensorList, bool, int64_t, double, bool, bool, bool);
using Packed = RnnResult (*)(const Tensor&, const Tensor&, const Tensor&, TensorList, bool, int64_t, double, bool,
                             bool);
namespace composite = at::compositeimplicitautograd;

template <Mode kMode, Plain kPlain, Packed kPacked>
void register_rnn(torch::Library& library, const std::string& name) {
  library.impl((name + ".input").c_str(), TORCH_FN((rnn<kMode, kPlain>)));
  library.impl((name + ".data").c_str(), TORCH_FN((rnn_packed<kMode, kPacked>)));
}

void register_networks(torch::Library& library) {
  library.impl("lstm.input", TORCH_FN(lstm));
  library.impl("lstm.data", TORCH_FN(lstm_packed));
  register_rnn<kGru, composite::gru, composite::gru>(library, "gru");
  register_rnn<kTanh, composite::rnn_tanh, composite::rnn_tanh>(library, "rnn_tanh");
  register_rnn<kRelu, composite::rnn_relu, composite::rnn_relu>(library, "rnn_relu");
}

}  // namespace

// Composites are differentiated through what they call: the same functions serve with autograd and without.
void register_recurrent_cudnn(torch::Library& library) {
  register_networks(permanent_library("aten", c10::DispatchKey::AutogradPrivateUse1));
  register_networks(library);
}

}  // namespace quartz
