// uniform_, normal_, exponential_ and bernoulli_ of PyTorch, and what is made of them, drawn from the counter of the
// generator (kernels/random_fill.h). PyTorch's composite operators (rand, randn, rand_like, ...) end here. Checks and
// their messages are PyTorch's own, by its templates for backends; what the kernels do not serve is the native
// device's.
#include "aten/random_kernel.h"

#include <ATen/ops/bernoulli_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exponential_ops.h>
#include <ATen/ops/normal_ops.h>
#include <ATen/ops/uniform_ops.h>

#include <ATen/native/DistributionTemplates.h>

#include "aten/alias.h"
#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

using Generator = std::optional<at::Generator>;
using kernels::Distribution;
namespace templates = at::native::templates;

// Elements that the kernels draw: float32, float16, bfloat16, float64, and pairs of them.
bool serves(const at::Tensor& self) { return has_random_type(self) || self.is_complex(); }

void draw(const at::Tensor& self, Distribution distribution, double first, double second, const Generator& generator) {
  kernels::RandomFill fill{};
  fill.distribution = distribution;
  fill.first = first;
  fill.second = second;
  draw_random(self, fill, generator);
}

// What PyTorch's templates call. `Tag` is their name for the native generator's class and means nothing here.
struct Tag {};
template <class>
struct UniformKernel {
  void operator()(at::TensorIteratorBase& iter, double from, double to, const Generator& generator) {
    draw(iter.tensor(0), Distribution::kUniform, from, to, generator);
  }
};
template <class>
struct NormalKernel {
  void operator()(const at::Tensor& self, double mean, double std, const Generator& generator) {
    TORCH_CHECK_NOT_IMPLEMENTED(has_random_type(self), "\"normal\" not implemented for '", self.scalar_type(), "'");
    at::assert_no_internal_overlap(self);
    draw(self, Distribution::kNormal, mean, std, generator);
  }
};
template <class>
struct ExponentialKernel {
  void operator()(at::TensorIteratorBase& iter, double rate, const Generator& generator) {
    draw(iter.tensor(0), Distribution::kExponential, rate, 0.0, generator);
  }
};
template <class>
struct BernoulliKernel {
  void operator()(const at::Tensor& self, double p, const Generator& generator) {
    draw(self, Distribution::kBernoulli, p, 0.0, generator);
  }
};

// On a GPU a probability outside [0, 1] counts as the nearer bound, NaN as 0: to find one takes a wait for the device.
template <class T>
void check_probabilities(const at::Tensor& p) {
  const T* values = p.const_data_ptr<T>();
  for (int64_t i = 0; i < p.numel(); ++i) {
    TORCH_CHECK(values[i] >= 0 && values[i] <= 1, "bernoulli expects every p to be in [0, 1], but got p=", values[i]);
  }
}

template <class>
struct BernoulliTensorKernel {
  void operator()(const at::Tensor& self, const at::Tensor& p, const Generator& generator) {
    check_same_device("bernoulli", {{"self", self}, {"p", p}});
    TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(p.scalar_type()),
                                "bernoulli expects probabilities of a floating type, got ", p.scalar_type());
    const bool wide = p.scalar_type() == at::kDouble;
    const auto dense = at::expand_inplace(self, p, "bernoulli_")->to(wide ? at::kDouble : at::kFloat).contiguous();
    if (!on_gpu(dense)) wide ? check_probabilities<double>(dense) : check_probabilities<float>(dense);
    kernels::RandomFill fill{};
    fill.distribution = Distribution::kBernoulli;
    fill.probabilities = dense.const_data_ptr();
    fill.wide_probabilities = wide;
    draw_random(self, fill, generator);
  }
};

bool serves_bernoulli(const at::Tensor& self) {
  switch (self.scalar_type()) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kBool:
      return true;
    default:
      return has_random_type(self);
  }
}

at::Tensor& uniform_(at::Tensor& self, double from, double to, Generator generator) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  if (!serves(self)) {
    fallback_of<at::_ops::uniform_>(self, from, to, generator);
    return self;
  }
  return templates::uniform_impl_<UniformKernel, Tag>(self, from, to, generator);
}

at::Tensor& normal_(at::Tensor& self, double mean, double std, Generator generator) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  if (!serves(self)) {
    fallback_of<at::_ops::normal_>(self, mean, std, generator);
    return self;
  }
  return templates::normal_impl_<NormalKernel, Tag>(self, mean, std, generator);
}

at::Tensor& exponential_(at::Tensor& self, double rate, Generator generator) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  if (!has_random_type(self)) {
    fallback_of<at::_ops::exponential_>(self, rate, generator);
    return self;
  }
  return templates::exponential_impl_<ExponentialKernel, Tag>(self, rate, generator);
}

at::Tensor& bernoulli_float_(at::Tensor& self, double p, Generator generator) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  if (!serves_bernoulli(self)) {
    fallback_of<at::_ops::bernoulli__float>(self, p, generator);
    return self;
  }
  return templates::bernoulli_impl_<BernoulliKernel, Tag>(self, p, generator);
}
at::Tensor& bernoulli_tensor_(at::Tensor& self, const at::Tensor& p, Generator generator) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  if (!serves_bernoulli(self)) {
    fallback_of<at::_ops::bernoulli__Tensor>(self, p, generator);
    return self;
  }
  return templates::bernoulli_impl_<BernoulliTensorKernel, Tag>(self, p, generator);
}
at::Tensor& bernoulli_out(const at::Tensor& self, Generator generator, at::Tensor& out) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  if (!serves_bernoulli(out)) {
    fallback_of<at::_ops::bernoulli_out>(self, generator, out);
    return out;
  }
  return templates::bernoulli_out_impl<BernoulliTensorKernel, Tag>(out, self, generator);
}
at::Tensor bernoulli_p(const at::Tensor& self, double p, Generator generator) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  auto result = at::empty_like(self);
  return bernoulli_float_(result, p, std::move(generator));
}

// Mean or standard deviation of every element: z times the one plus the other, each rounded to the dtype.
template <class Mean, class Std>
at::Tensor normal(Mean mean, Std std, Generator generator) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  return templates::normal_impl<NormalKernel, Tag>(mean, std, generator);
}
template <class Mean, class Std>
at::Tensor& normal_out(Mean mean, Std std, Generator generator, at::Tensor& out) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  return templates::normal_out_impl<NormalKernel, Tag>(out, mean, std, generator);
}

}  // namespace

QUARTZ_OPERATORS(random) {
  using Tensor = const at::Tensor&;
  operators.replace<&uniform_>("uniform_");
  operators.replace<&normal_>("normal_");
  operators.replace<&exponential_>("exponential_");
  operators.replace<&bernoulli_float_>("bernoulli_.float");
  operators.replace<&bernoulli_tensor_>("bernoulli_.Tensor");
  operators.replace<&bernoulli_out>("bernoulli.out");
  operators.replace<&bernoulli_p>("bernoulli.p");
  operators.replace<&normal<Tensor, double>>("normal.Tensor_float");
  operators.replace<&normal<double, Tensor>>("normal.float_Tensor");
  operators.replace<&normal<Tensor, Tensor>>("normal.Tensor_Tensor");
  operators.replace<&normal_out<Tensor, double>>("normal.Tensor_float_out");
  operators.replace<&normal_out<double, Tensor>>("normal.float_Tensor_out");
  operators.replace<&normal_out<Tensor, Tensor>>("normal.Tensor_Tensor_out");
}

}  // namespace quartz
