#!/usr/bin/env bash
# Builds and runs the GoogleTest binaries of csrc/tests: PYTHON=... [SANITIZE=address,undefined] scripts/gtest.sh
# Each test_*.cpp runs in a process of its own: on the default substrate, and on the host substrate with two devices.
# GTEST_OPTIONAL=1: where GoogleTest is not installed, say so and succeed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python3}")
sanitize=${SANITIZE:-}
PATH=$(dirname "$python"):$PATH # cmake, ctest and ninja may be this environment's

if [ ! -e /usr/include/gtest/gtest.h ] && [ ! -e /usr/local/include/gtest/gtest.h ] && [ -z "${QUARTZ_GTEST_ROOT:-}" ]; then
  echo "GoogleTest binaries NOT BUILT and NOT RUN: install libgtest-dev, or set QUARTZ_GTEST_ROOT" >&2
  [ "${GTEST_OPTIONAL:-0}" = 1 ] && exit 0
  exit 1
fi
options="-DQUARTZ_BUILD_TESTS=ON -DQUARTZ_GTEST_ROOT=${QUARTZ_GTEST_ROOT:-}"

if [ -z "$sanitize" ]; then
  # The in-place build of setup.py, whose objects the tests link.
  CMAKE_ARGS="$options ${CMAKE_ARGS:-}" "$python" setup.py -q build_ext --inplace
  build=build/inplace
else
  build=build/sanitize
  command -v ninja >/dev/null && options+=" -G Ninja"
  # shellcheck disable=SC2086 # words
  cmake -S . -B $build $options -DPython_EXECUTABLE="$python" -DQUARTZ_BUILD_PYTHON=OFF -DQUARTZ_SANITIZE="$sanitize"
  cmake --build $build --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
  # torch's own libraries are not instrumented: containers that cross the border would look overflown. An allocation that
  # is too large returns null, as without the sanitizer: the tests of out-of-memory errors ask for that.
  export ASAN_OPTIONS=detect_container_overflow=0:allocator_may_return_null=1:${ASAN_OPTIONS:-}
  export UBSAN_OPTIONS=print_stacktrace=1:${UBSAN_OPTIONS:-}
fi

ctest --test-dir $build --output-on-failure --no-tests=error
TORCH_QUARTZ_SUBSTRATE=host TORCH_QUARTZ_HOST_DEVICES=2 ctest --test-dir $build --output-on-failure --no-tests=error
