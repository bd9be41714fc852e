"""One process of a pair: the reference side runs checks and sends what came out, the other side compares.

Usage (started by ``shard.py``): ``python -m harness.worker ROLE SUBSTRATE SAMPLES``. Requests are lines of JSON on
standard input, one for each variant. The reference writes pickled outcomes to the pipe whose number is in
``CONFORMANCE_PIPE``; the other side reads them there and writes lines of JSON to standard output.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import sys
import time
import warnings

from . import target as targets

_STICKY = ("device-side assert", "illegal memory access", "unspecified launch failure", "misaligned address")
SICK_DEVICE = 70  # exit status: a CUDA error from which the process cannot recover


def _make_run(database, target, request):
    import torch

    from .databases import entries

    entry = entries(request["database"])[request["name"]]
    return database.run(target, entry, getattr(torch, request["dtype"]), request["samples"])


def _outcomes(database, target, request):
    """Yield (check, outcomes) for every check of a request; samples that cannot be made leave no outcomes."""
    run = None
    for check in request["checks"]:
        try:
            run = run or _make_run(database, target, request)
            result = database.checks[check](run)
        except Exception as error:  # the samples could not be generated
            result = f"{type(error).__name__}: {str(error)[:200]}"
        yield check, result


def _stop_if_sick(result) -> None:
    """End the process after a CUDA error that makes every later call fail; the driver starts another one."""
    texts = [result] if isinstance(result, str) else [o.error[1] for o in result if o.error]
    if any(sign in text for text in texts for sign in _STICKY):
        os._exit(SICK_DEVICE)


def _reference(target, requests, pipe) -> None:
    from .databases import DATABASES

    for request in requests:
        for check, result in _outcomes(DATABASES[request["database"]], target, request):
            pickle.dump((request["id"], check, result), pipe, protocol=pickle.HIGHEST_PROTOCOL)
            pipe.flush()
            _stop_if_sick(result)


def _compared(target, requests, pipe, report) -> None:
    from .databases import DATABASES

    for request in requests:
        started = time.monotonic()
        produced = _outcomes(DATABASES[request["database"]], target, request)
        for expected_check in request["checks"]:
            report(["waiting", request["id"], expected_check])
            try:
                _, check, reference = pickle.load(pipe)
            except (EOFError, pickle.UnpicklingError):
                report(["reference lost", request["id"], expected_check])
                os._exit(0)
            report(["running", request["id"], check])
            _, got = next(produced)
            report(["result", request["id"], check, _verdict(target, request, check, reference, got)])
            _stop_if_sick(got)
        report(["done", request["id"], time.monotonic() - started])
        if request["id"] % 200 == 0:
            gc.collect()


def _verdict(target, request, check, reference, got) -> dict:
    import dataclasses

    from .comparison import Rules, Verdict, compare
    from .databases import ERROR_CHECKS, UNORDERED_CHECKS
    from .exclusions import CLOSE_ON_HOST, OWN_ORDER, RANDOM, UNINITIALISED

    own, fallback, computed = targets.take_counts()
    name = request["name"].split(".")[0] if request["name"].split(".")[0] in UNINITIALISED else request["name"]
    if isinstance(reference, str):
        verdict = Verdict(message=reference, without_reference=1)
    elif isinstance(got, str):
        verdict = Verdict(status="error", message=got)
    else:
        ordered = check not in UNORDERED_CHECKS
        close = request["name"] in CLOSE_ON_HOST or not computed.isdisjoint(OWN_ORDER)
        strict = target.substrate == "host" and not close and ordered
        # Sums whose terms cancel, through many layers: errors count against the largest element too.
        summed = check.startswith("double_backward") or (request["database"] == "module_db" and "backward" in check)
        scale = 1e-5 if not strict and summed else 0.0
        random = not computed.isdisjoint(RANDOM)
        rules = Rules(bit_equal=strict, values=name not in UNINITIALISED, strides=ordered, scale=scale, random=random)
        verdict = compare(reference, got, rules, errors=check in ERROR_CHECKS)
        if random and verdict.status == "passed" and check not in ERROR_CHECKS:
            _compare_with_second_run(target, request, check, got, verdict)
    return {**dataclasses.asdict(verdict), "own": own, "fallback": fallback}


def _compare_with_second_run(target, request, check, got, verdict) -> None:
    """Lower the verdict if the same seed does not give the same random numbers again."""
    from .comparison import Rules, compare
    from .databases import DATABASES

    again = dict(_outcomes(DATABASES[request["database"]], target, {**request, "checks": [check]}))[check]
    targets.take_counts()
    second = compare(got, again, Rules(bit_equal=True)) if not isinstance(again, str) else None
    if second is None or second.status != "passed":
        verdict.lower("failed", f"second run with the same seed: {again if second is None else second.message}")


def main(role: str, substrate: str) -> None:
    """Serve requests until standard input ends."""
    faulthandler.enable()
    warnings.filterwarnings("ignore")
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what operators print goes to the log
    target = targets.load(role, substrate)
    import torch

    torch.set_num_threads(1)

    def report(line: list) -> None:
        results.write(json.dumps(line) + "\n")

    requests = (json.loads(line) for line in sys.stdin)
    number = int(os.environ["CONFORMANCE_PIPE"])
    if role == "reference":
        with os.fdopen(number, "wb") as pipe:
            pickle.dump("ready", pipe)
            pipe.flush()
            _reference(target, requests, pipe)
    else:
        with os.fdopen(number, "rb") as pipe:
            pickle.load(pipe)  # the reference is ready too: from here on the driver watches for progress
            report(["ready", os.getpid()])
            _compared(target, requests, pipe, report)


if __name__ == "__main__":
    main(*sys.argv[1:])
