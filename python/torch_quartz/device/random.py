"""Random numbers: one default generator per device, seeded together with ``torch.manual_seed``.

A generator holds two sequences under one seed. ``rand``, ``randn``, ``normal_``, ``uniform_``, ``exponential_``,
``bernoulli``, ``multinomial`` and dropout draw from a counter (Philox4x32-10): the same numbers on host and CUDA. What
the native device computes (``randint``, ``randperm``, ``poisson``, ...) draws from a native generator: on cuda the
default one is CUDA's, on host it is the CPU's algorithm with a state of its own. Page: docs/ops/random.md.
"""

from collections.abc import Iterable

import torch

from torch_quartz import _C
from torch_quartz.device import lifecycle
from torch_quartz.device._utils import DeviceLike, _checked_index


def _get_generator(device: DeviceLike = None) -> torch.Generator:
    """Return the default generator of a device (AOTAutograd asks by this name)."""
    return _C.default_generator(_checked_index(device))


# Seeds given before there is a CUDA context, in their order: (all devices, seed).
_pending: list[tuple[bool, int]] = []


def _seed_later(all_devices: bool, seed: int) -> None:
    # CUDA keeps a seed of its own until there is a context; ours follows then.
    (torch.cuda.manual_seed_all if all_devices else torch.cuda.manual_seed)(seed)
    first = not _pending
    if all_devices:
        _pending.clear()
    _pending.append((all_devices, seed))
    if first:
        torch.cuda._lazy_call(_apply_pending)


def _apply_pending() -> None:
    seeds = _pending.copy()
    _pending.clear()
    for all_devices, seed in seeds:
        for index in range(_C.device_count()) if all_devices else [_C.current_device()]:
            _get_generator(index).manual_seed(seed)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device.

    Parameters
    ----------
    seed : int
        From -2**63 to 2**64 - 1.

    Examples
    --------
    >>> torch.quartz.manual_seed(7)
    >>> torch.quartz.initial_seed()
    7
    """
    if lifecycle.is_initialized():
        _get_generator().manual_seed(int(seed))
    else:
        _seed_later(False, int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices, as ``torch.manual_seed`` does.

    Parameters
    ----------
    seed : int
        From -2**63 to 2**64 - 1.

    Examples
    --------
    >>> torch.quartz.manual_seed_all(7)
    """
    if not lifecycle.is_initialized():
        _seed_later(True, int(seed))
        return
    for index in range(_C.device_count()):
        _get_generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seed the generator of the current device with a random number.

    Examples
    --------
    >>> torch.quartz.seed()
    """
    _get_generator().seed()


def seed_all() -> None:
    """Seed the generators of all devices with one random number.

    Examples
    --------
    >>> torch.quartz.seed_all()
    """
    seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    """Return the seed that the generator of the current device was last given.

    Examples
    --------
    >>> torch.quartz.manual_seed(3)
    >>> torch.quartz.initial_seed()
    3
    """
    return _get_generator().initial_seed()


def get_rng_state(device: DeviceLike = "quartz") -> torch.Tensor:
    """Return the state of a device's generator, a CPU tensor of bytes.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.get_rng_state().dtype
    torch.uint8
    """
    return _get_generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of the generators of all devices.

    Examples
    --------
    >>> len(torch.quartz.get_rng_state_all()) == torch.quartz.device_count()
    True
    """
    return [get_rng_state(index) for index in range(_C.device_count())]


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "quartz") -> None:
    """Set the state of a device's generator.

    Parameters
    ----------
    new_state : torch.Tensor
        What `get_rng_state` returned.
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> state = torch.quartz.get_rng_state()
    >>> first = torch.rand(4, device="quartz")
    >>> torch.quartz.set_rng_state(state)
    >>> torch.equal(first, torch.rand(4, device="quartz"))
    True
    """
    _get_generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of the generators of all devices.

    Parameters
    ----------
    new_states : iterable of torch.Tensor
        What `get_rng_state_all` returned, one state per device.

    Examples
    --------
    >>> torch.quartz.set_rng_state_all(torch.quartz.get_rng_state_all())
    """
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
