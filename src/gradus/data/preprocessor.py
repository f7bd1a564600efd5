"""preprocessor_config.json beside published weights, as the keys of a recipe's data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import ValidationError

from gradus import limits
from gradus.errors import UserError
from gradus.recipe.schema import ImagesData, Pixels, PositiveFloat, Preprocess, Section, upto

FILE = "preprocessor_config.json"
CLASSES = ("ViT", "DeiT", "Beit", "Siglip", "CLIP", "Bit", "ConvNext")  # of transformers, without ImageProcessor
RESAMPLE = get_args(Preprocess.model_fields["resample"].annotation)  # by Pillow's numbers
SQUEEZED = 384  # pixels from which ConvNext's class ignores the aspect ratio; below, it crops the centre
WITHOUT_EFFECT = re.compile(  # do_convert_rgb: every image is converted to the channels that the model reads
    "do_convert_rgb|do_reduce_labels|default_to_square|processor_class|_valid_processor_keys|(input_)?data_format"
    "|return_tensors|device|disable_grouping"
)


class ShortestEdge(Section):
    shortest_edge: Pixels


class Sides(Section):
    height: Pixels
    width: Pixels


Size = Pixels | tuple[Pixels, Pixels] | ShortestEdge | Sides


class Preprocessor(Section):
    """The fields that are read. None: the default of the class."""

    image_processor_type: str | None = None
    feature_extractor_type: str | None = None  # as older versions wrote it
    do_resize: bool = True
    size: Size | None = None
    resample: Annotated[int, upto(len(RESAMPLE) - 1, 0)] | None = None
    do_center_crop: bool | None = None
    crop_size: Size | None = None
    crop_pct: PositiveFloat = 224 / 256
    do_rescale: bool = True
    rescale_factor: PositiveFloat = 1 / 255
    do_normalize: bool = True
    image_mean: list[float] = []
    image_std: list[PositiveFloat] = []


def read(file: Path, model: Any, image_size: int) -> dict[str, Any]:
    """`mean`, `std` and `preprocess` of a recipe's data that prepare images as the class of transformers does that the
    file names. Rescaling is a part of mean and std.

    model: the configuration of the weights beside the file; where training reads another image_size, lengths change in
    proportion. Raises UserError for a class, a field or a value that is not known.
    """
    said = {
        key: value for key, value in limits.read_object(file).items()
        if value is not None and (value or key in Preprocessor.model_fields) and not WITHOUT_EFFECT.fullmatch(key)
    }  # fmt: skip

    def refused(why: str) -> UserError:
        return UserError(f"{file}: {why}. Correct it, or set data.preprocess, data.mean and data.std in the recipe.")

    try:
        p = Preprocessor(**said)
    except ValidationError as e:
        key = e.errors()[0]["loc"][0]
        raise refused(f"{key}={said[key]!r:.80}: this field is not supported, or not with this value") from None
    name = p.image_processor_type or p.feature_extractor_type or "ViTImageProcessor"
    kind = re.sub("(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", name)
    if kind not in CLASSES:
        raise refused(f"{name:.60} is not supported; the image processors of {', '.join(CLASSES)} are")

    def sides(size: Any, square: bool) -> tuple[int, ...]:
        """(height, width), or (the shorter side,), in proportion to the image_size that training reads."""
        if isinstance(size, int):
            size = (size,) * (1 + square)
        values = (side for _, side in size) if isinstance(size, Section) else size
        return tuple(round(side * image_size / model.image_size) for side in values)

    square, larger = kind not in ("CLIP", "Bit", "ConvNext"), 256 / 224 if kind == "DeiT" else 1
    resize = sides(p.size or round(larger * model.image_size), square) if p.do_resize else None
    center_crop = kind in ("CLIP", "Bit", "DeiT") if p.do_center_crop is None else p.do_center_crop
    cut = sides(p.crop_size or model.image_size, True) if center_crop else ()
    if kind == "ConvNext" and resize:
        if resize[0] < SQUEEZED:
            cut, center_crop, resize = cut + resize, True, (int(resize[0] / p.crop_pct),)
        else:
            resize = resize[:1] * 2
    if {*cut, image_size} != {image_size}:
        reads = f"the model reads {image_size} × {image_size}"
        raise refused(f"it crops images to {' × '.join(map(str, cut))} pixels, and {reads}")
    mean, std = p.image_mean, p.image_std
    if not p.do_normalize:
        mean, std = [0.0] * model.n_channels, [1.0] * model.n_channels
    if not len(mean) == len(std) == model.n_channels:
        raise refused(f"image_mean and image_std need {model.n_channels} numbers each, one per channel")
    scale = 255 * (p.rescale_factor if p.do_rescale else 1)  # of values in 0..1
    number = p.resample if p.resample is not None else 2 if kind == "ViT" else 3
    resize = resize[0] if resize and len(resize) == 1 else resize
    how = Preprocess(resize=resize, resample=RESAMPLE[number], center_crop=center_crop)
    return {"mean": [x / scale for x in mean], "std": [x / scale for x in std], "preprocess": how}


def as_published(data: ImagesData, file: Path, model: Any, image_size: int) -> ImagesData:
    """The data, with mean, std and preprocess from the file where the recipe does not set them. Without a file, images
    are resized to image_size by their shorter side, and cropped."""
    said = read(file, model, image_size) if file.is_file() else {"preprocess": Preprocess(resize=image_size)}
    return data.model_copy(update={key: value for key, value in said.items() if getattr(data, key) is None})
