"""Telling inputs that a model does not take from models that capture cannot run.

Both end in an exception of the twin's forward. It is the inputs' fault where the model would have raised it on real
tensors too, and that is believed only where each rung of the ladder fails with the same words: what comes of
missing data is worded differently on meta and on fake tensors, the check of a shape is not. In doubt it is capture
that cannot run the model, and the first step is recorded.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

# Words of errors that only tensors without data cause. The last are those of torch's stand-ins for kernels that take
# half precision on a GPU and, in truth, more than that elsewhere (`grouped_mm`, which mixtures of experts call).
_OF_CAPTURE = re.compile(
    r"meta (tensor|device)|fake|data pointer|data_ptr|storage|numpy|data.dependent|\bbf16\b|b?float16|float8",
    re.IGNORECASE,
)
_OF_INPUTS = (TypeError, ValueError, IndexError, KeyError, RuntimeError, AssertionError, AttributeError)


class NotOnThisRung(RuntimeError):
    """A rung that was not tried to the end: it says nothing of the inputs."""


class ForwardFailed(Exception):
    """The twin's forward raised its cause."""


@contextlib.contextmanager
def in_forward() -> Iterator[None]:
    """Mark what is raised inside as raised by the forward."""
    try:
        yield
    except NotOnThisRung:
        raise
    except Exception as error:
        raise ForwardFailed from error


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """torch logs the traceback of each operation that fails on fake tensors; we say in a line what came of it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def unfit_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What Python says of calling ``model.forward`` with so many or such named inputs; None if it can be called."""
    if model._forward_pre_hooks or type(model).__call__ is not nn.Module.__call__:
        return None  # these may make other inputs of them
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a built-in or scripted forward
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def fault_of_inputs(errors: Sequence[Exception]) -> str | None:
    """The model's own words, if these exceptions, one of each rung, are the inputs' fault."""
    tried = [error for error in errors if not isinstance(error, NotOnThisRung)]
    causes = [error.__cause__ for error in tried if isinstance(error, ForwardFailed)]
    if not causes or len(causes) < len(tried):
        return None
    found = {(type(cause), str(cause)) for cause in causes}
    kind, words = found.pop()
    if found or not issubclass(kind, _OF_INPUTS) or issubclass(kind, NotImplementedError):
        return None
    if kind.__module__.startswith("torch.") or _OF_CAPTURE.search(words):
        return None
    return f"{kind.__name__}: {' '.join(words.split())[:300]}"
