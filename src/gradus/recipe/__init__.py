"""The recipe: what is trained, and how. No torch in here."""

from gradus.recipe.load import load, resolve
from gradus.recipe.schema import Recipe
from gradus.recipe.text import dump, header, looked_for, names

__all__ = ["Recipe", "dump", "header", "load", "looked_for", "names", "resolve"]
