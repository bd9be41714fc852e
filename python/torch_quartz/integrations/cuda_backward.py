"""Backward passes of plain ``"cuda"`` tensors in a process that has imported torch_quartz.

PyTorch's autograd engine knows one accelerator per process, and a registered out-of-tree device takes the place of
CUDA: the engine then stops every backward pass of ``"cuda"`` tensors with an internal assertion (2.11 to 2.15,
pytorch#161129). There is no hook to ask per graph. So every backward pass that starts in Python looks which device
its graph lives on, and a CUDA graph runs in a scope in which the engine takes CUDA for the accelerator
(``csrc/runtime/accelerator_conflict.h``). Forward passes need nothing. A graph that crosses between ``"cuda"`` and
``"quartz"`` has no single answer and raises.

Only the cuda substrate needs this; `install` does nothing elsewhere.
"""

import functools

import torch

_original = None


def install() -> None:
    """Wrap the function through which every backward pass that starts in Python goes (cuda substrate only)."""
    from torch_quartz import _C

    if _C.substrate() == "cuda":
        install_for("cuda")


def install_for(native: str) -> None:
    """Wrap ``torch.autograd.graph._engine_run_backward`` for graphs on devices of one more type.

    Parameters
    ----------
    native : str
        The device type beside quartz whose backward passes have to work, ``"cuda"``.
    """
    global _original
    if _original is not None:
        return
    from torch_quartz import _C

    original = _original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def _engine_run_backward(t_outputs, *args, **kwargs):
        on_quartz, on_native = _accelerators(t_outputs, native)
        if on_native:
            wanted = native
        elif on_quartz and _C.scoped_accelerator() is not None:
            wanted = "privateuseone"  # a quartz graph inside a hook of a CUDA graph
        else:
            wanted = None
        try:
            if wanted is None:
                return original(t_outputs, *args, **kwargs)
            return _C.call_with_accelerator(wanted, original, (t_outputs, *args), kwargs)
        except RuntimeError as error:
            explained = _explain(error, t_outputs, native)
            if explained is None:
                raise
            raise explained from error

    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = _engine_run_backward


def undo() -> None:
    """Put PyTorch's own function back and give the engine its one accelerator again."""
    global _original
    if _original is None:
        return
    from torch_quartz import _C

    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = _original
    _original = None
    _C.restore_accelerator()


def _accelerators(outputs, native: str, whole: bool = False) -> tuple[bool, bool]:
    # (graph on quartz, graph on the native device), by the first node on either unless `whole`.
    from torch_quartz import _C

    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    if not whole and any(tensor.device.type == "quartz" for tensor in tensors):
        return True, False
    on_quartz, on_native = _C.graph_accelerators(tensors, native, whole)
    nodes = [output.node for output in outputs if isinstance(output, torch.autograd.graph.GradientEdge)]
    seen = set()
    while nodes and (whole or not (on_quartz or on_native)):
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        kinds = {metadata.device.type for metadata in node._input_metadata}
        on_quartz, on_native = on_quartz or "quartz" in kinds, on_native or native in kinds
        nodes.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    return on_quartz, on_native


def _explain(error: RuntimeError, outputs, native: str) -> RuntimeError | None:
    # The error to raise in place of one that speaks of PyTorch's inside and says nothing to a user.
    text = str(error)
    advice = f'keep the whole graph on "{native}" or on "quartz", which is the same memory of the same GPU'
    if "cannot be redirected" in text:
        return RuntimeError(
            f'backward: PyTorch cannot run a backward pass of "{native}" tensors in a process that has imported '
            f"torch_quartz ({text.splitlines()[0]}): run it in a process without torch_quartz, or move the model to "
            '"quartz"'
        )
    if "INTERNAL ASSERT" in text and "stream" in text and all(_accelerators(outputs, native, whole=True)):
        return RuntimeError(
            f'backward: the graph crosses between "{native}" and "quartz" tensors, and PyTorch\'s autograd engine '
            f"knows one accelerator per backward pass: {advice}, or call .detach() where it crosses"
        )
    return None
