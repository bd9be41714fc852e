// What can be asked of CUDA without starting it in this process.
//
// The first CUDA call of a process starts the driver library, and its forked children can then never use a GPU: the
// server process of "forkserver", which imports the main module, would make every one of its children useless.
#pragma once

#include <string>

namespace quartz {

// Empty when a CUDA device can be used, else the sentence that says why not. Asks the management library first, and
// CUDA itself only where that leaves a doubt.
std::string cuda_unavailable_reason();

// True in a process forked from one that had started CUDA. Never starts it.
bool cuda_in_bad_fork();

}  // namespace quartz
