"""Start a function on n processes that have met over gloo. The processes come from a server that has imported torch and gradus: 0.3 s, not 7."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import pickle
import queue
import sys
import time
import traceback

spent = 0.0  # processor seconds of all processes that were started so far, which no parent of them waits for


def server():
    context = multiprocessing.get_context("forkserver")
    below = ("fsdp", "tensor.parallel", "checkpoint", "pipelining")
    context.set_forkserver_preload(["pytest", *(f"torch.distributed.{name}" for name in below), "gradus.proof.prove"])
    return context


def _enter(file: str, name: str, rank: int, n: int, port: int, results, args: tuple, environment: dict) -> None:
    gc.freeze()  # what the server has imported is no garbage
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    import torch

    from gradus.parallel import world as worlds

    if "COVERAGE_PROCESS_START" in os.environ:  # `make coverage`: this fork is of a server that an earlier test started
        from coverage import Coverage

        Coverage.current().switch_context(os.environ["GRADUS_TEST"])
    torch.set_num_threads(1)
    try:
        here = worlds.find()
        worlds.join(here, timeout=60)
        spec = importlib.util.spec_from_file_location("distributed_test_module", file)
        module = sys.modules["distributed_test_module"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        found = (rank, True, pickle.dumps(getattr(module, name)(here, *args)))
    except BaseException:
        found = (rank, False, traceback.format_exc())
    results.put((*found, time.process_time()))
    results.close()
    results.join_thread()
    worlds.leave(0 if found[1] else 1)


def run(n: int, function, *args, timeout: float = 900.0, environment: dict | None = None) -> list:
    """What `function(world, *args)` returned on each of n processes, in the order of their ranks.

    `function` is a plain function of a module's top level. Raises AssertionError with the traceback of the first process that failed.
    """
    from gradus.parallel.world import free_port

    global spent
    context = server()
    results, port = context.Queue(), free_port()
    environment = (environment or {}) | {name: os.environ[name] for name in ("GRADUS_TEST",) if name in os.environ}
    file, name = function.__code__.co_filename, function.__name__
    processes = [context.Process(target=_enter, args=(file, name, r, n, port, results, args, environment), daemon=True) for r in range(n)]
    for p in processes:
        p.start()
    answers, end = {}, time.monotonic() + timeout
    try:
        while len(answers) < n:
            try:
                rank, fine, value, seconds = results.get(timeout=0.5)
            except queue.Empty:
                gone = [r for r, p in enumerate(processes) if not p.is_alive() and r not in answers]
                assert time.monotonic() < end, f"no answer within {timeout} s from ranks {sorted(set(range(n)) - set(answers))}"
                assert not gone or not results.empty(), f"ranks {gone} died (exit codes {[processes[r].exitcode for r in gone]})"
                continue
            spent += seconds
            assert fine, f"rank {rank} of {n}:\n{value}"
            answers[rank] = pickle.loads(value)
    finally:
        for p in processes:
            p.join(5 if len(answers) == n else 0.1)
            if p.is_alive():
                p.kill()
    return [answers[r] for r in range(n)]
