// What the tests share: tensors from and to plain numbers, error texts, and the proof that a device still works.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/device.h"

namespace quartz::test {

// A one-dimensional float tensor of quartz:`device` (-1: the current one). The values are written by the native
// device, not by an operator under test.
at::Tensor on_quartz(const std::vector<float>& values, c10::DeviceIndex device = -1);

// The same on the CPU and on the native device.
at::Tensor on_cpu(const std::vector<float>& values);

// All elements in logical order, of any device and real dtype.
std::vector<double> values_of(const at::Tensor& tensor);

// 0, 1, ... count - 1.
std::vector<float> iota(int64_t count);

// Options of the native device of quartz:`device`.
at::TensorOptions native_options(c10::DeviceIndex device = 0);
at::TensorOptions quartz_options(c10::DeviceIndex device = 0);

// Allocates, copies both ways and computes, and compares with numbers computed here.
::testing::AssertionResult still_works(c10::DeviceIndex device = 0);

// Whether `text` contains `part`, with both in the message.
::testing::AssertionResult contains(const std::string& text, const std::string& part);

}  // namespace quartz::test

// The statement throws an exception of type Error whose text contains `part`.
#define QUARTZ_EXPECT_ERROR(Error, part, ...)                                        \
  do {                                                                               \
    try {                                                                            \
      __VA_ARGS__;                                                                   \
      ADD_FAILURE() << "no error thrown by " #__VA_ARGS__;                           \
    } catch (const Error& error) {                                                   \
      EXPECT_TRUE(::quartz::test::contains(error.what_without_backtrace(), (part))); \
    }                                                                                \
  } while (false)
