"""Random crop and flip of training images, as is usual for photographs: pad by four, cut the old size out, mirror half."""

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 4


def draw_crops(num_epochs: int, num_examples: int, generator: torch.Generator) -> Tensor:
    """[epochs, examples, 3]: how far each image is moved down and right, and whether it is mirrored."""
    shape = (num_epochs, num_examples)
    moves = torch.randint(2 * PADDING + 1, (*shape, 2), generator=generator)
    return torch.cat([moves, torch.randint(2, (*shape, 1), generator=generator)], dim=-1)


def cropped(images: Tensor, crops: Tensor) -> Tensor:
    """The images [n, channels, h, w] moved and mirrored as `crops` [n, 3] says; runs under torch.func.vmap.

    The images are normalised by now, so the border that comes in is the mean colour.
    """
    count, channels, height, width = images.shape
    down, right, mirrored = (part.unsqueeze(-1) for part in crops.unbind(-1))  # [n, 1] each
    columns = torch.arange(width, device=images.device)
    columns = torch.where(mirrored.bool(), width - 1 - columns, columns) + right  # [n, w]
    rows = torch.arange(height, device=images.device) + down  # [n, h]
    example = torch.arange(count, device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=images.device).view(1, -1, 1, 1)
    padded = F.pad(images, (PADDING,) * 4)
    return padded[example, channel, rows[:, None, :, None], columns[:, None, None, :]]
