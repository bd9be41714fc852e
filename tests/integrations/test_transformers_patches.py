"""The replacements in other packages: installed late, listed, taken back, and only for quartz."""

import pytest

MODULES = ["accelerate", "safetensors", "transformers"]


@pytest.mark.parametrize("name", MODULES)
def test_every_replacement_is_listed_with_a_reason(name):
    from torch_quartz.integrations import patches

    entry = next(patch for patch in patches.PATCHES if patch.name == name)
    assert name in patches.installed()
    assert all(target and len(reason) > 20 for target, reason in entry.changes)


def test_import_of_the_package_imports_none_of_them(run_python):
    code = """
        import sys, torch, torch_quartz
        print([name for name in ("transformers", "accelerate", "safetensors", "numpy.random") if name in sys.modules])
    """
    assert run_python(code).strip() in ("[]", "['numpy.random']")


PROBE = """
    import functools
    def probe():
        import accelerate.utils.modeling, accelerate.utils.memory, accelerate.state, accelerate.checkpointing
        import accelerate.accelerator, safetensors, safetensors.torch, transformers
        import transformers.modeling_utils, transformers.core_model_loading, transformers.pipelines.base
        import transformers.training_args, transformers.utils.import_utils, transformers.trainer
        import transformers.cache_utils, transformers.generation.utils, transformers.integrations.accelerate
        import transformers.generation.continuous_batching.initialization as cb
        from transformers import TrainingArguments
        return dict(
            max_memory=accelerate.utils.modeling.get_max_memory,
            copied=transformers.integrations.accelerate.accelerate_max_memory,
            scaler=accelerate.accelerator.get_grad_scaler,
            cache=accelerate.utils.modeling.clear_device_cache,
            default=accelerate.state.PartialState.__dict__["default_device"].fget,
            save=accelerate.accelerator.save_accelerator_state,
            load=accelerate.accelerator.load_accelerator_state,
            accelerator=accelerate.Accelerator.__init__,
            open=safetensors.torch.safe_open, open_copied=transformers.modeling_utils.safe_open,
            warmup=transformers.modeling_utils.caching_allocator_warmup,
            weights=transformers.core_model_loading._materialize_copy,
            pipeline=transformers.pipelines.base.Pipeline.__init__,
            placement=transformers.pipelines.base.Pipeline.device_placement,
            setup=TrainingArguments.__dict__["_setup_devices"].func,
            bf16=transformers.training_args.is_torch_bf16_gpu_available,
            rng=transformers.trainer.Trainer._save_rng_state, rng2=transformers.trainer.Trainer._load_rng_state,
            update=transformers.cache_utils.Cache.update,
            decode=transformers.generation.utils.GenerationMixin._optimize_model_for_decode,
        )
    def ours(found):
        def is_ours(value):
            if hasattr(value, "__wrapped__"):
                return True
            return type(value).__module__.startswith("torch_quartz")
        return sorted(name for name, value in found.items() if is_ours(value))
"""


@pytest.mark.parametrize("first", ["torch_quartz", "transformers"])
def test_replacements_reach_every_copy_in_either_import_order_and_are_taken_back(run_python, first):
    imports = "import torch_quartz" if first == "torch_quartz" else "probe(); import torch_quartz"
    code = f"""
        import os
        os.environ["HF_HUB_OFFLINE"] = "1"
        {PROBE.replace(chr(10), chr(10) + "    ")}
        import sys, torch
        before = None
        {imports}
        after = probe()
        installed = ours(after)
        torch_quartz.undo_patches()
        undone = probe()
        print(installed)
        print([name for name in undone if name in ours(undone) and name != "placement"])
        torch_quartz.install_patches()
        again = ours(probe())
        print(again == installed)
    """
    lines = run_python(code).splitlines()
    expected = (
        "['accelerator', 'bf16', 'cache', 'copied', 'decode', 'default', 'load', 'max_memory', 'open', 'open_copied', "
        "'pipeline', 'placement', 'rng', 'rng2', 'save', 'scaler', 'setup', 'update', 'warmup', 'weights']"
    )
    assert lines == [expected, "['decode']", "True"] or lines == [expected, "[]", "True"]


def test_programs_that_only_import_torch_keep_their_device(run_python, checkpoint):
    """With the package installed, ``import torch`` registers the device, but nothing moves to it by itself."""
    code = """
        import os, sys
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        if "torch_quartz" not in sys.modules:  # not installed in this environment: do what the entry point does
            import torch_quartz
            torch_quartz._autoloaded = True
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM, TrainingArguments
        folder = sys.argv[1]
        print(AutoModelForCausalLM.from_pretrained(folder, device_map="auto").device.type)
        print(TrainingArguments(folder + "/out").device.type, Accelerator().device.type)
        print(AutoModelForCausalLM.from_pretrained(folder, device_map="quartz").device.type)
    """
    lines = run_python(code, arguments=[checkpoint], autoload=True, stderr="").split("\n")
    assert lines[:3] == ["cpu", "cpu cpu", "quartz"]


def test_explicit_import_after_automatic_loading_counts(run_python):
    code = """
        import importlib
        import torch
        import torch_quartz
        torch_quartz._autoloaded = True
        from torch_quartz.integrations import choice
        choice.watch_import()
        torch_quartz.install_patches()
        print(choice.preferred())
        def function():
            {statement}
        function()
        print(choice.preferred())
    """
    statements = ["import torch_quartz", "from torch_quartz import __version__", "import torch_quartz.device"]
    for statement in [*statements, "importlib.import_module('torch_quartz')"]:
        assert run_python(code.format(statement=statement)).split() == ["False", "True"], statement


def test_replacements_leave_other_devices_alone(tmp_path):
    import torch
    from accelerate.utils import get_max_memory
    from torch_quartz.integrations.safetensors import quartz_index
    from torch_quartz.integrations.transformers import _warmup_device, pipeline_device

    assert get_max_memory({"cpu": "1KB", "disk": 5}) == {"cpu": 1000, "disk": 5}
    assert quartz_index("cpu") is None and quartz_index(torch.device("cuda:1")) is None and quartz_index("mps") is None
    assert _warmup_device("disk") == "disk" and _warmup_device("cuda:1") == "cuda:1" and _warmup_device("cpu") == "cpu"

    class Model:
        device = torch.device("cuda:0")

    assert pipeline_device(Model(), None) is None and pipeline_device(Model(), 0) is None
    assert pipeline_device(Model(), "cuda:0") is None and pipeline_device(object(), 0) is None
