"""ship: a compressed model as the standard architecture with fewer blocks, loaded without this package."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replearn import ReplearnError
from replearn.compression import Compressed, compress, recognise
from replearn.compression.shipping import ship, standard

pytest.importorskip("transformers")
pytest.importorskip("timm")
pytest.importorskip("torchvision")

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2}
BARE = """
import os, sys, torch
sys.modules["replearn"] = None  # an import of replearn fails
for folder in map(str.rstrip, sys.stdin):
    os.chdir(folder)
    names = {"torch": torch}
    exec(open("bare.py").read(), names)
    made = names["model"](torch.load("x.pt"))
    torch.save(getattr(made, "logits", made).detach(), "y.pt")
    sys.modules.pop("load", None)
    print("ready", folder, flush=True)
"""


def hugging_face(name: str, **settings: Any) -> nn.Module:
    import transformers

    text = {"vocab_size": 40, "initializer_range": 0.2}
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "bert": ("BertForMaskedLM", "BertConfig", {**SHAPE, **text}),
        "classifier": ("BertForSequenceClassification", "BertConfig", {**SHAPE, **text, "num_labels": 4}),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 5, "n_head": 2, "n_positions": 32,
                                                   **text, "bos_token_id": 0, "eos_token_id": 0}),
        "llama": ("LlamaForCausalLM", "LlamaConfig", {**SHAPE, **text}),
        "mistral": ("MistralForCausalLM", "MistralConfig", {**SHAPE, **text, "num_key_value_heads": 1}),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SHAPE, **text, "num_key_value_heads": 1,
                                                      "sliding_window": 4,
                                                      "use_sliding_window": True, "max_window_layers": 3}),
        "vit": ("ViTForImageClassification", "ViTConfig", {**SHAPE, "image_size": 8, "patch_size": 4}),
        "deit": ("DeiTForImageClassification", "DeiTConfig", {**SHAPE, "image_size": 8, "patch_size": 4}),
        "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {**SHAPE, "image_size": 8, "patch_size": 4}),
        "resnet": ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16],
                                                                    "depths": [3, 4], "layer_type": "basic"}),
        "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig",
                      {"depths": [3, 4, 2, 2], "hidden_sizes": [8, 16, 8, 8], "num_attention_heads": [1] * 4,
                       "sr_ratios": [1] * 4, "mlp_ratios": [2] * 4, "decoder_hidden_size": 16}),
        "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", {**SHAPE, "conv_dim": [8] * 7,
                                                          "num_conv_pos_embedding_groups": 2}),
        "t5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 16, "num_layers": 3, "vocab_size": 40,
                                                          "decoder_start_token_id": 0}),
    }  # fmt: skip
    model, config, given = kinds[name]
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**{**given, **settings}))
    return made.eval()


def other(name: str) -> nn.Module:
    import timm
    from torchvision.models.resnet import BasicBlock, ResNet
    from torchvision.models.vision_transformer import VisionTransformer

    tiny = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "depth": 5, "num_classes": 4}
    torch.manual_seed(0)
    made: dict[str, Any] = {
        "timm_vit": lambda: timm.create_model("vit_tiny_patch16_224", **tiny, drop_path_rate=0.1),
        "timm_distilled": lambda: timm.create_model("deit_tiny_distilled_patch16_224", **tiny),
        "timm_resnet": lambda: timm.create_model("resnet18", layers=(3, 2, 1, 3), num_classes=4),
        "timm_convnext": lambda: timm.create_model("convnext_atto", num_classes=4),
        "torchvision_resnet": lambda: ResNet(BasicBlock, [3, 2, 1, 3], num_classes=4),
        "torchvision_vit": lambda: VisionTransformer(16, 8, 5, 2, 16, 24, num_classes=4),
    }
    model: nn.Module = made[name]()
    return model.eval()


def batches(model: nn.Module) -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    main = getattr(model, "main_input_name", "")
    if main == "input_ids":
        return [torch.randint(1, 40, (4, 10), generator=draws) for _ in range(3)]
    if main == "input_values":
        return [torch.randn(4, 1600, generator=draws) for _ in range(3)]
    side = getattr(getattr(model, "config", None), "image_size", None) or (
        32 if type(model).__name__ == "ConvNeXt" else 16
    )
    return [torch.randn(4, 3, side, side, generator=draws) for _ in range(3)]


def without(model: nn.Module, form: Any = "removal") -> Compressed:
    """The second block and the last one out."""
    data = batches(model)
    names = recognise(model, data).candidates
    # wide convolutions are slow to realign, and nn.MultiheadAttention is not realigned
    wide = any(isinstance(m, nn.Conv2d) and m.in_channels > 64 for m in model.modules())
    wide = wide or any(isinstance(m, nn.MultiheadAttention) for m in model.modules())
    return compress(model, data, budget=[names[1], names[-1]], form=form, realign=not wide)


def logits(made: Any) -> Tensor:
    return made if isinstance(made, Tensor) else made.logits


@pytest.fixture(scope="module")
def run_bare() -> Iterator[Callable[[Path, str, Tensor], Tensor]]:
    """Run a script that makes a model where replearn can't be imported; gives the model's output for x.

    One process for all, since the libraries take longer to import than the models to run.
    """

    def run(folder: Path, script: str, x: Tensor) -> Tensor:
        folder.mkdir(exist_ok=True)
        torch.save(x, folder / "x.pt")
        (folder / "bare.py").write_text(script)
        print(folder, file=bare.stdin, flush=True)
        assert f"ready {folder}\n" in iter(bare.stdout.readline, ""), f"{script}\nfailed: see stderr"
        made: Tensor = torch.load(folder / "y.pt")
        return made

    with subprocess.Popen([sys.executable, "-c", BARE], stdin=-1, stdout=-1, text=True) as bare:
        assert bare.stdin
        assert bare.stdout
        yield run


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral", "qwen2", "vit", "deit", "dinov2",
                                  "resnet", "segformer", "wav2vec2"])  # fmt: skip
def test_hugging_face_models_are_their_class_with_fewer_layers(name: str, tmp_path: Path) -> None:
    small = without(hugging_face(name))
    model: Any = small.model
    x = batches(model)[0]
    shipped = ship(small, tmp_path, x)
    assert "config.json" in shipped.files
    assert "model.safetensors" in shipped.files
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(again(x).logits, model(x).logits)
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())
    if name in ("resnet", "segformer"):
        assert again.config.depths[:2] == [2, 3]
    else:
        assert again.config.num_hidden_layers == 3
    if name == "qwen2":
        assert again.config.layer_types == [model.config.layer_types[i] for i in (0, 2, 3)]
    if again.can_generate():
        assert [attention.layer_idx for attention in again.modules() if hasattr(attention, "layer_idx")
                and hasattr(attention, "is_causal")] == [0, 1, 2]  # fmt: skip
        told = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(x, use_cache=False, **told)
        assert torch.equal(again.generate(x, use_cache=True, **told), expected)
        assert torch.equal(again.generate(x, use_cache=False, **told), expected)


@torch.no_grad()
def test_every_form_is_of_ordinary_modules_and_pickled_without_this_package(run_bare: Any, tmp_path: Path) -> None:
    for name, form in (("bert", "mlp"), ("llama", "attention"), ("gpt2", "low-rank"), ("vit", "channels")):
        small = without(hugging_face(name), form)
        model: Any = copy.deepcopy(small.model)
        assert not [m for m in model.modules() if type(m).__module__.startswith("replearn")]
        path, x = tmp_path / f"{name}.pt", batches(model)[0]
        torch.save(small.model, path)
        load = f"model = torch.load({str(path)!r}, weights_only=False)"
        expected = logits(torch.load(path, weights_only=False)(x))
        assert torch.equal(run_bare(tmp_path / name, load, x), expected)
        for again in (model, copy.deepcopy(model)):  # the second is a copy of one that records
            assert len(again(x, output_hidden_states=True).hidden_states) == 6


@torch.no_grad()
def test_auto_classes_and_snippets_load_it_without_this_package(run_bare: Any, tmp_path: Path) -> None:
    auto = {"llama": "CausalLM", "bert": "MaskedLM", "vit": "ImageClassification"}
    for name, kind in auto.items():
        small = without(hugging_face(name))
        shipped = ship(small, tmp_path / name / "out")
        x = batches(small.model)[0]
        folder = str(tmp_path / name / "out")
        load = f"from transformers import AutoModelFor{kind} as A\nmodel = A.from_pretrained({folder!r}).eval()"
        for place, script in {tmp_path / name: load, tmp_path / name / "snippet": shipped.snippet}.items():
            assert torch.equal(run_bare(place, script, x), logits(small.model(x))), script


BUILT: dict[str, tuple[str, Any]] = {
    "timm_vit": ("depth", 3),
    "timm_distilled": ("depth", 3),
    "timm_resnet": ("layers", [2, 2, 1, 2]),
    "timm_convnext": ("depths", [2, 2, 4, 2]),
    "torchvision_resnet": ("layers", [2, 2, 1, 2]),
    "torchvision_vit": ("num_layers", 3),
}


@torch.no_grad()
def test_timm_and_torchvision_build_it_by_constructor_arguments(run_bare: Any, tmp_path: Path) -> None:
    for name, (key, value) in BUILT.items():
        model = other(name)
        small = without(model)
        folder = tmp_path / name
        x = batches(model)[0]
        shipped = ship(small, folder / "out", x)
        assert shipped.files == ("load.py", "model.json", "model.safetensors")
        assert json.loads((folder / "out" / "model.json").read_text())["arguments"][key] == value
        assert str(shipped).endswith(shipped.snippet)
        y = run_bare(folder, shipped.snippet, x)
        torch.testing.assert_close(y, logits(small.model(x)), rtol=1e-5, atol=1e-5)


def test_batches_that_only_forward_knows_are_compared_as_the_model_takes_them() -> None:
    import torchvision

    model = torchvision.models.resnet18(num_classes=4).eval()
    batches = [(torch.randn(4, 3, 32, 32), torch.randint(4, (4,))) for _ in range(5)]
    small = compress(
        model, batches, budget=["layer1.1"], form="removal", forward=lambda model, batch: model(batch[0])
    )
    assert type(standard(small)) is type(model)


def test_tied_weights_stay_tied_and_the_compressed_model_keeps_its_own() -> None:
    small = without(hugging_face("gpt2"))
    made: Any = standard(small)
    assert made.lm_head.weight is made.transformer.wte.weight
    before = small.model.get_parameter("transformer.wte.weight").clone()
    with torch.no_grad():
        made.transformer.wte.weight.zero_()
    assert torch.equal(small.model.get_parameter("transformer.wte.weight"), before)


@pytest.mark.parametrize(("form", "what"), [("mlp", "the mlp half of a block"), ("full", "a full map")])
def test_what_is_not_standard_is_named(form: str, what: str, tmp_path: Path) -> None:
    small = without(hugging_face("vit"), form)
    first = small.fitted.blocks[0].name
    with pytest.raises(ReplearnError, match=f"^{first} is {what}, which transformers's ViTFor.*form='removal'"):
        ship(small, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_that_computes_by_its_index_is_refused() -> None:
    """GPT-2 can scale attention by the layer's number, which changes when an earlier layer goes."""
    small = without(hugging_face("gpt2", scale_attn_by_inverse_layer_idx=True, initializer_range=1.0))
    with pytest.raises(
        ReplearnError,
        match=r"no standard GPT2LMHeadModel: transformer.h.1.attn.scaling is 0\.\d+, and 0\.\d+ in that",
    ):
        standard(small)


def test_a_changed_model_and_one_of_no_library_are_refused_with_a_reason() -> None:
    model: Any = other("torchvision_resnet")
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    with pytest.raises(
        ReplearnError, match=r"no standard ResNet: conv1.weight is \(64, 3, 3, 3\), and \(64, 3, 7, 7\)"
    ):
        standard(without(model))
    strided: Any = other("torchvision_resnet")
    strided.conv1.stride = (1, 1)
    with pytest.raises(ReplearnError, match=r"conv1.stride is \(1, 1\), and \(2, 2\) in that"):
        standard(without(strided))
    from tests.zoo import ZOO

    own = ZOO["encoder_pre_norm"].fresh()
    data = [ZOO["encoder_pre_norm"].batch()] * 3
    small = compress(own, data, budget=[recognise(own, data).candidates[-1]], form="removal")
    with pytest.raises(ReplearnError, match="is of no library whose constructors are known"):
        standard(small)
