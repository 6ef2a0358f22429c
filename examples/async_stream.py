"""Several readers of one engine at the same time, each with its own pace; one of them goes away early."""

from __future__ import annotations

import asyncio

from leafkv import AsyncEngine, RequestOutputKind, SamplingParams

DELTAS = SamplingParams(temperature=0.0, max_tokens=16, output_kind=RequestOutputKind.DELTA)


async def read(engine: AsyncEngine, country: str, *, pause: float = 0.0, most: int = 100) -> None:
    """Print an answer as it comes. Who is slow gets several tokens at once, and holds up nobody else."""
    stream = engine.generate(f"The capital of {country} is", DELTAS)
    pieces = 0
    async for output in stream:
        for answer in output.outputs:
            print(f"{country:7} {answer.text!r}")
        pieces += 1
        if pieces == most:
            break
        await asyncio.sleep(pause)
    await stream.aclose()  # which ends the request, if it has not ended


async def main() -> None:
    async with AsyncEngine(num_blocks=64) as engine:
        await asyncio.gather(read(engine, "France"), read(engine, "Italy", pause=0.2), read(engine, "Germany", most=2))
        stats = engine.stats()
        print(f"{stats.generated_tokens} tokens in {stats.steps} steps")


if __name__ == "__main__":
    asyncio.run(main())
