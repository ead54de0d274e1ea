"""Hugging Face models: generation, keyword arguments, gradient checkpointing, save_pretrained and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import SMALL, ZOO, shake_

import replearn
from replearn import ReplearnError, operators
from replearn.blocks.running import call
from replearn.operators._base.operator import Operator
from replearn.surgery.replace import plan_of

DECODERS = ("hf_gpt2", "hf_llama", "hf_qwen2", "hf_mistral")
OPERATORS = ("projection", "head_wise", "mlp", "attention_mlp", "whole_block")


def talkative(name: str, operator: str) -> nn.Module:
    """A replaced decoder, with weights large enough that it does not say one word for ever."""
    model = ZOO[name].replaced(operators.available()[operator]())
    shake_(model, 0.3)
    return model


def prompt() -> dict[str, Tensor]:
    """Two prompts of different lengths, the shorter one padded on the left."""
    ids = torch.randint(2, 32, (2, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[1, :2], mask[1, :2] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, **settings: Any) -> Tensor:
    return model.generate(**prompt(), max_new_tokens=7, min_new_tokens=7, do_sample=False, **settings)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", DECODERS)
def test_generation_is_the_same_with_and_without_a_cache_and_after_deploy(name: str, operator: str) -> None:
    model = talkative(name, operator)
    plain = replearn.deploy(model)
    for settings in ({}, {"num_beams": 3}):
        expected = generate(model, use_cache=False, **settings)
        assert expected.shape == (2, 13)
        assert len(set(expected[:, 6:].flatten().tolist())) > 2  # it says something
        for other in (model, plain):
            assert torch.equal(generate(other, use_cache=True, **settings), expected)
        assert torch.equal(generate(plain, use_cache=False, **settings), expected)


def test_generation_is_the_same_with_a_static_cache() -> None:
    model = talkative("hf_llama", "whole_block")
    expected = generate(model, use_cache=False)
    assert torch.equal(generate(model, cache_implementation="static"), expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_takes_its_input_by_position_or_by_the_block_s_own_keyword(operator: str) -> None:
    options = operators.available()[operator]()
    for name in ("hf_bert", "declared_tuple"):
        entry = ZOO[name]
        model = entry.replaced(options)
        target = replearn.plan(entry.fresh(), first=2, operator=options).targets[0]
        x = torch.randn(2, 5, 16)
        for block in (model.get_submodule(target.name), replearn.deploy(model).get_submodule(target.name)):
            by_position, by_keyword = block(x), block(**{target.anatomy.input: x})
            if name == "declared_tuple":
                assert isinstance(by_position, tuple)
                assert isinstance(by_keyword, tuple)
                (by_position,), (by_keyword,) = by_position, by_keyword
            assert torch.equal(by_position, by_keyword)
            assert by_position.shape == x.shape


def gradients(name: str, operator: str, checkpointing: str) -> dict[str, Tensor | None]:
    """The gradients of one step, with checkpointing off, or switched on before or after the replacement."""
    model: Any = ZOO[name].fresh()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if checkpointing == "before":
        model.gradient_checkpointing_enable()
    options = operators.available()[operator](stop_gradient=False)
    replearn.replace_(model, replearn.plan(model, first=2, operator=options))
    if checkpointing == "after":
        model.gradient_checkpointing_enable()
    model.train()
    batch = ZOO[name].batch()
    labels = torch.tensor([0, 1]) if name in ("hf_vit", "hf_bert") else batch["input_ids"]
    model(**batch, labels=labels).loss.backward()
    return {key: parameter.grad for key, parameter in model.named_parameters()}


@pytest.mark.parametrize("operator", ["projection", "attention_mlp", "whole_block"])
@pytest.mark.parametrize("name", ["hf_vit", "hf_bert", "hf_gpt2", "hf_llama"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, operator: str) -> None:
    expected = gradients(name, operator, "off")
    assert any("layers.1." in key or "layer.1." in key or "h.1." in key for key in expected)
    for when in ("before", "after"):
        found = gradients(name, operator, when)
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            assert (gradient is None) == (found[key] is None), key
            if gradient is not None:
                torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-7)


def test_a_checkpointed_whole_block_is_run_again_in_the_backward_pass() -> None:
    model: Any = ZOO["hf_llama"].replaced(operators.WholeBlock()).train()
    calls = []
    model.model.layers[1].run.block.self_attn.register_forward_hook(lambda *_: calls.append(1))
    for enabled, expected in ((False, 1), (True, 2)):
        if enabled:
            model.gradient_checkpointing_enable()
        calls.clear()
        model(**ZOO["hf_llama"].batch(), use_cache=True).logits.sum().backward()
        assert len(calls) == expected


FORMS = [operators.Projection(), operators.AttentionMLP(), operators.WholeBlock(), operators.Removal()]


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("operator", FORMS, ids=lambda options: options.name)
@pytest.mark.parametrize("name", ["hf_llama", "hf_bert"])
def test_hidden_states_have_an_entry_for_every_block(name: str, operator: Any, asked_before: bool) -> None:
    batch, model = ZOO[name].batch(), ZOO[name].fresh()
    if asked_before:  # the library's hooks hang on the blocks now, and are no reason to keep them
        call(model, {**batch, "output_hidden_states": True})
    plan = replearn.plan(model, first=2, operator=operator)
    replearn.replace_(model, plan)
    shake_(model, 0.02)
    for asked in (model, replearn.deploy(model)):
        seen: list[Tensor] = []
        block = asked.get_submodule(plan.targets[0].name)
        watch = block.register_forward_hook(lambda _, args, out, seen=seen: seen.extend((args[0], first_of(out))))
        made: Any = call(asked, {**batch, "output_hidden_states": True})
        watch.remove()
        assert len(made.hidden_states) == 1 + 4  # the embeddings and four blocks
        assert torch.equal(made.hidden_states[1], seen[0])
        assert torch.equal(made.hidden_states[2], seen[1])
    untouched: Any = call(ZOO[name].fresh(), {**batch, "output_hidden_states": True})
    assert len(untouched.hidden_states) == 1 + 4  # a model of the class that has all its blocks


def first_of(made: Any) -> Tensor:
    return made[0] if isinstance(made, tuple) else made


def test_hooks_of_the_user_still_keep_a_block() -> None:
    model: Any = ZOO["hf_llama"].fresh()
    call(model, {**ZOO["hf_llama"].batch(), "output_hidden_states": True})
    model.model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ReplearnError, match="it has hooks, which would be lost with it"):
        replearn.plan(model, first=2)


# ---- families that no file of ours describes ----------------------------------------------------


def other(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A small model of a family that gets the whole-block operator, and a batch."""
    import transformers

    settings: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "vocab_size": 32, "pad_token_id": 1}
    if name == "Swin":
        settings = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 4], "num_heads": [1, 2]}
        settings |= {"window_size": 4, "num_labels": 4}
    if name == "T5":
        settings = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 4, "num_heads": 2, "vocab_size": 32}
    head = {"Swin": "ForImageClassification", "T5": "ForConditionalGeneration"}.get(name, "ForCausalLM")
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}{head}")(config).eval()
    shake_(model, 0.05)
    ids = torch.randint(2, 32, (2, 5))
    batch = {"pixel_values": torch.randn(2, 3, 16, 16)} if name == "Swin" else {"input_ids": ids}
    return model, {**batch, **({"decoder_input_ids": ids} if name == "T5" else {})}


@pytest.mark.parametrize("name", ["Swin", "GPTNeoX", "T5", "Mixtral", "Gemma2"])
def test_other_families_come_back_from_their_folder(name: str, tmp_path: Path) -> None:
    model, batch = other(name)
    plan = replearn.plan(model, first=2)
    assert {target.operator.name for target in plan.targets} == {"whole_block"}
    replearn.replace_(model, plan)
    shake_(model, 0.02)
    model.save_pretrained(tmp_path)
    again = replearn.from_pretrained(type(model), tmp_path).eval()
    expected = call(model, batch).logits
    assert torch.equal(call(again, batch).logits, expected)
    torch.testing.assert_close(call(replearn.deploy(again), batch).logits, expected)
    assert not any(isinstance(value, Tensor) for module in again.modules() for value in vars(module).values())


def test_an_operator_keeps_the_labels_that_the_model_reads_off_its_layers() -> None:
    model: Any = ZOO["hf_qwen2"].fresh()
    model.model.layers[1].attention_type = "sliding_attention"
    replearn.replace_(model, replearn.plan(model, first=2))
    for other in (model, replearn.deploy(model)):
        assert other.model.layers[1].attention_type == "sliding_attention"
    assert isinstance(model.model.layers[1], Operator)


# ---- save_pretrained and back -------------------------------------------------------------------

SIX = ("hf_llama", "hf_qwen2", "hf_mistral", "hf_gpt2", "hf_bert", "hf_vit")


def said(model: Any, name: str) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(**ZOO[name].batch()).logits
    return logits


@pytest.mark.parametrize("operator", [operators.Projection(correction="low-rank", rank=2), operators.WholeBlock()])
@pytest.mark.parametrize("name", SIX)
def test_save_pretrained_carries_the_plan_and_from_pretrained_brings_the_model_back(
    name: str, operator: operators.Options, tmp_path: Path
) -> None:
    model: Any = ZOO[name].replaced(operator)
    shake_(model, 0.1)
    model.save_pretrained(tmp_path)
    again = replearn.from_pretrained(type(model), tmp_path)
    assert type(again) is type(model)
    assert torch.equal(said(again, name), said(model, name))
    assert plan_of(again) == plan_of(model)
    assert again.config.architectures == [type(model).__name__]
    low = replearn.from_pretrained(type(model), tmp_path, dtype=torch.bfloat16)
    assert low.dtype is torch.bfloat16
    coefficients = {parameter.dtype for key, parameter in low.named_parameters() if key.endswith((".a", ".b"))}
    assert coefficients == {torch.float32}
    again.save_pretrained(tmp_path / "twice")  # and once more
    assert torch.equal(said(replearn.from_pretrained(type(model), tmp_path / "twice"), name), said(model, name))


def test_an_auto_class_finds_the_model_and_tied_weights_stay_tied(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    model: Any = ZOO["hf_mistral"].replaced()
    model.save_pretrained(tmp_path, max_shard_size="5KB")  # in several files
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = replearn.from_pretrained(AutoModelForCausalLM, tmp_path)
    assert again.lm_head.weight is again.get_input_embeddings().weight
    assert torch.equal(generate(again), generate(model))
    with pytest.raises(ReplearnError, match=r"AutoModelForImageClassification has no model for a MistralConfig"):
        replearn.from_pretrained(AutoModelForImageClassification, tmp_path)


def test_a_calibrated_model_carries_its_plan_too_and_a_deployed_one_does_not(tmp_path: Path) -> None:
    model: Any = ZOO["hf_llama"].fresh().eval()
    plan = replearn.plan(model, first=2, operator=operators.Projection(correction="full"))
    replearn.calibrate_(model, plan, [ZOO["hf_llama"].batch() for _ in range(2)])
    assert model.config.replearn_plan == json.loads(plan.to_json())
    plain: Any = replearn.deploy(model)
    assert not hasattr(plain.config, "replearn_plan")
    assert model.config.replearn_plan == json.loads(plan.to_json())


def test_a_config_shared_with_another_model_stays_as_it_was() -> None:
    model: Any = ZOO["hf_llama"].fresh()
    config = model.config
    other = type(model)(config)
    replearn.replace_(model, replearn.plan(model, first=2))
    assert not hasattr(other.config, "replearn_plan")
    assert other.config is config
    inside = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    assert inside == {id(model.config)}  # one config for the whole model, as before


def test_a_folder_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    model: Any = ZOO["hf_llama"].fresh()
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ReplearnError, match=r"its config\.json has no replearn_plan.*LlamaForCausalLM"):
        replearn.from_pretrained(type(model), tmp_path / "plain")
    with pytest.raises(ReplearnError, match="takes a Hugging Face model class, as AutoModelForCausalLM"):
        replearn.from_pretrained(model.__class__.__name__, tmp_path / "plain")
    replearn.replace_(model, replearn.plan(model, first=2))
    model.save_pretrained(tmp_path / "replaced")
    config = json.loads((tmp_path / "replaced/config.json").read_text())
    for change, told in (
        ({"num_hidden_layers": 6, "layer_types": None}, "has 6 blocks, and the plan was made for 4"),
        ({"num_hidden_layers": 2, "layer_types": None}, "The plan does not fit"),
        ({"vocab_size": 99}, r"another configuration: \S+ has the shape \(\d+, \d+\) there and \(99, \d+\) here"),
    ):
        (tmp_path / "replaced/config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ReplearnError, match=told):
            replearn.from_pretrained(type(model), tmp_path / "replaced")
    (tmp_path / "replaced/config.json").write_text(json.dumps(config))
    (tmp_path / "plain/model.safetensors").replace(tmp_path / "replaced/model.safetensors")
    with pytest.raises(ReplearnError, match=r"not those of its plan: \d+ (missing|unexpected) keys"):
        replearn.from_pretrained(type(model), tmp_path / "replaced")
    (tmp_path / "replaced/model.safetensors").unlink()
    with pytest.raises(ReplearnError, match=r"can't be read as those of its config\.json: .*no file named"):
        replearn.from_pretrained(type(model), tmp_path / "replaced")
    with pytest.raises(ReplearnError, match="can't be read: it is neither a folder with the"):
        replearn.from_pretrained(type(model), tmp_path / "nothing")


def test_a_head_for_other_classes_starts_anew_where_asked(tmp_path: Path) -> None:
    model: Any = ZOO["hf_vit"].fresh()
    replearn.replace_(model, replearn.plan(model, first=2))
    model.save_pretrained(tmp_path)
    again = replearn.from_pretrained(type(model), tmp_path, num_labels=7, ignore_mismatched_sizes=True)
    assert again.classifier.out_features == 7
    assert torch.equal(again.vit.embeddings.cls_token, model.vit.embeddings.cls_token)
