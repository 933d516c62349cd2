"""How many parameters a model has and how many bytes they take, counted from its shape.

Counted are the matrices: embeddings, attention, feed-forward, experts, recurrences. Norms, biases, vision and audio
towers and draft layers are not; published models come out within about 2 %. A stated size (of the files) is better and
replaces the count. Quantised checkpoints keep embeddings in 16 bits, and MXFP4 ones everything but the experts.
"""

from __future__ import annotations

from msgspec import Struct, structs

from kvroute.sizing.fields import Fields
from kvroute.sizing.layers import Attention, Latent, Layer, State
from kvroute.sizing.patterns import Kind

UNGATED_FAMILIES = frozenset(
    {"opt", "gpt2", "gpt_neox", "gpt_bigcode", "falcon", "starcoder2", "mpt", "phi", "nemotron", "nemotron_h", "bloom"}
)
MXFP4_BITS = 4 + 8 / 32  # one 8-bit scale for 32 numbers
SCALE_BITS = 16  # one scale a group in grouped integer formats


class Weights(Struct, frozen=True, kw_only=True):
    """What the weights are and how much memory they take, over all GPUs."""

    parameters: int
    active_parameters: int  # used for one token; equal to `parameters` without experts
    total_bytes: int
    expert_bytes: int = 0  # the part of `total_bytes` that is routed experts
    experts: int = 0  # in a layer
    experts_per_token: int = 0

    def read_bytes(self, batch: int = 1) -> int:
        """Bytes that one decode step of `batch` sequences reads.

        Experts are taken to be chosen evenly and independently, so that a batch touches 1 - (1 - k/E)^batch of them.
        """
        if not self.experts or not self.expert_bytes:
            return self.total_bytes
        touched = 1 - (1 - self.experts_per_token / self.experts) ** batch
        return self.total_bytes - self.expert_bytes + round(self.expert_bytes * touched)

    def resized(self, total_bytes: int) -> Weights:
        """The same model with a stated size."""
        share = self.expert_bytes / self.total_bytes if self.total_bytes else 0.0
        return structs.replace(self, total_bytes=total_bytes, expert_bytes=round(total_bytes * share))


def weights_of(
    fields: Fields, root: Fields, kinds: list[Kind], layers: tuple[Layer, ...], element_bytes: int
) -> Weights | None:
    """Count the weights; None, with a note, where the shape lacks a field that is needed for it.

    `fields` describes the language model, `root` is the whole configuration, where quantisation is stated.
    """
    hidden = fields.whole("hidden_size", "n_embd", "d_model")
    vocab = fields.whole("vocab_size", "padded_vocab_size")
    if hidden is None or vocab is None:
        fields.notes.append("hidden_size or vocab_size is not stated: the weights cannot be counted, give their size")
        return None
    tied = fields.flag("tie_word_embeddings")
    tied = root.flag("tie_word_embeddings") if tied is None else tied
    tied = (fields.word("model_type") or "").startswith("gemma") if tied is None else tied
    embeddings = hidden * vocab * (1 if tied else 2)
    dense = sum(_mixer(fields, cache, hidden) for layer in layers for cache in layer)
    experts, per_token = _experts(fields)
    expert = _expert(fields, hidden)
    feed = [_feed_forward(fields, index, kind, hidden, experts) for index, kind in enumerate(kinds)]
    if not (expert if experts else any(feed)):
        fields.notes.append("the feed-forward's size is not stated: the weights cannot be counted, give their size")
        return None
    sparse = feed.count(None)
    dense += sum(one for one in feed if one is not None) + sparse * _beside_experts(fields, hidden, experts)
    routed = sparse * experts * expert
    dense_each, routed_each = _bytes_each(root, element_bytes)
    return Weights(
        parameters=embeddings + dense + routed,
        active_parameters=embeddings + dense + sparse * per_token * expert,
        total_bytes=embeddings * element_bytes + round(dense * dense_each) + round(routed * routed_each),
        expert_bytes=round(routed * routed_each),
        experts=experts if sparse else 0,
        experts_per_token=per_token if sparse else 0,
    )


def _mixer(fields: Fields, cache: Attention | Latent | State, hidden: int) -> int:
    """Parameters of one layer's attention or recurrence."""
    if isinstance(cache, State):
        return hidden * (cache.channels() + 2 * cache.out_channels)
    heads = fields.whole("num_attention_heads", "n_head", "n_heads") or 0
    if isinstance(cache, Attention):
        query = heads * cache.key_dim * (2 if fields.flag("attn_output_gate") else 1)
        return hidden * (query + cache.kv_heads * (cache.key_dim + cache.value_dim) + heads * cache.value_dim)
    plain = cache.plain
    if plain is None:
        return _compressed_mixer(fields, cache, hidden, heads)
    narrow = fields.whole("q_lora_rank")
    query = heads * plain.key_dim
    queries = hidden * query if narrow is None else narrow * (hidden + query)
    keys = plain.key_dim - cache.rope_dim + plain.value_dim
    return (
        queries + hidden * (cache.rank + cache.rope_dim) + cache.rank * heads * keys + heads * plain.value_dim * hidden
    )


def _compressed_mixer(fields: Fields, cache: Latent, hidden: int, heads: int) -> int:
    """Parameters of a cache of compressed attention: of its window the layer's own, of its rest the compressor's."""
    narrow, out = fields.whole("q_lora_rank"), fields.whole("o_lora_rank")
    if narrow is None or out is None:
        return 0
    if cache.window is not None:
        wide = heads * cache.rank
        return narrow * (hidden + wide) + hidden * cache.rank + out * (wide + (fields.whole("o_groups") or 1) * hidden)
    if not cache.index_numbers:
        return 2 * hidden * cache.rank
    chooser = fields.needed("index_n_heads")
    key = cache.index_numbers // chooser
    return 4 * hidden * (cache.rank + key) + narrow * cache.index_numbers + hidden * chooser


def _matrices(fields: Fields) -> int:
    """Matrices of one feed-forward: up and down, and a gate where the family has one."""
    return 2 if (fields.word("model_type") or "") in UNGATED_FAMILIES else 3


def _experts(fields: Fields) -> tuple[int, int]:
    count = fields.whole("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", least=0) or 0
    chosen = fields.whole("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", least=0) or 0
    return (count, min(count, chosen)) if count > 1 and chosen else (0, 0)


def _expert(fields: Fields, hidden: int) -> int:
    if isinstance(fields.data.get("intermediate_size"), list):
        return 0
    size = fields.whole("moe_intermediate_size", "intermediate_size", "ffn_hidden_size")
    inner = fields.whole("moe_latent_size") or hidden
    return _matrices(fields) * inner * (size or 0)


def _beside_experts(fields: Fields, hidden: int, experts: int) -> int:
    """Router and shared experts of a sparse layer."""
    if not experts:
        return 0
    size = fields.whole("moe_intermediate_size", "intermediate_size") or 0
    if (fields.word("model_type") or "").startswith("llama4"):
        shared: int | None = size
    else:
        shared = fields.whole(
            "moe_shared_expert_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            least=0,
        )
    count = fields.whole("n_shared_experts", "num_shared_experts", least=0)
    shared = size * (count or 0) if shared is None else shared * (count or 1)
    latent = 2 * hidden * (fields.whole("moe_latent_size") or 0)
    return hidden * experts + _matrices(fields) * hidden * shared + latent


def _feed_forward(fields: Fields, index: int, kind: Kind, hidden: int, experts: int) -> int | None:
    """Parameters of the dense feed-forward of layer `index`; None where the layer is sparse."""
    letters = fields.word("hybrid_override_pattern")
    if letters:
        if letters[index] == "E":
            return None
        return _dense(fields, hidden, index) if letters[index] == "-" else 0
    words = fields.items("layers_block_type")
    if words and (fields.word("model_type") or "").startswith("nemotron_h"):
        return None if words[index] == "moe" else _dense(fields, hidden, index) if words[index] == "mlp" else 0
    return None if experts and _is_sparse(fields, index) else _dense(fields, hidden, index)


def _dense(fields: Fields, hidden: int, index: int) -> int:
    sizes = fields.data.get("intermediate_size")
    if isinstance(sizes, list):  # one a layer (Gemma 3n)
        listed = Fields(
            {str(layer): size for layer, size in enumerate(sizes)}, f"{fields.path}intermediate_size.", fields.notes
        )
        return _matrices(fields) * hidden * (listed.whole(str(index)) or 0)
    size = fields.whole("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    if size is None and (fields.word("model_type") or "") in ("gpt2", "gpt_bigcode", "falcon", "bloom"):
        size = 4 * hidden  # these families state it only where it differs
    return _matrices(fields) * hidden * (size or 0)


def _is_sparse(fields: Fields, index: int) -> bool:
    """Whether layer `index` of a model with experts routes to them."""
    words = fields.items("mlp_layer_types")
    if words and index < len(words):
        return bool(words[index] != "dense")
    if index < (fields.whole("first_k_dense_replace", "moe_layer_start_index", least=0) or 0):
        return False
    if index in (fields.items("mlp_only_layers") or ()):
        return False
    period = fields.whole("expert_layer_period")
    if period is not None:
        return index % period == (fields.whole("expert_layer_offset", least=0) or 0) % period
    frequency = fields.data.get("moe_layer_freq")
    if isinstance(frequency, list):
        return index >= len(frequency) or frequency[index] != 0
    step = fields.whole("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq") or 1
    return (index + 1) % step == 0


def _bytes_each(root: Fields, element_bytes: int) -> tuple[float, float]:
    """Bytes of one parameter of the dense matrices, and of the experts, as the checkpoint is quantised."""
    quantised = root.inner("quantization_config") or root.inner("compression_config")
    if quantised is None:
        return float(element_bytes), float(element_bytes)
    method = (quantised.word("quant_method", "quant_algo") or "").lower()
    bits = _bits(quantised, method)
    if bits is None:
        root.notes.append(
            f"the quantisation {method or 'without a name'} is not known: weights counted unquantised, give their size"
        )
        return float(element_bytes), float(element_bytes)
    routed = MXFP4_BITS if root.word("expert_dtype") == "fp4" else bits  # DeepSeek V4: the rest as quant_method says
    return (float(element_bytes) if method == "mxfp4" else bits / 8), routed / 8


def _bits(quantised: Fields, method: str) -> float | None:
    """Bits of a quantised parameter, scales included."""
    if method == "mxfp4":
        return MXFP4_BITS
    if "fp4" in method:
        return 4 + 8 / 16
    if "fp8" in method or method == "modelopt":
        return 8
    if method == "bitsandbytes":
        return 4 if quantised.flag("load_in_4bit") else 8
    if method.replace("_", "-") == "compressed-tensors":
        return _compressed_bits(quantised)
    bits = quantised.whole("bits", "w_bit", most=16)
    if bits is None:
        return None
    group = quantised.data.get("group_size", quantised.data.get("q_group_size"))
    return bits + (SCALE_BITS + bits) / group if isinstance(group, int) and group > 0 else bits


def _compressed_bits(quantised: Fields) -> float | None:
    groups = quantised.inner("config_groups")
    for name in sorted(groups.data) if groups else ():
        group = groups.inner(name) if groups else None
        weights = group.inner("weights") if group else None
        bits = weights.whole("num_bits", most=16) if weights else None
        if weights is not None and bits is not None:
            size = weights.whole("group_size", least=-1) or 0
            return bits + SCALE_BITS / size if size > 0 and bits < 8 else bits
    return None
