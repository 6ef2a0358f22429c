"""Send each prompt to the worker that has most of it cached, knowing the workers' caches by their events alone."""

from __future__ import annotations

from leafkv import CacheMirror, KVManager, Ready

BLOCK_SIZE = 16
SYSTEM_PROMPTS = [list(range(start, start + 100)) for start in (0, 1000, 2000)]


class Worker:
    """Stands for a process with a model. Here it keeps the books of its KV cache and computes nothing."""

    def __init__(self) -> None:
        self.manager = KVManager(256, BLOCK_SIZE, event_capacity=1024)

    def answer(self, number: int, prompt: list[int]) -> int:
        """Run a prompt; return how many of its tokens were in the cache."""
        admission = self.manager.begin(number, prompt)
        assert isinstance(admission, Ready)
        self.manager.grow(number, len(prompt) - admission.cached_tokens)
        self.manager.commit(number, len(prompt))
        self.manager.release(number)
        return admission.cached_tokens


def main() -> None:
    workers = [Worker() for _ in range(2)]
    mirrors = [CacheMirror(BLOCK_SIZE) for _ in workers]
    for number in range(12):
        if number == 6:
            # The router restarts. A snapshot of each worker, and it knows again what it knew.
            mirrors = [CacheMirror(BLOCK_SIZE) for _ in workers]
            for worker, mirror in zip(workers, mirrors, strict=True):
                mirror.load(worker.manager.snapshot())
        prompt = SYSTEM_PROMPTS[number % 3] + [3000 + number] * 20
        known = [mirror.lookup(prompt) for mirror in mirrors]
        # Of equals the one with fewer blocks.
        best = max(range(len(workers)), key=lambda index: (known[index], -len(mirrors[index])))
        found = workers[best].answer(number, prompt)
        mirrors[best].apply(workers[best].manager.events())
        print(
            f"prompt {number:2} to worker {best}: {known[best]} of {len(prompt)} tokens expected there, {found} found"
        )
    for index, mirror in enumerate(mirrors):
        for prefix in mirror.hot_prefixes(2):
            print(f"worker {index} has reused a prefix of {len(prefix.blocks)} blocks {prefix.reuses} times")


if __name__ == "__main__":
    main()
