"""Finding blocks: real architectures on the meta device, and the tiny ones of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, Declared, Listed, Residual, Scaled, Staged, hugging_face, outputs, sequence, shake_, timm_vit

import replearn
from replearn import ReplearnError, operators
from replearn.blocks.running import call


def on_meta(build: Callable[..., nn.Module], *args: Any, **settings: Any) -> nn.Module:
    with torch.device("meta"):
        return build(*args, **settings)


def torchvision_model(name: str, **settings: Any) -> nn.Module:
    import torchvision

    return on_meta(torchvision.models.get_model, name, weights=None, **settings)


def timm_model(name: str, **settings: Any) -> nn.Module:
    import timm

    return on_meta(timm.create_model, name, **settings)


def summary(model: nn.Module) -> list[tuple[str, int]]:
    return [(stack.name, len(stack)) for stack in replearn.find_stacks(model)]


def families_of(model: nn.Module) -> set[str]:
    return {stack.family for stack in replearn.find_stacks(model)}


# The zoo


@pytest.mark.parametrize("name", ZOO)
def test_every_model_of_the_zoo_listens_to_its_batch_and_to_its_blocks(name: str) -> None:
    """Else nothing that is checked on its outputs could fail."""
    model, batch = ZOO[name].fresh(), ZOO[name].batch()
    made = outputs(model, batch)[0]
    assert made.isfinite().all()
    assert (made[0] - made[1]).abs().max() > 1e-3 * made.abs().max()
    for target in replearn.plan(model, first=2).targets:
        before = outputs(model, batch)[0]
        shake_(model.get_submodule(target.name), 0.1)
        assert (outputs(model, batch)[0] - before).abs().max() > 1e-3 * before.abs().max(), target.name


@pytest.mark.parametrize("name", ZOO)
def test_every_model_of_the_zoo_is_found_with_its_family(name: str) -> None:
    entry = ZOO[name]
    stacks = replearn.find_stacks(entry.fresh())
    assert tuple(len(stack) for stack in stacks) == entry.stacks
    assert {stack.family for stack in stacks} == {entry.family}
    assert {anatomy.kind for stack in stacks for anatomy in stack.anatomies} == {entry.kind}
    for stack in stacks:
        assert all(not anatomy.transition for anatomy in stack.anatomies[1:])


POST_NORM = ("decoder", "encoder_post_norm", "hf_bert", "hf_roberta", "timm_eva_post_norm", "timm_vit_post_norm")


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.kind == "transformer"])
def test_an_anatomy_names_the_parts_that_the_block_really_uses(name: str) -> None:
    """Watch a real forward pass: what the roles take and give must be what the block does with them."""
    entry = ZOO[name]
    model = entry.fresh()
    stack = replearn.find_stacks(model)[0]
    anatomy, block = stack.anatomies[1], model.get_submodule(stack.blocks[1])
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    parts = {role: block.get_submodule(part.path) for role, part in anatomy.parts.items() if role != "activation"}
    for role, layer in parts.items():

        def watch(_: nn.Module, args: Any, made: Any, role: str = role) -> None:
            seen[role] = (args[0], made)

        layer.register_forward_hook(watch)
    call(model, entry.batch())  # with gradients: the fast path of nn.TransformerEncoder calls no layers
    by_multihead = entry.family in ("torchvision_vit", "torch_transformer")  # which reads the weight itself
    assert parts.keys() - seen.keys() == ({"proj"} if by_multihead else set())
    if "proj" in seen:
        assert seen["proj"][1].shape[-1] == seen["norm1"][0].shape[-1]
        assert parts["proj"].weight.shape[0] % anatomy.num_heads == 0
    if "down" not in parts:
        return
    activation: Any = block
    for step in anatomy.parts["activation"].path.split("."):
        activation = getattr(activation, step)

    def rows(role: str) -> Tensor:
        cut = anatomy.parts[role].rows
        return seen[role][1] if cut is None else seen[role][1][..., cut[0] : cut[1]]

    hidden = activation(rows("gate")) * rows("up") if "gate" in parts else activation(rows("up"))
    torch.testing.assert_close(seen["down"][0], hidden)
    if entry.name not in POST_NORM:
        torch.testing.assert_close(seen["up"][0].flatten(), seen["norm2"][1].flatten())


# The placement table of the specification


@pytest.mark.parametrize(
    ("build", "blocks", "by_four", "densest"),
    [
        (replearn.models.resnet32, 15, 3, 3),
        (replearn.models.resnet110, 54, 12, 12),
        (lambda: torchvision_model("resnet34"), 16, 1, 4),
        (lambda: torchvision_model("resnet50"), 16, 1, 4),
        (lambda: torchvision_model("resnet101"), 33, 5, 9),
        (lambda: torchvision_model("resnet152"), 50, 9, 13),
        (lambda: torchvision_model("vit_b_16"), 12, 2, 3),
        (lambda: timm_model("deit_small_patch16_224"), 12, 2, 3),
    ],
)
def test_the_placement_table_holds(build: Any, blocks: int, by_four: int, densest: int) -> None:
    model = build()
    paper, dense = replearn.plan(model, first=4), replearn.plan(model, first=2)
    assert paper.num_blocks == dense.num_blocks == blocks
    assert (len(paper.targets), len(dense.targets)) == (by_four, densest)
    assert {target.position % 4 for target in paper.targets} == {0}
    assert {target.position % 4 for target in dense.targets} == {2}


def test_a_dense_bottleneck_plan_takes_its_reduction_from_the_next_block_and_says_so() -> None:
    plan = replearn.plan(torchvision_model("resnet50"), first=2)
    for target in plan.targets:
        roles = {read.role for read in target.reads}
        sides = {role: {read.side for read in target.reads if read.role == role} for role in roles}
        assert sides == {"reduce": {"next"}, "middle": {"previous", "next"}, "expand": {"next"}}
        assert any("reduce comes from the next source alone" in note for note in target.notes)


BY_50 = [(f"layer{i}", depth) for i, depth in enumerate((3, 4, 6, 3), 1)]


@pytest.mark.parametrize(
    ("build", "family", "stacks"),
    [
        (lambda: torchvision_model("resnet18"), "torchvision_resnet", [(f"layer{i}", 2) for i in range(1, 5)]),
        (lambda: torchvision_model("resnext50_32x4d"), "torchvision_resnet", BY_50),
        (lambda: torchvision_model("vit_b_16"), "torchvision_vit", [("encoder.layers", 12)]),
        (lambda: timm_model("resnet26"), "timm_resnet", [(f"layer{i}", 2) for i in range(1, 5)]),
        (lambda: timm_model("resnet50d"), "timm_resnet", BY_50),
        (lambda: timm_model("seresnet50"), "timm_resnet", BY_50),
    ],
)
def test_torchvision_s_and_timm_s_models_are_known(build: Any, family: str, stacks: list[tuple[str, int]]) -> None:
    model = build()
    assert summary(model) == stacks
    assert families_of(model) == {family}


@pytest.mark.parametrize(
    ("name", "prefix"), [("deeplabv3_resnet50", "backbone"), ("fasterrcnn_resnet50_fpn", "backbone.body")]
)
def test_torchvision_backbones_inside_detectors_and_segmenters(name: str, prefix: str) -> None:
    model = torchvision_model(name, weights_backbone=None)
    assert summary(model) == [(f"{prefix}.{stage}", depth) for stage, depth in BY_50]
    plan = replearn.plan(model, first=2)
    assert [target.operator.name for target in plan.targets] == ["bottleneck"] * 4
    assert plan.parameters_after < plan.parameters_before


# the files of timm whose models are a plain run of ViT blocks
VIT_FILES = (
    *("beit", "cait", "convit", "deepseek_vit", "deit", "eva", "gemma4_vit", "naflexvit", "qwen3_vit"),
    *(f"vision_transformer{kind}" for kind in ("", "_hybrid", "_relpos", "_sam")),
    *("vitamin", "xcit"),
)
# blocks without one square output projection: they have a family, and are replaced whole
WHOLE = {"ParallelThingsBlock", "DiffParallelScalingBlock"}


def shallow(name: str) -> nn.Module:
    """The model with three blocks and no initialisation, if it can be built so: that is much faster."""
    for settings in ({"depth": 3, "weight_init": "skip"}, {"depth": 3}):
        try:
            return timm_model(name, **settings)
        except (TypeError, AttributeError, AssertionError):
            continue
    return timm_model(name)


@pytest.mark.slow
@pytest.mark.parametrize("file", VIT_FILES)
def test_vits_of_every_file_of_timm_are_known(file: str) -> None:
    import timm

    names = timm.list_models(module=file)
    assert names
    for name in names[:: -(-len(names) // 8)]:  # at most eight of a file
        model = shallow(name)
        stack = next(stack for stack in replearn.find_stacks(model) if stack.name.endswith("blocks"))
        block = stack.block_type.rpartition(".")[2]
        assert stack.family == "timm_vit", name
        assert stack.anatomies[1].kind == ("any" if block in WHOLE else "transformer"), name
        plan = replearn.plan(model, first=2, interval=2)
        expected = "whole_block" if block in WHOLE else "projection"
        assert {t.operator.name for t in plan.targets if t.stack == stack.name} == {expected}, name


@pytest.mark.parametrize(
    ("name", "stacks"),
    [
        ("convnext_tiny", [(f"stages.{i}.blocks", depth) for i, depth in enumerate((3, 3, 9, 3))]),
        ("swin_tiny_patch4_window7_224", [("layers.2.blocks", 6)]),
        ("mixer_s32_224", [("blocks", 8)]),
        ("poolformerv2_s12", [("stages.2.blocks", 6)]),
        ("regnetx_004", [("s3", 7), ("s4", 12)]),  # blocks that are not in a list
        ("mvitv2_tiny", [("stages.2.blocks", 5)]),
        ("levit_128", [(f"stages.{i}.blocks", 4) for i in range(3)]),
        ("res2net50_26w_4s", [(f"layer{i + 1}", depth) for i, depth in enumerate((3, 4, 6, 3))]),
        ("inception_resnet_v2", [("repeat", 10), ("repeat_1", 20), ("repeat_2", 9)]),
    ],
)  # fmt: skip
def test_other_timm_models_are_found_by_equal_blocks(name: str, stacks: list[tuple[str, int]]) -> None:
    model = timm_model(name)
    assert summary(model) == stacks
    assert families_of(model) == {"generic"}
    plan = replearn.plan(model, first=2)
    assert {target.operator.name for target in plan.targets} == {"whole_block"}
    assert any("generic scan" in note for note in plan.notes)


# Hugging Face


def test_a_70b_llama_is_planned() -> None:
    settings = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "vocab_size": 128256}
    settings |= {"intermediate_size": 28672, "num_key_value_heads": 8}
    model = on_meta(hugging_face, "LlamaForCausalLM", "LlamaConfig", **settings)
    plan = replearn.plan(model, first=2)
    assert plan.num_blocks == 80
    assert len(plan.targets) == 20
    assert plan.parameters_before > 70e9
    assert plan.parameters_after == plan.parameters_before - 20 * plan.targets[0].parameters_before + 20 * 2


def test_heads_that_do_not_add_up_to_the_width_fall_to_the_whole_block_with_a_note() -> None:
    config = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    model = hugging_face("Qwen3ForCausalLM", "Qwen3Config", head_dim=16, vocab_size=32, **config)
    plan = replearn.plan(model, first=2)
    assert [target.operator.name for target in plan.targets] == ["whole_block"]
    assert "projection does not fit" in plan.targets[0].notes[0]
    assert "16x32, not square" in plan.targets[0].notes[0]
    assert "16x32, not square" in str(plan)
    mlp = replearn.plan(model, first=2, operator=operators.MLP())  # which reads no projection
    assert [target.operator.name for target in mlp.targets] == ["mlp"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Dinov2", {"image_size": 8, "patch_size": 4}),
        ("OPT", {"vocab_size": 32, "ffn_dim": 24, "word_embed_proj_dim": 16}),
        ("Gemma", {"vocab_size": 32, "intermediate_size": 24, "head_dim": 8, "num_key_value_heads": 1}),
    ],
)
def test_other_hugging_face_models_are_found_by_equal_blocks(name: str, settings: dict[str, Any]) -> None:
    settings |= {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    built = hugging_face(f"{name}Model", f"{name}Config", **settings).eval()
    assert [(stack.family, len(stack)) for stack in replearn.find_stacks(built)] == [("generic", 4)]
    replearn.replace_(built, replearn.plan(built, first=2))
    ids = torch.arange(6).view(2, 3)
    batch = {"pixel_values": torch.randn(2, 3, 8, 8)} if "image_size" in settings else {"input_ids": ids}
    replearn.deploy(built, example=batch)


# torch


ON_TRANSFORMERS = sorted(name for name, options in operators.available().items() if "transformer" in options.kinds)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("operator", ON_TRANSFORMERS)
def test_the_fast_path_of_an_encoder_is_right_with_padding(operator: str) -> None:
    """In eval mode nn.TransformerEncoder packs padded tokens away into nested tensors."""
    entry = ZOO["encoder_post_norm"]
    model = entry.replaced(operators.available()[operator]())
    tokens, padding = sequence(), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    nested = []
    watched = model.get_submodule("layers.1")
    handle = watched.register_forward_pre_hook(lambda _, args: nested.append(args[0].is_nested))
    with torch.no_grad():
        packed = model(tokens, src_key_padding_mask=padding)
    handle.remove()
    assert nested == [True]
    expected = model(tokens, src_key_padding_mask=padding).detach()  # with gradients it takes the ordinary path
    torch.testing.assert_close(packed[~padding], expected[~padding], rtol=1e-5, atol=1e-6)
    plain = replearn.deploy(model)
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens, src_key_padding_mask=padding), packed, rtol=1e-5, atol=1e-6)


# A user's own


def test_a_block_with_its_anatomy_is_as_good_as_a_family() -> None:
    class Mine(nn.Module):
        replearn_anatomy = replearn.anatomy("mine", "basic", conv1="a", conv2="b", norm="last", activation="act")

        def __init__(self, width: int, out: int) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1, bias=False)
            self.last, self.act = nn.BatchNorm2d(out), nn.SiLU()
            self.skip = nn.Conv2d(width, out, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.skip(x) + self.last(self.b(self.act(self.a(x)))))

    model = Staged([nn.Sequential(Mine(4, 4), Mine(4, 4), Mine(4, 8), Mine(8, 8), Mine(8, 8))], 4, 8).eval()
    stacks = replearn.find_stacks(model)
    assert [(stack.name, stack.family, len(stack)) for stack in stacks] == [
        ("stages.0[0..1]", "mine", 2),
        ("stages.0[2..4]", "mine", 3),
    ]
    assert stacks[1].anatomies[0].transition == "changes width from 4 to 8"
    plan = replearn.plan(model, first=2)
    assert [(target.name, target.operator.name) for target in plan.targets] == [("stages.0.3", "basic")]
    replearn.replace_(model, plan)
    replearn.deploy(model.eval(), example=torch.randn(2, 3, 6, 6))


def test_an_anatomy_without_a_role_rules_out_the_operators_that_read_it() -> None:
    class Half(Declared):
        replearn_anatomy = replearn.anatomy(
            *("mine", "transformer"), input="hidden", returns="tuple",
            norm2="norm", up="up", down="down", activation="act",
        )  # fmt: skip

    model = Listed(Half)
    plan = replearn.plan(model, first=2)
    assert [target.operator.name for target in plan.targets] == ["whole_block"]
    assert "this mine block has no proj" in plan.targets[0].notes[0]
    assert replearn.plan(model, first=2, operator=operators.MLP()).targets
    for options in (operators.Projection(), operators.HeadWise(), operators.NoWeights()):
        with pytest.raises(replearn.ReplearnError, match="no targets"):
            replearn.plan(model, first=2, operator=options)


def test_settings_of_a_block_that_are_named_like_an_operator_s_parts_do_no_harm() -> None:
    class Awkward(Declared):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = self.scale = 1
            self.target = self.fuse = self.forward_mode = "fast"

    for options in operators.available().values():
        if "transformer" not in options.kinds:
            continue
        model = Listed(Awkward).eval()
        plan = replearn.plan(model, first=2, operator=options())
        replearn.replace_(model, plan)
        plain = replearn.deploy(model, example=sequence())
        assert model.blocks[1].forward_mode == plain.blocks[1].forward_mode == "fast"


def test_a_subclass_with_a_forward_of_its_own_falls_to_the_generic_scan() -> None:
    from timm.models.vision_transformer import Block

    class Louder(Block):
        def forward(self, x: Tensor, **settings: Any) -> Tensor:
            return 2 * super().forward(x, **settings)

    class Same(Block):
        pass

    assert families_of(timm_vit(block_fn=Louder)) == {"generic"}
    assert families_of(timm_vit(block_fn=Same)) == {"timm_vit"}

    class Encoder(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, *args: Any, **settings: Any) -> Tensor:
            return super().forward(src) + 1

    assert families_of(nn.TransformerEncoder(Encoder(16, 2, 24), 4, enable_nested_tensor=False)) == {"generic"}


def test_a_block_with_exchanged_pieces_keeps_the_operators_that_still_fit() -> None:
    model = ZOO["hf_llama"].fresh()
    for layer in model.model.layers:
        layer.mlp = Residual()
    stack = replearn.find_stacks(model)[0]
    assert stack.family == "hf_llama"
    assert sorted(stack.anatomies[1].parts) == ["norm1", "norm2", "proj"]
    for layer in model.model.layers:
        layer.self_attn = nn.Identity()
    assert families_of(model) == {"generic"}


@pytest.mark.parametrize("first", ["same", "wider"])
def test_plain_lists_of_equal_blocks_are_found(first: str) -> None:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 16), nn.ReLU())

    blocks = [block(16 if first == "same" else 3), *(block(16) for _ in range(4))]
    model = nn.Sequential(nn.Flatten(), nn.Sequential(*blocks), nn.Linear(16, 2))
    assert summary(model) == [("1", 5)]
    assert summary(nn.ModuleList([nn.Linear(2, 2), *blocks])) == [("[1..5]", 5)]
    assert summary(nn.Sequential(*blocks)) == [("[0..4]", 5)]


def test_which_blocks_are_a_stack() -> None:
    def blocks(count: int) -> nn.Module:
        return nn.Sequential(*(Residual() for _ in range(count)))

    assert summary(blocks(2)) == []
    assert summary(nn.Sequential(*(blocks(3) for _ in range(4)))) == [("[0..3]", 4)]  # not those inside
    pool = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 24))  # a lone block of a known family
    assert summary(nn.ModuleDict({"pool": pool, "body": blocks(3)})) == [("body", 3)]


def test_blocks_that_say_they_return_a_tuple_are_not_removed_blindly() -> None:
    with pytest.raises(replearn.ReplearnError, match="no targets"):
        replearn.plan(Listed(Scaled), first=2, operator=operators.Removal())
    with pytest.raises(replearn.ReplearnError, match=r"Scaled\.forward returns.*returns='tuple'"):
        replearn.plan(Listed(Scaled), targets=["blocks.1"], operator=operators.Removal())
    assert replearn.plan(Listed(Declared), first=2, operator=operators.Removal()).targets


class Siblings(nn.Module):
    """Equal layers in a list, which `way` runs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layers = way, nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "heads on a list":
            return torch.stack([layer(x[index]) for index, layer in enumerate(self.layers)])
        if self.way == "heads on items":
            return torch.stack([layer(features) for features, layer in zip(x, self.layers, strict=True)])
        if self.way == "shared list":
            made = [x]
            self.append_all(made)
            return made[-1]
        for layer in reversed(self.layers) if self.way == "backwards" else self.layers:
            x = layer(x) if x.sum() > 0 else torch.relu(layer(x))
        return x

    def append_all(self, made: list[Tensor]) -> None:
        for layer in self.layers:
            made.append(layer(made[-1]))


@pytest.mark.parametrize(
    ("way", "lengths"),
    [("heads on a list", []), ("heads on items", []), ("shared list", [5]), ("backwards", [5]), ("chain", [5])],
)
def test_siblings_are_a_stack_where_they_feed_each_other(way: str, lengths: list[int]) -> None:
    assert [len(stack) for stack in replearn.find_stacks(Siblings(way))] == lengths


def test_stacks_inside_branches_are_found() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([branch(x) for branch in self.branches]).sum(0)

    assert [stack.name for stack in replearn.find_stacks(Branches())] == [f"branches.{i}" for i in range(3)]


def test_detection_heads_are_no_stack() -> None:
    import torchvision

    with torch.device("meta"):
        model = torchvision.models.get_model("ssdlite320_mobilenet_v3_large", weights=None, weights_backbone=None)
    assert replearn.find_stacks(model) == ()


def test_heads_of_layers_are_no_stack_beside_a_backbone_of_blocks() -> None:
    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = timm_model("regnetx_004")
            self.head = nn.Sequential(*(nn.Conv2d(4, 4, 1, device="meta") for _ in range(5)))

    assert summary(Segmenter()) == [("backbone.s3", 7), ("backbone.s4", 12)]


def test_prediction_heads_are_no_stack_where_a_hugging_face_model_says_what_its_blocks_are() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.RTDetrForObjectDetection(transformers.RTDetrConfig())
    assert summary(model) == [("model.decoder.layers", 6)]


def test_a_block_that_the_model_reads_from_is_kept_with_the_reason() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 32, "attention_hidden_size": 16}
    model = transformers.RwkvModel(transformers.RwkvConfig(vocab_size=50, context_length=16, **sizes))
    with pytest.raises(ReplearnError, match=r"reads blocks\.1\.attention, which an operator does not have"):
        replearn.plan(model, interval=2, first=2)


class Stages(nn.Module):
    """Equal lists of layers as attributes, run in a loop."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("one", "two", "three"):
            layers = (nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2))
            setattr(self, name, nn.ModuleList(layers))

    def forward(self, x: Tensor) -> Tensor:
        for stage in (self.one, self.two, self.three):
            for layer in stage:
                x = layer(x)
        return x


def test_lists_of_layers_are_no_blocks() -> None:
    assert replearn.find_stacks(Stages()) == ()
