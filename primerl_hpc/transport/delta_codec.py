"""What changed between two files of the same size: their XOR, word by word, as a mask and the words that are not zero.

    data = encode(old, new, word_bytes=2)       # of two bfloat16 files
    apply(old, data)                            # old is new now, bit for bit

The mask has a bit per word; the words are cut into byte planes, so that bytes which rarely change (signs, exponents) lie
together. Both are deflated (runs and Huffman codes only), piece by piece: memory is bounded, and a piece without a change takes
no room. One encoding serves every share of changed words: docs/decisions/0010-weight-transports.md has the measurement.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.errors import DataError

PIECE_BYTES = 1 << 22
_HEAD = struct.Struct("<4sBxxxQ")  # magic, bytes of a word, bytes of the file
_PIECE = struct.Struct("<II")  # deflated bytes of mask and of words; 0, 0: the piece did not change
_MAGIC = b"PDL1"


def encode(old: NDArray[np.uint8], new: NDArray[np.uint8], *, word_bytes: int) -> bytes:
    """``old`` and ``new``: files as [bytes], of one size. ``word_bytes``: 1, 2, 4 or 8, those of the tensors' elements."""
    if len(old) != len(new):
        raise ValueError(f"files of {len(old)} and {len(new)} bytes have no delta")
    parts = [_HEAD.pack(_MAGIC, word_bytes, len(new))]
    for start in range(0, len(new), PIECE_BYTES):
        words = _words(old[start : start + PIECE_BYTES], word_bytes) ^ _words(
            new[start : start + PIECE_BYTES], word_bytes
        )
        is_changed = words != 0
        changed = np.flatnonzero(is_changed)
        if not len(changed):
            parts.append(_PIECE.pack(0, 0))
            continue
        mask = _deflate(np.packbits(is_changed))
        planes = words[changed].view(np.uint8).reshape(-1, word_bytes).T
        values = _deflate(np.ascontiguousarray(planes))
        parts += [_PIECE.pack(len(mask), len(values)), mask, values]
    return b"".join(parts)


def apply(file: NDArray[np.uint8], delta: bytes) -> None:
    """Change ``file`` [bytes] in place, as far as the delta can be read. Raises DataError where it cannot."""
    try:
        magic, word_bytes, size = _HEAD.unpack_from(delta)
        if magic != _MAGIC or size != len(file):
            raise DataError(f"a delta of {size} bytes ({magic!r}) does not belong to a file of {len(file)}")
        position = _HEAD.size
        for start in range(0, size, PIECE_BYTES):
            mask_bytes, value_bytes = _PIECE.unpack_from(delta, position)
            position += _PIECE.size
            if mask_bytes:
                mask = zlib.decompress(delta[position : position + mask_bytes])
                values = zlib.decompress(delta[position + mask_bytes : position + mask_bytes + value_bytes])
                _apply_piece(file[start : start + PIECE_BYTES], word_bytes, mask, values)
            position += mask_bytes + value_bytes
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise DataError(f"not a whole delta ({error})") from error


def _apply_piece(piece: NDArray[np.uint8], word_bytes: int, mask: bytes, values: bytes) -> None:
    words = _words(piece, word_bytes)
    is_changed = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(words)).view(np.bool_)
    planes = np.frombuffer(values, np.uint8).reshape(word_bytes, -1)
    words[np.flatnonzero(is_changed)] ^= np.ascontiguousarray(planes.T).view(f"u{word_bytes}").reshape(-1)
    if not np.shares_memory(words, piece):
        piece[:] = words.view(np.uint8)[: len(piece)]


def _deflate(data: NDArray[np.uint8]) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return stream.compress(data) + stream.flush()


def _words(piece: NDArray[np.uint8], word_bytes: int) -> NDArray:
    """[words]: a view of the piece, or a padded copy where its size is no multiple of a word's."""
    if odd := len(piece) % word_bytes:
        piece = np.concatenate([piece, np.zeros(word_bytes - odd, np.uint8)])
    return piece.view(f"u{word_bytes}")
