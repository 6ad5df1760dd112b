"""Judge: owns inputs, references and verdicts; trusts no reply.

Order: policy, compile, launch, verify, probe, measure. The first stage that refuses ends it; the evidence names it.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torch_kevolve.candidate import Candidate
from torch_kevolve.devices import current
from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation.base import Job
from torch_kevolve.evaluation.exhibits import Exhibits
from torch_kevolve.evaluation.measure import malloc_setting
from torch_kevolve.evaluation.policy import object_problem, problem_of
from torch_kevolve.evaluation.port import Port
from torch_kevolve.evaluation.statistics import checked, floor_ms, signature, summary
from torch_kevolve.evidence import Evidence, Stage, Timing
from torch_kevolve.languages import LANGUAGES
from torch_kevolve.languages.base import Built
from torch_kevolve.settings import Settings

log = logging.getLogger(__name__)
SETUP_S = 120.0
ARM_S = 300.0
GLANCE_S = 0.15
LOOK_S = 0.6
CONFIRM_S = 2.5
ARMS = ("inductor", "max_autotune")


class Judge:
    """One job, one worker behind `port`. Raises EvaluationError only when the baselines themselves cannot run."""

    def __init__(self, job: Job, settings: Settings, port: Port, seed: int = 0) -> None:
        self.job, self.settings, self.port = job, settings, port
        self.device = current(job.device)
        self.exhibits = Exhibits(job, settings, seed)
        self.baselines: dict[str, Timing] = {}
        self.notes: dict[str, str] = {}
        self.workdir = tempfile.TemporaryDirectory(prefix="kevolve-build-")
        self.arms = ["eager"]
        self._pool = ThreadPoolExecutor(max(1, min(16, torch.get_num_threads())))

    def open(self) -> None:
        """Give the worker the inputs, compile the Inductor arms, time all baselines."""
        self._setup()
        for arm in ARMS:
            left = self.job.deadline - time.monotonic()
            if left < 5 and len(self.arms) > 1:
                self.notes[arm] = "no time was left to compile it"
                continue
            reply = self.port.call({"do": "compile", "arm": arm}, min(ARM_S, max(30.0, left)))
            if "died" in reply or "problem" in reply:
                self.notes[arm] = str(reply.get("died") or reply.get("problem"))[:300]
                if "died" in reply:
                    self._setup()
                continue
            self.arms.append(arm)
        samples = self._time(self.arms, LOOK_S)
        if isinstance(samples, str):
            raise EvaluationError(detail=f"the baselines cannot be timed: {samples}")
        self.baselines = summary({**samples, "candidate": samples["eager"]})[0]
        del self.baselines["candidate"]

    def evaluate(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Evidence]]:
        """Builds run in parallel ahead of the judgement."""
        builds: list[tuple[Candidate, str, Future[Built] | None]] = []
        for candidate in candidates:
            problem = problem_of(candidate)
            builds.append((candidate, problem, None if problem else self._pool.submit(self._build, candidate)))
        for candidate, problem, future in builds:
            yield candidate, self._judge(candidate, problem, future)

    def confirm(self, candidate: Candidate) -> Evidence:
        """Fresh worker, fresh seeds, all arms interleaved."""
        self.port.restart()
        self.exhibits.renew(self.exhibits.seed + 1)
        problem = problem_of(candidate)
        evidence = self._judge(candidate, problem, None if problem else self._pool.submit(self._build, candidate), True)
        return evidence

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.port.close()
        self.exhibits.close()
        self.workdir.cleanup()

    def _build(self, candidate: Candidate) -> Built:
        arch = self.device.facts().arch if candidate.language != "triton" or self.device.name == "cuda" else "interpret"
        built = LANGUAGES[candidate.language]().build(candidate, self.job.binding, arch, Path(self.workdir.name))
        if built.artifact is not None and candidate.language == "cpp":
            problem = object_problem(built.artifact)
            if problem:
                return Built(None, f"policy: {problem}")
        return built

    def _judge(self, candidate: Candidate, problem: str, future: Future[Built] | None, confirming: bool = False) -> Evidence:
        if problem or future is None:
            return self._refuse(Stage.POLICY, problem)
        try:
            built = future.result()
        except Exception as error:  # our own builder broke: say so, judge the next one
            log.exception("building failed")
            return self._refuse(Stage.COMPILE, f"the builder broke: {type(error).__name__}: {error}")
        if not built.ok:
            return self._refuse(Stage.POLICY if built.note.startswith("policy:") else Stage.COMPILE, built.note)
        found = self._prove(candidate, built, confirming)
        return replace(found, compile_s=built.seconds, profile=dict(built.profile))

    def _prove(self, candidate: Candidate, built: Built, confirming: bool) -> Evidence:
        if self.port.fresh:
            self._setup()
            if not confirming:
                missing = self._arms_again()
                if missing:
                    raise EvaluationError(detail=missing)
        seconds = self.settings.candidate_s
        load = {"do": "load", "candidate": candidate.to_json(), "artifact": str(built.artifact)}
        reply = self.port.call(load, seconds)
        why = reply.get("died") or reply.get("problem")
        if why:
            return self._refuse(Stage.LAUNCH, str(why))
        stage, why = self.exhibits.verify(candidate, self.port, seconds)
        if why:
            return replace(self._refuse(stage, why), errors=self.exhibits.errors(), errors_twin=self.exhibits.errors_twin())
        return self._measure(confirming)

    def _measure(self, confirming: bool) -> Evidence:
        errors = {"errors": self.exhibits.errors(), "errors_twin": self.exhibits.errors_twin()}
        arms = list(self.arms)
        if not confirming:
            # The two fastest baselines are enough while searching; all of them stand beside a winner.
            arms = sorted(self.baselines, key=lambda name: self.baselines[name].median_ms)[:2]
            glance = self._time([*arms, "candidate"], GLANCE_S, 3)
            if isinstance(glance, str):
                return replace(self._refuse(Stage.MEASURE, glance), **errors)
            timings, ratio, low, high = summary(glance)
            if ratio < 0.8:
                return self._done(timings, ratio, low, high, errors)
        else:
            missing = self._arms_again()
            if missing:
                return replace(self._refuse(Stage.MEASURE, missing), **errors)
        samples = self._time([*arms, "candidate"], CONFIRM_S if confirming else LOOK_S)
        if isinstance(samples, str):
            return replace(self._refuse(Stage.MEASURE, samples), **errors)
        return self._done(*summary(samples), errors)

    def _done(self, timings: dict[str, Timing], ratio: float, low: float, high: float, errors: dict[str, Any]) -> Evidence:
        floor = floor_ms(self.exhibits.bytes_moved(), self.device.ceilings())
        mine = timings["candidate"].median_ms
        if mine < floor and mine < 0.9 * min(t.median_ms for name, t in timings.items() if name != "candidate"):
            return replace(
                self._refuse(Stage.MEASURE, f"{mine:.4f} ms is below the roofline floor of {floor:.4f} ms"), **errors
            )
        return replace(
            self._evidence(Stage.DONE, True, ""),
            arms=timings,
            ratio=ratio,
            ratio_lo=low,
            ratio_hi=high,
            roofline=floor / 0.9 / mine,
            **errors,
        )

    def _arms_again(self) -> str:
        """A fresh worker has no Inductor arms: compile them again (Inductor's cache makes it short)."""
        for arm in self.arms[1:]:
            reply = self.port.call({"do": "compile", "arm": arm}, ARM_S)
            if "died" in reply or "problem" in reply:
                return f"baseline {arm}: {reply.get('died') or reply.get('problem')}"
        return ""

    def _time(self, arms: Sequence[str], seconds: float, least: int = 7) -> dict[str, list[float]] | str:
        message = {"do": "time", "arms": list(arms), "seconds": seconds, "least": least}
        reply = self.port.call(message, self.settings.candidate_s + 60 * seconds)
        why = reply.get("died") or reply.get("problem")
        if why:
            return str(why)
        try:
            return checked(reply.get("samples"), arms)
        except EvaluationError as error:
            self.port.restart()
            return str(error)

    def _setup(self) -> None:
        reply = self.port.call(self.exhibits.setup_message(), SETUP_S)
        if "died" in reply or "problem" in reply:
            raise EvaluationError(detail=f"set-up: {reply.get('died') or reply.get('problem')}")
        self.port.fresh = False
        if self.device.name == "cpu":
            self.port.call({"do": "limit", "bytes": self.exhibits.memory_allowed()}, 10)

    def _refuse(self, stage: Stage, note: str) -> Evidence:
        return self._evidence(stage, False, note or "no reason was given")

    def _evidence(self, stage: Stage, ok: bool, note: str) -> Evidence:
        return Evidence(
            reached=stage,
            ok=ok,
            note=note,
            signature=signature(note),
            sizes=dict(self.job.binding),
            flags={
                **self.job.flags,
                "malloc": malloc_setting() if self.device.name == "cpu" else "",
                "frozen": str(self.job.frozen),
            },
            device={"hard": dict(self.device.fingerprint().hard), "soft": self.device.soft()},
        )
