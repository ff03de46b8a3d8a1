"""Models for the tests: the demo model with real weights, and a tiny random one that loads at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from llama_index_fakes import FakeReader
    from store_fakes import HashingEmbedder

    from llama_index.llms.reader_rag import ReaderLLM
    from reader_rag import Reader

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_TRAINING_TEXT = (
    "The reader looks up how a text goes on, and the model verifies it in one pass. ",
    "A chunk is a retrieved piece of text; a span stands verbatim in the answer and in a chunk. ",
    "for name, value in sorted(table.items()):\n    print(name, value)\n",
    "Größe, naïve, 日本語 and 👩‍👩‍👧 are made of bytes too. ",
)


def build_tiny_model(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save a random 2-layer Llama and a byte-level BPE tokenizer (about 600 ids) with a ChatML template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TRAINING_TEXT * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>"),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        # Wide enough that the logits differ clearly, as those of a trained model do.
        "initializer_range": 0.3,
    } | config
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model as a transformers folder in the user's cache (converted there by the first run)."""
    from reader_rag.convert import convert
    from reader_rag.errors import ReaderError
    from reader_rag.load import demo_model_file

    try:
        return convert(demo_model_file(), progress=True)
    except ReaderError as error:
        pytest.fail(f"the tests need the demo model: {error}", pytrace=False)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_folder, local_files_only=True)


@pytest.fixture(scope="session")
def demo_calibration(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """How long the demo model's passes take: what the user's cache knows of it, and what this run measures."""
    file = tmp_path_factory.mktemp("demo-cache") / "calibration.json"
    measured = demo_folder.parent.parent / file.name
    if measured.exists():
        shutil.copy(measured, file)
    return file


@pytest.fixture(scope="session")
def demo_reader(demo_folder: Path, demo_calibration: Path) -> Reader:
    """The demo model in float32; its statistics go to a folder of this run, never to the user's cache."""
    from reader_rag import Reader

    return Reader.load(demo_folder, dtype="float32", device="cpu", cache_dir=demo_calibration.parent)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random 2-layer Llama with a byte-level tokenizer and a ChatML template."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def elsewhere(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `other_process.py` says of the tiny model in a process whose hashes of strings differ from ours."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    script = Path(__file__).with_name("other_process.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model), str(tmp_path_factory.mktemp("elsewhere"))],
        env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.fixture(scope="session")
def tiny_calibration(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """How long the tiny model's passes take: measured once, or every fresh Reader would measure it again."""
    from reader_rag import Reader

    cache = tmp_path_factory.mktemp("calibration")
    Reader.load(tiny_model, dtype="float32", device="cpu", cache_dir=cache)
    return cache / "calibration.json"


@pytest.fixture
def reader(tiny_model: Path, tiny_calibration: Path, tmp_path: Path) -> Reader:
    """A fresh Reader of the tiny model in float32, with empty statistics."""
    from reader_rag import Reader

    (tmp_path / "cache").mkdir()
    shutil.copy(tiny_calibration, tmp_path / "cache")
    return Reader.load(tiny_model, dtype="float32", device="cpu", cache_dir=tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test's store goes; nothing is there yet."""
    return tmp_path / "store"


@pytest.fixture
def embedder() -> HashingEmbedder:
    """An embedder without a model, for stores."""
    from store_fakes import HashingEmbedder

    return HashingEmbedder()


@pytest.fixture
def fake() -> FakeReader:
    """A Reader without a model, for the LlamaIndex face."""
    from llama_index_fakes import FakeReader

    return FakeReader()


@pytest.fixture
def llm(fake: FakeReader) -> ReaderLLM:
    """The LlamaIndex face over `fake`."""
    from llama_index.llms.reader_rag import ReaderLLM

    return ReaderLLM(reader=fake)
