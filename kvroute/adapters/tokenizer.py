"""Text -> token ids, exactly those of Hugging Face, with `fastokens` where it can and `tokenizers` where it cannot.

The one idea: a tokenizer looks for its added tokens first and works on the pieces between them one by one. So a text
may be cut before any added token that is always found (an *anchor*), and the parts be tokenised apart; a conversation
that grew by a turn costs only its new end. `anchors_of` says which tokens are always found:

- it swallows no neighbours (lstrip, rstrip, single_word) and is looked for in the text as it stands (not normalised);
- no other added token overlaps it, itself included, so no match can begin before it and cover it;
- it begins with neither a letter nor a space, so a neighbour that asks for a word's end still finds one.

What depends on "the first piece" (a metaspace put in front) stays right, because the later part begins with the anchor.
`Tokenizer` still tries the anchor that it offers on texts that are easy to get wrong.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import fastokens
import msgspec
import tokenizers
from msgspec import Struct

from kvroute.adapters.model_files import TOKENIZER, ModelFiles
from kvroute.adapters.rebuilt import rebuild
from kvroute.errors import ConfigError
from kvroute.kv.chain import TOKEN_BYTES, TokenBytes

Encode = Callable[[list[str], bool], list[bytes]]  # texts, add special tokens -> ids of each

SAMPLES = (
    "You are a helpful assistant.\nUse the tools, don't guess: 3 files (12,345 bytes) in /usr/lib.",
    "  two spaces, a tab\t, 中文字符, кириллица, e\u0301 and \u00e9, 🙂🏽, \ufeff, ﬁ, Ⅷ, ½.\r\n\n  \n",
    'def f(x):\n    return {"a": [1, 2.5e-10], "b": "it\'s"}  # ünïcödé\n\n\nWHAT?!... www.x-y.org/?q=1&r=2',
    "", " ", "\n", "x", "'s", "é" * 40, "1234567890" * 5, " leading", "trailing ", "\u2028\u00a0\u3000\x00\x7f",
)  # fmt: skip


class AddedToken(Struct, frozen=True):
    """One entry of tokenizer.json's added_tokens; `special` is about decoding only."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True


class TokenizerSpec(Struct, frozen=True):
    """The part of tokenizer.json that decides where a text may be cut."""

    added_tokens: tuple[AddedToken, ...] = ()
    normalizer: dict[str, Any] | None = None

    @property
    def normalizes(self) -> bool:
        """Whether text is changed before it is tokenised."""
        return self.normalizer not in (None, {"type": "Sequence", "normalizers": []})


def anchors_of(spec: TokenizerSpec) -> tuple[str, ...]:
    """Return the added tokens before which any text may be cut, in the tokenizer's order."""
    contents = [token.content for token in spec.added_tokens if token.content]
    starts = {text[:end] for text in contents for end in range(1, len(text))}
    ends = {text[start:] for text in contents for start in range(1, len(text))}
    return tuple(
        token.content
        for token in spec.added_tokens
        if token.content
        and not (token.single_word or token.lstrip or token.rstrip or (token.normalized and spec.normalizes))
        and not (token.content[0].isalnum() or token.content[0].isspace() or token.content[0] == "_")
        and not _overlaps(token.content, contents, starts, ends)
    )


def _overlaps(text: str, contents: Collection[str], starts: Collection[str], ends: Collection[str]) -> bool:
    """Return whether an added token (this one at another place included) can share characters with this one."""
    inner = {text[a:b] for a in range(len(text)) for b in range(a + 1, len(text) + 1)} - {text}
    return (
        any(text[start:] in starts for start in range(1, len(text)))
        or any(text[:end] in ends for end in range(1, len(text)))
        or not inner.isdisjoint(contents)
        or sum(text in other for other in contents) > 1
    )


class Tokenizer:
    """A tokenizer, loaded and tried. Loading takes up to seconds; nothing here waits for anything else.

    Raises:
        ConfigError: neither library loads the file, or it adds special tokens in a way that is not understood.
    """

    def __init__(self, files: ModelFiles) -> None:
        path = files.directory / TOKENIZER
        self.library, self._encode, spec = _load(path, files)
        self.anchors = anchors_of(spec)
        self.surroundings = self._surroundings()  # ids that add_special_tokens puts before and after a text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenBytes:
        """Return the ids of a text. Special tokens inside the text are recognised, as engines do."""
        ids = self._encode([text], False)[0]
        before, after = self.surroundings if add_special_tokens else (b"", b"")
        return TokenBytes(before + ids + after)

    def encode_parts(self, texts: list[str]) -> list[bytes]:
        """Return the ids of every text, in one call that leaves the interpreter lock to others.

        Raises:
            ValueError: the tokenizer gives up on a text, for instance on a pattern that takes too long.
        """
        return self._encode(texts, False)

    def anchor_for(self, conversation: str) -> str | None:
        """Return the anchor that cuts a sample conversation into the most parts and passes the trial; None without one.

        Of equals the one that comes last is taken: the next turn goes on there.
        """
        found = [anchor for anchor in self.anchors if anchor in conversation]
        found.sort(key=lambda anchor: (-conversation.count(anchor), -conversation.rfind(anchor)))
        return next(filter(self.may_cut, found), None)

    def may_cut(self, anchor: str) -> bool:
        """Return whether cutting before an anchor, and tokenising both parts apart, gives the same ids."""
        for before, after in zip(SAMPLES, SAMPLES[1:] + SAMPLES[:1], strict=True):
            whole, first, rest = self._encode([before + anchor + after, before, anchor + after], False)
            if whole != first + rest:
                return False
        return True

    def _surroundings(self) -> tuple[bytes, bytes]:
        """Return the ids that `add_special_tokens` puts before and after a text."""
        bare, full = self._encode([SAMPLES[0]], False)[0], self._encode([SAMPLES[0]], True)[0]
        at = full.find(bare)
        before, after = full[:at], full[at + len(bare) :]
        others = (before + self._encode([text], False)[0] + after == self._encode([text], True)[0] for text in SAMPLES)
        if at % TOKEN_BYTES or not all(others):
            raise ConfigError("tokenizer: special tokens are not simply put around the text, so it cannot be used here")
        return before, after


def _load(path: Path, files: ModelFiles) -> tuple[str, Encode, TokenizerSpec]:
    """Return the faster library that agrees with Hugging Face's own, its way to encode, and the tokens it looks for."""
    try:
        definition = path.read_bytes()
        if files.rebuilt_by is not None:
            definition = rebuild(definition, files.rebuilt_by)
        spec = msgspec.json.decode(definition, type=TokenizerSpec)
        reference = tokenizers.Tokenizer.from_str(definition.decode())
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"tokenizer: {path} is not a tokenizer of Hugging Face's format: {error}") from error
    known = {token.content for token in spec.added_tokens}
    added = [token for token in map(_added_token, files.added_tokens) if token.content not in known]
    spec = msgspec.structs.replace(spec, added_tokens=(*spec.added_tokens, *added))
    encode = _with_tokenizers(reference, added)
    texts = [*SAMPLES, "".join(token.content + "x" for token in spec.added_tokens)]
    try:
        faster = _with_fastokens(fastokens.Tokenizer.from_json_str(definition.decode()), added)
        agrees = faster(texts, True) == encode(texts, True)
    except ValueError:  # a model that it does not know, or text that it cannot encode
        agrees = False
    return ("fastokens", faster, spec) if agrees else ("tokenizers", encode, spec)


def _added_token(fields: dict[str, Any]) -> AddedToken:
    return msgspec.convert({"normalized": not fields.get("special", True), **fields}, AddedToken)


def _with_tokenizers(library: tokenizers.Tokenizer, added: list[AddedToken]) -> Encode:
    library.add_tokens([tokenizers.AddedToken(**msgspec.structs.asdict(token)) for token in added])
    library.no_truncation()
    library.no_padding()

    def encode(texts: list[str], add_special_tokens: bool) -> list[bytes]:
        # encode_batch, because encode keeps the interpreter lock
        encodings = library.encode_batch(texts, add_special_tokens=add_special_tokens)
        return [array("I", encoding.ids).tobytes() for encoding in encodings]

    return encode


def _with_fastokens(library: Any, added: list[AddedToken]) -> Encode:
    library.add_tokens([tokenizers.AddedToken(**msgspec.structs.asdict(token)) for token in added])
    library.no_truncation()
    library.no_padding()
    flat = library.encode_batch_flat

    def encode(texts: list[str], add_special_tokens: bool) -> list[bytes]:
        # One text a call: several at once are spread over threads, which costs four times the CPU for texts of a turn.
        return [flat((text,), add_special_tokens=add_special_tokens)[0] for text in texts]

    return encode
