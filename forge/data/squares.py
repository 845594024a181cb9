"""Pictures as squares of one size, which a vision model takes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from forge.data.headers import header_of
from forge.data.pictures import Policy, decode, pillow, upright

_GREY = 128         # around a picture that does not fill its square; near 0 once it is normalised


@dataclass(frozen=True)
class Squares:
    """A picture no larger than a square becomes one. A larger one becomes a grid of at most max_tiles squares, row by
    row, and one more that shows all of it, as in SmolVLM and InternVL; with max_tiles=1, that one alone.

    The grid is the one whose shape is nearest to the picture's, and of several the finest, with no more squares along a
    side than the picture has pixels for. The picture is stretched to it.

    size: of a side, in pixels. fit: how all of a picture gets into one square. squash: it is stretched; crop: its
    middle; pad: all of it, grey beside it.
    """

    size: int
    max_tiles: int
    fit: Literal["squash", "crop", "pad"]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows). The grid of a picture on its side is this one on its side, except that both are alike for a
        square picture; so the number of squares does not depend on how a picture is turned."""
        most = [min(self.max_tiles, -(-side // self.size)) for side in (width, height)]
        grids = [(columns, rows) for columns in range(1, most[0] + 1)
                 for rows in range(1, min(most[1], self.max_tiles // columns) + 1)]

        def unlike(grid: tuple[int, int]) -> tuple[Fraction, int]:
            wide, high = grid[0] * height, grid[1] * width
            return Fraction(max(wide, high), min(wide, high)), -grid[0] * grid[1]

        return min(grids, key=unlike)

    def count(self, width: int, height: int) -> int:
        """How many squares a picture of these sides becomes."""
        columns, rows = self.grid(width, height)
        return columns * rows + 1 if columns * rows > 1 else 1

    def cut(self, data: bytes, policy: Policy) -> np.ndarray:
        """[count, size, size, 3] uint8, the square that shows all of the picture last. Raises BadPicture."""
        header = header_of(data)
        width, height = upright(header, policy)
        columns, rows = self.grid(width, height)
        tiled = (columns * self.size, rows * self.size)
        whole = self._fitted(width, height)
        image = pillow().fromarray(decode(data, policy, (max(tiled[0], whole[0]), max(tiled[1], whole[1]))
                                          if columns * rows > 1 else whole))
        overview = self._overview(image, whole)[None]
        if columns * rows == 1:
            return overview
        tiles = np.asarray(_resized(image, tiled)).reshape(rows, self.size, columns, self.size, 3)
        return np.concatenate([tiles.swapaxes(1, 2).reshape(-1, self.size, self.size, 3), overview])

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """The sides that a picture has inside a square."""
        if self.fit != "pad":
            return self.size, self.size
        longer = max(width, height)
        return max(1, round(width * self.size / longer)), max(1, round(height * self.size / longer))

    def _overview(self, image: Any, whole: tuple[int, int]) -> np.ndarray:
        """[size, size, 3]."""
        box = (0.0, 0.0, float(image.width), float(image.height))
        if self.fit == "crop":
            side = min(image.size)
            left, top = (image.width - side) / 2, (image.height - side) / 2
            box = (left, top, left + side, top + side)
        shown = np.asarray(_resized(image, whole, box))
        if shown.shape[0] == shown.shape[1] == self.size:
            return shown
        square = np.full((self.size, self.size, 3), _GREY, np.uint8)
        top, left = ((self.size - side) // 2 for side in shown.shape[:2])
        square[top:top + shown.shape[0], left:left + shown.shape[1]] = shown
        return square


def _resized(image: Any, sides: tuple[int, int], box: tuple[float, float, float, float] | None = None) -> Any:
    """Pillow widens its filter where it shrinks, so every pixel counts and no moire appears."""
    return image.resize(sides, pillow().Resampling.BICUBIC, box)
