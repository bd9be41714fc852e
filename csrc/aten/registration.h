// Everything libquartz.so registers with PyTorch, in one order.
#pragma once

#include <torch/library.h>

#include <source_location>
#include <string>

#include "runtime/export.h"

namespace quartz {

// Registers the device, its memory and all operators. Runs once, when libquartz.so is loaded; calling it again does
// nothing. A C++ program calls it to make sure that the library is linked in.
QUARTZ_API void initialize();

// A library for implementations with `key` that is never destroyed: its destructor would take the kernels away, and
// tensors may be used until the very end of the process.
torch::Library& permanent_library(const std::string& space, c10::DispatchKey key,
                                  std::source_location where = std::source_location::current());

// Own kernels, one function a file; `library` is the IMPL library of aten on PrivateUse1.
void register_factories(torch::Library& library);        // factories.cpp
void register_views(torch::Library& library);            // views.cpp
void register_copies(torch::Library& library);           // copy.cpp
void register_set(torch::Library& library);              // set.cpp
void register_convolution(torch::Library& library);      // convolution.cpp
void register_attention(torch::Library& library);        // attention.cpp
void register_recurrent(torch::Library& library);        // recurrent.cpp: host only
void register_histogram(torch::Library& library);        // histogram.cpp: host only
void register_recurrent_cudnn(torch::Library& library);  // recurrent_cudnn.cpp: cuda only
void register_fft_half(torch::Library& library);         // fft_half.cpp: cuda only
void register_jagged(torch::Library& library);           // jagged.cpp: cuda only
// Unboxed versions of the fallback for the operators that dispatch cost matters most for.
void register_hot_operators(torch::Library& library);  // hot_operators.cpp
// The fallback by name wherever a composite kernel would be preferred to it; returns how many.
int register_direct();     // direct.cpp
void register_fallback();  // direct.cpp
void register_autocast();  // autocast.cpp

}  // namespace quartz
