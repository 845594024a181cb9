"""Hashes that decide on which side a sample is: the published ones, and the same as ever."""

import numpy as np
import pytest

from forge.data.hashing import LAST_SHIFT, STEP, held_out, stirred
from forge.data.token_scan import _mixed


def test_all_of_it_is_splitmix64():
    """The first numbers of seed 0, as the reference implementation (Vigna) prints them."""
    numbers = stirred(np.arange(1, 4, dtype=np.uint64) * np.uint64(STEP))
    assert [hex(number) for number in (numbers ^ numbers >> np.uint64(LAST_SHIFT)).tolist()] == [
        "0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_no_document_changes_its_side_from_one_release_to_the_next():
    assert [hex(number) for number in _mixed(np.array([0, 1, 50256], np.uint16)).tolist()] == [
        "0x6f68261b8937eb46", "0x2a94fcbf999dcde6", "0xac7d6a4eded3edc3"]
    numbers = np.arange(40, dtype=np.uint64) * np.uint64(7919 << 32) | (np.arange(40) % 7 + 100).astype(np.uint64)
    assert np.flatnonzero(held_out(stirred(numbers), 0.2)).tolist() == [0, 15, 22, 26, 28, 35, 36, 38]


@pytest.mark.parametrize("fraction", [0.0, 1e-12, 0.5, 1 - 1e-12])
def test_either_side_has_one_and_the_lowest_are_held_out(fraction):
    hashes = stirred(np.arange(1, 100, dtype=np.uint64))
    held = held_out(hashes, fraction)
    assert held.any() and not held.all()
    assert fraction > 0.9 or hashes[held].max() < hashes[~held].min()
