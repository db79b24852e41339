"""Models as people write them: transformers and peft, trained, generated from and compiled."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.runtime.in_memory import attach
from tests.runtime.parity import check_parity, seeded

transformers = pytest.importorskip("transformers", reason="needs transformers")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

IDS = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(0))


def llama(layers=4):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
    )
    return transformers.LlamaForCausalLM(config)


def loss_of(model):
    return model(IDS, labels=IDS).loss


def checkpointed(reentrant):
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def frozen():
    model = llama().requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    return model


@pytest.mark.parametrize("threshold_numel", [1000, 1 << 30])
def test_llama(threshold_numel):
    check_parity(llama, loss_of, threshold_numel=threshold_numel, steps=2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_llama_with_activation_checkpointing(reentrant):
    check_parity(lambda: checkpointed(reentrant), loss_of, threshold_numel=1000)


def test_llama_with_frozen_blocks():
    check_parity(frozen, loss_of, threshold_numel=1000)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"]])
def test_low_rank_adapters(targets):
    peft = pytest.importorskip("peft", reason="needs peft")
    residency = check_parity(lambda: peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=targets)), loss_of, threshold_numel=1000)
    trained = {name for grads in residency.grads.values() for name in grads}
    assert trained and all("lora" in name for name in trained)


def test_adapters_are_saved_from_the_hooked_model():
    peft = pytest.importorskip("peft", reason="needs peft")
    make = seeded(lambda: peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"])))
    plain, hooked = make(), make()
    attach(hooked)
    want, got = peft.get_peft_model_state_dict(plain), peft.get_peft_model_state_dict(hooked)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)


def test_llama_generates_what_the_plain_model_does():
    make = seeded(llama)
    plain, hooked = make().eval(), make().eval()
    _, residency = attach(hooked, threshold_numel=1000)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(plain.generate(IDS, **options), hooked.generate(IDS, **options))
    assert residency.live_peak <= 3
    assert not residency.live


def t5():
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=97, decoder_start_token_id=0, dropout_rate=0.0)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("threshold_numel", [1000, 1 << 30])
def test_t5_trains(threshold_numel):
    check_parity(t5, loss_of, threshold_numel=threshold_numel)


@pytest.mark.parametrize("threshold_numel", [1000, 1 << 30])
def test_t5_generates_what_the_plain_model_does(threshold_numel):
    make = seeded(t5)
    plain, hooked = make().eval(), make().eval()
    _, residency = attach(hooked, threshold_numel=threshold_numel)
    options = {"max_new_tokens": 5, "num_beams": 2}
    assert torch.equal(plain.generate(IDS, **options), hooked.generate(IDS, **options))
    assert residency.live_peak <= 3
    assert not residency.live


def test_a_pretrained_model_saves_itself(tmp_path):
    make = seeded(llama)
    plain, hooked = make(), make()
    attach(hooked)
    hooked.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    want, got = plain.state_dict(), again.state_dict()
    assert all(torch.equal(want[key], got[key]) for key in want)


def compiled_blocks():
    model = llama(2)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    return model


def compiled_calls():
    model = llama(2)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


@pytest.mark.slow
def test_compiled_blocks():
    check_parity(compiled_blocks, loss_of, steps=2)


@pytest.mark.slow
def test_blocks_whose_calls_are_compiled():
    check_parity(compiled_calls, loss_of, steps=2)


@pytest.mark.slow
def test_a_compiled_block_is_one_graph():
    torch._dynamo.reset()
    model = seeded(llama)()
    layer = model.model.layers[0]
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    layer.forward = torch.compile(layer.forward, backend=count, fullgraph=True)
    attach(model)
    for _ in range(3):
        loss_of(model).backward()
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="transformers asks torch for it while it is compiled: torch 2.7 has it")
def test_a_compiled_model():
    torch._dynamo.reset()
    make = seeded(lambda: llama(2))
    plain, hooked = make(), make()
    _, residency = attach(hooked, threshold_numel=1000)
    fast = torch.compile(hooked, backend="aot_eager")
    for _ in range(2):
        loss, ours = loss_of(plain), fast(IDS, labels=IDS).loss
        loss.backward()
        ours.backward()
        assert torch.equal(loss, ours)
    for name, param in plain.named_parameters():
        assert torch.equal(param.grad, residency.grad(name)), name
    assert residency.live_peak <= 3
    assert not residency.live


def test_a_hooked_model_is_not_copied():
    model = llama(2)
    attach(model)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(model)
