// LSTM and GRU cells of the host substrate. PyTorch's composite cells call the fused operators for every device that is
// not the CPU, and the CPU has no kernels for them.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include "aten/alias.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"

namespace quartz {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

Tensor add_optional(const Tensor& sum, const OptionalTensor& term, AliasScope& scope) {
  return given(term) ? sum + scope.to_native(*term) : sum;
}

// i, f, g, o = chunks of (input gates + hidden gates + biases); c' = sigmoid(f) c + sigmoid(i) tanh(g);
// h' = sigmoid(o) tanh(c'). The workspace keeps the four activated gates for the backward.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  auto sum = scope.to_native(input_gates) + scope.to_native(hidden_gates);
  sum = add_optional(add_optional(sum, input_bias, scope), hidden_bias, scope);
  scope.check_operands("aten::_thnn_fused_lstm_cell");
  const auto gates = sum.chunk(4, 1);
  const auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const auto cy = f * scope.to_native(cx) + i * g;
  const auto hy = o * cy.tanh();
  return {scope.to_quartz(hy), scope.to_quartz(cy), scope.to_quartz(at::cat({i, f, g, o}, 1))};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hy, const OptionalTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  if (!given(grad_hy) && !given(grad_cy)) return {};
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto gates = scope.to_native(workspace).chunk(4, 1);
  const auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const auto tanh_cy = scope.to_native(cy).tanh();
  auto grad_c = at::zeros_like(tanh_cy), grad_o = at::zeros_like(tanh_cy);
  if (given(grad_cy)) grad_c = grad_c + scope.to_native(*grad_cy);
  if (given(grad_hy)) {
    const auto grad_h = scope.to_native(*grad_hy);
    grad_c = grad_c + grad_h * o * (1 - tanh_cy * tanh_cy);
    grad_o = grad_h * tanh_cy * o * (1 - o);
  }
  const auto grad_gates = at::cat(
      {grad_c * g * i * (1 - i), grad_c * scope.to_native(cx) * f * (1 - f), grad_c * i * (1 - g * g), grad_o}, 1);
  return {scope.to_quartz(grad_gates), scope.to_quartz(grad_c * f),
          has_bias ? scope.to_quartz(grad_gates.sum(0)) : Tensor()};
}

// r, z, n = chunks: r = sigmoid(xr + hr); z = sigmoid(xz + hz); n = tanh(xn + r hn); h' = n + z (h - n).
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto x = add_optional(scope.to_native(input_gates), input_bias, scope).chunk(3, 1);
  const auto y = add_optional(scope.to_native(hidden_gates), hidden_bias, scope).chunk(3, 1);
  const auto h = scope.to_native(hx);
  scope.check_operands("aten::_thnn_fused_gru_cell");
  const auto r = (x[0] + y[0]).sigmoid(), z = (x[1] + y[1]).sigmoid(), n = (x[2] + r * y[2]).tanh();
  return {scope.to_quartz(n + z * (h - n)), scope.to_quartz(at::cat({r, z, n, h, y[2]}, 1))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto saved = scope.to_native(workspace).chunk(5, 1);
  const auto &r = saved[0], &z = saved[1], &n = saved[2], &h = saved[3], &hn = saved[4];
  const auto grad = scope.to_native(grad_hy);
  const auto grad_n = grad * (1 - z) * (1 - n * n), grad_z = grad * (h - n) * z * (1 - z);
  const auto grad_r = grad_n * hn * r * (1 - r);
  const auto grad_input = at::cat({grad_r, grad_z, grad_n}, 1), grad_hidden = at::cat({grad_r, grad_z, grad_n * r}, 1);
  return {scope.to_quartz(grad_input), scope.to_quartz(grad_hidden), scope.to_quartz(grad * z),
          has_bias ? scope.to_quartz(grad_input.sum(0)) : Tensor(),
          has_bias ? scope.to_quartz(grad_hidden.sum(0)) : Tensor()};
}

}  // namespace

void register_recurrent(torch::Library& library) {
  own_kernel<&lstm_cell>(library, "_thnn_fused_lstm_cell");
  own_kernel<&lstm_cell_backward>(library, "_thnn_fused_lstm_cell_backward_impl");
  own_kernel<&gru_cell>(library, "_thnn_fused_gru_cell");
  own_kernel<&gru_cell_backward>(library, "_thnn_fused_gru_cell_backward");
}

}  // namespace quartz
