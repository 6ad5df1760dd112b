"""Worker: a process that may die. One message in, one reply out, on pipes of its own.

Standard output belongs to the candidate and is thrown away.
Started as `python -m torch_kevolve.evaluation.worker IN OUT`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys

from torch_kevolve.evaluation.runner import Runner


def limit_memory(extra: int) -> None:
    """Cap the address space at what is mapped now plus `extra` bytes: a greedy candidate gets a failed allocation."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = mapped + extra
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def main() -> None:
    ask = os.fdopen(int(sys.argv[1]), "r")
    answer = os.fdopen(int(sys.argv[2]), "w")
    faulthandler.disable()
    runner = Runner()
    answer.write(json.dumps({"ready": True}) + "\n")
    answer.flush()
    for line in ask:
        message = json.loads(line)
        if message["do"] == "limit":
            limit_memory(int(message["bytes"]))
            reply: dict[str, object] = {}
        else:
            reply = runner.handle(message)
        answer.write(json.dumps({**reply, "id": message.get("id")}) + "\n")
        answer.flush()


if __name__ == "__main__":
    main()
