"""Answers that a program can read: JSON that follows a schema, whatever the model would have liked to say."""

from __future__ import annotations

import json

from leafkv import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
SENTENCES = ("Anna is 34 years old and lives in Oslo.", "My uncle Ben from Lima has just turned 60.")


def main() -> None:
    llm = LLM(num_blocks=128)
    form = StructuredOutputsParams(json=SCHEMA)  # or regex="...", or choice=["...", "..."]
    params = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=form)
    prompts = [f"Who is this? Answer with JSON.\n\n{sentence}\n\n" for sentence in SENTENCES]
    for result in llm.generate(prompts, params):
        person = json.loads(result.outputs[0].text)
        print(f"{person['name']}, {person['age']}, {person['city']}")


if __name__ == "__main__":
    main()
