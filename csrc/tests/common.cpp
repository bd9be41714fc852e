#include "common.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "aten/alias.h"
#include "runtime/allocator.h"
#include "runtime/substrate.h"

namespace quartz::test {

at::TensorOptions native_options(c10::DeviceIndex device) {
  return at::TensorOptions(substrate().native_device(device)).dtype(at::kFloat);
}

at::TensorOptions quartz_options(c10::DeviceIndex device) {
  return at::TensorOptions(c10::Device(kQuartz, device)).dtype(at::kFloat);
}

at::Tensor on_cpu(const std::vector<float>& values) {
  auto tensor = at::empty({static_cast<int64_t>(values.size())}, at::kFloat);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<float>());
  return tensor;
}

at::Tensor on_quartz(const std::vector<float>& values, c10::DeviceIndex device) {
  const c10::DeviceGuard guard(c10::Device(kQuartz, resolve_device(device)));
  const auto nbytes = values.size() * sizeof(float);
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, &allocator(), /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<float>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(values.size())});
  native_alias(tensor, AliasKind::kFull).copy_(on_cpu(values));
  return tensor;
}

std::vector<double> values_of(const at::Tensor& tensor) {
  const auto cpu = tensor.detach().cpu().to(at::kDouble).contiguous();
  const auto* data = cpu.const_data_ptr<double>();
  return {data, data + cpu.numel()};
}

std::vector<float> iota(int64_t count) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(i);
  return values;
}

::testing::AssertionResult still_works(c10::DeviceIndex device) {
  try {
    const auto x = on_quartz({1, 2, 3}, device), y = on_quartz({10, 20, 30}, device);
    const auto sum = values_of(x.add(y)), scaled = values_of(x.mul_(2));
    if (sum == std::vector<double>{11, 22, 33} && scaled == std::vector<double>{2, 4, 6}) {
      return ::testing::AssertionSuccess();
    }
    return ::testing::AssertionFailure() << "wrong numbers: " << ::testing::PrintToString(sum) << ", "
                                         << ::testing::PrintToString(scaled);
  } catch (const std::exception& error) {
    return ::testing::AssertionFailure() << error.what();
  }
}

::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "expected \"" << part << "\" in: " << text;
}

}  // namespace quartz::test
