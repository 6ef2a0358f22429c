"""A process is killed in the middle of an answer; another one goes on with it, to the same tokens, each told once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from leafkv import LLM, RequestOutputKind, SamplingParams

PROMPT = "Once upon a time"
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=24, output_kind=RequestOutputKind.DELTA)


def die_answering(journal: str) -> None:
    """The process that is killed. It prints the id of its request, and its tokens as they come: 6 of them."""
    for count, output in enumerate(LLM(num_blocks=64, journal=journal).stream(PROMPT, PARAMS), start=1):
        print(output.request_id, *output.outputs[0].token_ids, flush=True)
        if count == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "requests.journal"
        command = [sys.executable, __file__, str(journal)]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
        request_id = told.split()[0]
        tokens = [int(token) for line in told.splitlines() for token in line.split()[1:]]
        print(f"Killed after {len(tokens)} tokens.")

        llm = LLM.resume(journal, num_blocks=64)
        for output in llm.stream(request_id=request_id, after=len(tokens)):
            tokens += output.outputs[0].token_ids
        undisturbed = llm.generate(PROMPT, PARAMS)[0].outputs[0]
        same = "as" if tokens == undisturbed.token_ids else "NOT as"
        print(f"{len(tokens)} tokens in the end, {same} in a process that nobody kills: {undisturbed.text!r}")
        llm.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        die_answering(sys.argv[1])
    else:
        main()
