"""Random numbers: one default generator per device, seeded together with ``torch.manual_seed``.

On cuda the default generators share their state with CUDA's, so ``"quartz"`` and ``"cuda"`` draw from one sequence. On
host they are the CPU's algorithm with a state of their own, so that a seed gives the numbers it gives on ``"cpu"``.
"""

from collections.abc import Iterable

import torch

from torch_quartz import _C
from torch_quartz.device import lifecycle
from torch_quartz.device._utils import DeviceLike, _checked_index


def _get_generator(device: DeviceLike = None) -> torch.Generator:
    """Return the default generator of a device (AOTAutograd asks by this name)."""
    return _C.default_generator(_checked_index(device))


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
        torch.cuda.manual_seed(seed)  # the same state, and CUDA keeps the seed until there is a context


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
        torch.cuda.manual_seed_all(seed)  # see manual_seed
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
