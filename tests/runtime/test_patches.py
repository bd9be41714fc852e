"""The table of patches: each is in docs/patches.md, can be taken back, and leaves other devices alone."""

from pathlib import Path

import pytest
import torch
import torch_quartz
from torch_quartz.integrations import patches
from torch_quartz.integrations.import_hooks import on_import

DOCS = Path(__file__).resolve().parents[2] / "docs" / "patches.md"


@pytest.fixture(autouse=True)
def all_installed():
    yield
    torch_quartz.install_patches()


def test_all_are_installed_at_import():
    assert patches.installed() == [patch.name for patch in patches.PATCHES]


def test_status(run_python):
    printed = run_python(
        """
        import sys, torch, torch_quartz
        from torch_quartz.integrations import patches
        first = patches.status()
        assert "torch._inductor" not in sys.modules
        import torch.nn.attention.flex_attention
        patches.undo("dlpack")
        for name in ("dlpack", "multiprocessing", "flex_attention", "cuda_backward"):
            print(name, first[name], patches.status()[name], sep=": ")
        print("inductor", first["inductor"], sep=": ")
        """
    )
    engine = "active" if torch.quartz.substrate() == "cuda" else "not needed on the host substrate"
    assert printed.splitlines() == [
        "dlpack: active: taken back",
        "multiprocessing: active: active",
        "flex_attention: waiting for the import of torch.nn.attention.flex_attention: active",
        f"cuda_backward: {engine}: {engine}",
        "inductor: waiting for the import of torch._inductor.compile_fx",
    ]
    assert list(patches.status()) == [patch.name for patch in patches.PATCHES]


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_table_is_complete_and_documented(patch):
    text = DOCS.read_text()
    assert f"`{patch.name}`" in text
    assert patch.changes
    for target, reason in patch.changes:
        assert target and reason
        for part in target.split(" (")[0].split(", "):
            assert part.split("'s ")[0].split()[0] in text, f"{part} is not in docs/patches.md"


def snapshot():
    from multiprocessing.reduction import ForkingPickler

    return [
        torch.Tensor.__dlpack__,
        torch.Tensor.__dlpack_device__,
        torch.autograd.graph._engine_run_backward,
        *(ForkingPickler._extra_reducers[kind] for kind in (torch.Tensor, torch.nn.Parameter, torch.UntypedStorage)),
    ]


def test_undo_and_install_again():
    patched = snapshot()
    torch_quartz.undo_patches()
    assert patches.installed() == []
    original = snapshot()
    assert original[0] is not patched[0] and original[3] is not patched[3]
    assert (torch.ones(2, device="quartz") + 1).tolist() == [2, 2]
    torch_quartz.undo_patches()
    torch_quartz.install_patches()
    torch_quartz.install_patches()
    assert patches.installed() == [patch.name for patch in patches.PATCHES]
    torch_quartz.undo_patches()
    assert snapshot() == original


def test_undo_one():
    patches.undo("dlpack")
    assert "dlpack" not in patches.installed()
    with pytest.raises(ValueError, match="no patch 'dlpack' is installed"):
        patches.undo("dlpack")
    with pytest.raises(ValueError, match="no patch 'nothing' is installed; installed are: "):
        patches.undo("nothing")
    torch_quartz.install_patches()
    assert set(patches.installed()) == {patch.name for patch in patches.PATCHES}


class TestImportHooks:
    @pytest.fixture
    def module(self, tmp_path, monkeypatch):
        (tmp_path / "quartz_hook_sample.py").write_text("value = 1\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(__import__("sys").modules, "quartz_hook_sample", raising=False)
        return "quartz_hook_sample"

    def test_runs_after_the_first_import(self, module):
        seen = []
        hooks = [on_import(module, lambda m, i=i: seen.append((i, m.value))) for i in range(3)]
        assert seen == []
        import quartz_hook_sample

        assert sorted(seen) == [(0, 1), (1, 1), (2, 1)]
        on_import(module, lambda m: seen.append("now"))
        assert seen[-1] == "now"
        import importlib

        importlib.reload(quartz_hook_sample)
        assert len(seen) == 4
        assert not any(hook in __import__("sys").meta_path for hook in hooks)

    def test_removed_hooks_do_nothing(self, module):
        hook = on_import(module, lambda m: pytest.fail("called"))
        hook.remove()
        hook.remove()
        import quartz_hook_sample  # noqa: F401

    def test_missing_modules_stay_missing(self):
        hook = on_import("quartz_no_such_module", lambda m: None)
        with pytest.raises(ModuleNotFoundError):
            __import__("quartz_no_such_module")
        hook.remove()
