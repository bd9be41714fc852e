#!/usr/bin/env bash
# Runs every example as its text says: PYTHON=... scripts/examples.sh
# A numbered Python file is run; a folder with a CMakeLists.txt is built against torch and torch_quartz and its programs are run.
set -euo pipefail
cd "$(dirname "$0")/../examples"
python=$(command -v "${PYTHON:-python3}")
PATH=$(dirname "$python"):$PATH
prefix=$("$python" -c 'import pathlib, torch, torch_quartz
print(torch.utils.cmake_prefix_path, pathlib.Path(torch_quartz.__file__).parent, sep=";")')

for example in *; do
  echo "== examples/$example"
  if [ -f "$example/CMakeLists.txt" ]; then
    cmake -S "$example" -B "$example/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix"
    cmake --build "$example/build" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
    find "$example/build" -maxdepth 1 -type f -executable ! -name '*.so' -print0 | sort -z | xargs -0 -r -n1 -t env
  elif [[ $example == [0-9]*.py ]]; then
    "$python" "$example"
  fi
done
