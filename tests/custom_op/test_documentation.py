"""docs/adding_an_op.md, section 3: its C++ file and the Python code that builds it, as a reader would copy them."""

import re
from pathlib import Path

import torch
from cpp_build import compile_library
from torch.utils import cpp_extension

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_an_op.md"


def test_the_cpp_file_and_its_build(tmp_path, monkeypatch, capsys):
    section = PAGE.read_text().split("\n## 3. ")[1].split("\n## 4. ")[0]
    (source,) = re.findall(r"```cpp\n(.*?)```", section, re.DOTALL)
    (build,) = re.findall(r"```python [^\n]*\n(.*?)```", section, re.DOTALL)
    (tmp_path / "softclip.cpp").write_text(source)
    monkeypatch.chdir(tmp_path)

    def load(name, sources, is_python_module, extra_include_paths, extra_ldflags, extra_cflags):
        assert not is_python_module
        options = [*(f"-I{path}" for path in extra_include_paths), *extra_ldflags, *extra_cflags]
        (source,) = sources
        torch.ops.load_library(str(compile_library(Path(source), tmp_path / f"{name}.so", *options)))

    monkeypatch.setattr(cpp_extension, "load", load)  # the compiler alone: a test of the page needs no ninja
    exec(compile(build, str(PAGE), "exec"), {"__name__": "__main__"})
    assert "tensor([0., 0.], device='quartz:0')" in capsys.readouterr().out

    softclip = torch.ops.my_library.softclip
    x = torch.linspace(-3, 3, 7)
    torch.quartz.reset_op_counts()
    result = softclip(x.to("quartz"), 2.0)
    assert result.device.type == "quartz" and "my_library::softclip" not in torch.quartz.op_counts()
    torch.testing.assert_close(result.cpu(), 2 * torch.tanh(x / 2))
    torch.testing.assert_close(softclip(x, 2.0), 2 * torch.tanh(x / 2))
