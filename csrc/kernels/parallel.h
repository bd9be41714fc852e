// How a CPU kernel uses threads: it is given a parallel_for by the caller (PyTorch's thread pool in the library) and
// owns none. Tasks must not depend on which thread runs them or on how many there are.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

namespace quartz::kernels {

// A reference to a callable of (int64_t begin, int64_t end); it does not own it.
class RangeTask {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, RangeTask>>>
  RangeTask(const F& callable)  // implicit, like a function argument
      : object_(&callable),
        call_([](const void* object, int64_t begin, int64_t end) { (*static_cast<const F*>(object))(begin, end); }) {}
  void operator()(int64_t begin, int64_t end) const { call_(object_, begin, end); }

 private:
  const void* object_;
  void (*call_)(const void*, int64_t, int64_t);
};

class Parallel {
 public:
  using Run = void (*)(int64_t count, int64_t grain, RangeTask task);
  Parallel(int threads, Run run) : threads_(threads), run_(run) {}

  // Threads that run() may use: for choosing how many tasks to make, never for the order of a sum.
  int threads() const { return threads_; }
  // Calls task on ranges that cover [0, count), each of at least `grain` elements unless it is the last.
  void run(int64_t count, int64_t grain, RangeTask task) const {
    if (count > 0) run_(count, grain, task);
  }

 private:
  int threads_;
  Run run_;
};

// Everything on the calling thread, for tests.
inline Parallel serial() {
  return {1, [](int64_t count, int64_t, RangeTask task) { task(0, count); }};
}

}  // namespace quartz::kernels
