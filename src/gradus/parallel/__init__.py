"""How a model runs: techniques applied from outside, in one documented order."""
