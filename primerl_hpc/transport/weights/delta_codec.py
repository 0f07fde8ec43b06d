"""Delta of two files of the same size: their XOR, word by word, stored as a mask and the nonzero words.

    data = encode(old, new, word_bytes=2)       # two files of bfloat16 tensors
    apply(old, data)                            # old is now identical to new

The mask has one bit per word. The words are split into byte planes, which groups the bytes that rarely change (signs,
exponents). Mask and planes are compressed with deflate (run-length and Huffman coding only) in pieces of `PIECE_BYTES`,
so memory is bounded and an unchanged piece takes eight bytes. One encoding is used for any share of changed words:
docs/decisions/0010-weight-transports.md has the measurements.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.errors import DataError

PIECE_BYTES = 1 << 22
_HEAD = struct.Struct("<4sBxxxQ")  # magic, bytes per word, bytes of the file
_PIECE = struct.Struct("<II")  # compressed bytes of the mask and of the words; 0, 0: unchanged piece
_MAGIC = b"PDL1"
_WORD_BYTES = (1, 2, 4, 8)


def max_delta_bytes(size: int) -> int:
    """Return the maximum size of the delta of a file of ``size`` bytes: incompressible mask and words plus overhead."""
    raw = size + size // 8
    return raw + raw // 1000 + 1024 * (size // PIECE_BYTES + 2)


def encode(old: NDArray[np.uint8], new: NDArray[np.uint8], *, word_bytes: int) -> bytes:
    """Return the delta from ``old`` to ``new``, two files of the same size [bytes].

    ``word_bytes``: size of the tensors' elements: 1, 2, 4 or 8.
    """
    if len(old) != len(new):
        raise ValueError(f"cannot encode a delta of files of different size: {len(old)} and {len(new)} bytes")
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
    """Apply the delta to ``file`` [bytes] in place.

    Raises DataError if the delta is malformed; ``file`` may then be partly changed. In addition to the delta, this
    needs the memory of one piece, whatever sizes the delta declares.
    """
    try:
        magic, word_bytes, size = _HEAD.unpack_from(delta)
        if magic != _MAGIC or size != len(file):
            raise DataError(
                f"a delta for {size} bytes ({magic!r}) does not apply to a file of {len(file)} bytes"
            )
        if word_bytes not in _WORD_BYTES:
            raise DataError(f"the delta has words of {word_bytes} bytes; supported are 1, 2, 4 and 8")
        position = _HEAD.size
        for start in range(0, size, PIECE_BYTES):
            mask_bytes, value_bytes = _PIECE.unpack_from(delta, position)
            position += _PIECE.size
            if mask_bytes:
                mask = delta[position : position + mask_bytes]
                values = delta[position + mask_bytes : position + mask_bytes + value_bytes]
                _apply_piece(file[start : start + PIECE_BYTES], word_bytes, mask, values)
            elif value_bytes:
                raise ValueError("a piece has words but no mask")
            position += mask_bytes + value_bytes
        if position != len(delta):
            raise ValueError(f"it has {len(delta)} bytes, but its pieces end at {position}")
    except (struct.error, zlib.error, ValueError, IndexError) as error:
        raise DataError(f"incomplete or damaged delta ({error})") from error


def _apply_piece(piece: NDArray[np.uint8], word_bytes: int, mask: bytes, values: bytes) -> None:
    """Apply one piece; ``mask`` and ``values`` are compressed. Raises ValueError and zlib.error."""
    words = _words(piece, word_bytes)
    bits = np.frombuffer(_inflate(mask, (len(words) + 7) // 8), np.uint8)
    is_changed = np.unpackbits(bits, count=len(words)).view(np.bool_)
    size = int(np.count_nonzero(is_changed)) * word_bytes
    planes = np.frombuffer(_inflate(values, size), np.uint8).reshape(word_bytes, -1)
    words[np.flatnonzero(is_changed)] ^= np.ascontiguousarray(planes.T).view(f"u{word_bytes}").reshape(-1)
    if not np.shares_memory(words, piece):
        piece[:] = words.view(np.uint8)[: len(piece)]


def _deflate(data: NDArray[np.uint8]) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return stream.compress(data.data) + stream.flush()


def _inflate(data: bytes, size: int) -> bytes:
    """Decompress exactly ``size`` bytes. Raises ValueError if ``data`` holds more or fewer."""
    stream = zlib.decompressobj()
    inflated = stream.decompress(data, size + 1)  # bounds the memory that damaged data can take
    if len(inflated) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"a part does not decompress to {size} bytes")
    return inflated


def _words(piece: NDArray[np.uint8], word_bytes: int) -> NDArray:
    """Return the piece as [words]: a view, or a padded copy if its size is not a multiple of ``word_bytes``."""
    if odd := len(piece) % word_bytes:
        piece = np.concatenate([piece, np.zeros(word_bytes - odd, np.uint8)])
    return piece.view(f"u{word_bytes}")
