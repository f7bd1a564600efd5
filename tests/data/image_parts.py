"""What the tests of images share: pictures drawn at random, and tables of them."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from gradus.data.images import FileImages


def random_images(n, channels=3, height=6, width=6, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, channels, height, width), dtype=np.uint8)


def picture(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))


def png(image: np.ndarray | Image.Image) -> bytes:
    out = io.BytesIO()
    (picture(image) if isinstance(image, np.ndarray) else image).save(out, format="PNG")
    return out.getvalue()


def write_parquet(path, files, labels, image="img", names=None, label_type=None):
    cells = pa.array([{"bytes": f, "path": None} for f in files], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table({image: cells, "label": pa.array(labels, label_type or pa.int64())})
    if names:
        features = {image: {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=7)
    return path


def content(dataset):
    return [(d["image"].tolist(), d["label"]) for d in (dataset[i] for i in range(len(dataset)))]


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def kept(folder, images, n_classes=3, name="noise"):
    """These images as a data set that is kept in a folder; `images` has them."""
    images.tofile(folder / "images.bin")
    classes = [str(c) for c in range(n_classes)]
    index = {name: i for i, name in enumerate(classes)}
    data = FileImages(name, np.arange(len(images)) % n_classes, classes, index, images.shape[1:], folder, None)
    data.images = images
    return data


def noise(folder, n=30, channels=3, height=8, width=8):
    return kept(folder, random_images(n, channels, height, width))
