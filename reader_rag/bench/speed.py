"""Speed of real answers: our engine with drafts and without, beside transformers' generate, in turns in one process."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList

from reader_rag.bench.rows import read_rows
from reader_rag.reader import Reader
from reader_rag.settings import Drafting, Sampling
from reader_rag.stats import Stats
from reader_rag.store.chunk import Chunk

SYSTEMS = ("generate", "prompt_lookup", "plain", "reader")
LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Run:
    """One answer by one system. `decode_s` and `decode_tokens` leave out the prefill (and what it brought), `answer_s` nothing."""

    text: str
    tokens: tuple[int, ...]
    ttft_s: float
    decode_s: float
    decode_tokens: int
    answer_s: float
    stats: Stats | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of decoding."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Never stops; notes when the first tokens were there and how many."""

    def __init__(self, prompt_tokens: int) -> None:
        self.start, self.prompt_tokens = time.perf_counter(), prompt_tokens
        self.first_s, self.first_tokens = 0.0, 0

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if not self.first_tokens:
            self.first_s = time.perf_counter() - self.start
            self.first_tokens = int(input_ids.shape[1]) - self.prompt_tokens
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def greedy_generate(
    reader: Reader, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any
) -> list[list[int]]:
    """transformers' greedy `generate` on the caller's own model object: each prompt's new tokens, padded to the longest.

    Several prompts are one batch, padded on the left. `options` go to `generate` too.
    """
    ends, longest = sorted(reader.eos), max(map(len, prompts))
    pad = min(ends, default=0)
    padded = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    with torch.inference_mode():
        out = reader.model.generate(
            input_ids=torch.tensor(padded, device=reader.device),
            attention_mask=torch.tensor(mask, device=reader.device),
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,  # a model's generation config may set one, and we are asked for plain greedy
            max_new_tokens=max_tokens,
            eos_token_id=ends,
            pad_token_id=pad,
            **options,
        )
    tokens: list[list[int]] = out[:, longest:].tolist()
    return tokens


def generate_run(reader: Reader, prompt: Sequence[int], max_tokens: int, *, lookup: bool = False) -> Run:
    """transformers' greedy `generate`; with `lookup` its prompt lookup decoding."""
    clock = _Clock(len(prompt))
    (new,) = greedy_generate(
        reader,
        [prompt],
        max_tokens,
        stopping_criteria=StoppingCriteriaList([clock]),
        **({"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}),
    )
    total = time.perf_counter() - clock.start
    tokens = tuple(new)
    text = reader.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Run(text, tokens, clock.first_s, total - clock.first_s, len(tokens) - clock.first_tokens, total)


def reader_run(
    reader: Reader,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    chunks: Sequence[Chunk],
    drafting: Drafting | None = None,
) -> Run:
    """Our engine, greedy; `Drafting(sources=())` is plain decoding."""
    start = time.perf_counter()
    answer = reader.generate(
        prompt, sampling=Sampling(max_tokens=max_tokens), chunks=chunks, drafting=drafting
    )
    total, stats = time.perf_counter() - start, answer.stats
    return Run(answer.text, answer.tokens, stats.ttft_s, stats.decode_s, stats.tokens, total, stats)


def measure(
    reader: Reader,
    prompt: Sequence[int],
    *,
    chunks: Sequence[Chunk] = (),
    max_tokens: int = 128,
    systems: Sequence[str] = SYSTEMS,
) -> dict[str, Run]:
    """One prompt through each system in turn, in one process and dtype."""
    runs = {}
    for system in systems:
        if system in ("generate", "prompt_lookup"):
            runs[system] = generate_run(reader, prompt, max_tokens, lookup=system == "prompt_lookup")
        else:
            off = Drafting(sources=()) if system == "plain" else None
            runs[system] = reader_run(reader, prompt, max_tokens, chunks=chunks, drafting=off)
    return runs


def speed(
    reader: Reader,
    file: str | Path,
    *,
    only: str | None = None,
    limit: int | None = None,
    max_tokens: int = 128,
    progress: bool = True,
) -> dict[str, Any]:
    """Every row through every system, the order rotating from row to row; totals as `report` shows them."""
    rows = read_rows(file, only=only, limit=limit)
    measure(reader, reader.encode_prompt("Say hello."), max_tokens=4)  # first passes allocate and warm caches
    reader.forget()
    runs: list[dict[str, Run]] = []
    for number, row in enumerate(tqdm(rows, desc="questions", disable=None if progress else True)):
        prompt = reader.encode_prompt(row.messages)
        turn = number % len(SYSTEMS)
        order = SYSTEMS[turn:] + SYSTEMS[:turn]
        runs.append(measure(reader, prompt, chunks=row.chunks, max_tokens=max_tokens, systems=order))
    return summarise(reader, runs)


def summarise(reader: Reader, runs: Sequence[dict[str, Run]]) -> dict[str, Any]:
    """Totals: tokens over decoding seconds by system, ratios of these and of whole answers, and how many texts equal plain's."""
    rate = {
        system: sum(r[system].decode_tokens for r in runs) / max(sum(r[system].decode_s for r in runs), 1e-9)
        for system in SYSTEMS
    }
    whole = {system: sum(r[system].answer_s for r in runs) for system in SYSTEMS}
    stats = [r["reader"].stats for r in runs if r["reader"].stats]
    own = sum(s.draft_s + s.other_s for s in stats)
    return {
        "rows": len(runs),
        "tokens_per_pass": round(sum(s.tokens for s in stats) / max(sum(s.passes for s in stats), 1), 4),
        **{
            f"{system}_tokens_per_s": round(rate[system], 3)
            for system in ("reader", "plain", "generate", "prompt_lookup")
        },
        "speedup_vs_generate": round(rate["reader"] / rate["generate"], 3),
        "speedup_vs_prompt_lookup": round(rate["reader"] / rate["prompt_lookup"], 3),
        "answer_speedup_vs_generate": round(whole["generate"] / whole["reader"], 3),
        "answer_speedup_vs_prompt_lookup": round(whole["prompt_lookup"] / whole["reader"], 3),
        "identical": sum(r["reader"].tokens == r["plain"].tokens for r in runs),
        "identical_to_generate": sum(r["reader"].tokens == r["generate"].tokens for r in runs),
        "draft_share": round(own / max(sum(s.decode_s for s in stats), 1e-9), 4),
        "answer_s": {system: round(whole[system] / len(runs), 4) for system in SYSTEMS},
        "ttft_s": {system: round(median(r[system].ttft_s for r in runs), 4) for system in SYSTEMS},
        "accepted_by_source": _summed([s.accepted_by_source for s in stats]),
        "pass_ms": round(1000 * sum(s.verify_s for s in stats) / max(sum(s.passes for s in stats), 1), 2),
        **setting(reader),
    }


def report(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    lines = [
        f"{result['rows']} questions, {headline(result)}",
        f"{'':16}{'tokens/s':>10}{'x generate':>12}{'first token':>13}{'whole answer':>14}{'x generate':>12}",
    ]
    for system in SYSTEMS:
        rate, whole = result[f"{system}_tokens_per_s"], result["answer_s"][system]
        lines.append(
            f"{system:16}{rate:10.1f}{rate / result['generate_tokens_per_s']:12.2f}{result['ttft_s'][system]:11.2f} s"
            f"{whole:12.2f} s{result['answer_s']['generate'] / whole:12.2f}"
        )
    lines.append(
        f"{result['tokens_per_pass']:.2f} tokens per pass at {result['pass_ms']:.0f} ms a pass; "
        f"drafting and other Python {100 * result['draft_share']:.1f} % of decoding; "
        f"texts equal to plain {result['identical']}/{result['rows']}, to generate {result['identical_to_generate']}/{result['rows']}"
    )
    lines.append(
        "accepted by source: " + ", ".join(f"{k} {v}" for k, v in result["accepted_by_source"].items())
    )
    return "\n".join(lines)


def setting(reader: Reader) -> dict[str, Any]:
    """What the figures of any bench depend on."""
    return {
        "model": reader.name,
        "dtype": str(reader.dtype).removeprefix("torch."),
        "width": reader.width,
        "kernels": reader.kernels,
        "machine": machine(),
    }


def headline(result: dict[str, Any]) -> str:
    """`setting` for people."""
    return f"{result['model']}, {result['dtype']}, width {result['width']}, {result['kernels']} kernels, {result['machine']}"


def machine() -> str:
    """The machine in words: processor, threads, torch."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {torch.get_num_threads()} threads, {capability}, torch {torch.__version__}"


def _summed(ledgers: Sequence[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for ledger in ledgers:
        for source, count in ledger.items():
            total[source] = total.get(source, 0) + count
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))
