"""Importing: what it costs, what it says when something does not fit, and autoload by ``import torch``."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import torch_quartz
from torch_quartz import _load

PACKAGE = Path(torch_quartz.__file__).parent

MISSPELT = "TORCH_QUARTZ_" + "HOST_DEVICE"  # in two parts: what is written in one must be in docs/environment.md


def test_silent(run_python):
    assert run_python("import torch_quartz") == ""
    assert run_python("import torch, torch_quartz, torch.quartz") == ""


def test_cost_and_what_is_not_imported(run_python):
    code = """
    import json, sys, time, torch
    before = set(sys.modules)
    start = time.perf_counter()
    import torch_quartz
    elapsed = time.perf_counter() - start
    new = sorted(name for name in set(sys.modules) - before if not name.startswith(("torch_quartz", "torch.quartz")))
    print(json.dumps([elapsed, new]))
    """
    elapsed, new = json.loads(run_python(code))
    heavy = ("torch._inductor", "torch._dynamo", "transformers", "accelerate", "safetensors", "numpy", "triton")
    assert [name for name in new if name.startswith(heavy)] == []
    # The budget is 150 ms; a loaded machine must not fail a test, so what bounds the cost here is what gets imported.
    assert len(new) < 25, new
    print(f"import torch_quartz costs {1000 * elapsed:.0f} ms over import torch")


@pytest.mark.parametrize(
    "installed,built,sentence",
    [
        ("2.10.0", None, "torch_quartz supports PyTorch 2.11 to 2.15, but PyTorch 2.10.0 is installed"),
        ("2.16.0.dev1", "2.16.0", "torch_quartz supports PyTorch 2.11 to 2.15, but PyTorch 2.16.0.dev1 is installed"),
        ("1.13.1+cu117", "2.13.0", "torch_quartz supports PyTorch 2.11 to 2.15"),
        ("2.14.1+cu130", "2.13.0+cpu", "was built against PyTorch 2.13.0+cpu, but PyTorch 2.14.1+cu130 is installed"),
        ("2.11.0", "2.12.1", "install torch==2.12.* or rebuild it with"),
        ("unknown", None, "supports PyTorch"),
    ],
)
def test_versions_that_do_not_fit(installed, built, sentence):
    with pytest.raises(ImportError) as caught:
        _load.check_versions(installed, built)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "installed,built", [("2.13.1", "2.13.0+cpu"), ("2.11.0+cu130", "2.11.0"), ("2.15.0a0+git1", None)]
)
def test_versions_that_fit(installed, built):
    _load.check_versions(installed, built)


@pytest.mark.parametrize(
    "error,sentence",
    [
        ("/x/_C.so: undefined symbol: _ZN2at4_ops3addE", "the symbol _ZN2at4_ops3addE is missing"),
        ("_C.so: undefined symbol: _ZN6quartz5aliasE", "its own two libraries are of different builds"),
        ("libtorch_cuda.so: cannot open shared object file: No such file", "needs the shared library libtorch_cuda.so"),
        ("No module named 'torch_quartz._C'", "the compiled half of torch_quartz is not built for Python"),
        ("cannot import name '_C' from 'torch_quartz'", "the compiled half of torch_quartz is not built for Python"),
        ("quartz: bad thing\nException raised from f at g.cpp:1", "torch_quartz cannot be loaded: quartz: bad thing"),
        ("", "torch_quartz cannot be loaded: no message"),
    ],
)
def test_errors_of_the_compiled_half_become_sentences(error, sentence):
    text = _load.explain(error, "2.13.0", "2.13.0")
    assert sentence.replace("its own two", "own two") in text and "\n" not in text


def test_another_backend():
    with pytest.raises(ImportError, match="this process already has the out-of-tree device 'npu'"):
        _load.check_backend_name("npu")
    _load.check_backend_name("privateuseone")
    _load.check_backend_name("quartz")


def test_another_backend_in_the_process(run_python):
    run_python(
        """
        import torch
        torch.utils.rename_privateuse1_backend("other")
        try:
            import torch_quartz
        except ImportError as error:
            assert "out-of-tree device 'other'" in str(error)
        else:
            raise SystemExit("imported")
        torch.ones(2)
        """
    )


@pytest.fixture
def copy_of_the_package(tmp_path):
    """Return a folder for PYTHONPATH with the Python files of the package and no compiled half."""
    target = tmp_path / "copy" / "torch_quartz"
    skip = shutil.ignore_patterns("*.so", "lib", "include", "share", "__pycache__")
    shutil.copytree(PACKAGE, target, ignore=skip, symlinks=True)
    return target.parent


def test_missing_compiled_half(run_python, copy_of_the_package):
    code = "import torch_quartz"
    environment = {"PYTHONPATH": str(copy_of_the_package)}
    run_python(
        code,
        status=1,
        stderr="ImportError: the compiled half of torch_quartz is not built for",
        environment=environment,
    )


def test_other_torch_minor(run_python, copy_of_the_package):
    (copy_of_the_package / "torch_quartz" / "_build_config.py").write_text('TORCH_VERSION = "2.10.9+cpu"\n')
    run_python(
        "import torch_quartz",
        status=1,
        stderr=f"ImportError: torch_quartz was built against PyTorch 2.10.9+cpu, but PyTorch {torch.__version__} is",
        environment={"PYTHONPATH": str(copy_of_the_package)},
    )


def test_missing_symbol(run_python, copy_of_the_package):
    source = copy_of_the_package / "fake.c"
    source.write_text("void c10_no_such_function(void);\nvoid *PyInit__C(void) { c10_no_such_function(); return 0; }\n")
    library = copy_of_the_package / "torch_quartz" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    run_python(
        "import torch_quartz",
        status=1,
        stderr="the symbol c10_no_such_function is missing; rebuild it with",
        environment={"PYTHONPATH": str(copy_of_the_package)},
    )


def test_no_torch(tmp_path):
    # -S -I: no site-packages, so there is no torch.
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import torch_quartz"
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "ImportError: torch_quartz needs PyTorch 2.11 to 2.15, but no module named torch is installed" in done.stderr


@pytest.mark.parametrize(
    "variable,value,sentence",
    [
        ("TORCH_QUARTZ_SUBSTRATE", "gpu", "TORCH_QUARTZ_SUBSTRATE must be 'host' or 'cuda', got 'gpu'"),
        ("TORCH_QUARTZ_HOST_DEVICES", "0", "TORCH_QUARTZ_HOST_DEVICES must be an integer from 1 to 16, got '0'"),
        ("TORCH_QUARTZ_HOST_DEVICES", "two", "TORCH_QUARTZ_HOST_DEVICES must be an integer from 1 to 16, got 'two'"),
    ],
)
def test_wrong_variables(run_python, variable, value, sentence):
    run_python("import torch_quartz", status=1, stderr=sentence, environment={variable: value})


def test_unknown_variables_are_a_warning(run_python):
    code = "import torch, torch_quartz, torch_quartz; print(torch.ones(1, device='quartz').device)"
    sentence = f"RuntimeWarning: torch_quartz knows no environment variable {MISSPELT}, which has no effect"
    assert run_python(code, stderr=sentence, environment={MISSPELT: "2"}) == "quartz:0\n"


@pytest.mark.host
def test_cuda_cannot_be_forced_without_a_gpu(run_python):
    run_python(
        "import torch_quartz",
        status=1,
        stderr="TORCH_QUARTZ_SUBSTRATE=cuda, but",
        environment={"TORCH_QUARTZ_SUBSTRATE": "cuda"},
    )
    code = "import torch, torch_quartz; print(torch.quartz.substrate())"
    assert run_python(code, environment={"TORCH_QUARTZ_SUBSTRATE": "host"}) == "host\n"


class TestAutoload:
    """The entry point, offered to torch through a distribution that exists only for these tests."""

    @pytest.fixture
    def run(self, run_python, tmp_path):
        metadata = tmp_path / "site" / "quartz_autoload_test-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: quartz-autoload-test\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_quartz = torch_quartz:_autoload\n")

        def run(code, *, choice=None, package=PACKAGE.parent, **options):
            environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(package)])}
            if choice is not None:
                environment["TORCH_QUARTZ_AUTOLOAD"] = choice
            return run_python(code, environment=environment, autoload=True, **options)

        return run

    def test_import_torch_is_enough(self, run):
        code = "import torch; print(torch.ones(2, device='quartz').device, hasattr(torch, 'quartz'))"
        assert run(code, choice="1") == "quartz:0 True\n"

    def test_default(self, run):
        code = "import torch; print(hasattr(torch, 'quartz'), torch.version.cuda is None)"
        registered, without_cuda = run(code).split()
        assert registered == without_cuda

    def test_refused(self, run):
        code = """
        import sys, torch
        assert not hasattr(torch, "quartz") and "torch_quartz" not in sys.modules
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"
        torch.ones(2, requires_grad=True).sum().backward()
        import torch_quartz
        print(torch.ones(2, device="quartz").sum().item(), torch_quartz._autoloaded)
        """
        assert run(code, choice="0") == "2.0 False\n"

    @pytest.mark.parametrize("choice", ["0", "1", None])
    def test_importing_the_package_first(self, run, choice):
        code = """
        import torch_quartz
        import torch
        print(torch.ones(2, device="quartz").sum().item(), torch_quartz._autoloaded)
        """
        assert run(code, choice=choice) == "2.0 False\n"

    @pytest.mark.parametrize("choice", ["0", "1"])
    def test_importing_a_submodule_first(self, run, choice):
        code = """
        import torch_quartz.environment
        import torch
        from torch.quartz.amp import autocast
        print(torch.ones(2, device="quartz").sum().item())
        """
        assert run(code, choice=choice) == "2.0\n"

    def test_a_package_that_does_not_fit_never_breaks_import_torch(self, run, copy_of_the_package):
        (copy_of_the_package / "torch_quartz" / "_build_config.py").write_text('TORCH_VERSION = "2.10.9+cpu"\n')
        code = """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import torch
        messages = [str(w.message) for w in caught if "torch-quartz" in str(w.message)]
        # An installed torch-quartz has an entry point beside the one of the copy: the same message, twice.
        assert len(set(messages)) == 1 and "was built against PyTorch 2.10.9+cpu" in messages[0], messages
        assert torch.ones(2).sum() == 2
        try:
            import torch_quartz
        except ImportError as error:
            print(str(error).split(":")[0])
        """
        output = run(code, choice="1", package=copy_of_the_package)
        assert output.startswith("torch_quartz was built against PyTorch 2.10.9+cpu")

    def test_a_wrong_value_is_a_warning(self, run):
        run("import torch; torch.ones(2)", choice="yes", stderr="TORCH_QUARTZ_AUTOLOAD must be '0' or '1', got 'yes'")


def test_programs_that_do_not_import_the_package(run_python):
    code = """
    import torch
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    try:
        torch.ones(1, device="quartz")
    except RuntimeError as error:
        assert "quartz" in str(error)
    """
    run_python(code)


class TestInfo:
    def test_page(self):
        done = subprocess.run([sys.executable, "-m", "torch_quartz", "info"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        rows = dict(line.split(":", 1) for line in done.stdout.splitlines())
        for name in (
            "torch-quartz",
            "PyTorch",
            "Python",
            "system",
            "built against",
            "CUDA half",
            "substrate",
            "CUDA driver",
        ):
            assert rows[name].strip(), name
        assert torch.__version__ in rows["PyTorch"] and torch_quartz.__version__ in rows["torch-quartz"]
        assert torch.quartz.substrate_reason() in rows["substrate"]
        assert len(done.stdout.splitlines()) <= 40

    def test_variables_are_shown(self):
        environment = dict(os.environ, TORCH_QUARTZ_HOST_DEVICES="3", TORCH_QUARTZ_SUBSTRATE="host")
        done = subprocess.run(
            [sys.executable, "-m", "torch_quartz", "info"], capture_output=True, text=True, env=environment
        )
        rows = dict(line.split(":", 1) for line in done.stdout.splitlines())
        assert done.returncode == 0, done.stderr
        assert rows["TORCH_QUARTZ_HOST_DEVICES"].strip() == "3"
        assert "quartz:2" in done.stdout

    def test_unknown_variables_are_named(self):
        environment = dict(os.environ, **{MISSPELT: "2"})
        done = subprocess.run(
            [sys.executable, "-m", "torch_quartz", "info"], capture_output=True, text=True, env=environment
        )
        rows = dict(line.split(":", 1) for line in done.stdout.splitlines())
        assert rows[MISSPELT].strip() == "2 (unknown variable, no effect)"

    def test_patches_and_their_state(self):
        done = subprocess.run([sys.executable, "-m", "torch_quartz", "info"], capture_output=True, text=True)
        rows = dict(line.split(":", 1) for line in done.stdout.splitlines())
        assert rows["patch dlpack"].strip() == "active"
        assert rows["patch transformers"].strip().startswith("waiting for the import of transformers.")

    def test_usage(self):
        done = subprocess.run([sys.executable, "-m", "torch_quartz"], capture_output=True, text=True)
        assert done.returncode == 2 and "info" in done.stderr


class TestEnvironment:
    def test_the_table_is_in_the_documentation(self):
        from torch_quartz import environment

        text = (PACKAGE.parents[1] / "docs" / "environment.md").read_text()
        for variable in environment.VARIABLES:
            assert f"`{variable.name}`" in text

    def test_no_other_python_file_reads_a_variable(self):
        reads = re.compile(r"(environ|getenv)[^\n]*TORCH_QUARTZ_")
        for path in PACKAGE.rglob("*.py"):
            assert path.name == "environment.py" or not reads.search(path.read_text()), path

    def test_autoload(self, monkeypatch):
        from torch_quartz import environment

        for value, choice in (("1", True), ("0", False), ("", None)):
            monkeypatch.setenv("TORCH_QUARTZ_AUTOLOAD", value)
            assert environment.autoload() is choice
        monkeypatch.setenv("TORCH_QUARTZ_AUTOLOAD", "on")
        with pytest.raises(ValueError, match="must be '0' or '1', got 'on'"):
            environment.autoload()
