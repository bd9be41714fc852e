"""Send quartz tensors to other processes: queues, pipes, DataLoader workers, spawned arguments.

- cuda: the native alias goes through PyTorch's own CUDA IPC, so sender and receiver see the same memory, with CUDA's
  rules (the sender keeps the tensor alive; a child uses ``spawn`` or ``forkserver``).
- host: the values are copied into CPU shared memory and from there into quartz memory of the receiver. Sender and
  receiver do not see each other's writes. PyTorch's own path would swap the memory below the quartz tensor for a
  shared file.
"""

from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing import reductions

_originals: dict[type, object] = {}


def install() -> None:
    """Register reducers for tensors, parameters and storages that pass everything but quartz on to PyTorch's own."""
    reducers = {torch.Tensor: _reduce_tensor, torch.nn.Parameter: _reduce_tensor, torch.UntypedStorage: _reduce_storage}
    for kind, reducer in reducers.items():
        _originals[kind] = ForkingPickler._extra_reducers[kind]
        ForkingPickler.register(kind, reducer)


def undo() -> None:
    """Register PyTorch's own reducers again."""
    for kind, reducer in _originals.items():
        ForkingPickler.register(kind, reducer)
    _originals.clear()


def _reduce_tensor(tensor: torch.Tensor):
    original = _originals.get(type(tensor), reductions.reduce_tensor)
    if tensor.device.type != "quartz":
        return original(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a quartz tensor that requires gradients and is no leaf cannot be sent to another process, since autograd "
            "does not cross processes: send tensor.detach()"
        )
    torch.utils.hooks.warn_if_has_hooks(tensor)
    from torch_quartz import _C

    if _C.substrate() == "cuda":
        native = _C.native_alias(tensor.detach())
    else:
        native = tensor.detach().cpu()
    rebuild, arguments = reductions.reduce_tensor(native)
    return _rebuild_tensor, (rebuild, arguments, type(tensor), str(tensor.device), tensor.requires_grad)


def _rebuild_tensor(rebuild, arguments, kind: type, device: str, requires_grad: bool) -> torch.Tensor:
    from torch_quartz import _C

    native = rebuild(*arguments)
    if native.device.type == "cpu":
        tensor = native.to(device)
    else:
        tensor = _C.adopt(native, torch.device(device).index)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _reduce_storage(storage: torch.UntypedStorage):
    if storage.device.type != "quartz":
        return _originals.get(type(storage), reductions.reduce_storage)(storage)
    from torch_quartz import _C

    if _C.substrate() == "cuda":
        raise RuntimeError(
            "cannot send a quartz storage to another process: send a quartz tensor (as with CUDA storages)"
        )
    return _rebuild_storage, (storage.cpu(), str(storage.device))


def _rebuild_storage(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    return storage.to(device=device)
