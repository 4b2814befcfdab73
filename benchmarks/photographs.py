"""Tiles of two photographs that come with scikit-learn, loaded as pictures usually are."""

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SIDE, STRIDE = 32, 16  # pixels
BANDS = 5  # of a photograph, from the sky down: with two of them ten classes
BATCH = 64


class Tiles(Dataset):
    """Squares of 32 x 32, in ten classes: which photograph, and how far down in it.

    As torchvision has it, a tile becomes a picture, then a tensor, then one of mean 0, each by
    itself, when it is asked for.
    """

    def __init__(self) -> None:
        self._tiles: list[tuple[np.ndarray, int]] = []
        for number, photograph in enumerate(load_sample_images().images):
            height, width, _ = photograph.shape
            for top in range(0, height - SIDE + 1, STRIDE):
                band = BANDS * top // (height - SIDE + 1)
                for left in range(0, width - SIDE + 1, STRIDE):
                    tile = photograph[top : top + SIDE, left : left + SIDE].copy()
                    self._tiles.append((tile, BANDS * number + band))

    def __len__(self) -> int:
        return len(self._tiles)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        tile, label = self._tiles[index]
        picture = np.array(Image.fromarray(tile))
        pixels = torch.from_numpy(picture).permute(2, 0, 1).contiguous()
        pixels = pixels.to(torch.float32).div(255)
        mean, std = (torch.tensor((0.5, 0.5, 0.5)).view(3, 1, 1) for _ in range(2))
        return pixels.sub_(mean).div_(std), label


def loader() -> DataLoader:
    """Shuffled, whole batches only, read by the process that trains."""
    return DataLoader(Tiles(), batch_size=BATCH, shuffle=True, drop_last=True)
