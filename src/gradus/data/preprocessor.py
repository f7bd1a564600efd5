"""What preprocessor_config.json beside published weights says of images, as a recipe's data say it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field, ValidationError

from gradus import limits
from gradus.errors import UserError
from gradus.recipe.schema import ImagesData, Pixels, PositiveFloat, Preprocess, Section

FILE = "preprocessor_config.json"
CONVNEXT_SQUEEZES = 384  # pixels from which ConvNext's class squeezes; below, it cuts the centre out of a larger image
RESAMPLE = get_args(Preprocess.model_fields["resample"].annotation)  # by Pillow's numbers
CLASSES = {  # of transformers → its defaults: (a number as size is a square's side, resample, centre crop, size / crop)
    "ViT": (True, 2, False, 1.0), "DeiT": (True, 3, True, 256 / 224), "Beit": (True, 3, False, 1.0),
    "Siglip": (True, 3, False, 1.0), "CLIP": (False, 3, True, 1.0), "Bit": (False, 3, True, 1.0),
    "ConvNext": (False, 3, False, 1.0),
}  # fmt: skip
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
Channels = float | list[float]


class Preprocessor(Section):
    """The fields that are followed."""

    image_processor_type: str = "ViTImageProcessor"
    feature_extractor_type: str | None = None  # as older versions wrote it
    do_resize: bool = True
    size: Size | None = None
    resample: Annotated[int, Field(ge=0, lt=len(RESAMPLE))] | None = None
    do_center_crop: bool | None = None
    crop_size: Size | None = None
    crop_pct: PositiveFloat | None = None
    do_rescale: bool = True
    rescale_factor: PositiveFloat = 1 / 255
    do_normalize: bool = True
    image_mean: Channels | None = None
    image_std: Channels | None = None


def read(file: Path, n_channels: int, own_size: int, image_size: int) -> dict[str, Any]:
    """`mean`, `std` and `preprocess` of a recipe's data that prepare images as the class of transformers does that the
    file names. Rescaling is a part of mean and std.

    own_size: pixels per side of the images that the weights beside the file read; image_size: of those that are read
    here, in whose proportion all lengths change. Raises UserError for a class, a field or a value that is not known.
    """
    said = limits.read_object(file)
    for key, value in dict(said).items():
        known = key in Preprocessor.model_fields
        if value is None or WITHOUT_EFFECT.fullmatch(key) or (value is False and not known):
            del said[key]

    def refused(key: str, why: str) -> UserError:
        instead = "Or say in the recipe how images are prepared: data.preprocess, data.mean and data.std"
        return UserError(f"{file}: {key}={said.get(key)!r:.80}: {why}. {instead}.")

    try:
        p = Preprocessor(**said)
    except ValidationError as e:
        raise refused(e.errors()[0]["loc"][0], "not known here, or not with such a value") from None
    field = "feature_extractor_type" if p.feature_extractor_type else "image_processor_type"
    kind = re.sub("(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", getattr(p, field))
    if kind not in CLASSES:
        raise refused(field, f"how this class prepares images is not known here, only {', '.join(CLASSES)}")
    square, resample, crops, larger = CLASSES[kind]

    def sides(size: Any, square: bool) -> list[int]:
        """[height, width], or [the shorter side]."""
        values = [side for _, side in size] if isinstance(size, Section) else size
        values = [values] * (1 + square) if isinstance(values, int) else values
        return [round(side * image_size / own_size) for side in values]

    resize = sides(p.size or round(larger * own_size), square) if p.do_resize else None
    center_crop = crops if p.do_center_crop is None else p.do_center_crop
    crop = sides(p.crop_size or own_size, True) if center_crop else [image_size]
    if kind == "ConvNext" and resize is not None:
        if len(resize) > 1:
            raise refused("size", "this class takes a shortest_edge")
        if resize[0] < CONVNEXT_SQUEEZES:
            crop, center_crop = crop + resize, True
            resize = [int(resize[0] / (p.crop_pct or 224 / 256))]
        else:
            resize *= 2
    if set(crop) != {image_size}:
        raise refused("crop_size", f"these weights read images of {own_size} × {own_size} pixels")
    mean, std, scale = [0.0] * n_channels, [1.0] * n_channels, 255 * (p.rescale_factor if p.do_rescale else 1)
    if p.do_normalize:
        mean, std = (x if isinstance(x, list) else [x] * n_channels for x in (p.image_mean, p.image_std))
        if len(mean) != n_channels or len(std) != n_channels or None in mean + std or min(std) <= 0:
            what = f"are not {n_channels} numbers each, by which images are normalised. Write them there"
            raise UserError(f"{file}: image_mean and image_std {what}.")
    how = {"resize": resize and (tuple(resize) if len(resize) > 1 else resize[0]), "center_crop": center_crop}
    number = resample if p.resample is None else p.resample
    preprocess = Preprocess(resample=RESAMPLE[number], **how)
    return {"mean": [x / scale for x in mean], "std": [x / scale for x in std], "preprocess": preprocess}


def as_published(data: ImagesData, file: Path, n_channels: int, own_size: int, image_size: int) -> ImagesData:
    """The data with what they leave open of mean, std and preprocess as `read` finds it in the file, where there is
    one."""
    said = {"preprocess": Preprocess(resize=image_size)}
    if file.is_file():
        said = read(file, n_channels, own_size, image_size)
    return data.model_copy(update={key: value for key, value in said.items() if getattr(data, key) is None})
