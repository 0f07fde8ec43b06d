"""Encoding of deltas: exact for every word size, small where little changed, and no damaged delta is applied."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.common.errors import DataError
from primerl_hpc.transport.weights import delta_codec
from primerl_hpc.transport.weights.delta_codec import apply, encode, max_delta_bytes


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(0, 5000),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    word_bytes=st.sampled_from([1, 2, 4, 8]),
    piece=st.sampled_from([64, 1024, 1 << 22]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_delta_turns_the_old_file_into_the_new_one(
    size: int, share: float, word_bytes: int, piece: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size, np.uint8)
    new = np.where(rng.random(size) < share, rng.integers(0, 256, size, np.uint8), old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_codec, "PIECE_BYTES", piece)
        delta = encode(old, new, word_bytes=word_bytes)
        found = old.copy()
        apply(found, delta)
    np.testing.assert_array_equal(found, new)


def test_a_delta_of_few_changes_is_small_for_every_word_size() -> None:
    rng = np.random.default_rng(0)
    old = rng.standard_normal(1 << 20).astype(np.float32)
    new = old.copy()
    new[rng.random(len(new)) < 0.02] *= np.float32(1 + 2**-20)
    delta = encode(old.view(np.uint8), new.view(np.uint8), word_bytes=4)
    assert len(delta) < 0.03 * old.nbytes
    assert len(encode(old.view(np.uint8), old.view(np.uint8), word_bytes=4)) < 100


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 400), seed=st.integers(0, 1000))
def test_a_truncated_delta_is_refused(cut: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = rng.integers(0, 256, (2, 300), np.uint8)
    delta = encode(old, new, word_bytes=2)
    if cut < len(delta):
        with pytest.raises(DataError):
            apply(old.copy(), delta[:cut])


def test_a_delta_for_another_file_is_refused() -> None:
    with pytest.raises(DataError, match="a delta for 8 bytes"):
        apply(np.zeros(9, np.uint8), encode(np.zeros(8, np.uint8), np.ones(8, np.uint8), word_bytes=2))


# -- size ------------------------------------------------------------------------------------------


def test_an_unchanged_piece_of_four_mebibytes_takes_eight_bytes() -> None:
    for pieces in (1, 2, 3):
        file = np.zeros(pieces << 22, np.uint8)
        assert len(encode(file, file, word_bytes=2)) == 16 + 8 * pieces
    file = np.zeros((1 << 22) + 1, np.uint8)
    assert len(encode(file, file, word_bytes=2)) == 16 + 8 * 2


@pytest.mark.parametrize("size", [0, 1, 7, 1000, 100_000, (1 << 22) + 5])
def test_no_delta_exceeds_the_maximum_that_a_receiver_accepts(size: int) -> None:
    """Random bytes in half of the words: neither the mask nor the words can be compressed."""
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, size, np.uint8)
    for share in (0.5, 1.0):
        new = np.where(rng.random(size) < share, rng.integers(0, 256, size, np.uint8), old)
        assert len(encode(old, new, word_bytes=1)) <= max_delta_bytes(size)


@pytest.mark.parametrize(
    ("size", "most"),
    [
        (0, 2048),  # two kibibytes for the header and an incomplete piece
        (8000, 8000 + 1000 + 9 + 2048),  # words, mask, a thousandth of both
        (1 << 22, (1 << 22) + (1 << 19) + 4718 + 3072),  # and a kibibyte for each piece
    ],
)
def test_the_maximum_is_the_raw_mask_and_words_and_little_more(size: int, most: int) -> None:
    assert max_delta_bytes(size) == most


def test_files_of_different_size_have_no_delta() -> None:
    with pytest.raises(ValueError, match="files of different size: 8 and 9 bytes"):
        encode(np.zeros(8, np.uint8), np.zeros(9, np.uint8), word_bytes=2)


# -- damage ----------------------------------------------------------------------------------------

OLD, NEW = np.arange(100, dtype=np.uint8), np.arange(100, dtype=np.uint8)
NEW[[3, 4, 50]] = 0


def delta_of(mask: bytes, values: bytes, *, word_bytes: int = 2, magic: bytes = b"PDL1") -> bytes:
    """Return a delta for 100 bytes in one piece with these two compressed parts."""
    head = delta_codec._HEAD.pack(magic, word_bytes, 100)
    return head + delta_codec._PIECE.pack(len(mask), len(values)) + mask + values


def parts(num_words: int = 2) -> tuple[bytes, bytes]:
    """Return mask and words of a delta that changes the first words of two bytes."""
    mask = np.packbits(np.arange(50) < num_words).tobytes()
    return zlib.compress(mask), zlib.compress(bytes(2 * num_words))


def test_a_delta_from_parts_is_applied() -> None:
    file = OLD.copy()
    apply(file, delta_of(*parts()))
    np.testing.assert_array_equal(file, OLD)
    apply(file, encode(OLD, NEW, word_bytes=2))
    np.testing.assert_array_equal(file, NEW)


@pytest.mark.parametrize("size", [0, 3, 6, 8, 1000])
def test_a_part_that_inflates_to_another_size_is_refused(size: int) -> None:
    (mask, values), other = parts(), zlib.compress(bytes(size))
    for delta in (delta_of(other, values), delta_of(mask, other)):
        with pytest.raises(DataError, match="incomplete or damaged delta"):
            apply(OLD.copy(), delta)


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (delta_of(*parts(), magic=b"PDL2"), r"a delta for 100 bytes \(b'PDL2'\) does not apply"),
        (delta_of(*parts(), word_bytes=3), "words of 3 bytes; supported are 1, 2, 4 and 8"),
        (delta_of(*parts(), word_bytes=0), "words of 0 bytes"),
        (delta_of(b"", parts()[1]), "a piece has words but no mask"),
        (delta_of(*parts()) + b"x", "it has [0-9]+ bytes, but its pieces end at"),
        (delta_of(parts()[0] + b"x", parts()[1]), "does not decompress to 7 bytes"),
        (delta_of(parts()[0], parts()[1][:-1]), "does not decompress to 4 bytes"),
        (delta_of(b"no mask", parts()[1]), "incomplete or damaged delta"),
        (b"", "incomplete or damaged delta"),
    ],
)
def test_a_damaged_delta_is_refused_with_the_reason(delta: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        apply(OLD.copy(), delta)


def test_a_file_whose_size_is_no_multiple_of_a_word_keeps_its_last_bytes() -> None:
    old, new = np.arange(13, dtype=np.uint8), np.arange(13, dtype=np.uint8)
    new[12] = 99
    for word_bytes in (2, 4, 8):
        file = old.copy()
        apply(file, encode(old, new, word_bytes=word_bytes))
        np.testing.assert_array_equal(file, new)
