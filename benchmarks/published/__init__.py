"""Published measurements of other people's runs, priced by the same profiles, chips and softwares as a plan of Gradus.

points: what a file of points may hold. runs: a point of a step's time or memory → a recipe, a cluster and a software. software: what that
software does otherwise than Gradus. price: seconds of many runs at once. fit: chips' and softwares' parameters. others: what is no run.
memory: a point of peak memory → what is asked, and its bytes as kept.yaml has the program. estimates: what people use instead.
"""
