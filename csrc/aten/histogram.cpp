// histc of integers on the host substrate: CUDA has kernels for them and the CPU has none, while Transformers calls it
// for routing statistics on every device that is not the CPU.
#include <ATen/ops/histc.h>

#include "aten/alias.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"

namespace quartz {
namespace {

// Counts are exact: every integer of at most 53 bits is a float64, and so is every count. Larger int64 values would be
// rounded and might fall into the neighbouring bin, so they are refused.
at::Tensor native_histc(const at::Tensor& native, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  if (!at::isIntegralType(native.scalar_type(), /*includeBool=*/false)) return at::histc(native, bins, min, max);
  if (native.scalar_type() == at::kLong && native.numel() != 0) {
    constexpr int64_t kLimit = int64_t{1} << 53;
    TORCH_CHECK_VALUE(native.max().item<int64_t>() <= kLimit && native.min().item<int64_t>() >= -kLimit,
                      "quartz: histc: int64 values beyond 2^53 are not supported on host memory");
  }
  return at::histc(native.to(at::kDouble), bins, min, max).to(native.scalar_type());
}

at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  return scope.to_quartz(native_histc(scope.to_native(self), bins, min, max));
}

at::Tensor& histc_out(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max,
                      at::Tensor& out) {
  TORCH_CHECK(out.scalar_type() == self.scalar_type(), "torch.histogram: input tensor and hist tensor should",
              " have the same dtype, but got input ", self.scalar_type(), " and hist ", out.scalar_type());
  if (out.device() != self.device()) throw_mixed_devices(self.device(), out.device(), "aten::histc.out", "out");
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto result = native_histc(scope.to_native(self), bins, min, max);
  auto target = scope.to_native(out);
  target.resize_(result.sizes());
  target.copy_(result);
  scope.write_back(out);
  return out;
}

}  // namespace

void register_histogram(torch::Library& library) {
  own_kernel<&histc>(library, "histc");
  own_kernel<&histc_out>(library, "histc.out");
}

}  // namespace quartz
