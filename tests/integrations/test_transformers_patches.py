"""The replacements in other packages: installed late, listed, taken back, and only for quartz."""

import inspect
import os
from pathlib import Path

import pytest
from transformers.generation.continuous_batching.initialization import resolve_max_memory_percent

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
        print(*(name for name in ("transformers", "accelerate", "safetensors") if name in sys.modules))
    """
    assert run_python(code).strip() == ""


# Prints which of the functions that the libraries call are *not* replaced, which are not after a second installation,
# and whether taking the patches back restores every one of them.
PROBE = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
{imports}

def probe():
    import accelerate.accelerator as accelerator, accelerate.utils.modeling as modeling, accelerate.state as state
    import safetensors.torch, transformers.cache_utils, transformers.core_model_loading, transformers.generation.utils
    import transformers.integrations.accelerate, transformers.modeling_utils, transformers.pipelines.base
    import transformers.trainer, transformers.training_args
    import transformers.generation.continuous_batching.initialization as continuous

    pipeline, trainer = transformers.pipelines.base.Pipeline, transformers.trainer.Trainer
    arguments = transformers.training_args.TrainingArguments
    return dict(
        memory=modeling.get_max_memory, memory_renamed=transformers.integrations.accelerate.accelerate_max_memory,
        scaler=accelerator.get_grad_scaler, cache=modeling.clear_device_cache, fp16=accelerator.Accelerator.__init__,
        default=vars(state.PartialState)["default_device"], save=accelerator.save_accelerator_state,
        load=accelerator.load_accelerator_state, open=safetensors.torch.safe_open,
        open_copied=transformers.modeling_utils.safe_open, open_public=safetensors.safe_open,
        warmup=transformers.modeling_utils.caching_allocator_warmup,
        weights=transformers.core_model_loading._materialize_copy, pipeline=pipeline.__init__,
        placement=pipeline.device_placement, setup=vars(arguments)["_setup_devices"],
        bf16=transformers.training_args.is_torch_bf16_gpu_available, save_rng=trainer._save_rng_state,
        load_rng=trainer._load_rng_state, update=transformers.cache_utils.Cache.update,
        decode=transformers.generation.utils.GenerationMixin._optimize_model_for_decode,
        continuous=continuous.resolve_max_memory_percent,
    )

patched = probe()
torch_quartz.undo_patches()
originals = probe()
print(*(name for name in patched if patched[name] is originals[name]))
torch_quartz.install_patches()
again = probe()
print(*(name for name in again if again[name] is originals[name]))
torch_quartz.undo_patches()
print(probe() == originals)
"""


@pytest.mark.parametrize("imports", ["import torch_quartz", "import transformers.trainer, accelerate, torch_quartz"])
def test_replacements_reach_every_copy_in_either_import_order_and_are_taken_back(run_python, imports):
    untouched = "" if "device" in inspect.signature(resolve_max_memory_percent).parameters else "continuous"
    assert run_python(PROBE.format(imports=imports)).split("\n")[:3] == [untouched, untouched, "True"]


@pytest.fixture
def installed(tmp_path):
    """Return the environment of a process in which the package is installed: its entry point can be found."""
    import torch_quartz

    metadata = tmp_path / "site" / "torch_quartz-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-quartz\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_quartz = torch_quartz:_autoload\n")
    package = Path(torch_quartz.__file__).parents[1]
    return {
        "PYTHONPATH": f"{package}{os.pathsep}{metadata.parent}",
        "TORCH_QUARTZ_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.mark.host
def test_programs_that_only_import_torch_keep_their_device(run_python, checkpoint, installed):
    """With the package installed, ``import torch`` registers the device, but nothing moves to it by itself."""
    code = """
        import sys
        from transformers import AutoModelForCausalLM, TrainingArguments, pipeline
        from accelerate import Accelerator
        folder = sys.argv[1]
        print(AutoModelForCausalLM.from_pretrained(folder, device_map="auto").device.type)
        print(TrainingArguments(folder + "/out").device.type, Accelerator().device.type)
        print(AutoModelForCausalLM.from_pretrained(folder, device_map="quartz").device.type)
        print(AutoModelForCausalLM.from_pretrained(folder, device_map=0).device)
    """
    output = run_python(code, arguments=[checkpoint], autoload=True, environment=installed, stderr="")
    assert output.splitlines() == ["cpu", "cpu cpu", "quartz", "quartz:0"]


@pytest.mark.parametrize(
    "statement",
    [
        "import torch_quartz",
        "from torch_quartz import __version__",
        "import torch_quartz.device",
        "importlib.import_module('torch_quartz')",
    ],
)
def test_explicit_import_after_automatic_loading_counts(run_python, installed, statement):
    code = f"""
        import importlib
        import torch
        from torch_quartz.integrations import choice
        def program():
            {statement}
        torch.quartz.current_device()
        choice.torch_quartz._autoloaded = True  # the line above this function has imported the package
        choice.watch_import()
        torch.quartz.manual_seed(0)
        print(choice.preferred())
        program()
        print(choice.preferred(), type(choice.torch_quartz.__spec__).__name__)
    """
    assert run_python(code, autoload=True, environment=installed).split() == ["False", "True", "ModuleSpec"]


def test_import_of_torch_alone_does_not_count(run_python, installed):
    code = """
        import sys
        import torch
        torch.ones(2, device="quartz").sum().item()
        torch.quartz.get_rng_state()
        package = sys.modules["torch_quartz"]
        print(package.integrations.choice.preferred(), package._autoloaded)
        import torch_quartz
        print(package.integrations.choice.preferred(), package._autoloaded)
    """
    assert run_python(code, autoload=True, environment=installed).split() == ["False", "True", "True", "False"]


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
