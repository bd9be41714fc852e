"""Share quartz tensors with other processes: queues, pipes, DataLoader workers, spawned arguments, ``share_memory_``.

Sender and receiver see the same memory, as with CUDA and CPU tensors:

- cuda: the native alias goes through PyTorch's own CUDA IPC, with CUDA's rules (the sender keeps the tensor alive; a
  child uses ``spawn`` or ``forkserver``).
- host: the native storage below moves into shared memory, as PyTorch moves that of a CPU tensor, and the quartz storage
  follows it. PyTorch's own path would treat the quartz storage itself as CPU memory and fail.
"""

from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing import reductions

_reducers: dict[type, object] = {}
_methods: dict[str, object] = {}


def install() -> None:
    """Register reducers for tensors, parameters and storages, and let ``share_memory_`` share quartz memory."""
    reducers = {torch.Tensor: _reduce_tensor, torch.nn.Parameter: _reduce_tensor, torch.UntypedStorage: _reduce_storage}
    for kind, reducer in reducers.items():
        _reducers[kind] = ForkingPickler._extra_reducers[kind]
        ForkingPickler.register(kind, reducer)
    for name, method in (("share_memory_", _share_memory_), ("is_shared", _is_shared)):
        _methods[name] = getattr(torch.UntypedStorage, name)
        method.__doc__ = _methods[name].__doc__
        setattr(torch.UntypedStorage, name, method)


def undo() -> None:
    """Register PyTorch's own reducers and methods again."""
    for kind, reducer in _reducers.items():
        ForkingPickler.register(kind, reducer)
    for name, method in _methods.items():
        setattr(torch.UntypedStorage, name, method)
    _reducers.clear()
    _methods.clear()


def _share_memory_(self: torch.UntypedStorage, *args, **kwargs) -> torch.UntypedStorage:
    if self.device.type != "quartz":
        return _methods["share_memory_"](self, *args, **kwargs)
    from torch_quartz import _C

    if _C.substrate() == "host" and self.nbytes() > 0:  # CUDA memory can be shared as it is
        # The call lets the quartz storage follow its native storage to the new memory.
        _C.call_on_aliases(lambda natives: [natives[0].share_memory_()][:0], [_bytes_of(self)])
        if not self.is_shared():
            raise RuntimeError(
                "share_memory_: the memory of this quartz tensor belongs to another library and cannot be shared with "
                "other processes: share tensor.clone() instead"
            )
    return self


def _is_shared(self: torch.UntypedStorage) -> bool:
    if self.device.type != "quartz":
        return _methods["is_shared"](self)
    return _methods["is_shared"](_native_storage(self))


def _reduce_tensor(tensor: torch.Tensor):
    original = _reducers.get(type(tensor), reductions.reduce_tensor)
    if tensor.device.type != "quartz":
        return original(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "a quartz tensor that requires gradients and is no leaf cannot be sent to another process, since autograd "
            "does not cross processes: send tensor.detach()"
        )
    from torch_quartz import _C

    if _C.substrate() == "host":
        rebuild, arguments = original(tensor)  # pickles the storage, and so comes to _reduce_storage
        adopted = None
    else:
        torch.utils.hooks.warn_if_has_hooks(tensor)
        rebuild, arguments = reductions.reduce_tensor(_C.native_alias(tensor.detach()))
        adopted = (type(tensor), tensor.requires_grad)
    return _rebuild_tensor, (rebuild, arguments, adopted, tensor.is_conj(), tensor.is_neg())


def _rebuild_tensor(rebuild, arguments, adopted: tuple | None, conj: bool, neg: bool) -> torch.Tensor:
    tensor = rebuild(*arguments)
    kind, requires_grad = adopted or (type(tensor), tensor.requires_grad)
    if not adopted and not conj and not neg:
        return tensor
    tensor = tensor.detach()
    if adopted:
        from torch_quartz import _C

        tensor = _C.adopt(tensor)
    # PyTorch's reducers lose these two bits.
    if conj:
        tensor = tensor.conj()
    if neg:
        tensor = torch._neg_view(tensor)
    return kind(tensor, requires_grad) if kind is torch.nn.Parameter else tensor.requires_grad_(requires_grad)


def _reduce_storage(storage: torch.UntypedStorage):
    if storage.device.type != "quartz":
        return _reducers.get(type(storage), reductions.reduce_storage)(storage)
    from torch_quartz import _C

    if _C.substrate() == "cuda":
        raise RuntimeError("Cannot pickle quartz storage on cuda; try pickling a quartz tensor instead")
    storage.share_memory_()
    return _rebuild_storage, (*reductions.reduce_storage(_native_storage(storage)), storage.device.index)


def _rebuild_storage(rebuild, arguments, device_index: int) -> torch.UntypedStorage:
    from torch_quartz import _C

    native = torch.empty(0, dtype=torch.uint8).set_(rebuild(*arguments))
    return _C.adopt(native, device_index).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _native_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    from torch_quartz import _C

    return _C.native_alias(_bytes_of(storage)).untyped_storage()
