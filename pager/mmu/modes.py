"""Keeping the runtime's own operations apart from the modes that the user's code runs under.

A page in is not part of the user's operation. Under inference mode it would make tensors that a parameter cannot
have as its data; under a dispatch mode it would be seen: selective checkpoints count operations of the forward, and
find others in the recomputation, where other pages are absent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch

_UNCHANGED = contextlib.nullcontext()  # one for all: making one costs as much as all the rest of asking


@contextlib.contextmanager
def _leave_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def ordinary_tensors() -> contextlib.AbstractContextManager[None]:
    """Tensors made inside are ordinary ones, also in inference mode: they become a parameter's ``data``."""
    return _leave_inference_mode() if torch.is_inference_mode_enabled() else _UNCHANGED


# Private, but the only way; a torch without it has no modes to be kept out of.
_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode sees what runs here."""
    return _num_modes() > 0


in_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)
"""Whether a transform of ``torch.func`` runs here."""


def in_forward_mode() -> bool:
    """Whether one of the transforms differentiates in forward mode: what is saved there are wrappers."""
    return any(
        layer.key() == torch._C._functorch.TransformType.Jvp
        for layer in torch._C._functorch.get_interpreter_stack() or ()
    )


@contextlib.contextmanager
def _without_transforms() -> Iterator[None]:
    """Nothing inside is seen by ``torch.func``, whose transforms wrap every tensor, nor by dispatch modes."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack(), _python_dispatch._disable_current_modes():
        yield


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """No dispatch mode of the user's sees what runs inside, and no transform of ``torch.func`` wraps it."""
    if in_transform():
        return _without_transforms()
    if not _num_modes():
        return _UNCHANGED
    disable = getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)
    return disable()


def apart(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Work of the runtime's own, in the midst of whatever the user is doing: autocast, inference mode, any mode."""
    if (
        torch.is_inference_mode_enabled()
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled(device_type)
        or in_dispatch_mode()
        or in_transform()
    ):
        return _apart(device_type)
    return torch._C.DisableTorchFunction()  # inside backward there is nothing else, and this costs a tenth


@contextlib.contextmanager
def _apart(device_type: str) -> Iterator[None]:
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device_type, enabled=False),
        torch._C.DisableTorchFunction(),
        without_dispatch_modes(),
    ):
        yield
