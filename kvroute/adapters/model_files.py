"""A model's tokenizer files on disk: where they are, and what they say.

Looked for in this order: a directory that was named, the model's root where it is a local directory, the Hugging Face
cache. Nothing is ever downloaded. Which template wins, and how special tokens become template variables, follows
`transformers` (`tokenization_utils_base.py`); which models do not render through Jinja follows vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from xxhash import xxh3_128

from kvroute.adapters.rebuilt import DEFAULT_TOKENS, rebuilding_class
from kvroute.errors import ConfigError

TOKENIZER = "tokenizer.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HARMONY_MODELS = {"gpt_oss"}
OWN_RENDERERS = {  # architectures whose chats vLLM renders in Python of its own
    "MoonshotKimiaForCausalLM", "KimiK3ForConditionalGeneration", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM", "InklingForCausalLM",
    "InklingForConditionalGeneration",
}  # fmt: skip
FINGERPRINTED = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "config.json")


class ModelFiles(Struct, frozen=True):
    """What the tokenizer's files say."""

    directory: Path
    templates: dict[str, str]  # name -> Jinja source; "default" is the one for most chats
    variables: dict[str, Any]  # special tokens, as templates read them
    added_tokens: tuple[dict[str, Any], ...]  # tokens that must be known besides those of tokenizer.json, in order
    digest: str  # of everything that decides about tokens
    rebuilt_by: str | None = None  # see `rebuilt`
    why_elsewhere: str | None = None  # set where the engine renders chats without Jinja, with the reason


def find_model(setting: str, root: str | None, name: str, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return the directory of a model's tokenizer, and where it was found or why it was not.

    Args:
        setting: "auto", or a directory.
        root: what the replica says the model was loaded from: a directory on its machine, or a hub name.
        name: the name that the replica serves the model under, often a hub name too.

    Raises:
        ConfigError: a directory was named and has no tokenizer.
    """
    if setting != "auto":
        directory = Path(setting).expanduser()
        if not (directory / TOKENIZER).is_file():
            raise ConfigError(
                f"tokenizer: {directory} holds no {TOKENIZER}; name a model's directory, or choose auto or none"
            )
        return directory, f"as configured, {directory}"
    if root is not None and (Path(root) / TOKENIZER).is_file():
        return Path(root), f"the model's root, {root}"
    for hub_name in dict.fromkeys(filter(None, (root, name))):
        if (snapshot := _cached(hub_name, environ)) is not None:
            return snapshot, f"the Hugging Face cache, {snapshot}"
    return None, f"neither {root or name} as a directory nor the Hugging Face cache holds a {TOKENIZER}"


def _cached(hub_name: str, environ: Mapping[str, str]) -> Path | None:
    """Return the snapshot of a hub model that `main` names, else the newest one, where it holds a tokenizer."""
    if hub_name.count("/") > 1 or hub_name.startswith(("/", ".")):
        return None
    home = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    hub = Path(environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    model = hub / f"models--{hub_name.replace('/', '--')}"
    main = model / "refs" / "main"
    snapshots = sorted(model.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    if main.is_file():
        snapshots.insert(0, model / "snapshots" / main.read_text().strip())
    return next((path for path in snapshots if (path / TOKENIZER).is_file()), None)


def read_model(directory: Path) -> ModelFiles:
    """Read what lies beside a tokenizer.json.

    Raises:
        ConfigError: a file is not what its name says.
    """
    config = _json(directory / "tokenizer_config.json")
    templates = dict(_templates(directory, config))
    model = _json(directory / "config.json")
    rebuilt_by = rebuilding_class(model.get("model_type"), config.get("tokenizer_class"))
    special = {**(DEFAULT_TOKENS if rebuilt_by else {}), **_json(directory / "special_tokens_map.json"), **config}
    return ModelFiles(
        directory=directory,
        templates=templates,
        variables=_variables(special),
        added_tokens=tuple(_added_tokens(special)),
        digest=_digest(directory, templates),
        rebuilt_by=rebuilt_by,
        why_elsewhere=_why_elsewhere(directory, model),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise ConfigError(f"tokenizer: {path} is not a JSON object ({error}); restore the model's own file") from None


def _templates(directory: Path, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield templates by name; a later one replaces an earlier one."""
    for listed in (config.get("chat_template"), _json(directory / "chat_template.json").get("chat_template")):
        if isinstance(listed, str):
            yield "default", listed
        elif isinstance(listed, dict):
            yield from listed.items()
        elif isinstance(listed, list):
            yield from ((entry["name"], entry["template"]) for entry in listed)
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        yield path.stem, path.read_text(encoding="utf-8")
    if (path := directory / "chat_template.jinja").is_file():
        yield "default", path.read_text(encoding="utf-8")


def _variables(config: dict[str, Any]) -> dict[str, Any]:
    named = {name: config.get(name) for name in SPECIAL_TOKENS}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if text}


def _added_tokens(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tokens that Hugging Face adds to a tokenizer when it loads it with this configuration."""
    decoder = config.get("added_tokens_decoder") or {}
    yield from (decoder[id_] for id_ in sorted(decoder, key=int))
    named = [config.get(name) for name in SPECIAL_TOKENS] + (config.get("additional_special_tokens") or [])
    for token in filter(None, named):
        yield token if isinstance(token, dict) else {"content": token}


def _digest(directory: Path, templates: dict[str, str]) -> str:
    digest = xxh3_128()
    for name in FINGERPRINTED:
        path = directory / name
        data = path.read_bytes() if path.is_file() else b""
        digest.update(b"%d:" % len(data) + data)
    digest.update(msgspec.json.encode(sorted(templates.items())))
    return digest.hexdigest()[:16]


def _why_elsewhere(directory: Path, config: dict[str, Any]) -> str | None:
    if config.get("model_type") in HARMONY_MODELS:
        return "its engine renders chats with Harmony"
    if own := OWN_RENDERERS.intersection(config.get("architectures") or ()):
        return f"its engine renders chats of {own.pop()} with code of its own"
    if (directory / "tekken.json").is_file() or any(directory.glob("tokenizer.model.v*")):
        return "its engine may render chats in Mistral's own format"
    return None
