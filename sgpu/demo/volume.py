"""A small real image data set as a volume: the hand-written digits that scikit-learn ships, one JPEG file each."""

from __future__ import annotations

import pathlib

from sgpu.contract.errors import InputError

_PIXELS = 32


def make(folder: pathlib.Path) -> int:
    """Writes <digit>/<number>.jpg, 1,797 files of 32 x 32 grey pixels; the number of files.

    A folder that is complete already is left as it is.
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(f"the demo needs {error.name}; install it with: pip install 'sgpu[demo]'") from None
    digits = load_digits()
    complete = folder / ".complete"
    if complete.exists():
        return len(digits.images)
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / str(int(digit))
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * (255 / 16)).astype("uint8"))
        image.resize((_PIXELS, _PIXELS), Image.Resampling.BICUBIC).save(place / f"{number:04d}.jpg", quality=92)
    complete.touch()
    return len(digits.images)
