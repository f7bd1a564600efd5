"""What a run will cost, before anything is spent.

A plan of a training run, in the order in which it comes about:

    request, answer             the request → recipe, hardware, layout; the figures as rows
    hf                          a bare model (a preset, a config.json) → a whole recipe, with published settings
    case, batches               the question, completed once; the micro-batches of a process, synthetic without data
    search, cut                 which layout: pruned by bounds, estimated from one small model, the best traced exactly
    engine                      the hub: a case → the processes that need most → memory and work of a step
    profiles, tracing, trace    which blocks are traced; a small model stepped under fake tensors; what its step records
    stage, process              profiles → a stage with all its blocks; a process as data: stages, what it holds of them
    compose                     operations and copies of a process
    peak, traffic               events of memory over the step, and their peak; what keeps parameters alike sends
    step                        work → seconds, by roofline (operations) and collectives (transfers)
    counts                      parameters and operations of the model alone, for MFU
    budget                      seconds → days, money, energy, CO2
    figures, keys, show         a figure with its formula, a layout as words, the screen

Beside it: `serving`, `passes` and `pass_tracing` (a model in use), `devices` (a recipe on every device), `web` (the
page), `published` (how far published runs are off), `store` (what was traced, on disk), `work` (the words they share).
"""
