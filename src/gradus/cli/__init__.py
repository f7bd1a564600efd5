"""`gradus VERB RECIPE key=value ...`: a file for each group of verbs (start, plan, train, use, measure, move), in which
each verb is a thin function beside its options. `parsing` makes the parser, the help and the completion of them;
`running` calls the function. Heavy imports are inside the functions, so that `--help` is quick."""

from gradus.cli.parsing import JOURNEY, parse, parser
from gradus.cli.running import main, run

__all__ = ["JOURNEY", "main", "parse", "parser", "run"]
