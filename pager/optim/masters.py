"""Which parameters have a fp32 master, and whether it is still theirs.

With ``master="float32"`` the optimizer steps a bf16 parameter in fp32: its class sees the master, a fp32 gradient and
fp32 states. The master of a paged parameter is the parameter itself and 16 low bits (`pager.optim.master`), which are
paged like a state; that of a small one, which stays an ordinary tensor, is another ordinary tensor.

A master belongs to the values that the last update wrote. Whoever writes to the parameter afterwards moves its
version; the next update then begins from the value as it stands, in other words with low bits of zero. A state dict
with the very values it has, and writes that torch does not count (through ``.data``), keep the low bits, which are less
than half a unit in the last place.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from pager.errors import ConfigError
from pager.mmu import values
from pager.optim.master import join, split

logger = logging.getLogger("pager.optim")

if TYPE_CHECKING:
    from pager.mmu.binding import Binding
    from pager.optim.adopted import AdoptedOptimizer

# The name under which a parameter's low bits stand among its paged states; no class makes one of this name.
LOW = "pager.low_bits"
# The name of the whole master in an optimizer's state dict.
MASTER = "master"


def stepped_dtype(dtype: torch.dtype, *, master: bool) -> torch.dtype:
    """The dtype in which a parameter of ``dtype`` is stepped."""
    return torch.float32 if master and dtype == torch.bfloat16 else dtype


class Masters:
    """The masters of one optimizer's parameters."""

    def __init__(self, adopted: AdoptedOptimizer, *, enabled: bool) -> None:
        self._adopted = adopted
        self.enabled = enabled
        # The version of each parameter at which its master was its own.
        self._versions: dict[Binding, int] = {}
        # By identity; of each small parameter its master, and the version at which it was that.
        self._small: Any = WeakTensorKeyDictionary()

    def has(self, binding: Binding) -> bool:
        """Whether a paged parameter is stepped through a master."""
        return self.enabled and binding.segment.dtype == torch.bfloat16

    def check_loaded(self) -> None:
        """Refuse states that torch's ``load_state_dict`` has rounded, because it did not know of masters yet."""
        optimizer = self._adopted.optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params if self.enabled else ():
            for key, value in optimizer.state.get(param, {}).items() if param.dtype == torch.bfloat16 else ():
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.dtype == torch.bfloat16:
                    raise ConfigError(
                        f"{key} of {type(optimizer).__name__} is bfloat16, but master='float32' steps bf16 "
                        "parameters in fp32. Where it comes from a checkpoint, load_state_dict() has rounded it: "
                        "pass the optimizer to pager.manage(model, optimizer) before loading, or step it once."
                    )

    # -- paged -------------------------------------------------------------------------------------

    def are_valid(self, binding: Binding) -> bool:
        """Whether the low bits belong to the parameter's value."""
        return self._versions.get(binding) == binding.version()

    def knows(self, binding: Binding) -> bool:
        """Whether a step has made the parameter's master."""
        return binding in self._versions

    def written(self, binding: Binding) -> None:
        """An update has written, or is about to be seen as having written, parameter and low bits."""
        if self.enabled:
            self._versions[binding] = binding.version()

    def whole(self, binding: Binding) -> torch.Tensor:
        """The master as a fp32 tensor on the CPU, in the parameter's layout."""
        mmu = self._adopted.mmu
        weight = values.cpu_tensor(mmu, binding, alias=False)
        low = self._adopted.paged_states(binding).get(LOW)
        master = weight.float()
        if low is not None and self.are_valid(binding) and values.has_value(mmu, low):
            flat = values.cpu_tensor(mmu, low, alias=False)
            if flat.stride() != weight.stride():
                # The parameter was converted (channels_last) since: like states, low bits stay laid out as they are.
                flat = torch.empty_strided(weight.size(), weight.stride(), dtype=flat.dtype).copy_(flat)
            storages = [tensor.untyped_storage() for tensor in (weight, flat, master)]
            count = binding.segment.num_elements
            views = [
                torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,), (1,))
                for storage, tensor in zip(storages, (weight, flat, master), strict=True)
            ]
            join(views[0], views[1], views[2])
        return master

    def load(self, binding: Binding, master: torch.Tensor) -> None:
        """Give a paged parameter this master (fp32, on the CPU): its value and its low bits."""
        segment = binding.segment
        master = torch.empty_strided(segment.size, segment.stride).copy_(master)
        weight = torch.empty_strided(segment.size, segment.stride, dtype=torch.bfloat16)
        low = torch.empty_strided(segment.size, segment.stride, dtype=torch.int16)
        count = segment.num_elements
        flat = [
            torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), 0, (count,), (1,))
            for tensor in (master, weight, low)
        ]
        split(flat[0], flat[1], flat[2])
        mmu = self._adopted.mmu
        values.store(mmu, binding, weight)
        values.store(mmu, self._adopted.make_state(binding, LOW, torch.int16), low)
        self.written(binding)

    def end(self) -> None:
        """The optimizer is ordinary again: torch steps bf16 parameters with states of their dtype."""
        if not self.enabled:
            return
        optimizer = self._adopted.optimizer
        num_rounded = 0
        for param, state in optimizer.state.items():
            for key, value in state.items() if param.dtype == torch.bfloat16 else ():
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.dtype == torch.float32:
                    state[key] = value.to(torch.bfloat16)
                    num_rounded += 1
        if num_rounded:
            logger.warning(
                "close() ends the fp32 masters of %s and rounds its %d fp32 states to bfloat16, which torch steps bf16 "
                "parameters with; to train on exactly, save optimizer.state_dict() before close()",
                type(optimizer).__name__,
                num_rounded,
            )

    # -- small -------------------------------------------------------------------------------------

    def has_small(self, param: torch.Tensor) -> bool:
        """Whether an ordinary parameter is stepped through a master."""
        return self.enabled and param.dtype == torch.bfloat16

    def knows_small(self, param: torch.Tensor) -> bool:
        """Whether a step has made the master of an ordinary parameter."""
        return param in self._small

    def small(self, param: torch.Tensor) -> torch.Tensor:
        """A small parameter's master, fp32, where the parameter is; to be copied before it is changed."""
        master, version = self._small.get(param, (None, -1))
        if master is None or master.device != param.device:
            return param.detach().float()
        # The very values it has, written once more (a model's state dict after the optimizer's), keep it.
        if version != param._version and not torch.equal(master.to(param.dtype), param.detach()):
            return param.detach().float()
        return master

    def keep_small(self, param: torch.Tensor, master: torch.Tensor) -> None:
        """An update has written ``master``, rounded, to the parameter."""
        self._small[param] = (master, param._version)

    def load_small(self, param: torch.Tensor, master: torch.Tensor) -> None:
        """Give a small parameter this master: its value is the master rounded."""
        master = master.to(param.device, torch.float32)
        with torch.no_grad():
            param.copy_(master)
        self.keep_small(param, master.clone())
