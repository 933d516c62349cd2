"""Finding and reading a model's files."""

from __future__ import annotations

import json

import pytest

from kvroute.adapters.model_files import find_model, read_model
from kvroute.errors import ConfigError

NOWHERE = {"HF_HUB_CACHE": "/nonexistent"}


def write(directory, **files):
    """Write JSON files; the names have `_json` or another ending after an underscore."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        stem, _, ending = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{stem}.{ending}").write_text(text, encoding="utf-8")
    return directory


def snapshot(home, name, commit, *, main=False):
    model = home / "hub" / f"models--{name.replace('/', '--')}"
    if main:
        (model / "refs").mkdir(parents=True, exist_ok=True)
        (model / "refs" / "main").write_text(commit)
    return write(model / "snapshots" / commit, tokenizer_json={})


def test_a_named_directory_is_taken_or_refused(tmp_path):
    """A directory without a tokenizer is an error that names it and the remedy."""
    with pytest.raises(ConfigError, match=r"tokenizer: .*holds no tokenizer.json"):
        find_model(str(tmp_path), None, "m", NOWHERE)
    write(tmp_path, tokenizer_json={})
    assert find_model(str(tmp_path), None, "m", NOWHERE)[0] == tmp_path


def test_a_root_on_this_machine_comes_first(tmp_path):
    """What the replica loaded from is the best source where it exists here, too."""
    root = write(tmp_path / "m", tokenizer_json={})
    snapshot(tmp_path, "org/m", "c1")
    assert find_model("auto", str(root), "org/m", {"HF_HOME": str(tmp_path)}) == (root, f"the model's root, {root}")


def test_the_cache_is_searched_by_root_and_by_name(tmp_path):
    """The snapshot that `main` names wins; without it the newest; a snapshot without a tokenizer is passed over."""
    write(snapshot(tmp_path, "org/m", "c0").parent / "c9", config_json={})
    main = snapshot(tmp_path, "org/m", "c1", main=True)
    only = snapshot(tmp_path, "served", "c2")
    environ = {"HF_HOME": str(tmp_path)}
    assert find_model("auto", "org/m", "served", environ)[0] == main
    assert find_model("auto", "/elsewhere/m", "served", environ)[0] == only
    assert find_model("auto", None, "org/m", {"HF_HUB_CACHE": str(tmp_path / "hub")})[0] == main


def test_without_files_the_reason_says_what_was_looked_for(tmp_path):
    """Nothing found is an answer, not an error."""
    directory, why = find_model("auto", "org/m", "served", {"HF_HOME": str(tmp_path)})
    assert (directory, "org/m" in why) == (None, True)


def test_special_tokens_become_variables_and_tokens(tmp_path):
    """Tokens are strings or objects, in the newer file or the older one; absent ones are no variables."""
    write(
        tmp_path,
        tokenizer_json={},
        special_tokens_map_json={"bos_token": "<s>", "eos_token": "<old>"},
        tokenizer_config_json={
            "eos_token": {"content": "</s>", "normalized": False},
            "pad_token": None,
            "added_tokens_decoder": {"10": {"content": "<b>"}, "9": {"content": "<a>"}},
            "extra_special_tokens": {"image_token": "<image>"},
        },
    )
    files = read_model(tmp_path)
    assert files.variables == {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}
    assert [token["content"] for token in files.added_tokens] == ["<a>", "<b>", "<s>", "</s>"]


@pytest.mark.parametrize(
    ("files", "templates"),
    [
        ({"tokenizer_config_json": {"chat_template": "a"}}, {"default": "a"}),
        ({"tokenizer_config_json": {"chat_template": {"default": "a", "rag": "b"}}}, {"default": "a", "rag": "b"}),
        ({"tokenizer_config_json": {"chat_template": [{"name": "tool_use", "template": "t"}]}}, {"tool_use": "t"}),
        (
            {"tokenizer_config_json": {"chat_template": "a"}, "chat_template_json": {"chat_template": "b"}},
            {"default": "b"},
        ),
        ({"tokenizer_config_json": {"chat_template": "a"}, "chat_template_jinja": "ü"}, {"default": "ü"}),
        ({}, {}),
    ],
)
def test_templates_are_found_where_hugging_face_finds_them(tmp_path, files, templates):
    """One template or several, inside the configuration or beside it; a file beside it wins."""
    assert read_model(write(tmp_path, **files)).templates == templates


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config_json": {"model_type": "gpt_oss"}}, "Harmony"),
        ({"config_json": {"architectures": ["DeepseekV32ForCausalLM"]}}, "DeepseekV32ForCausalLM"),
        ({"tekken_json": {}}, "Mistral"),
        ({"config_json": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}}, None),
    ],
)
def test_models_that_do_not_render_through_jinja_are_known(tmp_path, files, reason):
    """Their chats are left to a replica, with the reason."""
    why = read_model(write(tmp_path, **files)).why_elsewhere
    assert (why is None) if reason is None else (why is not None and reason in why)


def test_the_digest_changes_with_every_file_that_decides(tmp_path):
    """Routers with different tokenizers, templates or model types do not share an index."""
    digests = {read_model(write(tmp_path, tokenizer_json={})).digest}
    for files in (
        {"tokenizer_json": {"a": 1}},
        {"tokenizer_config_json": {"eos_token": "x"}},
        {"chat_template_jinja": "x"},
        {"config_json": {"model_type": "qwen2"}},
    ):
        digests.add(read_model(write(tmp_path, **files)).digest)
    assert len(digests) == 5


def test_a_broken_file_is_named(tmp_path):
    """The error says which file it is."""
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not a JSON object"):
        read_model(write(tmp_path, tokenizer_config_json="{"))


def test_classes_that_rebuild_a_tokenizer_bring_their_default_tokens(tmp_path):
    """Where the configuration is silent the class speaks; an explicit null means none."""
    write(
        tmp_path,
        config_json={"model_type": "qwen2"},
        tokenizer_config_json={"eos_token": "<|im_end|>", "pad_token": None},
    )
    files = read_model(tmp_path)
    assert files.rebuilt_by == "Qwen2Tokenizer"
    assert files.variables == {"eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
