// What an error says of the call that failed. Nothing here runs unless one did.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace quartz {

// A failed call: its operator, and for each argument of the schema the name and, where it is or contains tensors, the
// value as the caller gave it (else None).
struct FailedCall {
  std::string op;
  std::vector<std::string> names;
  std::vector<c10::IValue> values;

  // The name of the argument that is, or contains, the tensor; empty if there is none.
  std::string argument_with(const c10::TensorImpl* tensor) const;

  // "aten::mm(self: quartz:0 float32[2, 3], mat2: quartz:0 float64[3, 4])"
  std::string text() const;

  // Adds the text to an error of the native kernel, below its own message. The type of the error and the beginning of
  // its message stay. If the kernel called another operator of quartz which failed, that one has been named already.
  void add_to(c10::Error& error) const;
};

}  // namespace quartz
