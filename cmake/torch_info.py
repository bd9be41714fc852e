"""Print what CMake needs to know about the Python interpreter and its torch, one `NAME=value` a line.

Lists are joined with ";", as CMake writes them. CMakeLists.txt runs this at configure time instead of
`find_package(Torch)`, which would detect CUDA architectures and compilers on its own.
"""

import os
import pathlib
import sys
import sysconfig

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_quartz itself may be half built

import torch


def cuda_package_folders(site: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of NVIDIA's pip packages beside torch (``nvidia/cu13``, ``nvidia/cuda_runtime``, ...)."""
    return sorted(p for p in (site / "nvidia").glob("*") if (p / "include").is_dir() or (p / "lib").is_dir())


def main() -> None:
    package = pathlib.Path(torch.__file__).parent
    folders = cuda_package_folders(package.parent) if torch.version.cuda else []
    facts = {
        "PYTHON_VERSION": "{}.{}.{}".format(*sys.version_info[:3]),
        "PYTHON_INCLUDE_DIR": sysconfig.get_paths()["include"],
        "PYTHON_EXT_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        "TORCH_VERSION": torch.__version__,
        "TORCH_CUDA_VERSION": torch.version.cuda or "",
        "TORCH_CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
        "TORCH_LIB_DIR": package / "lib",
        "TORCH_INCLUDE_DIRS": ";".join(
            str(package / p) for p in ("include", "include/torch/csrc/api/include") if (package / p).is_dir()
        ),
        "CUDA_PACKAGE_INCLUDE_DIRS": ";".join(str(p / "include") for p in folders if (p / "include").is_dir()),
        "CUDA_PACKAGE_LIB_DIRS": ";".join(str(p / "lib") for p in folders if (p / "lib").is_dir()),
    }
    for name, value in facts.items():
        print(f"{name}={value}")


if __name__ == "__main__":
    main()
