// A small extension of somebody who has never heard of quartz: operators with CPU and CUDA kernels only, one for each
// way in which an operator can take and return its arguments.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <mutex>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// What a kernel of these would check before it touches the memory.
const Tensor& native(const Tensor& x) {
  TORCH_CHECK(x.is_cpu() || x.is_cuda(), "thirdparty: expected a CPU or CUDA tensor, got one on ", x.device());
  return x;
}

Tensor scale(const Tensor& x, double factor) {
  native(x);
  if (x.is_cuda()) return x * factor;
  const auto dense = x.to(at::kFloat).contiguous();
  auto result = at::empty_like(dense);
  for (int64_t i = 0; i < dense.numel(); i++) {
    result.data_ptr<float>()[i] = dense.data_ptr<float>()[i] * static_cast<float>(factor);
  }
  return result;
}

class ScaleFunction final : public torch::autograd::Function<ScaleFunction> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, double factor) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("thirdparty::scale", "").typed<decltype(scale)>();
    context->saved_data["factor"] = factor;
    context->save_for_backward({x});
    return op.call(x, factor);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    TORCH_CHECK(context->get_saved_variables()[0].device() == gradients[0].device());
    return {gradients[0] * context->saved_data["factor"].toDouble(), Tensor()};
  }
};

Tensor scale_autograd(const Tensor& x, double factor) { return ScaleFunction::apply(x, factor); }

Tensor add_optional(const Tensor& x, const OptionalTensor& bias) {
  native(x);
  return bias.has_value() ? x + native(*bias) : x.clone();
}

Tensor sum_list(at::TensorList tensors) {
  auto total = at::zeros_like(native(tensors.at(0)));
  for (const auto& tensor : tensors) total += native(tensor);
  return total;
}

Tensor take(const Tensor& x, const c10::List<OptionalTensor>& indices) {
  native(x);
  for (const OptionalTensor& index : indices) {
    if (index.has_value()) native(*index);
  }
  return at::index(x, indices);
}

Tensor& scale_(Tensor& x, double factor) {
  native(x);
  return x.mul_(factor);
}

void scale_list_(at::TensorList tensors, double factor) {
  for (const auto& tensor : tensors) {
    Tensor copy = native(tensor);
    copy.mul_(factor);
  }
}

Tensor& scale_out(const Tensor& x, double factor, Tensor& out) {
  native(x), native(out);
  out.resize_(x.sizes());
  return out.copy_(x).mul_(factor);
}

Tensor middle(const Tensor& x) { return native(x).narrow(0, 1, x.size(0) - 2); }

std::vector<Tensor> halves(const Tensor& x) { return native(x).chunk(2, 0); }

std::tuple<Tensor, Tensor> value_and_mask(const Tensor& x) { return {native(x).relu(), x > 0}; }

Tensor noise(const Tensor& x, std::optional<at::Generator> generator) {
  native(x);
  if (generator.has_value()) TORCH_CHECK(generator->device().type() == x.device().type(), "thirdparty: generator");
  if (x.is_cpu()) {  // as a kernel of its own would draw
    auto* own = at::get_generator_or_default<at::CPUGeneratorImpl>(generator, at::detail::getDefaultCPUGenerator());
    const std::lock_guard<std::mutex> lock(own->mutex_);
    auto result = at::empty_like(x);
    for (int64_t i = 0; i < result.numel(); i++) result.data_ptr<float>()[i] = static_cast<float>(own->random() % 1000);
    return result;
  }
  return at::empty_like(x).uniform_(0, 1000, generator);
}

Tensor moved(const Tensor& x, at::Device device) {
  TORCH_CHECK(device.is_cpu() || device.is_cuda(), "thirdparty: device ", device);
  return native(x).to(device, /*non_blocking=*/false, /*copy=*/true);
}

int64_t count(const Tensor& x) { return native(x).gt(0).sum().item<int64_t>(); }

Tensor fails(const Tensor& x) {
  TORCH_CHECK_INDEX(false, "thirdparty: no such thing in ", native(x).sizes());
  return x;
}

TORCH_LIBRARY(thirdparty, m) {
  m.def("scale(Tensor x, float factor) -> Tensor");
  m.def("add_optional(Tensor x, Tensor? bias=None) -> Tensor");
  m.def("sum_list(Tensor[] tensors) -> Tensor");
  m.def("take(Tensor x, Tensor?[] indices) -> Tensor");
  m.def("scale_(Tensor(a!) x, float factor) -> Tensor(a!)");
  m.def("scale_list_(Tensor(a!)[] tensors, float factor) -> ()");
  m.def("scale.out(Tensor x, float factor, *, Tensor(a!) out) -> Tensor(a!)");
  m.def("middle(Tensor(a) x) -> Tensor(a)");
  m.def("halves(Tensor(a -> *) x) -> Tensor(a)[]");
  m.def("value_and_mask(Tensor x) -> (Tensor, Tensor)");
  m.def("noise(Tensor x, *, Generator? generator=None) -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("moved(Tensor x, *, Device device) -> Tensor");
  m.def("count(Tensor x) -> int");
  m.def("fails(Tensor x) -> Tensor");
}

void implement(torch::Library& m) {
  m.impl("scale", scale);
  m.impl("add_optional", add_optional);
  m.impl("sum_list", sum_list);
  m.impl("take", take);
  m.impl("scale_", scale_);
  m.impl("scale_list_", scale_list_);
  m.impl("scale.out", scale_out);
  m.impl("middle", middle);
  m.impl("halves", halves);
  m.impl("value_and_mask", value_and_mask);
  m.impl("noise", noise);
  m.impl("moved", moved);
  m.impl("count", count);
  m.impl("fails", fails);
}

TORCH_LIBRARY_IMPL(thirdparty, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(thirdparty, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(thirdparty, Autograd, m) { m.impl("scale", scale_autograd); }

Tensor scale_fake(const Tensor& x, double) { return at::empty_like(x, x.options().dtype(at::kFloat)); }
TORCH_LIBRARY_IMPL(thirdparty, Meta, m) { m.impl("scale", scale_fake); }

}  // namespace
