"""The recipe: what is trained, and how. No torch in here."""

from gradus.recipe.check import validate
from gradus.recipe.load import adopt, dump, header, load, looked_for, names, resolve
from gradus.recipe.schema import Recipe

__all__ = ["Recipe", "adopt", "dump", "header", "load", "looked_for", "names", "resolve", "validate"]
