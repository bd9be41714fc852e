// QUARTZ_TORCH_VERSION: 211 for torch 2.11. One build serves one minor version; this selects between their interfaces.
#pragma once

#include <torch/headeronly/version.h>

#define QUARTZ_TORCH_VERSION (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)
