"""data=digits: real pictures, the handwritten digits that scikit-learn ships."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from forge.data import Split
from forge.data.drawing import encoded
from forge.data.embedded import FORMATS, Embedded, about_a_picture
from forge.data.pack import Packed, chosen
from forge.errors import UnusableEnvironment

_BRIGHTEST = 16         # of the set's pixels


@dataclass(frozen=True)
class Digits(Embedded):
    """1,797 digits of 13 writers, 8 by 8 pixels, scaled up; and one question. See Embedded.

    Source: Alpaydin and Kaynak 1998, the test part of "Optical Recognition of Handwritten Digits" (UCI).
    A picture's pixels alone decide whether it is held out, so equal pictures are on one side.
    """

    name = "digits"

    def made(self, split: Split) -> Iterator[Packed]:
        try:
            from PIL import Image
            from sklearn.datasets import load_digits  # a second, and the pictures come with the package
        except ImportError as error:
            raise UnusableEnvironment(f"data=digits needs {error.name}: pip install \"forge-switchboard[digits]\", or "
                                      "use data=shapes.") from error
        loaded = load_digits()
        for number, (pixels, digit) in enumerate(zip(loaded.images, loaded.target.tolist(), strict=True)):
            grey = (pixels * (255 / _BRIGHTEST)).round().astype("uint8")
            content = hashlib.blake2b(grey.tobytes(), digest_size=16).hexdigest()
            if chosen(content, self.heldout) != (split == "heldout"):
                continue
            picture = Image.fromarray(grey).resize((self.size, self.size), Image.Resampling.BICUBIC).convert("RGB")
            field = FORMATS[number % len(FORMATS)]
            yield f"{number:04}", {field: encoded(picture, field), "txt": f"a handwritten {digit}".encode(),
                                   "json": about_a_picture([("Which digit is this?", str(digit))])}
