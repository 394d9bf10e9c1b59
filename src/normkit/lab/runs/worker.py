"""The process that measures. It reads requests, one JSON object a line, and answers each with one.

It runs one thread of torch with deterministic algorithms, so a measurement's bits do not depend on how many
workers there are; a worker for studies that measure time has all cores and torch as its users find it. It ends
when its input ends, at once and whatever it is doing, so it never outlives the run that started it.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from normkit.lab.claim import Study
    from normkit.lab.corpus import Corpus
    from normkit.lab.language import Language

Request = dict[str, Any]
Reply = dict[str, Any]


def main() -> None:
    """Serve requests from stdin until it ends."""
    # Replies have the pipe to themselves: what a study prints goes to the log.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, requests), daemon=True).start()
    hello = requests.get()
    _prepare(timing=bool(hello["timing"]), threads=int(hello["threads"]))
    while True:
        request = requests.get()
        replies.write(json.dumps(_answer(request, hello["settings"]), allow_nan=False) + "\n")
        replies.flush()


def _listen(stream: TextIO, requests: queue.SimpleQueue[Request]) -> None:
    for line in stream:
        requests.put(json.loads(line))
    os._exit(0)


def _prepare(timing: bool, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    if not timing:
        torch.set_num_interop_threads(1)
        torch.use_deterministic_algorithms(True)


def _answer(request: Request, settings: Request) -> Reply:
    try:
        if "report" in request:
            return _report(request["report"], request["language"])
        return _measure(request, settings)
    except Exception as error:
        from normkit.lab.runs.judged import last_line

        traceback.print_exc()
        return {"error": last_line(error), "kind": type(error).__name__}


def _report(folder: str, language: Language) -> Reply:
    from normkit.lab.report import write_report

    return {"path": str(write_report(Path(folder), language))}


def _measure(request: Request, settings_json: Request) -> Reply:
    import torch

    from normkit.lab.claim import Bench
    from normkit.lab.draws import Draws
    from normkit.lab.runs.lines import jsonable
    from normkit.lab.settings import Settings

    settings = Settings.from_json(settings_json)
    study = find_study(request["module"], request["study"])
    arm = next(arm for arm in study.arms(settings) if arm.name == request["arm"])
    draws = Draws(study.id, arm.name, int(request["seed"]))
    corpus = _corpus(settings.corpus, settings.corpus_sha256) if study.corpus else None
    folder = Path(request["folder"]) if "folder" in request else None
    # A study draws from its own streams; should it reach for the global one, that must not depend on what this
    # worker did before.
    torch.manual_seed(draws.own("global").initial_seed())
    start = time.perf_counter()
    values = study.measure(arm.params, Bench(settings, draws, corpus, folder))
    seconds = time.perf_counter() - start
    return {"values": jsonable(values), "seconds": seconds}


def find_study(module: str, study: str) -> Study:
    """Return the study that a claim of ``module`` judges, or that it names in ``STUDIES``."""
    holder = importlib.import_module(module)
    studies = (*getattr(holder, "STUDIES", ()), *(claim.study for claim in getattr(holder, "CLAIMS", ())))
    return next(found for found in studies if found is not None and found.id == study)


@cache
def _corpus(path: str, sha256: str) -> Corpus:
    from normkit.lab.corpus import CorpusError, load_corpus

    corpus = load_corpus(path)
    if corpus.sha256 != sha256:
        raise CorpusError(f"{path} changed while the run was going on; start again with the text as it is now")
    return corpus
