"""The accelerator check: bit-exactness and the cost of passes at the shapes of real models, with no weights at hand.

    python -m reader_rag.bench.gpu --data FILE [--shape llama-3.1-8b] [--limit N] [--tiny]

Weights are random, so answers cannot be real: recorded answers are *replayed*. The walk is told the recorded tokens (a logits
processor names them), so acceptance is that of the recorded text and every pass costs what it costs. Speeds of replays are labelled so.
Decoding passes are timed with and without recording, and replays are compared with unrecorded passes bit for bit: CUDA graphs on a CUDA
device, elsewhere the same step called again. `--tiny` runs the same script on a small model and any device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from reader_rag.bench.rows import read_rows
from reader_rag.bench.speed import greedy_generate, machine
from reader_rag.device import synchronize
from reader_rag.engine import recorder_for, vocabulary_of
from reader_rag.load import Loaded, load_model
from reader_rag.reader import Reader
from reader_rag.settings import Drafting, Sampling
from reader_rag.verify.forward import FixedForward, Job
from reader_rag.verify.graphs import RECORD_AFTER, EagerRecorder, RecordedPasses
from reader_rag.verify.selfcheck import why_not_recorded

OFF = Drafting(sources=(), persist=False)
SHAPES: dict[str, PreTrainedConfig] = {
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=16384,
    ),
    "qwen2.5-7b": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=16384,
    ),
    "tiny": LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=49152,
        max_position_embeddings=8192,
    ),
}


class Told:
    """A logits processor that lets the recorded tokens win, one by one."""

    def __init__(self, prompt_tokens: int, answer: Sequence[int]) -> None:
        self._start, self._answer = prompt_tokens, answer

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = input_ids.shape[1] - self._start
        if at < len(self._answer):
            scores[:, self._answer[at]] = torch.finfo(scores.dtype).max
        return scores


def random_model(shape: str, device: torch.device, tokenizer: Any) -> Loaded:
    """A model of the shape with random weights in bfloat16, made on the device; the same weights every time."""
    config = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return Loaded(
        model=model, tokenizer=tokenizer, name=f"random {shape}", dtype=torch.bfloat16, device=device
    )


def check_exact(reader: Reader, prompts: Sequence[list[int]]) -> dict[str, bool]:
    """Greedy and seeded answers of random weights: drafts on and off, alone and in a batch, bit-equal text."""
    sampled = Sampling(max_tokens=24, temperature=0.8, seed=1)
    results = {"single": True, "batched": True}
    for sampling in (Sampling(max_tokens=24), sampled):
        plain = [reader.generate(p, sampling=sampling, drafting=OFF).tokens for p in prompts]
        alone = [reader.generate(p, sampling=sampling).tokens for p in prompts]
        batch = [a.tokens for a in reader.generate_batch(list(prompts), sampling=sampling)]  # type: ignore[union-attr]
        results["single"] &= alone == plain
        results["batched"] &= batch == plain
    return results


def check_graphs(reader: Reader) -> dict[str, Any]:
    """Whether replays of new recordings give the bits of unrecorded passes, why not, and what the reader itself does."""
    forward = reader._forward
    assert isinstance(forward, FixedForward)
    passes = RecordedPasses(forward, recorder_for(reader.device) or EagerRecorder())
    reason = why_not_recorded(forward, passes, vocabulary_of(reader.model))
    return {
        "equal": reason is None,
        "reason": reason,
        "replays": passes.replays,
        "used": reader.graphs,
        "not_used": reader.graphs_reason,
    }


def pass_ms(reader: Reader, context: int, *, recorded: bool, rounds: int = 10) -> float:
    """Milliseconds of a decoding pass over `context` filled positions, all rows busy: the median of `rounds`.

    recorded: from a recording that was made before, or calling the model. On a device without graphs a recording is an eager one.
    """
    forward, before = reader._forward, reader._forward.recorded  # type: ignore[union-attr]
    assert isinstance(forward, FixedForward)
    recorder = recorder_for(reader.device) or EagerRecorder()
    forward.recorded = RecordedPasses(forward, recorder) if recorded else None
    warm_up = RECORD_AFTER + 3  # the first writes to the arenas, then passes up to the recording
    jobs = [
        Job(forward.new_arena(), context, [1] * forward.width, range(-1, forward.width - 2))
        for _ in range(forward.rows)
    ]
    times = []
    for turn in range(warm_up + rounds):
        synchronize(reader.device)
        start = time.perf_counter()
        forward.decode(jobs)
        synchronize(reader.device)
        if turn >= warm_up:
            times.append(time.perf_counter() - start)
    forward.recorded = before
    return 1000 * statistics.median(times)


def floor_ms(reader: Reader, context: int) -> float:
    """Milliseconds to read all weights and the KV of all rows once, at the measured copy bandwidth."""
    weights: int = sum(p.numel() * p.element_size() for p in reader.model.parameters())
    forward = reader._forward
    assert isinstance(forward, FixedForward)
    kv = forward.slot_bytes * context * forward.rows
    bandwidth: float = copy_bandwidth(reader.device)
    seconds: float = (weights + kv) / bandwidth
    return 1000 * seconds


def copy_bandwidth(device: torch.device, megabytes: int = 256) -> float:
    """Bytes per second that a large copy reads; it writes as many."""
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() / best


def generate_tokens_per_s(reader: Reader, prompt: Sequence[int], tokens: int, **options: Any) -> float:
    """transformers' greedy generate on the same weights, prefill left out by the difference of two lengths."""
    seconds = []
    for count in (4, 4 + tokens):
        synchronize(reader.device)
        start = time.perf_counter()
        greedy_generate(reader, [prompt], count, min_new_tokens=count, **options)
        synchronize(reader.device)
        seconds.append(time.perf_counter() - start)
    return tokens / max(seconds[1] - seconds[0], 1e-9)


def replay(reader: Reader, recorded: Sequence[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Recorded answers through the engine, all submitted at once: tokens per second of decoding and per pass."""
    reader.forget()
    samplings = [
        Sampling(max_tokens=len(answer), processors=(Told(len(prompt), answer),))
        for prompt, answer in recorded
    ]
    synchronize(reader.device)
    start = time.perf_counter()
    answers = reader.generate_batch([prompt for prompt, _ in recorded], sampling=samplings)
    seconds = time.perf_counter() - start
    stats = [answer.stats for answer in answers]  # type: ignore[union-attr]
    assert [list(a.tokens) for a in answers] == [answer for _, answer in recorded]  # type: ignore[union-attr]
    tokens = sum(s.tokens for s in stats)
    # A pass counts in full for each of its rows: together they decoded for about the sum over the rows.
    decoding = sum(s.decode_s for s in stats) / reader.rows
    return {
        "tokens_per_pass": round(tokens / sum(s.passes for s in stats), 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "decoding_tokens_per_s": round(tokens / decoding, 2),
    }


def run(
    shape: str, file: str, *, device: torch.device, limit: int, rows: Sequence[int], width: int
) -> dict[str, Any]:
    """Everything of one shape; the loaded model is shared by engines of 1 and more rows."""
    tokenizer = load_model(None, device="cpu").tokenizer
    loaded = random_model(shape, device, tokenizer)
    recorded = []
    with tempfile.TemporaryDirectory() as cache:
        engines = {
            count: Reader(
                loaded,
                rows=count,
                width=width,
                drafting=Drafting(persist=False),
                prefix_bytes=0,
                cache_dir=cache,
            )
            for count in rows
        }
        first = engines[rows[0]]
        for row in read_rows(file):
            if row.responses:
                answer = first.encode(row.responses[0][1])[:128]
                if len(answer) > 8:
                    recorded.append((first.encode_prompt(list(row.messages)), answer))
        recorded = recorded[: max(limit, max(rows))]
        prompts = [prompt[-512:] for prompt, _ in recorded[:4]]
        result: dict[str, Any] = {
            "shape": shape,
            "device": machine(),
            "dtype": "bfloat16",
            "width": width,
            "mode": first.mode,
        }
        result["exact"] = {str(count): check_exact(engine, prompts) for count, engine in engines.items()}
        result["graphs"] = {str(count): check_graphs(engine) for count, engine in engines.items()}
        for name, replayed in (("pass_ms", True), ("pass_ms_unrecorded", False)):
            result[name] = {str(c): round(pass_ms(e, 1024, recorded=replayed), 3) for c, e in engines.items()}
        result["floor_ms"] = {str(c): round(floor_ms(e, 1024), 3) for c, e in engines.items()}
        result["generate_tokens_per_s"] = round(generate_tokens_per_s(first, prompts[0], 32), 2)
        if device.type == "cuda":
            result["static_compiled_tokens_per_s"] = round(
                generate_tokens_per_s(first, prompts[0], 32, cache_implementation="static"), 2
            )
        result["replay"] = {str(count): replay(engine, recorded) for count, engine in engines.items()}
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; a table on stderr, one JSON document as the last line of stdout. Exit code 1 when a text or a replay differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, metavar="FILE", help="rows with recorded responses")
    parser.add_argument(
        "--shape", action="append", choices=[s for s in SHAPES if s != "tiny"], help="(default: both)"
    )
    parser.add_argument("--limit", type=int, default=16, metavar="N", help="recorded answers per engine")
    parser.add_argument(
        "--rows", default="1,8,32", metavar="R,R", help="engines that are compared (default: 1,8,32)"
    )
    parser.add_argument("--width", type=int, default=16, metavar="W")
    parser.add_argument("--tiny", action="store_true", help="a small model, on any device")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        print("there is no CUDA device; --tiny runs the same script on the CPU", file=sys.stderr)
        return 2
    shapes = ["tiny"] if args.tiny else args.shape or ["llama-3.1-8b", "qwen2.5-7b"]
    rows = [int(count) for count in args.rows.split(",")]
    results = [
        run(shape, args.data, device=device, limit=args.limit, rows=rows, width=args.width)
        for shape in shapes
    ]
    for result in results:
        print(json.dumps(result, indent=1), file=sys.stderr)
    print(json.dumps({"results": results}))
    exact = all(ok for result in results for checks in result["exact"].values() for ok in checks.values())
    replayed = all(check["equal"] for result in results for check in result["graphs"].values())
    return 0 if exact and replayed else 1


if __name__ == "__main__":
    sys.exit(main())
