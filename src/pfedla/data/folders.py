"""A folder of images as examples: FOLDER/class/image.png, or FOLDER/client/class/image.png."""

from pathlib import Path

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.data.dataset import MOST_NUMBERS, Array, Dataset, dataset_of

ENDINGS = {".png", ".jpg", ".jpeg"}


def load_images(folder: Path) -> Dataset:
    """Read all images; they must be of one size. The names of the folders are the classes, and perhaps the clients."""
    depths = {depth: sorted(_find(folder, depth)) for depth in (2, 3)}
    if all(depths.values()):
        raise PfedlaError(f"{folder} mixes class/image ({depths[2][0].name}) and client/class/image; use one of them")
    if not any(depths.values()):
        raise PfedlaError(f"{folder} has no class/image.png and no client/class/image.png (or .jpg)")
    files = depths[2] or depths[3]
    images, first = [], files[0]
    for path in files:
        images.append(_read(path))
        if images[-1].shape[:2] != images[0].shape[:2]:
            sizes = " and ".join(f"{image.shape[1]}x{image.shape[0]}" for image in (images[-1], images[0]))
            raise PfedlaError(f"{path}: all images must have one size; it and {first} have {sizes}")
        if len(files) * images[0].size > MOST_NUMBERS:
            raise PfedlaError(f"{folder}: {len(files)} images of {images[0].size} numbers are too many")
    if any(image.ndim == 3 for image in images):
        images = [image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2) for image in images]
    owners = None if depths[2] else np.array([path.parent.parent.name for path in files])
    return dataset_of(folder.name, np.stack(images), np.array([path.parent.name for path in files]), client=owners)


def _find(folder: Path, depth: int) -> list[Path]:
    paths = folder.glob("/".join(["[!.]*"] * depth))
    return [path for path in paths if path.suffix.lower() in ENDINGS and path.is_file()]


def _read(path: Path) -> Array:
    """Return [height, width] of a grey image, [height, width, 3] of any other."""
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            if image.mode[0] in "IF":
                raise ValueError("more than 8 bits a pixel")
            return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except Exception as error:  # Pillow raises many kinds on damaged files
        raise PfedlaError(f"{path}: cannot be read ({error})") from None
