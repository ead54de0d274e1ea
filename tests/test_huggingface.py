"""Hugging Face models: generation with and without a cache, keyword arguments, gradient checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, shake_

import replearn
from replearn import operators
from replearn.operators.base import Operator

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


@pytest.mark.parametrize("operator", ["projection", "whole_block"])
def test_generation_is_the_same_with_a_static_cache(operator: str) -> None:
    model = talkative("hf_llama", operator)
    expected = generate(model, use_cache=False)
    assert torch.equal(generate(model, cache_implementation="static"), expected)


def test_the_replaced_model_generates_what_its_blocks_say_and_not_what_the_original_did() -> None:
    original = ZOO["hf_llama"].fresh()
    shake_(original, 0.3)
    before = generate(original)
    replearn.replace_(original, replearn.plan(original, first=2))
    assert not torch.equal(generate(original), before)


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


def test_hidden_states_are_those_of_the_kept_blocks() -> None:
    model: Any = ZOO["hf_llama"].replaced()
    made = model(**ZOO["hf_llama"].batch(), output_hidden_states=True)
    assert len(made.hidden_states) == 1 + 3  # the embeddings and three of four blocks
    assert torch.equal(model.lm_head(made.hidden_states[-1]), made.logits)


def test_an_operator_keeps_the_labels_that_the_model_reads_off_its_layers() -> None:
    model: Any = ZOO["hf_qwen2"].fresh()
    model.model.layers[1].attention_type = "sliding_attention"
    replearn.replace_(model, replearn.plan(model, first=2))
    for other in (model, replearn.deploy(model)):
        assert other.model.layers[1].attention_type == "sliding_attention"
    assert isinstance(model.model.layers[1], Operator)
