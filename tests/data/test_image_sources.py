"""Where images come from: class folders, tables, CIFAR-10's own files; what is wrong there is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pytest
from image_parts import content, picture, png, random_images, save, write_parquet

from gradus.data import images as module
from gradus.data.image_sources import find_sources
from gradus.data.images import channel_stats, open_images
from gradus.errors import UserError
from gradus.recipe.schema import ImagesData


def test_class_folders(tmp_path):
    pictures = random_images(8)
    for i, image in enumerate(pictures):
        save(tmp_path / ("valid" if i == 7 else "train") / ("ant" if i % 2 else "bee") / f"{i}.png", picture(image))
    (tmp_path / "train" / "ant" / "Thumbs.db").write_text("x")
    splits = open_images(ImagesData(path=str(tmp_path)))
    assert list(splits) == ["train", "valid"] and splits["train"].classes == ["ant", "bee"]
    assert content(splits["train"]) == [(pictures[i].tolist(), int(i % 2 == 0)) for i in (1, 3, 5, 0, 2, 4, 6)]
    assert content(splits["valid"]) == [(pictures[7].tolist(), 0)]
    save(tmp_path / "valid" / "beee" / "9.png", picture(pictures[0]))
    with pytest.raises(UserError, match=r"valid/beee/9\.png: label beee, but there are 2 classes: ant, bee"):
        open_images(ImagesData(path=str(tmp_path)))
    (tmp_path / "train" / "ant" / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"notes\.txt: not an image file"):
        open_images(ImagesData(path=str(tmp_path)))


def test_names_of_splits_may_have_capital_letters(tmp_path):
    for split, n in (("Train", 6), ("Test", 2)):
        for i in range(n):
            save(tmp_path / split / "ab"[i % 2] / f"{i}.png", picture(random_images(1)[0]))
    sources = find_sources(ImagesData(path=str(tmp_path)))
    assert {split: len(source.paths) for split, source in sources.items()} == {"train": 6, "test": 2}
    assert sorted(set(sources["train"].labels())) == ["a", "b"]


def labelled(folder, rows, kind="csv", header=("file_name", "label")):
    """metadata.csv or .jsonl; returns the labels' pictures by name, which it writes."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "csv":
        (folder / "metadata.csv").write_text("\n".join(map(",".join, [header, *rows])))
    else:
        (folder / "metadata.jsonl").write_text("".join(json.dumps(dict(zip(header, row))) + "\n" for row in rows))
    for i, row in enumerate(rows):
        save(folder / row[0], picture(random_images(1, seed=i)[0]))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_metadata_beside_pictures_is_as_the_package_datasets_reads_it(tmp_path, kind, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    labels = ["cat", "dog", "01"]
    labelled(tmp_path / "d" / "train", [(f"{'deep/' * (i % 2)}{i}.png", labels[i % 3]) for i in range(9)], kind)
    labelled(tmp_path / "d" / "test", [(f"{i}.tiff", labels[i]) for i in (2, 0)], kind)
    (tmp_path / "d" / "README.md").write_text("x")
    theirs = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "d"), cache_dir=str(tmp_path / "cache"))
    sources = find_sources(ImagesData(path=str(tmp_path / "d")))
    assert list(sources) == ["train", "test"]
    train = module._open(sources["train"])
    test = module._open(sources["test"], train)
    assert train.classes == ["01", "cat", "dog"]
    for split, ours in (("train", train), ("test", test)):
        rows = [(np.asarray(row["image"]).transpose(2, 0, 1).tolist(), row["label"]) for row in theirs[split]]
        assert [(image, train.classes[label]) for image, label in content(ours)] == rows


def test_metadata_of_a_folder_alone(tmp_path):
    labelled(tmp_path, [(f"{i}.png", str(i % 2), "x") for i in range(24)], header=("file_name", "which", "label"))
    splits = open_images(ImagesData(path=str(tmp_path), label="which"))
    assert splits["train"].classes == ["0", "1"] and len(splits["valid"]) == 2
    labelled(tmp_path, [(f"{'test/' if i > 21 else ''}{i}.png", str(i % 2)) for i in range(24)])
    splits = open_images(ImagesData(path=str(tmp_path)), image_size=6)
    assert len(splits["test"]) == 2  # the first folder of a file's name says the split


@pytest.mark.parametrize(
    "rows, says",
    [
        ([("0.png", "a"), ("gone.png", "b")], r"metadata\.csv, row 2: file_name gone\.png: no such file"),
        ([("0.png", "a"), ("1.png", "")], r"1\.png: no label\. Correct it"),
        ([("0.png", ""), ("1.png", "")], r"metadata\.csv: no training image has a label \(column label, labels, class, target\)\. Rename the column of labels"),
    ],
)
def test_what_is_wrong_in_metadata_is_named(rows, says, tmp_path):
    labelled(tmp_path, rows)
    (tmp_path / "gone.png").unlink(missing_ok=True)
    with pytest.raises(UserError, match=says):
        open_images(ImagesData(path=str(tmp_path)))
    (tmp_path / "metadata.csv").write_text("id,label\n0.png,a\n")
    with pytest.raises(UserError, match=r"metadata\.csv: row 1 has no column 'file_name'; it has: id, label"):
        open_images(ImagesData(path=str(tmp_path)))


def test_a_label_that_training_does_not_have_is_named(tmp_path):
    labelled(tmp_path / "train", [(f"{i}.png", "ab"[i % 2]) for i in range(20)])
    labelled(tmp_path / "test", [("0.png", "c")])
    with pytest.raises(UserError, match=r"test/0\.png: label c, but there are 2 classes: a, b"):
        open_images(ImagesData(path=str(tmp_path)))


def test_a_test_split_without_labels_is_none(tmp_path, capsys):
    files = [png(image) for image in random_images(20)]
    write_parquet(tmp_path / "a" / "train.parquet", files, [0, 1] * 10)
    write_parquet(tmp_path / "a" / "test.parquet", files[:3], [-1] * 3)
    labelled(tmp_path / "b" / "train", [(f"{i}.png", "ab"[i % 2]) for i in range(20)])
    labelled(tmp_path / "b" / "test", [("0.png",), ("1.png",)], header=("file_name",))
    for i in range(20):
        save(tmp_path / "c" / "train" / "ab"[i % 2] / f"{i}.png", picture(random_images(1)[0]))
    save(tmp_path / "c" / "test" / "0.png", picture(random_images(1)[0]))
    for folder in "abc":
        assert list(open_images(ImagesData(path=str(tmp_path / folder)), image_size=6)) == ["train", "valid"]
        assert "no labels (or only -1), so it is not used as the test split" in capsys.readouterr().out


def test_bad_labels_and_columns_are_named(tmp_path):
    path, files = tmp_path / "train.parquet", [png(image) for image in random_images(20)]

    def opened(labels, says, config=None, **options):
        write_parquet(path, files, labels, **options)
        with pytest.raises(UserError, match=says):
            open_images(ImagesData(path=str(path), **(config or {})))

    good = [0] * 20
    opened(good[:11] + [2] + good[12:], rf"{path}, row 11: label 2, but there are 2 classes: 0, 1", names=["a", "b"])
    opened(good[:19] + [-1], "row 19: label -1, but there are 2 classes", names=["a", "b"])
    opened(good[:8] + [None] + good[9:], "row 8: no label")
    opened([0.5] * 20, "row 0: label 0.5 is neither a whole number nor a name", label_type=pa.float64())
    opened(good, r"no image column \(image, img\); there are: photo, label. Set data.image=NAME", image="photo")
    opened(good, r"no label column \(lable\); there are: img, label", config={"label": "lable"})
    write_parquet(path, files, good)
    write_parquet(tmp_path / "test.parquet", files[:3], [0, 1, 0])
    with pytest.raises(UserError, match=r"test\.parquet, row 1: label 1, but there are 1 classes"):
        open_images(ImagesData(path=str(tmp_path)))


def test_labels_of_a_table_may_be_names(tmp_path):
    files = [png(image) for image in random_images(20)]
    write_parquet(tmp_path / "train.parquet", files, ["dog", "cat", "01", "1"] * 5, label_type=pa.string())
    write_parquet(tmp_path / "test.parquet", files[:2], ["1", "cat"], label_type=pa.string())
    splits = open_images(ImagesData(path=str(tmp_path)))
    assert splits["train"].classes == ["01", "1", "cat", "dog"] and splits["test"].labels.tolist() == [1, 2]
    write_parquet(tmp_path / "test.parquet", files[:1], ["cow"], label_type=pa.string())
    with pytest.raises(UserError, match=r"test\.parquet, row 0: label cow, but there are 4 classes: 01, 1, cat, dog"):
        open_images(ImagesData(path=str(tmp_path)))


def test_numbers_that_do_not_occur_are_no_classes(tmp_path):
    files = [png(image) for image in random_images(20)]
    write_parquet(tmp_path / "train.parquet", files, [1, 4] * 10)
    write_parquet(tmp_path / "test.parquet", files[:2], [4, 1])
    splits = open_images(ImagesData(path=str(tmp_path)))
    assert splits["train"].classes == ["1", "4"] and sorted(set(splits["train"].labels.tolist())) == [0, 1]
    assert splits["test"].labels.tolist() == [1, 0] and splits["test"][0]["label"] == 1


def test_bad_paths_are_named(tmp_path):
    def says(text, **config):
        with pytest.raises(UserError, match=text) as caught:
            open_images(ImagesData(**config))
        assert "\n" not in str(caught.value)

    (tmp_path / "cifar").mkdir()
    says("data.path is missing")
    says("data.path=x has no effect with data.source=digits", path="x", source="digits")
    says("data.label=y has no effect with data.source=digits", label="y", source="digits")
    says(r"no such file or folder. Did you mean cifar\?", path=str(tmp_path / "cifer"))
    says("no parquet file, no class folder and no CIFAR-10 archive", path=str(tmp_path / "cifar"))
    (tmp_path / "train.parquet").write_bytes(b"PAR0")
    says(r"train\.parquet: not a whole Parquet file", path=str(tmp_path / "train.parquet"))
    (tmp_path / "a.zip").write_bytes(b"PK")
    says(r"a\.zip: images come from", path=str(tmp_path / "a.zip"))


DAMAGES = ["null", "[", "{}", '{"mean": 5, "std": 5}', '{"mean": [0.5], "std": [0.5]}', '{"mean": [0.5, 0.5, "x"], "std": [0.5, 0.5, 0.5]}', "[" * 90_000, "\udc80"]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_what_is_kept_beside_decoded_images_is_made_anew_where_it_is_damaged(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    for i, image in enumerate(random_images(8)):
        save(tmp_path / "images" / ("valid" if i > 5 else "train") / "ab"[i % 2] / f"{i}.png", picture(image))

    def opened() -> tuple:
        split = open_images(ImagesData(path=str(tmp_path / "images")))["train"]
        return channel_stats(split), split.content

    whole = opened()
    kept = list((tmp_path / "cache" / "images").rglob("stats.json"))
    assert kept  # its content stands in about.json, of which test_a_damaged_cache_is_made_anew speaks
    for path in kept:
        path.write_bytes(damage.encode(errors="surrogateescape"))
    assert opened() == whole
    for path in kept:  # a pipe, which would be read without end
        path.unlink()
        os.mkfifo(path)
    assert opened() == whole


# ---------------------------------------------------------------- real ones


@pytest.mark.slow
@pytest.mark.shared_data
def test_cifar_10_training_statistics(shared_data):
    train = open_images(ImagesData(path=str(shared_data / "cifar10" / "train.parquet")))["train"].dataset
    mean, std = channel_stats(train)
    np.testing.assert_allclose(np.array(mean) * 255, [125.3069, 122.9504, 113.8654], atol=5e-5)
    np.testing.assert_allclose(np.array(std) * 255, [62.9932, 62.0887, 66.7049], atol=5e-5)
    assert channel_stats(train) == (mean, std)  # kept


HUB = """
import sys
import tarfile
from gradus.data.images import open_images
from gradus.errors import UserError
from gradus.recipe.schema import ImagesData
splits = open_images(ImagesData(path="hf:" + sys.argv[1]))
print({split: len(d) for split, d in splits.items()}, splits["train"].classes, splits["test"][2]["image"].sum(), splits["test"][2]["label"])
try:
    open_images(ImagesData(path="hf:nobody/nothing"))
except UserError as e:
    print(e)
"""


@pytest.mark.slow
def test_hugging_face_data_sets(tmp_path):
    images = random_images(24)
    write_parquet(tmp_path / "d" / "train-00000-of-00001.parquet", map(png, images[:20]), [i % 2 for i in range(20)], names=["a", "b"])
    write_parquet(tmp_path / "d" / "test-00000-of-00001.parquet", map(png, images[20:]), [0, 0, 1, 0], names=["a", "b"])
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    out = subprocess.run([sys.executable, "-c", HUB, tmp_path / "d"], env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[-2] == f"{{'train': 18, 'valid': 2, 'test': 4}} ['a', 'b'] {images[22].astype(int).sum()} 1"
    assert out[-1].startswith("hf:nobody/nothing: cannot be loaded (") and out[-1].endswith("stage it first: gradus fetch")


# ---------------------------------------------------------------- CIFAR-10's own files


def records(images, labels):
    return b"".join(bytes([label]) + image[0].tobytes() + image[1].tobytes() + image[2].tobytes() for image, label in zip(images, labels))


def test_cifar_archive_and_folder(tmp_path):
    images, labels = random_images(60, 3, 32, 32), [i % 10 for i in range(60)]
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for k in range(5):
        (folder / f"data_batch_{k + 1}.bin").write_bytes(records(images[10 * k : 10 * k + 10], labels[10 * k : 10 * k + 10]))
    (folder / "test_batch.bin").write_bytes(records(images[50:], labels[50:]))
    (folder / "batches.meta.txt").write_text("airplane\n")
    archive = tmp_path / "packed" / "cifar-10-binary.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname="cifar-10-batches-bin")
    for path in (folder, tmp_path, archive, archive.parent):
        config = ImagesData(path=str(path))
        assert sorted(open_images(config)["valid"].labels) == list(range(10))  # of the five of each class one
        train = module._open(find_sources(config)["train"])
        assert train.classes[3] == "cat" and content(train) == [(image.tolist(), label) for image, label in zip(images[:50], labels)]
        assert content(module._open(find_sources(config)["test"])) == [
            (image.tolist(), label) for image, label in zip(images[50:], labels[50:])
        ]


def test_cifar_errors(tmp_path):
    images = random_images(20, 3, 32, 32)
    file = tmp_path / "data_batch_1.bin"
    file.write_bytes(records(images, [0] * 20)[:-100])
    with pytest.raises(UserError, match=r"data_batch_1\.bin, row 19: an image of 2973 bytes, not 3073"):
        open_images(ImagesData(path=str(tmp_path)))
    file.write_bytes(records(images, [0] * 4 + [77] + [0] * 15))
    with pytest.raises(UserError, match=r"data_batch_1\.bin, row 4: label 77, but there are 10 classes"):
        open_images(ImagesData(path=str(tmp_path)))
    file.rename(tmp_path / "data_batch_1")
    with pytest.raises(UserError, match=r"pickles.*cifar-10-binary\.tar\.gz"):
        open_images(ImagesData(path=str(tmp_path)))
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "data_batch_1", arcname="cifar-10-batches-py/data_batch_1")
    with pytest.raises(UserError, match=r"pickles.*cifar-10-binary\.tar\.gz"):
        open_images(ImagesData(path=str(archive)))
