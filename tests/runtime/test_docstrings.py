"""Every public function of torch.quartz has a NumPy docstring, and its examples run."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch_quartz
from torch_quartz import environment, ops, testing
from torch_quartz.device import amp, nvtx
from torch_quartz.integrations import import_hooks, patches

MODULES = {"torch.quartz": torch.quartz, "torch.quartz.amp": amp, "torch.quartz.nvtx": nvtx, "torch_quartz.ops": ops}
PUBLIC = {
    f"{prefix}.{name}": getattr(module, name)
    for prefix, module in MODULES.items()
    for name in module.__all__
    if callable(getattr(module, name)) and getattr(module, name) is not torch.OutOfMemoryError
}


def examples(obj, name):
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=True)
    names = {"torch": torch, "torch_quartz": torch_quartz}
    return [test for test in finder.find(obj, name, globs=names) if test.examples]


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring(name):
    obj = PUBLIC[name]
    doc = inspect.getdoc(obj)
    assert doc, f"{name} has no docstring"
    assert doc.splitlines()[0].rstrip().endswith("."), f"{name}: the first line is no sentence"
    parameters = [p for p in inspect.signature(obj).parameters.values() if p.name not in ("self", "existing")]
    if parameters and not (inspect.isclass(obj) and issubclass(obj, tuple)):
        assert "Parameters\n----------" in doc, f"{name} does not describe its parameters"
        for parameter in parameters:
            assert parameter.name in doc, f"{name} does not describe {parameter.name}"
    if not (inspect.isclass(obj) and issubclass(obj, tuple)):
        assert examples(obj, name), f"{name} has no example"


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name):
    torch.manual_seed(0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in examples(PUBLIC[name], name):
        runner.run(test)
    assert runner.failures == 0 if hasattr(runner, "failures") else runner.summarize(verbose=False).failed == 0


OTHERS = [import_hooks, patches, environment, testing, torch_quartz]


@pytest.mark.parametrize("module", OTHERS, ids=lambda m: m.__name__)
def test_other_examples_run(module):
    result = doctest.testmod(module)
    assert result.failed == 0


def test_all_is_complete():
    public = {
        name
        for name, value in vars(torch.quartz).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__.startswith("torch_quartz")
    }
    assert public <= set(torch.quartz.__all__)
    for name in torch.quartz.__all__:
        assert hasattr(torch.quartz, name), name


def test_names_users_of_cuda_reach_for():
    names = [
        "is_available",
        "device_count",
        "current_device",
        "set_device",
        "device",
        "device_of",
        "get_device_name",
        "get_device_properties",
        "get_device_capability",
        "synchronize",
        "Stream",
        "Event",
        "stream",
        "current_stream",
        "default_stream",
        "set_stream",
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
        "initial_seed",
        "get_rng_state",
        "set_rng_state",
        "get_rng_state_all",
        "set_rng_state_all",
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "memory_stats",
        "memory_summary",
        "mem_get_info",
        "empty_cache",
        "Graph",
        "graph",
        "amp",
        "is_bf16_supported",
        "op_counts",
        "nvtx",
        "init",
        "is_initialized",
        "default_generators",
        "ipc_collect",
        "can_device_access_peer",
    ]
    assert [name for name in names if not hasattr(torch.quartz, name)] == []
    private = [
        "_lazy_init",
        "_is_in_bad_fork",
        "_is_compiled",
        "_initialized",
        "_utils",
        "_exchange_device",
        "_maybe_exchange_device",
    ]
    assert [name for name in private if not hasattr(torch.quartz, name)] == []
    assert torch.quartz._utils._get_device_index("quartz:0", True) == 0
    with pytest.raises(AttributeError, match=r"module 'torch.quartz' has no attribute 'nothing'"):
        getattr(torch.quartz, "nothing")  # noqa: B009


def test_what_is_absent_is_listed():
    page = Path(torch_quartz.__file__).resolve().parents[2] / "docs" / "README.md"
    rows = page.read_text().split("has not\n")[1].splitlines()
    listed = {name for row in rows if row.startswith("|") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    absent = {name for name in torch.cuda.__all__ if not hasattr(torch.quartz, name)}
    typed = {name for name in absent if re.fullmatch(r"[A-Z]\w+(Tensor|Storage)", name)}
    assert absent - typed <= listed
    assert "FloatTensor" in listed and hasattr(torch.quartz, "Graph")
    with pytest.raises(AttributeError, match=r"no attribute 'CUDAGraph': use torch\.quartz\.Graph"):
        _ = torch.quartz.CUDAGraph


def test_submodules_are_importable_under_both_names():
    import torch.quartz
    import torch.quartz.memory
    from torch.quartz import amp as amp_module
    from torch.quartz.amp import GradScaler, autocast

    assert amp_module is amp and autocast is amp.autocast and GradScaler is amp.GradScaler
    assert torch.quartz.memory.memory_allocated is torch.quartz.memory_allocated


def test_type_stubs_name_what_the_compiled_half_has():
    import ast

    from torch_quartz import _C

    stub = ast.parse(Path(torch_quartz.__file__).with_name("_C.pyi").read_text())
    stubbed = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert stubbed == {name for name in vars(_C) if not name.startswith("__")}
