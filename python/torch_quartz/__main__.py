"""``python -m torch_quartz generate|chat|bench|info``: serve a model, measure it, or describe this installation."""

import argparse
import ctypes
import os
import platform
import sys

from torch_quartz import environment
from torch_quartz._version import __version__
from torch_quartz.engine import command_line


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_quartz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command_line.add_commands(commands)
    page = commands.add_parser("info", help="print versions, substrate, devices, build options, driver and variables")
    page.set_defaults(run=_print_info)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (ValueError, TypeError, OSError, NotImplementedError) as error:  # what the user asked for cannot be done
        if parsed.run is _print_info:
            raise
        print(f"python -m torch_quartz {parsed.command}: {error}", file=sys.stderr)
        return 2


def _print_info(_: argparse.Namespace) -> int:
    print(info())
    return 0


def info() -> str:
    """Return one page about this installation, for a bug report, as lines of ``name: value``."""
    import torch

    rows: list[tuple[str, object]] = [
        ("torch-quartz", f"{__version__} in {os.path.dirname(os.path.abspath(__file__))}"),
        ("PyTorch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} processors"),
        ("processor", f"{torch.backends.cpu.get_cpu_capability()} kernels of PyTorch"),
    ]
    return "\n".join(f"{name + ': ':32}{value}" for name, value in rows + _built() + _running() + _settings())


def _built() -> list[tuple[str, object]]:
    try:
        from torch_quartz import _build_config
    except ImportError:
        return [("build", "no record of the build (_build_config.py is missing)")]
    config = {name: value for name, value in vars(_build_config).items() if name.isupper()}
    rows = [
        ("built against", f"PyTorch {config.pop('TORCH_VERSION')}, Python {config.pop('PYTHON_VERSION')}"),
        ("built with", f"{config.pop('COMPILER')}, {config.pop('BUILD_TYPE')}"),
        ("CUDA half", f"{'yes' if config.pop('WITH_CUDA') else 'no'} ({config.pop('WITH_CUDA_REASON')})"),
    ]
    config.pop("VERSION")
    if not _build_config.WITH_CUDA:
        config.pop("CUDA_ARCHITECTURES")
    return rows + [(name.lower().replace("_", " "), value) for name, value in config.items() if value]


def _running() -> list[tuple[str, object]]:
    import torch

    from torch_quartz.integrations import patches

    rows: list[tuple[str, object]] = [
        ("substrate", f"{torch.quartz.substrate()} ({torch.quartz.substrate_reason()})"),
        ("CUDA driver", _driver()),
    ]
    for index in range(torch.quartz.device_count()):
        free, total = torch.quartz.mem_get_info(index)
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        capability = "{}.{}".format(*torch.quartz.get_device_capability(index))
        rows.append((f"quartz:{index}", f"{torch.quartz.get_device_name(index)}, {memory}, capability {capability}"))
    return rows + [(f"patch {name}", state) for name, state in patches.status().items()]


def _driver() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none usable by this PyTorch"
    version = ctypes.c_int()  # 1000 * major + 10 * minor
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _settings() -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = list(environment.current().items())
    rows += [(name, f"{value} (unknown variable, no effect)") for name, value in environment.unknown().items()]
    return rows or [("variables", "no TORCH_QUARTZ_* variable is set")]


if __name__ == "__main__":
    sys.exit(main())
