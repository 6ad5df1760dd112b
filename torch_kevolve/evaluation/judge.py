"""Judge: owns inputs, references and verdicts; trusts no reply.

Order: policy, compile, launch, verify, probe, measure. The first stage that refuses ends it; the evidence names it.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torch_kevolve.candidate import Candidate
from torch_kevolve.devices import current
from torch_kevolve.devices.quiet import wait_for_quiet
from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation.base import LEAST_JUDGED, Job
from torch_kevolve.evaluation.exhibits import Exhibits
from torch_kevolve.evaluation.measure import malloc_setting
from torch_kevolve.evaluation.policy import object_problem, plan_problem, problem_of
from torch_kevolve.evaluation.port import Port
from torch_kevolve.evaluation.probes import POISONS, Proof
from torch_kevolve.evaluation.statistics import MATMULS, checked, floor_ms, flops, signature, summary
from torch_kevolve.evaluation.switches import Switches
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
"""Inductor's arms. Where nothing is autotuned (no matrix product on a CPU) the second is compiled for the confirmation
alone: it took half of the seconds before the first candidate, and its code is the default's."""
PATIENCE_S = {LOOK_S: 0.5, CONFIRM_S: 4.0}
"""How long it waits: a glance only drops what is far behind, and needs no quiet."""
Build = Callable[[Candidate, dict[str, int], str, Path], Built]


def build_here(candidate: Candidate, binding: dict[str, int], arch: str, workdir: Path) -> Built:
    """Build in this process. C++ is compiled by a child of it; Triton for a real GPU needs walls of its own."""
    return LANGUAGES[candidate.language]().build(candidate, binding, arch, workdir)


class Judge:
    """One job, one worker behind `port`. Raises EvaluationError only when the baselines themselves cannot run."""

    def __init__(self, job: Job, settings: Settings, port: Port, seed: int = 0, build: Build = build_here) -> None:
        self.job, self.settings, self.port = job, settings, port
        self.device = current(job.device)
        self.exhibits = Exhibits(job, settings, seed)
        self.baselines: dict[str, Timing] = {}
        self.notes: dict[str, str] = {}
        self.workdir = tempfile.TemporaryDirectory(prefix="kevolve-build-")
        self.arms = ["eager"]
        self._late = ARMS[1:] if self._nothing_to_tune() else ()
        self._compiled: set[str] = set()
        self._load, self._judged = 0.0, 0
        self._build_one = build
        self._builds: list[Future[Built]] = []
        self._before = Switches.now()
        self._pool = ThreadPoolExecutor(max(1, min(16, torch.get_num_threads())))

    def open(self) -> None:
        """Compile the Inductor arms in the worker while the answers are worked out here, then time all baselines."""
        started = time.monotonic()
        Switches.of(dict(self.job.task.flags)).put()
        self.exhibits.begin()
        self._together(lambda: self._compile_arms([arm for arm in ARMS if arm not in self._late]))
        ready = time.monotonic()
        samples = self._time(self.arms, LOOK_S, 3)
        if isinstance(samples, str):
            raise EvaluationError(detail=f"the baselines cannot be timed: {samples}")
        self.baselines = summary({**samples, "candidate": samples["eager"]})[0]
        del self.baselines["candidate"]
        took, timed = ready - started, time.monotonic() - ready
        log.info("%s opened: %.1f s for arms and references, %.1f s to time them", self.job.task.key[:8], took, timed)

    def evaluate(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Evidence]]:
        """Builds run in parallel ahead of the judgement. After the job's deadline no further candidate is begun, if
        LEAST_JUDGED were."""
        rows = [(candidate, *self._begin(candidate)) for candidate in candidates]
        for candidate, problem, future in rows:
            if time.monotonic() > self.job.deadline and self._judged >= LEAST_JUDGED:
                for _, _, other in rows:
                    if other is not None:
                        other.cancel()
                return
            started = time.monotonic()
            self._judged += 1
            found = self._judge(candidate, problem, future)
            log.info("%s judged in %.1f s: %s", candidate.id[:8], time.monotonic() - started, found.reached.name)
            yield candidate, found

    def confirm(self, candidate: Candidate) -> Evidence:
        """Fresh worker, fresh seeds, all arms interleaved; Inductor's that were left out so far are compiled now."""
        seed = self.exhibits.seed + 1
        problem, future = self._begin(candidate)
        self.exhibits.close()
        self.device.give_back()
        self.exhibits = Exhibits(self.job, self.settings, seed)
        self.port.restart()
        self._compiled.clear()
        self.exhibits.begin()
        missing = self._together(lambda: self._compile(self.arms) or self._compile_arms(self._late, needed=True))
        self._late = ()
        if missing:
            return self._refuse(Stage.MEASURE, missing)
        return self._judge(candidate, problem, future, True)

    def close(self) -> None:
        self._before.put()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.port.close()
        self.exhibits.close()
        self.device.give_back()
        self.workdir.cleanup()

    def _together(self, compile_arms: Callable[[], str]) -> str:
        """Set the worker up with the first draws, let it compile, and make all the rest meanwhile."""
        self._setup(whole=False)
        self.port.spare()
        # The references stay in this thread: in another one torch has one core and glibc gives freed pages back, so 65
        # M elements are compared in 3.3 s instead of 0.75.
        compiling = self._pool.submit(compile_arms)
        try:
            self._finish_exhibits()
        finally:
            wait([compiling])
        outcome = compiling.result()
        if not self.port.fresh:
            self._must(self.exhibits.rest_message(), SETUP_S)
        return outcome

    def _finish_exhibits(self) -> None:
        with self.device.share():
            self.exhibits.finish()
            self.device.give_back()

    def _nothing_to_tune(self) -> bool:
        return self.device.name == "cpu" and not any(op.target in MATMULS for op in self.job.task.graph.ops)

    def _compile_arms(self, wanted: Sequence[str], needed: bool = False) -> str:
        """What Inductor cannot compile is noted and is no rival. `needed`: whatever the deadline."""
        for arm in wanted:
            left = ARM_S if needed else self.job.deadline - time.monotonic()
            if left < 5 and len(self.arms) > 1:
                self.notes[arm] = "no time was left to compile it"
                continue
            reply = self.port.call({"do": "compile", "arm": arm}, min(ARM_S, max(30.0, left)))
            why = reply.get("died") or reply.get("problem")
            if why:
                self.notes[arm] = str(why)[:300]
                if self.port.fresh:
                    self._setup(whole=False)
                continue
            self.arms.append(arm)
            self._compiled.add(arm)
        return ""

    def _compile(self, arms: Sequence[str]) -> str:
        """Arms that this worker does not have yet: a fresh one has none (Inductor's cache makes it short)."""
        for arm in arms:
            if arm == "eager" or arm in self._compiled:
                continue
            reply = self.port.call({"do": "compile", "arm": arm}, ARM_S)
            why = reply.get("died") or reply.get("problem")
            if why:
                return f"baseline {arm}: {why}"[:300]
            self._compiled.add(arm)
        return ""

    def _begin(self, candidate: Candidate) -> tuple[str, Future[Built] | None]:
        allowed = self.exhibits.memory_allowed()
        problem = problem_of(candidate) or plan_problem(candidate.plan, self.job.binding, allowed)
        if problem:
            return problem, None
        future = self._pool.submit(self._build, candidate)
        self._builds.append(future)
        return "", future

    def _build(self, candidate: Candidate) -> Built:
        arch = self.device.facts().arch if candidate.language != "triton" or self.device.name == "cuda" else "interpret"
        built = self._build_one(candidate, dict(self.job.binding), arch, Path(self.workdir.name))
        if built.artifact is not None and candidate.language == "cpp":
            problem = object_problem(built.artifact.with_suffix(".o"), candidate.source)
            if problem:
                return Built(None, f"policy: {problem}")
        return built

    def _judge(
        self, candidate: Candidate, problem: str, future: Future[Built] | None, confirming: bool = False
    ) -> Evidence:
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
            self._setup(whole=True)
        seconds = self.settings.candidate_s
        load = {"do": "load", "candidate": candidate.to_json(), "artifact": str(built.artifact)}
        reply = self.port.call(load, seconds)
        why = reply.get("died") or reply.get("problem")
        if why:
            return self._refuse(Stage.LAUNCH, str(why)[:1000])
        proof = Proof(self.exhibits, candidate, self.port, seconds)
        with self.device.share():
            stage, why = proof.run()
            self.device.give_back()
        found = self._refuse(stage, why) if why else self._measure(candidate, proof, confirming)
        return replace(found, errors=proof.errors, errors_twin=proof.errors_twin)

    def _measure(self, candidate: Candidate, proof: Proof, confirming: bool) -> Evidence:
        arms = list(self.arms)
        library = candidate.language == "aten"
        if not confirming:
            # The fastest rival is enough while searching; all of them stand beside a winner.
            timed = list(self.baselines)  # an arm that joined for a confirmation was not timed at the opening
            rivals = [name for name in timed if not (library and name == "eager")] or timed
            arms = [min(rivals, key=lambda name: self.baselines[name].median_ms)]
        missing = self._compile(arms)
        if missing:
            return self._refuse(Stage.MEASURE, missing)
        samples: dict[str, list[float]] | str
        if not confirming:
            samples = self._time([*arms, "candidate"], GLANCE_S, 3, proof)
            if isinstance(samples, str):
                return self._refuse(Stage.MEASURE, samples)
            if summary(samples, library)[1] < 0.8:
                return self._done(samples, library)
        samples = self._time([*arms, "candidate"], CONFIRM_S if confirming else LOOK_S, 7, proof)
        return self._refuse(Stage.MEASURE, samples) if isinstance(samples, str) else self._done(samples, library)

    def _done(self, samples: dict[str, list[float]], library: bool) -> Evidence:
        timings, ratio, low, high = summary(samples, library)
        floor = self._floor()
        mine = timings["candidate"].median_ms
        others = min(timing.median_ms for name, timing in timings.items() if name != "candidate")
        if mine < floor < others:
            # The ceilings may be those of a slow hour of a shared machine: 19 GB/s on file where 36 were to be had.
            self.device.ceilings(again=True)
            floor = self._floor()
        # A baseline below the floor says that the ceilings were measured on a busy machine, not that it cheats.
        if mine < floor < others:
            return self._refuse(Stage.MEASURE, f"{mine:.4f} ms is impossible: the roofline floor is {floor:.4f} ms")
        return replace(
            self._evidence(Stage.DONE, True, ""),
            arms=timings,
            ratio=ratio,
            ratio_lo=low,
            ratio_hi=high,
            roofline=floor / 0.9 / mine if floor < others else None,
        )

    def _floor(self) -> float:
        return floor_ms(self.exhibits.bytes_moved(), flops(self.job.task, self.job.binding), self.device)

    def _time(
        self, arms: Sequence[str], seconds: float, least: int = 7, proof: Proof | None = None
    ) -> dict[str, list[float]] | str:
        """Samples, or why there are none. One measurement at a time on the device; none beside our own builds."""
        wait(self._builds)
        self._builds.clear()
        self.port.settle(60.0)
        message = {"do": "time", "arms": list(arms), "seconds": seconds, "least": least}
        self.exhibits.fill(self.exhibits.all[0])
        if proof is not None:
            proof.poison(POISONS[0])
        with self.device.lock():
            self._load = wait_for_quiet(self.device, PATIENCE_S.get(seconds, 0.0))
            reply = self.port.call(message, self.settings.candidate_s + 60 * seconds)
        why = reply.get("died") or reply.get("problem")
        if why:
            return str(why)[:1000]
        if proof is not None:
            problem = proof.timed_problem(reply)
            if problem:
                return f"the outputs of the timed run are wrong: {problem}"
        try:
            return checked(reply.get("samples"), arms)
        except EvaluationError as error:
            self.port.restart()
            return str(error)

    def _setup(self, whole: bool) -> None:
        self._compiled.clear()
        self._must(self.exhibits.setup_message(whole), SETUP_S)
        self.port.fresh = False
        if self.device.name == "cpu":
            self.port.call({"do": "limit", "bytes": self.exhibits.memory_allowed()}, 10)

    def _must(self, message: dict[str, Any], seconds: float) -> None:
        reply = self.port.call(message, seconds)
        why = reply.get("died") or reply.get("problem")
        if why:
            raise EvaluationError(detail=f"set-up: {why}"[:1000])

    def _refuse(self, stage: Stage, note: str) -> Evidence:
        return self._evidence(stage, False, note or "no reason was given")

    def _evidence(self, stage: Stage, ok: bool, note: str) -> Evidence:
        cpu = self.device.name == "cpu"
        return Evidence(
            reached=stage,
            ok=ok,
            note=note,
            signature=signature(note),
            sizes=dict(self.job.binding),
            flags={
                **self.job.flags,
                "malloc": malloc_setting() if cpu else "",
                "frozen": str(self.job.frozen),
                "load": f"{self._load:.2f}",
            },
            device={"hard": dict(self.device.fingerprint().hard), "soft": self._soft()},
        )

    def _soft(self) -> dict[str, Any]:
        if not hasattr(self, "_soft_facts"):
            self._soft_facts: dict[str, Any] = self.device.soft()
        return self._soft_facts
