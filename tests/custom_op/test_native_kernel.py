"""The author's side: examples/02_custom_op, a quartz kernel in Python and one in C++ against the installed headers."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch_quartz
from cpp_build import compile_library

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PACKAGE = Path(torch_quartz.__file__).resolve().parent


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example as a module, with its C++ operator compiled by the compiler alone."""
    spec = importlib.util.spec_from_file_location("custom_op_example", EXAMPLES / "02_custom_op.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = tmp_path_factory.mktemp("rms_scale") / f"rms_scale{sys.version_info.minor}.so"
    options = [f"-I{PACKAGE / 'include'}", f"-I{PACKAGE / 'include' / 'quartz'}", "-O2"]
    options += [f"-L{PACKAGE / 'lib'}", f"-Wl,-rpath,{PACKAGE / 'lib'}", "-lquartz"]
    library = compile_library(EXAMPLES / "02_custom_op" / "rms_scale.cpp", target, *options)
    module.cpp_extension = type("Loader", (), {"load": lambda **_: torch.ops.load_library(str(library))})
    module.build_rms_scale()  # for each test by itself, with the fake kernel and the gradient
    module.build_rms_scale = lambda: None  # once a process: main() finds it done
    return module


def test_the_example_runs(example, capsys):
    example.main()
    assert "equal" in capsys.readouterr().out


def test_the_quartz_kernel_runs_and_is_not_the_fallback(example):
    torch.quartz.reset_op_counts()
    example.softclip(torch.ones(3, device="quartz"), 1.0)
    torch.ops.example_cpp.rms_scale(torch.ones(2, 3, device="quartz"), torch.ones(3, device="quartz"), 0.0)
    counts = torch.quartz.op_counts()
    assert "example::softclip" not in counts and "example_cpp::rms_scale" not in counts


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (0, 16), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rms_scale(example, shape, dtype):
    x, weight = torch.randn(shape, dtype=dtype), torch.rand(shape[-1:], dtype=dtype)
    expected = torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-6)
    got = torch.ops.example_cpp.rms_scale(x.to("quartz"), weight.to("quartz"), 1e-6)
    torch.testing.assert_close(got.cpu(), expected)
    strided = x.to("quartz").repeat_interleave(2, -1)[..., ::2]
    torch.testing.assert_close(torch.ops.example_cpp.rms_scale(strided, weight.to("quartz"), 1e-6).cpu(), expected)


def test_errors_name_argument_rule_and_value(example):
    with pytest.raises(RuntimeError, match=r"weight must have shape \[4\].*got \[3\]"):
        torch.ops.example_cpp.rms_scale(torch.ones(2, 4, device="quartz"), torch.ones(3, device="quartz"), 0.0)
    with pytest.raises(RuntimeError, match="weight must be on the device of x, quartz:0, got cpu"):
        torch.ops.example_cpp.rms_scale(torch.ones(2, 4, device="quartz"), torch.ones(4), 0.0)


def test_opcheck(example):
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    x = torch.randn(3, 8, device="quartz", requires_grad=True)
    weight = torch.rand(8, device="quartz")
    torch.library.opcheck(torch.ops.example_cpp.rms_scale.default, (x, weight, 1e-6), test_utils=checks)
    torch.library.opcheck(example.softclip, (x, 2.0), test_utils=checks)
