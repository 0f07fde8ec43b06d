"""Parameters of vision towers with their projector to the text model."""

from __future__ import annotations

from primerl_hpc.plan.predict.architectures.config_reader import MAX_LAYERS, ConfigReader


def _linear(ins: int, outs: int) -> int:
    return (ins + 1) * outs


def qwen2_vl(reader: ConfigReader, hidden: int) -> int:
    """Return the parameters of Qwen2-VL's tower. ``hidden``: width of the text model, unused."""
    width, merge = reader.size("embed_dim"), reader.size("spatial_merge_size", default=2) ** 2
    ratio = reader.size("mlp_ratio", default=4)
    block = 4 * width + _linear(width, 3 * width) + _linear(width, width)
    block += _linear(width, ratio * width) + _linear(ratio * width, width)
    merger = (
        2 * width + _linear(merge * width, merge * width) + _linear(merge * width, reader.size("hidden_size"))
    )
    return _patches(reader, width) + _depth(reader) * block + merger


def qwen2_5_vl(reader: ConfigReader, hidden: int) -> int:
    width, inner = reader.size("hidden_size"), reader.size("intermediate_size")
    merge = reader.size("spatial_merge_size", default=2) ** 2
    block = 2 * width + _linear(width, 3 * width) + _linear(width, width)
    block += 2 * _linear(width, inner) + _linear(inner, width)
    merger = (
        width + _linear(merge * width, merge * width) + _linear(merge * width, reader.size("out_hidden_size"))
    )
    return _patches(reader, width) + _depth(reader) * block + merger


def qwen3_vl(reader: ConfigReader, hidden: int) -> int:
    """Return the parameters of the towers of Qwen3-VL and, without deepstack mergers, Qwen3.5."""
    width, inner = reader.size("hidden_size"), reader.size("intermediate_size")
    merge, out = reader.size("spatial_merge_size", default=2) ** 2, reader.size("out_hidden_size")
    block = 4 * width + _linear(width, 3 * width) + _linear(width, width)
    block += _linear(width, inner) + _linear(inner, width)
    merger = 2 * width + _linear(merge * width, merge * width) + _linear(merge * width, out)
    deep = len(reader.indices("deepstack_visual_indexes")) * (merger + 2 * (merge - 1) * width)
    positions = reader.size("num_position_embeddings") * width
    return _patches(reader, width) + width + positions + _depth(reader) * block + merger + deep


def kimi(reader: ConfigReader, hidden: int) -> int:
    """Return the parameters of the tower and projector of Kimi K2.5."""
    width = reader.size("hidden_size", "vt_hidden_size")
    inner = reader.size("intermediate_size", "vt_intermediate_size")
    layers = reader.size("num_hidden_layers", "vt_num_hidden_layers", most=MAX_LAYERS)
    patch = reader.size("patch_size")
    height, columns = (reader.size(f"pos_emb_{side}", f"init_pos_emb_{side}") for side in ("height", "width"))
    block = 4 * width + 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width)
    merged = 4 * width
    projector = 2 * width + _linear(merged, merged) + _linear(merged, hidden)
    embeddings = _linear(3 * patch**2, width) + height * columns * width
    return embeddings + layers * block + 2 * width + projector


def _depth(reader: ConfigReader) -> int:
    return reader.size("depth", most=MAX_LAYERS)


def _patches(reader: ConfigReader, width: int) -> int:
    channels = reader.size("in_channels", "in_chans", default=3)
    return channels * reader.size("temporal_patch_size", default=2) * reader.size("patch_size") ** 2 * width
