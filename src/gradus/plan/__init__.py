"""The plan: what a recipe will cost, traced from the code that trains, and set against what was measured."""
