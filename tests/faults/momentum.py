"""What jobs whose weights depend on every step so far have to come to."""

from __future__ import annotations

import torch


def uninterrupted(steps: int) -> torch.Tensor:
    """The weights after `steps`, trained here: the update depends on the step and on momentum."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        (weight * torch.tensor([1.0, 2.0, 3.0]) * (step % 5 + 1)).sum().backward()
        optimizer.step()
    return weight.detach()
