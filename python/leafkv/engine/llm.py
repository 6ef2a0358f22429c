"""The offline face: a model, its KV cache and an engine, behind vLLM's names."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leafkv.engine.beam_search import BeamSearchOutput, at_temperature, num_candidates, search
from leafkv.engine.build import EngineArgs, build
from leafkv.engine.engine import EngineStats
from leafkv.engine.interrupts import interrupts_deferred
from leafkv.engine.journal import Journal
from leafkv.engine.outputs import RequestOutput, Told, merge
from leafkv.engine.progress import progress_bar
from leafkv.engine.recorder import restore_unfinished
from leafkv.engine.resumed import Rest, existing, recorded
from leafkv.engine.router import Message, Prompt, as_prompts, is_chat
from leafkv.engine.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from leafkv.errors import InvalidInputError, InvariantError, JournalError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from leafkv.engine.request import Request
    from leafkv.engine.waiting import Policy
    from leafkv.models.tokenizer import Tokenizer


class LLM:
    """A language model that answers prompts, many at a time, over one paged KV cache.

    Safe to use from several threads: their requests share the steps.

    Args:
        model: a .gguf file or a Hugging Face directory, a loaded model, or None for the embedded default. With
            ``backend="transformers"``: a Hugging Face directory, or a model of transformers, which is taken over: its
            ``attn_implementation`` is "leafkv" from then on.
        num_blocks: size of the KV cache; None sizes it from free memory, and logs the figures.
        block_size: tokens per block.
        max_num_batched_tokens: tokens computed in one step at most: longer prompts are computed in chunks.
        max_num_seqs: samples that run at the same time at most, ``n`` for each request; more wait.
        max_model_len: tokens of a prompt and its answer at most; None for what the model was made for.
        enable_prefix_caching: whether prompts find the KV of prefixes computed before.
        partial_hits: whether they find it inside of blocks, too; what they share of a block is copied. On by default:
            to copy a block of 16 tokens takes less time than to compute one, and with whole blocks alone a prompt that
            is all cached still computes up to ``block_size`` tokens, not one.
        dtype: of the arithmetic. "float32", which "auto" is too: weights stay as the file has them, floats or
            quantized, and are widened exactly when they are used. "bfloat16": weights and activations are bfloat16.
            Of backend "transformers" also "float16", and "auto" is the checkpoint's own. Of a loaded model "auto" is
            what it was loaded with.
        quantization: "q8_0", "q4_0" or "q4_1" quantizes weights at load that the file has as floats; None leaves them
            as they are. It goes with float32 alone.
        kv_cache_dtype: "float32", "float16", "bfloat16", "int8", or "auto": float32, or of backend "transformers" the
            dtype of the model.
        num_threads: threads for attention and matrix products; None for all. PyTorch's are set while a step of backend
            "transformers" runs, for the whole process, as PyTorch has it; None leaves them.
        scheduling_policy: who goes first: "fcfs", in order of arrival; "priority", the lowest ``priority``; "prefix",
            who finds most of its prompt in the cache.
        max_waiting: requests that wait at the same time at most: one more is refused. None for no bound.
        queue_timeout: seconds that a request waits at most before it first runs; None for no bound.
        speculative_config: guess tokens and check them several at a time, as vLLM's option of this name; None to not.
        journal: a file in which requests survive the end of the process, see :meth:`resume`; it keeps answers until a
            thousand others have ended after them. None for no file.
        backend: whose code computes the model: "leafkv", which "auto" is too, or "transformers", the model code of
            that library, for any decoder that it has, over our cache and attention (``pip install 'leafkv[torch]'``).
            What the engine cannot do for a model is refused by name when it is loaded.
        device: "auto" or "cpu"; of backend "transformers" also a GPU, such as "cuda:0", and "auto" is one if there is
            any.
        tokenizer: of backend "transformers": a directory or a tokenizer, in place of the one beside the model. Where
            there is none, prompts are token ids.

    Raises:
        InvalidInputError: an argument is malformed, or not what ``model`` was loaded with.
        ModelLoadError: the model cannot be read, or not be quantized like that, or has what the engine does not do.
        MissingExtraError: a library that it takes is not installed.
        InsufficientMemoryError: the KV cache does not fit in free memory.
        JournalError: the journal is damaged, in use, or of another model.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        partial_hits: bool = True,
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        num_threads: int | None = None,
        scheduling_policy: Policy = "fcfs",
        max_waiting: int | None = None,
        queue_timeout: float | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        journal: str | Path | None = None,
        backend: str = "auto",
        device: Any = "auto",
        tokenizer: Any = None,
    ) -> None:
        args = EngineArgs(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            partial_hits=partial_hits,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            num_threads=num_threads,
            scheduling_policy=scheduling_policy,
            max_waiting=max_waiting,
            queue_timeout=queue_timeout,
            speculative_config=speculative_config,
            journal=journal,
            backend=backend,
            device=device,
            tokenizer=tokenizer,
        )
        built = build(model, args)
        self.manager = built.manager
        self.cache = built.cache
        self.engine = built.engine
        self._router = built.router
        self._tokenizer = built.tokenizer
        self._eos_token_ids = built.eos_token_ids
        self._lock = threading.Lock()
        self._inboxes: dict[str, _Inbox] = {}
        self._dropped: deque[str] = deque()
        self._identify = built.identify
        self._journal = built.journal
        self._resumed: dict[str, Request] = {}
        """Requests that have come back from the journal, and that nobody has asked for yet."""

    @classmethod
    def resume(cls, path: str | Path, model: Any = None, **options: Any) -> Self:
        """An `LLM` with the journal at ``path``, which goes on with the requests that had not ended there.

        They give the tokens that they would have given. One that does not fit is logged, and stays there. Ask for
        them with :meth:`stream` or :meth:`collect`: as everything here, they make progress when somebody waits for an
        answer.

        Args:
            path: the journal of an `LLM` or `AsyncEngine` that is gone, or that a checkpoint has written.
            model: that of the journal.
            options: those of `LLM`.

        Raises:
            JournalError: the journal is damaged, in use, or of another model.
            InvalidInputError: an option is malformed.
        """
        llm = cls(model, **options, journal=existing(path))
        assert llm._journal is not None
        for request in restore_unfinished(llm._router, llm._journal):
            llm._resumed[request.request_id] = request
            llm._inboxes[request.request_id] = _Inbox(delta=True)
            llm.engine.add_request(request, journaled=True)
        return llm

    @property
    def resumed(self) -> list[str]:
        """Ids of the requests that have come back from the journal, and that nobody has asked for yet."""
        return [*self._resumed]

    def collect(self) -> list[RequestOutput]:
        """The whole answers of all :attr:`resumed` requests, in the order in which they came once.

        One that has failed is among them, with what ended it as its ``error``.
        """
        requests = [self._resumed.pop(request_id) for request_id in self.resumed]
        inboxes = [self._inboxes[request.request_id] for request in requests]
        try:
            for inbox in inboxes:
                self._fill(inbox, finished=True)
        except BaseException:  # nobody has got anything yet: all of them can be asked for again
            self._resumed |= {request.request_id: request for request in requests}
            raise
        self._drop(requests)
        return [reduce(partial(merge, delta=True), inbox.outputs) for inbox in inboxes]

    def checkpoint(self, path: str | Path | None = None) -> int:
        """Hand all unfinished requests over to whoever resumes from the journal; return how many those are.

        Who waits for one of them here gets a `HandedOverError`.

        Args:
            path: a journal to be written; None for the one that this `LLM` has, which is closed then.

        Raises:
            InvalidInputError: there is no journal, or a request cannot be written down.
            JournalError: the journal cannot be written; nothing has changed.
        """
        with self._lock, interrupts_deferred():
            count = self.engine.checkpoint(None if path is None else lambda: Journal(path, self._identify()))
        self._abort_dropped()
        return count

    def close(self) -> None:
        """Write what is left to the journal, and let go of it. Requests that have not ended stay in it."""
        self._abort_dropped()
        with self._lock:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts; the results are in their order.

        Args:
            prompts: one or a list of: text, token ids, ``{"prompt": ...}``, ``{"prompt_token_ids": ...}``, chat
                messages; a dict may have a ``"cache_salt"``: only prompts of the same salt share their prefixes.
            sampling_params: for all prompts, or one per prompt.
            use_tqdm: show progress on a terminal, where `tqdm` is installed.
            priority: one per prompt; lower ones go first, with ``scheduling_policy="priority"``.

        Raises:
            InvalidInputError: a prompt is malformed or can never fit; nothing has run then.
            MissingExtraError: ``structured_outputs`` need the extra "guided".
            QueueFullError: more prompts wait, those of this call included, than ``max_waiting``.
            QueueTimeoutError: a prompt has waited for longer than ``queue_timeout``.
            JournalError: the journal cannot be written.
            Exception: what the model raised, if it did. The other requests of the call are then ended.
        """
        each_prompt = as_prompts(prompts)
        each_params = _each(sampling_params, len(each_prompt))
        priorities = _priorities(priority, len(each_prompt))
        requests = [
            self._router.prepare(prompt, params, priority=urgency)
            for prompt, params, urgency in zip(each_prompt, each_params, priorities, strict=True)
        ]
        return self._answer(requests, use_tqdm=use_tqdm)

    def _answer(self, requests: list[Request], *, use_tqdm: bool) -> list[RequestOutput]:
        inbox = _Inbox()
        finished: dict[str, RequestOutput] = {}
        try:
            for request in requests:
                self._add(request, inbox)
            with progress_bar(len(requests), shown=use_tqdm) as advance:
                while len(finished) < len(requests):
                    output = self._next(inbox)
                    if output.error is not None:
                        raise output.error
                    finished[output.request_id] = output
                    advance()
        except (KeyboardInterrupt, JournalError):
            self._forget(requests)
            raise
        finally:
            self._drop(requests)
        return [finished[request.request_id] for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of messages with "role" and "content"."""
        if not isinstance(messages, Sequence):
            raise InvalidInputError(f"messages: expected messages or lists of messages, got {messages!r}")
        conversations: list[Any] = [messages] if is_chat(messages) else list(messages)
        for conversation in conversations:
            if not is_chat(conversation):
                raise InvalidInputError(f"messages: expected dicts with 'role' and 'content', got {conversation!r}")
        return self.generate(conversations, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        after: int | Sequence[int] = 0,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt token by token: each result holds all of the answer so far (see ``output_kind``).

        The request starts with the first result asked for. Closing or dropping the iterator ends it.

        Without a prompt: the rest of the answer of a request of the journal, which has ended or come back by
        :meth:`resume`, in deltas.

        Args:
            prompt: text, token ids, ``{"prompt": ...}``, ``{"prompt_token_ids": ...}`` or chat messages.
            sampling_params: None for the defaults.
            priority: lower ones go first, with ``scheduling_policy="priority"``.
            request_id: the request of the journal.
            after: how many tokens of it the caller has had, of every sample or of each.

        Raises:
            InvalidInputError: the prompt is malformed or can never fit; there is no such request.
            Exception: as for :meth:`generate`, while results are asked for, after the tokens that came before it.
            HandedOverError: a :meth:`checkpoint` has handed the request over.
        """
        if prompt is not None:
            if request_id is not None or after != 0:
                raise InvalidInputError("request_id and after: they go without a prompt")
            return self._follow(self._router.prepare(prompt, sampling_params, priority=priority, stream=True))
        if request_id is None:
            raise InvalidInputError("prompt: expected one, or a request_id")
        request = self._resumed.get(request_id)
        if request is not None:
            return self._go_on(request, Rest(self._router, request, after))
        return _raising(recorded(self._router, self._journal, request_id, after))

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest answers to prompts, ``params.beam_width`` to each; the results are in the prompts' order.

        Args:
            prompts: as for :meth:`generate`.
            params: how wide and how long to search.

        Raises:
            InvalidInputError: a prompt is malformed or can never fit; nothing has run then.
            Exception: what the model raised, if it did.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidInputError(f"params: expected BeamSearchParams, got {params!r}")
        limits = SamplingParams(max_tokens=params.max_tokens)
        requests = [self._router.prepare(prompt, limits) for prompt in as_prompts(prompts)]
        outputs: list[BeamSearchOutput] = [BeamSearchOutput([]) for _ in requests]
        # The beams of all prompts make their steps together, as far as they may share anything.
        for salt in dict.fromkeys(request.cache_salt for request in requests):
            places = [place for place, request in enumerate(requests) if request.cache_salt == salt]
            found = search(
                [requests[place].prompt_token_ids for place in places],
                params,
                self._eos_token_ids,
                partial(self._next_logprobs, params, salt),
            )
            for place, output in zip(places, found, strict=True):
                outputs[place] = output
        if self._tokenizer is not None:
            for sequence in (sequence for output in outputs for sequence in output.sequences):
                sequence.text = self._tokenizer.decode(sequence.tokens, skip_special_tokens=False)
        return outputs

    def stats(self) -> EngineStats:
        """Counters since the start. Those of the blocks are in ``manager.stats()``."""
        with self._lock:
            stats = self.engine.stats()
        self._abort_dropped()
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, as after a change of the weights. It always works, so the answer is True.

        Requests that are running go on, and leave nothing in the cache.
        """
        with self._lock:
            self.manager.clear()
        self._abort_dropped()
        return True

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._tokenizer

    def _next_logprobs(
        self, search: BeamSearchParams, salt: str | None, contexts: list[list[int]]
    ) -> list[dict[int, float]]:
        """The log-probabilities of the tokens that a beam search looks at after each context."""
        scaled = search.temperature not in (0.0, 1.0)
        count = -1 if scaled else min(num_candidates(search, self._eos_token_ids), self._router.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, logprobs=count)
        salted = {} if salt is None else {"cache_salt": salt}
        requests = [
            self._router.prepare({"prompt_token_ids": context, **salted}, params, recorded=False)
            for context in contexts
        ]
        found = [
            {token: entry.logprob for token, entry in (output.outputs[0].logprobs or [{}])[0].items()}
            for output in self._answer(requests, use_tqdm=False)
        ]
        return [at_temperature(each, search.temperature) for each in found] if scaled else found

    def _follow(self, request: Request) -> Iterator[RequestOutput]:
        inbox = _Inbox(delta=request.params.output_kind is RequestOutputKind.DELTA)
        try:
            self._add(request, inbox)
            yield from self._read(inbox)
        except (KeyboardInterrupt, JournalError):
            self._forget([request])
            raise
        finally:
            self._drop([request])

    def _go_on(self, request: Request, rest: Rest) -> Iterator[RequestOutput]:
        if self._resumed.pop(request.request_id, None) is None:
            raise InvalidInputError(f"request_id: somebody else has asked for {request.request_id!r}")
        try:
            yield from self._read(self._inboxes[request.request_id], rest)
        except (KeyboardInterrupt, JournalError):
            self._forget([request])
            raise
        finally:
            self._drop([request])

    def _read(self, inbox: _Inbox, rest: Rest | None = None) -> Iterator[RequestOutput]:
        """What comes of a request, as far as it is in the rest of its answer."""
        told, finished = Told(delta=inbox.delta), False
        while not finished:
            output = self._next(inbox)
            finished = output.finished
            news = output if rest is None else rest.of(output)
            if news is not None and told.news(news):
                yield news
            if output.error is not None:
                raise output.error

    def _add(self, request: Request, inbox: _Inbox) -> None:
        with self._lock, interrupts_deferred():
            self._router.choose((self.engine,)).add_request(request)
            self._inboxes[request.request_id] = inbox
        self._abort_dropped()

    def _next(self, inbox: _Inbox) -> RequestOutput:
        """The next output for an inbox, after as many steps as it takes; they serve all requests alike."""
        self._fill(inbox)
        return inbox.outputs.popleft()

    def _fill(self, inbox: _Inbox, *, finished: bool = False) -> None:
        """Make steps until an inbox has something, or the end of the answer, be it of another thread's step."""
        while not inbox.has(finished=finished):
            with self._lock, interrupts_deferred():
                if not inbox.has(finished=finished):
                    self._step()
            self._abort_dropped()

    def _step(self) -> None:
        if not self.engine.has_unfinished_requests():
            raise InvariantError("an answer is awaited, and no request is left that could give it")
        for output in self.engine.step():
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.put(output)

    @staticmethod
    def _forget(requests: list[Request]) -> None:
        """After Ctrl-C, or a full disk: that they end here is not what the journal says, so they can be resumed."""
        for request in requests:
            request.recorded = False

    def _drop(self, requests: list[Request]) -> None:
        """End requests that have not ended, and forget them."""
        with interrupts_deferred():
            for request in requests:
                if self._inboxes.pop(request.request_id, None) is not None:
                    self._dropped.append(request.request_id)
            self._abort_dropped()

    def _abort_dropped(self) -> None:
        # An iterator may be dropped by the garbage collector, anywhere, even within a step: so the lock is never
        # waited for. Whoever holds it calls this after letting go of it, so nothing is left lying.
        while self._dropped:
            with interrupts_deferred():
                if not self._lock.acquire(blocking=False):
                    return
                try:
                    while self._dropped:
                        self.engine.abort_request(self._dropped.popleft())
                finally:
                    self._lock.release()


MOST_UNREAD = 64
"""Outputs of a stream that wait to be read: what comes after them is merged, as each may hold the whole answer."""


class _Inbox:
    """What waits for somebody, while others make the steps."""

    def __init__(self, *, delta: bool = False) -> None:
        self.outputs: deque[RequestOutput] = deque()
        self.delta = delta

    def has(self, *, finished: bool) -> bool:
        """Whether there is something, or the end of the answer."""
        return bool(self.outputs) and (not finished or self.outputs[-1].finished)

    def put(self, output: RequestOutput) -> None:
        if len(self.outputs) >= MOST_UNREAD and self.outputs[-1].request_id == output.request_id:
            output = merge(self.outputs.pop(), output, delta=self.delta)
        self.outputs.append(output)


def _raising(output: RequestOutput | None) -> Iterator[RequestOutput]:
    """An output, and then what ended the request."""
    if output is not None and Told(delta=True).news(output):
        yield output
    if output is not None and output.error is not None:
        raise output.error


def _priorities(priority: Any, count: int) -> list[Any]:
    """One for every prompt."""
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence) or len(priority) != count:
        raise InvalidInputError(f"priority: expected a list of {count}, one for each prompt, got {priority!r}")
    return list(priority)


def _each(params: Any, count: int) -> list[Any]:
    """One for every prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise InvalidInputError(f"sampling_params: expected SamplingParams or a list of them, got {params!r}")
    if len(params) != count:
        raise InvalidInputError(f"sampling_params: {len(params)} of them for {count} prompts")
    return list(params)
