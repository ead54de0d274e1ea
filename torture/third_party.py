"""Models of other libraries, as they are: each is deployed with equal outputs, left alone, or refused.

    python -m torture.third_party

torchvision (classification, detection, segmentation, video), timm, segmentation-models-pytorch, and small
configurations of transformers. Untrained, with every fourth block from the second replaced by the default
operator; deployed plain and as a flat graph. A model without a stack of blocks is counted. Outputs that differ
beyond rounding, and errors that are not a ReplearnError, are faults.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn

import replearn
from replearn import ReplearnError
from replearn.blocks.running import call

from .ledger import open_ledger

TORCHVISION = (
    "densenet121 efficientnet_b0 efficientnet_v2_s googlenet mobilenet_v2 mobilenet_v3_small "
    "regnet_y_400mf resnet18 resnet50 shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11_bn "
    "alexnet convnext_tiny inception_v3 maxvit_t mnasnet0_5 mobilenet_v3_large regnet_x_400mf resnet34 resnet101 "
    "resnext50_32x4d swin_v2_t vgg16 vit_b_32 wide_resnet50_2"
)
DETECTION = (
    "fasterrcnn_mobilenet_v3_large_320_fpn fasterrcnn_resnet50_fpn fasterrcnn_resnet50_fpn_v2 fcos_resnet50_fpn "
    "keypointrcnn_resnet50_fpn maskrcnn_resnet50_fpn retinanet_resnet50_fpn retinanet_resnet50_fpn_v2 "
    "ssd300_vgg16 ssdlite320_mobilenet_v3_large"
)
SEGMENTATION = "deeplabv3_mobilenet_v3_large deeplabv3_resnet50 fcn_resnet50 lraspp_mobilenet_v3_large"
VIDEO = "mc3_18 mvit_v2_s r2plus1d_18 r3d_18 s3d swin3d_t"
TIMM = (
    "cait_xxs24_224 coat_tiny convit_tiny convnextv2_atto crossvit_tiny_240 deit_tiny_patch16_224 dla34 "
    "edgenext_xx_small efficientformer_l1 efficientnetv2_rw_t eva02_tiny_patch14_224 ghostnet_050 "
    "gmixer_12_224 gmlp_ti16_224 levit_128s mixer_s32_224 mobileone_s0 mobilevit_xxs pit_ti_224 "
    "poolformer_s12 pvt_v2_b0 regnetx_002 repvgg_a0 resmlp_12_224 resnest14d rexnet_100 skresnet18 "
    "tiny_vit_5m_224 vit_tiny_patch16_224 xcit_nano_12_p16_224 "
    "bat_resnext26ts botnet26t_256 caformer_s18 coat_lite_tiny coatnet_pico_rw_224 convformer_s18 "
    "convnext_atto convnext_zepto_rms cpubone_nano cs3darknet_s csatv2 darknet17 davit_tiny "
    "deit3_small_patch16_224 deit_tiny_distilled_patch16_224 densenetblur121d dla46_c dpn48b ecaresnet26t "
    "efficientformerv2_s0 efficientnet_b0_gn efficientnet_cc_b0_4e efficientnet_lite0 efficientvim_m1 "
    "efficientvit_b0 efficientvit_m0 ese_vovnet19b_slim fasternet_t0 fastvit_t8 fbnetv3_b flexivit_small "
    "focalnet_tiny_srf gcresnet33ts gcvit_xxtiny ghostnetv2_100 ghostnetv3_050 halonet26t hardcorenas_a "
    "hgnetv2_b0 hiera_tiny_224 hrnet_w18_small iformer_t inception_next_atto inception_v4 lambda_resnet26t "
    "lcnet_035 lcnetv2_small legacy_seresnet18 legacy_seresnext26_32x4d levit_conv_128s lowformer_b0 "
    "mambaout_femto maxvit_pico_rw_256 mobilenetv4_conv_small mobilenetv4_hybrid_medium mobilevitv2_050 "
    "mvitv2_tiny nest_tiny nextvit_small nf_regnet_b0 nf_resnet26 pit_ti_distilled_224 poolformerv2_s12 "
    "rdnet_tiny regnety_002 regnetz_005 repghostnet_050 repvit_m0_9 res2net50_14w_8s resnet10t resnet26d "
    "resnet33ts resnet50_clip resnetaa34d resnetblur18 resnetrs50 resnetv2_18 resnetv2_50d_gn "
    "resnetv2_50x1_bit resnext26ts sam2_hiera_tiny samvit_base_patch16_224 sebotnet33ts_256 sehalonet33ts "
    "selecsls42 sequencer2d_s seresnet33ts shvit_s1 starnet_s050 swiftformer_xs swin_s3_tiny_224 "
    "swinv2_cr_tiny_224 swinv2_tiny_window8_256 tf_efficientnetv2_b0 tinynet_e tnt_s_patch16_224 tresnet_m "
    "twins_pcpvt_small twins_svt_small visformer_tiny vit_relpos_small_patch16_224 vit_small_r26_s32_224 "
    "vit_small_patch14_dinov2 vit_small_patch16_dinov3 vit_srelpos_small_patch16_224 vit_tiny_r_s16_p8_224 "
    "vitamin_small_224 volo_d1_224 vovnet39a xception41 xcit_tiny_12_p16_224"
)
SMP = (
    "Unet:resnet18 UnetPlusPlus:resnet34 MAnet:resnet18 Linknet:resnet50 FPN:resnet34 PSPNet:resnet50 "
    "PAN:resnet34 DeepLabV3:resnet34 DeepLabV3Plus:resnet50 UPerNet:resnet34 Segformer:mit_b0 "
    "Unet:mobilenet_v2 FPN:efficientnet-b0 Unet:timm-regnetx_002"
)
TRANSFORMERS = (
    "AlbertForMaskedLM ArceeForCausalLM BartForConditionalGeneration BeitForImageClassification BertForMaskedLM "
    "BertGenerationDecoder BigBirdForMaskedLM BioGptForCausalLM BlenderbotForConditionalGeneration "
    "BloomForCausalLM CamembertForMaskedLM CanineModel CLIPTextModel CLIPVisionModel CohereForCausalLM "
    "Cohere2ForCausalLM ConvBertForMaskedLM ConvNextForImageClassification ConvNextV2ForImageClassification "
    "Data2VecTextForMaskedLM Data2VecVisionModel DebertaForMaskedLM DebertaV2ForMaskedLM "
    "DeiTForImageClassification DiffLlamaForCausalLM Dinov2ForImageClassification DistilBertForMaskedLM "
    "ElectraForMaskedLM ErnieForMaskedLM EsmForMaskedLM FalconMambaForCausalLM FlaubertWithLMHeadModel FNetModel "
    "FocalNetForImageClassification FSMTForConditionalGeneration GemmaForCausalLM Gemma2ForCausalLM "
    "Gemma3ForCausalLM GlmForCausalLM Glm4ForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTNeoXForCausalLM "
    "GPTNeoXJapaneseForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM HeliumForCausalLM "
    "HubertModel IBertModel IJepaModel ImageGPTModel JambaForCausalLM JetMoeForCausalLM LayoutLMModel "
    "LEDForConditionalGeneration LlamaForCausalLM LongformerForMaskedLM LongT5ForConditionalGeneration "
    "M2M100ForConditionalGeneration MambaForCausalLM MarianMTModel MBartForConditionalGeneration "
    "MegatronBertForMaskedLM MistralForCausalLM MixtralForCausalLM MobileBertForMaskedLM "
    "MobileViTForImageClassification ModernBertForMaskedLM MPNetForMaskedLM MptForCausalLM MraForMaskedLM "
    "MT5ForConditionalGeneration MvpForConditionalGeneration NemotronForCausalLM NystromformerForMaskedLM "
    "OlmoForCausalLM Olmo2ForCausalLM OlmoeForCausalLM OPTForCausalLM PegasusForConditionalGeneration "
    "PersimmonForCausalLM PhiForCausalLM Phi3ForCausalLM PLBartForConditionalGeneration "
    "PoolFormerForImageClassification Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM "
    "RecurrentGemmaForCausalLM RegNetForImageClassification RemBertForMaskedLM ResNetForImageClassification "
    "RobertaForMaskedLM RobertaPreLayerNormForMaskedLM RoFormerForMaskedLM RwkvForCausalLM SiglipVisionModel "
    "SmolLM3ForCausalLM SplinterModel SqueezeBertForMaskedLM StableLmForCausalLM Starcoder2ForCausalLM "
    "SwiftFormerForImageClassification SwitchTransformersForConditionalGeneration T5ForConditionalGeneration "
    "T5EncoderModel TextNetForImageClassification UMT5ForConditionalGeneration ViTForImageClassification "
    "ViTMAEModel ViTMSNForImageClassification VitDetModel Wav2Vec2Model WavLMModel XGLMForCausalLM XLMModel "
    "XLMRobertaForMaskedLM YosoForMaskedLM BitForImageClassification"
)
SMALL = {  # what a configuration of transformers has of these is set so
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner"), 64),
    **dict.fromkeys(("hidden_dim",), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "image_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 6),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 6),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_labels"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "patch_size"), 8),
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def of_torchvision(key: str) -> tuple[nn.Module, Any]:
    import torchvision

    more: dict[str, Any] = {"init_weights": False} if key in ("googlenet", "inception_v3") else {}
    sides = (299, 299) if key == "inception_v3" else (224, 224)
    return torchvision.models.get_model(key, weights=None, num_classes=10, **more), torch.randn(1, 3, *sides)


def of_detection(key: str) -> tuple[nn.Module, Any]:
    import torchvision

    sized = {} if "320" in key or "300" in key else {"min_size": 160, "max_size": 160}
    model = torchvision.models.get_model(key, weights=None, weights_backbone=None, num_classes=5, **sized)
    return model, ([torch.rand(3, 160, 160)],)


def of_segmentation(key: str) -> tuple[nn.Module, Any]:
    import torchvision

    model = torchvision.models.get_model(key, weights=None, weights_backbone=None, num_classes=5)
    return model, torch.randn(1, 3, 96, 96)


def of_video(key: str) -> tuple[nn.Module, Any]:
    import torchvision

    sides = (16, 224, 224) if key == "mvit_v2_s" else (14, 64, 64) if key == "s3d" else (4, 64, 64)
    return torchvision.models.get_model(key, weights=None), torch.randn(1, 3, *sides)


def of_timm(key: str) -> tuple[nn.Module, Any]:
    import timm

    model = timm.create_model(key, num_classes=10)
    return model, torch.randn(1, *model.pretrained_cfg["input_size"])


def of_smp(key: str) -> tuple[nn.Module, Any]:
    import segmentation_models_pytorch as smp

    architecture, _, encoder = key.partition(":")
    model = getattr(smp, architecture)(encoder_name=encoder, encoder_weights=None, classes=3)
    return model, torch.randn(1, 3, 64, 64)


def of_transformers(key: str) -> tuple[nn.Module, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    made: Any = getattr(transformers, key)
    usual = made.config_class()
    model = made(made.config_class(**{name: value for name, value in SMALL.items() if hasattr(usual, name)}))
    taken = {
        "input_ids": torch.randint(3, 64, (1, 12)),
        "pixel_values": torch.randn(1, 3, 32, 32),
        "input_values": torch.randn(1, 400),
    }
    example = {model.main_input_name: taken[model.main_input_name]}
    if model.config.is_encoder_decoder:
        example["decoder_input_ids"] = torch.randint(3, 64, (1, 6))
    return model, example


LIBRARIES = {
    "torchvision": (of_torchvision, TORCHVISION),
    "timm": (of_timm, TIMM),
    "transformers": (of_transformers, TRANSFORMERS),
    "smp": (of_smp, SMP),
    "segmentation": (of_segmentation, SEGMENTATION),
    "detection": (of_detection, DETECTION),
    "video": (of_video, VIDEO),
}
NAMES = [f"{library}:{name}" for library, (_, names) in LIBRARIES.items() for name in names.split()]


def built(name: str) -> tuple[nn.Module, Any]:
    library, _, key = name.partition(":")
    torch.manual_seed(0)
    model, example = LIBRARIES[library][0](key)
    return model.eval(), example


def trial(name: str) -> str:
    try:
        model, example = built(name)
        with torch.no_grad():
            call(model, example)
    except Exception as error:  # the library's own
        return f"not built: {type(error).__name__}"
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    try:
        plan = replearn.plan(model, interval=4, first=2)
    except ReplearnError:
        return "no targets"
    if any(not torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items()):
        raise RuntimeError("planning has changed the model")
    replearn.replace_(model, plan).eval()
    with torch.no_grad():
        call(model, example)
    outcome = []
    for flatten in (False, True):
        try:
            replearn.deploy(model, example, flatten=flatten)  # which compares them
            outcome.append("equal")
        except ReplearnError as error:
            if "please report" in str(error):
                raise
            outcome.append("refused")
    return f"deployed {outcome[0]}, flat {outcome[1]}"


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ledger = open_ledger("third_party", total=len(NAMES), seconds=3600)
    while ledger.open:
        name = NAMES[ledger.done]
        try:
            outcome = trial(name)
            ledger.count(name.partition(":")[0], outcome)
            if "equal, flat equal" not in outcome:
                ledger.note(outcome, name)
        except Exception as error:
            ledger.note("faults", f"{name}: {type(error).__name__}: {str(error)[:300]}")
        ledger.finish_case()
    return ledger.report()


if __name__ == "__main__":
    sys.exit(main())
