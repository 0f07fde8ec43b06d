"""Images in messages: four formats and a limit on pixels, which are checked before anything is decoded or started."""

from __future__ import annotations

import base64
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.security.test_hostile_files import damaged

Image = pytest.importorskip("PIL.Image")

from primerl_hpc.orchestrator.rollout_data import RolloutFailed  # noqa: E402
from primerl_hpc.orchestrator.rollouts.images import open_image  # noqa: E402

ACCEPTED = ("PNG", "JPEG", "WEBP", "GIF")
PICTURE = Image.new("RGB", (8, 8), (200, 10, 10))


def saved(name: str) -> bytes | None:
    """Return a small image in a format; None if Pillow cannot write the format without other software."""
    file = io.BytesIO()
    try:
        PICTURE.save(file, name)
    except (OSError, ValueError, KeyError):
        return None
    return file.getvalue()


Image.init()
OTHERS = [name for name in sorted(Image.SAVE) if name in Image.OPEN and name not in ACCEPTED and saved(name)]


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def large_png(side: int) -> bytes:
    """Return a black image with one bit per pixel: a few kilobytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    pack = zlib.compressobj(9)
    rows = b"".join([*(pack.compress(bytes(1 + (side + 7) // 8)) for _ in range(side)), pack.flush()])
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_four_formats_are_opened(name: str) -> None:
    data = saved(name)
    assert data is not None
    assert open_image(url_of(data)).size == (8, 8)


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_refused_whatever_type_the_url_declares(name: str) -> None:
    data = saved(name)
    assert data is not None
    with pytest.raises(RolloutFailed, match="DamagedImage: not an image in PNG, JPEG, WEBP or GIF"):
        open_image(url_of(data))


def test_no_image_starts_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "gs"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # Pillow searches for it only once
    eps = saved("EPS")
    assert eps is not None
    with pytest.raises(RolloutFailed):
        open_image(url_of(eps))
    assert not (tmp_path / "started").exists()


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    data = large_png(13_000)
    assert len(data) < 64 * 1024
    with pytest.raises(RolloutFailed, match=r"13000 x 13000 pixels; at most 16777216"):
        open_image(url_of(data))
    with pytest.raises(RolloutFailed, match="at most 16777216"):
        open_image(url_of(large_png(20_000)))  # exceeds the limit of Pillow itself
    assert open_image(url_of(large_png(4096))).size == (4096, 4096)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_image_is_opened_or_fails_its_rollout(data: st.DataObject) -> None:
    whole = saved(data.draw(st.sampled_from(ACCEPTED)))
    assert whole is not None
    try:
        open_image(url_of(data.draw(damaged(whole))))
    except RolloutFailed as error:
        assert error.kind == "DamagedImage"


LIBRARIES = """
import io, sys
from pathlib import Path
from primerl_hpc.common.safety.images import restrict_pillow
restrict_pillow(for_vllm={for_vllm})
{open}
for path in sys.argv[1:]:
    try:
        load(Path(path).read_bytes())
        print("opened")
    except Exception as error:
        print(type(error).__name__)
"""
OPEN = {
    "vllm": "from vllm.multimodal.media.image import ImageMediaIO\nload = ImageMediaIO().load_bytes",
    "renderers": "from renderers.qwen3_vl import _load_pil_image\nload = lambda data: _load_pil_image({'image': data})",
}
"""How the libraries of engines and environment servers open the bytes of an image."""


@pytest.mark.parametrize(
    ("library", "refusals"),
    [
        ("vllm", ["ValueError"] * 3),  # for which its server returns status 400
        ("renderers", ["UnidentifiedImageError", "DecompressionBombError", "DecompressionBombError"]),
    ],
)
def test_engines_and_environment_servers_open_only_these_formats(
    tmp_path: Path, library: str, refusals: list[str]
) -> None:
    files = [saved("GIF"), saved("EPS"), large_png(5000), large_png(20_000)]
    paths = [tmp_path / str(number) for number in range(len(files))]
    for path, data in zip(paths, files, strict=True):
        assert data is not None
        path.write_bytes(data)
    pytest.importorskip(library)
    code = LIBRARIES.format(for_vllm=library == "vllm", open=OPEN[library])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-4:] == ["opened", *refusals]
