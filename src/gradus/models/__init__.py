"""The families: build one from its configuration, load and save it in the Hugging Face layout, count it."""

from gradus.models import weights
from gradus.models.building import COMPONENTS, build, check_built, component, count, deferred, trainable, whole
from gradus.models.config_json import adapter_config, base_of, one_line, to_config_json
from gradus.models.family import Family, Stack, families, lookup, register
from gradus.models.loading import beside, load, load_deferred, load_plain, load_start, load_weights
from gradus.models.locating import digest, locate, weight_files
from gradus.models.opening import config_of, tensors_of
from gradus.models.saving import convert, save

__all__ = [
    "COMPONENTS", "Family", "Stack", "adapter_config", "base_of", "beside", "build", "check_built", "component",
    "config_of", "convert", "count", "deferred", "digest", "families", "load", "load_deferred", "load_plain",
    "load_start", "load_weights", "locate", "lookup", "one_line", "register", "save", "tensors_of", "to_config_json",
    "trainable", "weight_files", "weights", "whole",
]  # fmt: skip
