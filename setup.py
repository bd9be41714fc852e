"""Build of torch-quartz: setuptools asks CMake for the two libraries (see CMakeLists.txt).

Environment: TORCH_QUARTZ_CUDA=0 leaves the CUDA half out, =1 insists on it; CMAKE_ARGS adds CMake options;
CMAKE_BUILD_PARALLEL_LEVEL sets the number of compiler processes (all cores by default).
"""

import importlib.metadata
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

if int(setuptools.__version__.partition(".")[0]) < 77:  # older ones cannot read pyproject.toml, and say so at length
    sys.exit(
        f"torch-quartz needs setuptools 77 or newer, but {sys.executable} has {setuptools.__version__}: "
        "`pip install 'setuptools>=77'`"
    )

ROOT = pathlib.Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Configure, build and install the CMake project: into ``build_lib``, or in place for an editable install."""

    def run(self) -> None:
        """Build; setuptools clears ``inplace`` while it does, so it is noted here."""
        self.in_tree = bool(self.inplace)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Build everything; `ext` only names ``torch_quartz._C``."""
        try:
            torch_version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            raise SetupError(
                f"torch-quartz is built against the PyTorch of {sys.executable}, which has none: install torch first "
                "and call pip with --no-build-isolation"
            ) from None
        python = "py{}{}".format(*sys.version_info[:2])
        build_dir = ROOT / "build" / f"{python}-torch{torch_version}-{'inplace' if self.in_tree else 'wheel'}"
        cmake = _tool("cmake", "3.22")
        options = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DQUARTZ_INSTALL_IN_PLACE={'ON' if self.in_tree else 'OFF'}",
            "-DQUARTZ_BUILD_TESTS=OFF",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        if ninja := _find("ninja"):
            options += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(self.parallel or len(os.sched_getaffinity(0)))
        _run(cmake, "-S", ROOT, "-B", build_dir, *options)
        _run(cmake, "--build", build_dir, "--parallel", jobs)
        if self.in_tree:
            link = ROOT / "build" / "inplace"  # the newest in-place build, for scripts/gtest.sh
            link.unlink(missing_ok=True)
            link.symlink_to(build_dir.name)
        else:
            prefix = pathlib.Path(self.build_lib).resolve()
            for folder in ("include", "lib", "share"):  # no file of an earlier build may get into a wheel
                shutil.rmtree(prefix / "torch_quartz" / folder, ignore_errors=True)
            _run(cmake, "--install", build_dir, "--prefix", prefix)

    def copy_extensions_to_source(self) -> None:
        """Do nothing: CMake has written the libraries into python/torch_quartz itself."""

    def get_outputs(self) -> list[str]:
        """Return the files of an installed build, for setuptools' records."""
        return [str(path) for path in pathlib.Path(self.build_lib, "torch_quartz").rglob("*") if path.is_file()]


def _find(name: str) -> str | None:
    # The environment's own scripts first: a virtual environment need not be activated to be built in.
    return shutil.which(name, path=str(pathlib.Path(sys.executable).parent)) or shutil.which(name)


def _tool(name: str, version: str) -> str:
    path = _find(name)
    if path is None:
        raise SetupError(f"torch-quartz needs {name} {version} or newer: `pip install {name}` or the system's package")
    return path


def _run(*command: object) -> None:
    words = [str(word) for word in command]
    print("+", shlex.join(words), flush=True)
    try:
        subprocess.run(words, check=True)
    except subprocess.CalledProcessError as error:
        raise SetupError(f"`{words[0]} {words[1]} ...` failed with status {error.returncode}; see above") from None


setup(ext_modules=[Extension("torch_quartz._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
