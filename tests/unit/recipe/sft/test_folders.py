"""Files of a folder that hold the rows of a split."""

from pathlib import Path, PurePath

import pytest

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.resolve import check_rows
from primerl_hpc.recipe.schema.sft import SFTData
from primerl_hpc.recipe.sft.folders import data_files, group_by_split
from primerl_hpc.recipe.sft.tables import open_rows


def write_rows(folder: Path, *names: str) -> None:
    """Write a row into each file, whose prompt is the name."""
    import pyarrow
    import pyarrow.parquet

    for name in names:
        (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            table = pyarrow.table({"prompt": [name], "completion": ["c"]})
            pyarrow.parquet.write_table(table, path)
        else:
            path.write_text(f'{{"prompt": "{name}", "completion": "c"}}\n')


def prompts(folder: Path, **fields: object) -> list[str]:
    rows = open_rows(SFTData.model_validate({"path": str(folder), **fields}))
    return [rows[index].values["prompt"] for index in range(len(rows))]


def test_a_split_of_a_folder_has_its_own_rows_once(tmp_path):
    parts = ["train.parquet/part-0.parquet", "train.parquet/part-1.parquet"]
    write_rows(
        tmp_path,
        *parts,
        "train-more.jsonl",
        "test.jsonl",
        ".ipynb_checkpoints/train-checkpoint.jsonl",
        "_old/train.jsonl",
        "train.parquet/_temporary/part-2.parquet",
    )
    (tmp_path / "train.parquet" / "_SUCCESS").touch()
    (tmp_path / "dev.parquet").mkdir()  # an empty table
    assert prompts(tmp_path, split="train") == ["train-more.jsonl", *parts]
    assert prompts(tmp_path, split="test") == ["test.jsonl"]
    assert prompts(tmp_path / "train.parquet") == parts


def test_a_folder_of_several_splits_needs_a_split_before_the_queue(tmp_path):
    write_rows(tmp_path, "train.jsonl", "test.jsonl", "more.jsonl")
    expected = (
        r"the folder has files of several splits: no split in the name \(more\.jsonl\), "
        r"test \(test\.jsonl\), train \(train\.jsonl\)"
    )
    with pytest.raises(DataError, match=expected) as raised:
        open_rows(SFTData(path=str(tmp_path)))
    assert "set split of this source" in raised.value.hint
    with pytest.raises(DataError, match=expected):
        check_rows(tmp_path, 10, "chatml")
    check_rows(tmp_path, 10, "chatml", "train")
    with pytest.raises(DataError, match=r"no files of split 'validation': no split in the name \(more"):
        prompts(tmp_path, split="validation")


def test_a_folder_without_splits_or_with_one_is_read_completely(tmp_path):
    write_rows(tmp_path / "plain", "b/latest.jsonl", "a.jsonl", "contest.jsonl")
    assert prompts(tmp_path / "plain") == ["a.jsonl", "b/latest.jsonl", "contest.jsonl"]
    assert prompts(tmp_path / "plain", split="train") == prompts(tmp_path / "plain")
    write_rows(tmp_path / "held-out", "test-0.jsonl", "test-1.jsonl")
    assert prompts(tmp_path / "held-out") == ["test-0.jsonl", "test-1.jsonl"]


@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl", "test.jsonl", "valid_set.jsonl"],
        ["en-train.jsonl", "my.eval.jsonl", "train0.jsonl", "devices.jsonl", "retrain.jsonl"],
        ["data/train-00000-of-00001.parquet", "data/held_out-00000-of-00001-ab.parquet"],
        ["test/a.jsonl", "training/b.jsonl", "train_2/c/d.jsonl"],
        ["a.jsonl", "b/c.jsonl"],
    ],
)
def test_splits_are_those_of_package_datasets(tmp_path, names):
    pytest.importorskip("datasets")
    from datasets.data_files import DataFilesDict, get_data_patterns

    write_rows(tmp_path, *names)
    patterns = DataFilesDict.from_patterns(get_data_patterns(str(tmp_path)), base_path=str(tmp_path))
    expected = {
        str(split): sorted(str(PurePath(file).relative_to(tmp_path)) for file in files)
        for split, files in patterns.items()
    }
    groups = group_by_split(sorted(PurePath(name) for name in names))
    if list(groups) == [""]:
        groups = {"train": groups[""]}
    groups.pop("", None)  # `datasets` ignores files without a split next to files with one; we refuse them
    assert {split: sorted(map(str, files)) for split, files in groups.items()} == expected


def test_a_saved_dataset_names_its_splits_where_the_wanted_one_is_missing(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"prompt": "p", "completion": "c"}])
    datasets.DatasetDict({"easy": table, "hard": table}).save_to_disk(str(tmp_path))
    with pytest.raises(DataError, match="the dataset has no split 'train', it has easy, hard"):
        open_rows(SFTData(path=str(tmp_path)))
    assert len(open_rows(SFTData(path=str(tmp_path), split="hard"))) == 1
    assert data_files(tmp_path / "none") == []
