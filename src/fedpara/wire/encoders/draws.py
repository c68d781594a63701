"""Random numbers of a message, drawn on the host so that they are the same for every device.

Drawing takes longer than everything else that a GPU does with a message. `DrawnAhead` lets a thread of the host draw
while the device trains.
"""

import torch
from torch import Tensor


class DrawnAhead(torch.Generator):
    """A generator whose first uniform numbers can be drawn before they are needed."""

    _drawn: Tensor | None = None

    def draw(self, count: int, pinned: bool) -> None:
        """Draws what the first call of `uniform` returns. `pinned` speeds up the copy to a GPU."""
        self._drawn = torch.empty(count, pin_memory=pinned).uniform_(generator=self)

    def take(self, count: int) -> Tensor | None:
        """The numbers drawn ahead, once; None if there are none."""
        drawn, self._drawn = self._drawn, None
        assert drawn is None or drawn.numel() == count
        return drawn


def uniform(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """`count` numbers of U[0, 1) on the device, which the caller may overwrite."""
    drawn = generator.take(count) if isinstance(generator, DrawnAhead) else None
    if drawn is None:
        drawn = torch.rand(count, generator=generator, device=generator.device)
    return drawn.to(device, non_blocking=True)
