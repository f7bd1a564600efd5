"""The recipe: what is trained, and how. No torch in here."""

from gradus.recipe.check import validate
from gradus.recipe.load import adopt, dump, load, resolve
from gradus.recipe.schema import Recipe
from gradus.recipe.text import header, looked_for, names

__all__ = ["Recipe", "adopt", "dump", "header", "load", "looked_for", "names", "resolve", "validate"]
