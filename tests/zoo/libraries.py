"""Tiny, random models of transformers and timm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from zoo.measure import Member

CAUSAL: Final = """
    llama mistral qwen2 qwen3 gemma gemma2 phi phi3 gpt2 gpt_neox gpt_neo gptj opt bloom falcon stablelm olmo olmo2 starcoder2
    cohere cohere2 granite mpt smollm3 glm glm4 nemotron persimmon olmo3 codegen helium xglm ctrl biogpt gpt_bigcode exaone4
    seed_oss apertus arcee mixtral qwen3_moe olmoe granitemoe openai-gpt
"""
MASKED: Final = """
    bert roberta distilbert albert electra fnet deberta-v2 mpnet ernie nystromformer yoso big_bird longformer mobilebert
    squeezebert funnel ibert rembert roformer convbert megatron-bert modernbert mra data2vec-text
"""
SEQ2SEQ: Final = "t5 mt5 bart mbart pegasus blenderbot m2m_100 led longt5 bigbird_pegasus prophetnet plbart mvp marian fsmt"
IMAGE: Final = """
    vit beit resnet regnet dinov2 mobilenet_v2 poolformer pvt pvt_v2 focalnet bit vit_msn cvt swiftformer textnet ijepa
    data2vec-vision dinov2_with_registers
"""
TIMM: Final = """
    resnet18 resnetblur18 seresnet18 densenet121 mobilenetv3_small_050 mobilenetv4_conv_small efficientnet_b0 regnety_002
    convnext_atto convnextv2_atto vit_tiny_patch16_224 deit3_small_patch16_224 vit_small_patch16_rope_224 eva02_tiny_patch14_224
    vit_small_patch16_dinov3 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 maxvit_rmlp_pico_rw_256
    poolformer_s12 caformer_s18 xcit_nano_12_p16_224 cait_xxs24_224 coat_lite_tiny convit_tiny
    edgenext_xx_small mobilevit_xxs mobilevitv2_050 fastvit_t8 repvgg_a0 ghostnet_050 hrnet_w18_small dla34 vovnet39a
    xception41 sebotnet33ts_256 volo_d1_224 davit_tiny gcvit_xxtiny pit_ti_224 nfnet_l0
"""

KEEP_FP32: Final = {"fnet": ("*.fourier.self",), "mra": ("*.attention.output.dense",)}
"""A Fourier transform, which has no kernel in half; a layer that gets float32 from a computation of its own."""

TINY: Final = (
    (
        32,
        "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim image_size moe_intermediate_size",
    ),
    (64, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim max_length"),
    (2, "num_hidden_layers encoder_layers decoder_layers num_layers num_decoder_layers n_layer n_layers"),
    (2, "num_key_value_heads num_experts_per_tok type_vocab_size expand eos_token_id"),
    (4, "num_attention_heads encoder_attention_heads decoder_attention_heads num_heads n_head n_heads"),
    (4, "num_experts num_local_experts rotary_dim conv_kernel time_step_rank"),
    (8, "head_dim d_kv patch_size state_size"),
    (16, "chunk_size"),
    (128, "vocab_size"),
    (1024, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (5, "num_labels"),
    (0, "pad_token_id attention_dropout"),
    (1, "bos_token_id decoder_start_token_id"),
    (3, "num_channels"),
    (False, "use_cache"),
)
"""Values of a configuration, and the names that libraries have for them."""

LARGEST: Final = 4e7
"""Parameters of a model of transformers; larger ones take too long."""

SHARP: Final = 15.0
"""Factor of queries and keys. At random ones attention is so even that positions do not matter."""


def transformers_members(length: int) -> Iterator[Member]:
    """One model per architecture, over ``length`` tokens where it is causal."""
    import transformers

    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 120, (2, length), generator=draw)
    fewer, few = tokens[:, :64], tokens[:, :16]
    image = torch.randn(2, 3, 32, 32, generator=draw)
    kinds: list[tuple[str, Any, str, dict[str, Tensor]]] = [
        ("causal", transformers.AutoModelForCausalLM, CAUSAL, {"input_ids": tokens}),
        ("masked", transformers.AutoModelForMaskedLM, MASKED, {"input_ids": fewer}),
        (
            "seq2seq",
            transformers.AutoModelForSeq2SeqLM,
            SEQ2SEQ,
            {"input_ids": fewer, "decoder_input_ids": few},
        ),
        ("image", transformers.AutoModelForImageClassification, IMAGE, {"pixel_values": image}),
    ]
    for kind, auto, names, inputs in kinds:
        for name in names.split():
            yield Member(
                f"transformers, {kind} {name}",
                lambda name=name, auto=auto: _transformers_model(name, auto),
                lambda model, inputs=inputs: model(**inputs).logits,
                keep_fp32=KEEP_FP32.get(name, ()),
            )


def _transformers_model(name: str, auto: Any) -> nn.Module:
    from transformers import AutoConfig

    config = AutoConfig.for_model(name)
    for value, keys in TINY:
        for key in keys.split():
            if isinstance(getattr(config, key, None), int | float) or (
                hasattr(config, key) and key in ("head_dim", "pad_token_id", "num_key_value_heads")
            ):
                with suppress(Exception):  # some are properties
                    setattr(config, key, value)
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[:2]
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:.0e} parameters, because its configuration has other names for its sizes")
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2 and any(
                part in key for part in ("q_proj", "k_proj", "query", "qkv", "c_attn")
            ):
                parameter.mul_(SHARP)
    return model


def timm_members() -> Iterator[Member]:
    """One model per architecture, for images of 64 pixels where it takes them."""
    timm = _import_timm()

    def build(name: str) -> nn.Module:
        torch.manual_seed(0)
        try:
            return timm.create_model(name, num_classes=5, img_size=64)
        except (TypeError, AssertionError, RuntimeError):
            return timm.create_model(name, num_classes=5)

    def run(model: Any) -> Tensor:
        embeds = getattr(model, "patch_embed", None)
        size = (64, 64) if getattr(embeds, "img_size", None) is None else embeds.img_size
        return model(torch.randn(8, 3, *size, generator=torch.Generator().manual_seed(1)))

    for name in TIMM.split():
        yield Member(f"timm, {name}", lambda name=name: build(name), run, is_slow=True)


def _import_timm() -> Any:
    """timm, whose import needs torchvision for transforms of images, and for one class of layers, which no model here has."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # not there, or of another build of torch
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("", *TORCHVISION.split()):
            parent, _, child = f"torchvision.{name}".rstrip(".").rpartition(".")
            module = sys.modules[f"{parent}.{child}".lstrip(".")] = _Anything(child)
            if parent:
                setattr(sys.modules[parent], child, module)
    import timm

    return timm


TORCHVISION: Final = """
    datasets models models.feature_extraction ops ops.misc transforms transforms.functional
"""
"""The parts of torchvision that timm imports."""


class _Anything(ModuleType):
    """A module that has a class of every name."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Class(name, (), {})
        setattr(self, name, found)
        return found


class _Class(type):
    """A class that has an attribute of every name, as an enumeration may."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name
