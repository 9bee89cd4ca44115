"""The layout of DistributedDataParallel's buckets, which must not tell a resumed run from an undisturbed one.

An all-reduce over three or more ranks adds an element's values in an order that depends on where in its bucket the
element lies. DDP lays its buckets out anew after its first backward, by the order in which gradients came; so the first
step of every process is added up in another order than the same step of a run that was not restarted, and the last bits
differ. Here that new layout is brought about before the first step, by a backward that gives zeros.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def settle(*parts: object) -> None:
    """To be called by all ranks before the first step, with all that may be or hold a module in DDP; costs one
    all-reduce of the gradients.

    The layout is that of DDP's start, the last parameters first, whatever order the gradients come in. DDP with
    `find_unused_parameters` never changes its layout, and is left alone. So is one whose first backward is special:
    with `static_graph`, communication hooks, its own mixed precision or sparse gradients.
    """
    for part in parts:
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if isinstance(module, DistributedDataParallel) and not _is_special(module):
                _rehearse(module)


def _is_special(module: DistributedDataParallel) -> bool:
    return bool(
        module.find_unused_parameters
        or module.static_graph
        or module._comm_hooks
        or module.mixed_precision is not None
        or any(getattr(part, "sparse", False) for part in module.modules())
    )


def _rehearse(module: DistributedDataParallel) -> None:
    ignored = module.parameters_to_ignore
    parameters = [p for name, p in module.module.named_parameters() if p.requires_grad and name not in ignored]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    module.reducer.prepare_for_backward([])
    with torch.enable_grad():
        for parameter in reversed(parameters):
            parameter.view_as(parameter).backward(torch.zeros_like(parameter))
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
