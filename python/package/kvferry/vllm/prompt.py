"""Hash of a prompt and of everything else that its KV depends on, computed in the same way by both engines.

vLLM's own hashes of blocks cannot be used. They exist only with prefix caching, and depend on settings of the
engine: the algorithm, the block size, the path of an adapter.
"""

import hashlib
import sys
from array import array

from kvferry._native import prompt_hash as hash_of_parts


def names_media(vllm_config) -> bool:
    """True if vLLM names images and other media by their content. Without its caches it numbers them instead."""
    media = vllm_config.model_config.multimodal_config
    return media is None or media.mm_processor_cache_gb != 0 or vllm_config.cache_config.enable_prefix_caching


def prompt_hash(request, has_names: bool = True) -> bytes:
    """Returns the hash of a request's prompt. `has_names` is true if vLLM names its media by their content."""
    return hash_of_parts(list(_parts(request, has_names)))


def _parts(request, has_names: bool):
    """Yields the names and the contents of the parts."""
    if request.prompt_token_ids is not None:
        yield "tokens", _packed(request.prompt_token_ids)
    if (embeds := request.prompt_embeds) is not None:
        # A flag for each position, if not all positions are embeddings.
        yield "embeds", _tensor(embeds) + bytes(request.prompt_is_token_ids or ())
    for feature in request.mm_features:
        where = feature.mm_position
        name = feature.identifier if has_names or feature.data is None else _content(feature)
        yield "media", f"{feature.modality} {where.offset} {where.length} {name}".encode()
        if where.is_embed is not None:
            yield "places", _tensor(where.is_embed)
    if (adapter := request.lora_request) is not None:
        # The adapter's number and path differ between engines.
        yield "adapter", adapter.lora_name.encode()
    if salt := request.cache_salt:
        yield "salt", salt.encode()


def _packed(ids: list[int]) -> bytes:
    """Token ids, four little-endian bytes each."""
    try:
        packed = array("I", ids)
    except OverflowError:
        # No model has such a token, but a request may contain it.
        return repr(ids).encode()
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _tensor(tensor) -> bytes:
    from vllm.v1.utils import tensor_data

    digest = hashlib.sha256(tensor_data(tensor))
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return digest.digest()


def _content(feature) -> str:
    """Hash of the content of a medium that vLLM does not name by its content."""
    from vllm.multimodal.hasher import MultiModalHasher

    digest = hashlib.sha256()
    for part in MultiModalHasher.iter_item_to_bytes(feature.modality, feature.data.get_data()):
        digest.update(part)
    return digest.hexdigest()
